"""The number of queries of a row that plain torch attention masks and scores together.

Owns the size, for the kernels and for plans of memory. Pure: imports nothing.
"""

STRIP = 256
# Explicit scores of all heads in a strip at most, of which there are a few copies in float32: with
# very many keys a strip is lower.
SCORES = 1 << 28


def scored_strip(heads: int, keys: int) -> int:
    """Queries of a strip with explicit scores over ``keys``, at least one."""
    return max(1, min(STRIP, SCORES // (heads * keys)))
