"""Operations on tensors: paged attention, cache writes and copies, sampling. Knows neither requests
nor HTTP.

``attention`` is the interface, ``backend`` picks its implementation, ``reference`` holds the plain
implementations that tests compare with.
"""
