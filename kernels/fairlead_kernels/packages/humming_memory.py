"""Sizes of the package humming-kernels: the 4-bit matrices that it takes, their memory there, and
that of its compilers.

Owns these sizes, for the plan and for the products. Pure.
"""

from collections.abc import Iterable

# Of a matrix that it takes; its tiles for compute capability 9.0 have that many rows.
ROWS, COLUMNS = 128, 64
UNPACKAGED = f"humming takes multiples of {ROWS} rows and of {COLUMNS} columns"
# Bytes of two groups' scales and zero points: in 16 and 4 bits each; in the layout that our own
# products read, in float32 and a byte.
PAIR, OWN_PAIR = 5, 10
# RAM that one compiler takes, which is a process: measured, 0.7 GiB for the largest tile.
COMPILER = 768 << 20


def takes(rows: Iterable[int], columns: Iterable[int]) -> bool:
    """Whether it takes matrices with each of these numbers of rows and of columns, on every GPU."""
    return not any(x % ROWS for x in rows) and not any(x % COLUMNS for x in columns)
