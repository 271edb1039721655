"""Operations on tensors: paged attention, cache writes and copies, sampling. Knows neither requests
nor HTTP.

``interface`` is what all implementations offer and what tests compare them with; ``choice`` picks
from ``cpu``, ``gpu``, ``packages`` and ``plain``.
"""
