"""Arithmetic on counts, and the count of levels in a value from a file."""

from typing import Any

DEEPEST_JSON = 64  # levels of a JSON object from outside; what walks it calls itself for each


def ceil_div(count: int, divisor: int) -> int:
    """The quotient rounded up: how many parts of ``divisor`` hold ``count``, or the largest of
    ``divisor`` shares of it.
    """
    return -(-count // divisor)


def depth_of(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
