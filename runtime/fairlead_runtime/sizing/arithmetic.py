"""Arithmetic on counts."""


def ceil_div(count: int, divisor: int) -> int:
    """The quotient rounded up: how many parts of ``divisor`` hold ``count``, or the largest of
    ``divisor`` shares of it.
    """
    return -(-count // divisor)
