"""The state of fixed size that layers without keys keep of one sequence, as bytes of the one pool.

A sequence's whole state, of all its layers, is one flat run of bytes, which lies over units of the
pool in order:

    run      [ conv 0 | recurrent 0 | conv 1 | recurrent 1 | ... ]   each from a multiple of 64 on
    units    [      unit 7      |      unit 3      |   unit 9    ]   only the last has bytes unused

Owns where each tensor of a state lies. Pure: allocates nothing; ``device`` keeps the bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fairlead_runtime.sizing.arithmetic import ceil_div
from fairlead_runtime.sizing.config_json import DTYPE_BYTES

ALIGNMENT = 64  # bytes; a multiple of it is where a tensor begins, and a unit of a pool with states

DECODES = 32  # rows of one token each that one call of a mixer takes at most, with their states


class StatePart(NamedTuple):
    """One tensor that a layer keeps of a sequence. ``dtype`` "": the model's own type.

    ``name``: "conv" for the inputs that a convolution of K taps still needs, [channels, K - 1],
    oldest first; "recurrent" for what a recurrence keeps, as transformers' code shapes it. Further
    ones of a layer have their number behind it ("conv1").
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class StateComponent:
    """A part in its place: ``offset`` counts bytes from the beginning of the sequence's run."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """By number each layer with a state, and the bytes of a sequence's run, all layers together."""

    layers: Mapping[int, tuple[StateComponent, ...]]
    nbytes: int

    @classmethod
    def of(cls, parts: Mapping[int, Sequence[StatePart]], dtype: str) -> "StateLayout":
        """Lay out the parts of each layer, one after another by the layers' numbers. ``dtype``: the
        model's own.
        """
        layers: dict[int, tuple[StateComponent, ...]] = {}
        end = 0
        for layer in sorted(parts):
            components: list[StateComponent] = []
            for name, shape, own in parts[layer]:
                component = StateComponent(name, tuple(shape), own or dtype, aligned(end))
                end = component.offset + component.nbytes
                components.append(component)
            layers[layer] = tuple(components)
        return cls(layers, aligned(end))

    def units(self, unit_bytes: int) -> int:
        """Units of the pool that a sequence's run takes."""
        return ceil_div(self.nbytes, unit_bytes) if self.nbytes else 0


def aligned_width(width: int, column: int) -> int:
    """The next width, in columns of so many bytes, with which a unit is a multiple of ALIGNMENT."""
    step = ALIGNMENT // math.gcd(ALIGNMENT, column)
    return ceil_div(width, step) * step


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT
