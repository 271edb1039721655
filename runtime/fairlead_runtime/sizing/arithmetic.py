"""Arithmetic on counts, and the count of levels in a value from a file."""

import itertools
from typing import Any

_CONTAINERS = (dict, list)
PANEL = 32  # rows of a packed matrix come in multiples of it, at most
DEEPEST_JSON = 64  # levels of a JSON object from outside; what walks it calls itself for each


def ceil_div(count: int, divisor: int) -> int:
    """The quotient rounded up: how many parts of ``divisor`` hold ``count``, or the largest of
    ``divisor`` shares of it.
    """
    return -(-count // divisor)


def depth_of(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    depth, level = 1, [value]
    while level := [item for item in level if isinstance(item, _CONTAINERS) and item]:
        depth += 1
        level = list(
            itertools.chain.from_iterable(
                item.values() if isinstance(item, dict) else item for item in level
            )
        )
    return depth
