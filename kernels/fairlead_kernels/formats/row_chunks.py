"""Rows of a large matrix, a chunk at a time: what is made of a chunk is no larger than it."""

from collections.abc import Iterator

ELEMENTS = 1 << 20  # of a chunk


def row_chunks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """The rows of a matrix in order, all chunks but the last of a multiple of ``multiple`` rows."""
    step = max(1, ELEMENTS // max(1, columns) // multiple) * multiple
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))
