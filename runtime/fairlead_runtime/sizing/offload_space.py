"""How many units of preempted sequences fit into host memory, and what a GPU keeps to send them
there. Pure.

Owns the sizes that the plan counts and the cache allocates. docs/design/0013 says why.
"""

from typing import NamedTuple

# The staging buffer has pieces, so that one is filled while others cross. All of them hold 2,048
# tokens of a model with 128 KiB of keys and values a token.
PIECES, PIECE_BYTES = 4, 64 << 20


class Staging(NamedTuple):
    """``pieces`` of ``units`` units each, on the device."""

    pieces: int
    units: int

    @classmethod
    def of(cls, host_units: int, unit: int) -> "Staging":
        """The staging of ``host_units`` units of ``unit`` bytes: no more than they need, at least
        one unit a piece; nothing where there are none.
        """
        if not host_units:
            return cls(0, 0)
        pieces = min(PIECES, host_units)
        return cls(pieces, max(1, min(PIECE_BYTES // unit, -(-host_units // pieces))))

    def nbytes(self, unit: int) -> int:
        return self.pieces * self.units * unit


def units_of(space: int, unit: int, ranks: int) -> int:
    """Units of ``unit`` bytes that each of ``ranks`` has in ``space`` bytes of the pod's memory."""
    return space // (unit * ranks)
