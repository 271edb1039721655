"""Operations on tensors: paged attention, cache writes and copies, sampling. Knows no request and
no HTTP.

``attention`` is the interface, ``backend`` picks who implements it, ``reference`` is what all are
held against.
"""
