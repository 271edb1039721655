"""Packed rows whose sequences have states in units of a pool, for tests of operations on states."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairlead_kernels.interface.states import StatePlace, StateRows


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence: how many tokens of it are in the packed row, how many of these are of its prompt,
    and whether it begins here.
    """

    count: int
    prompt: int
    begins: bool


@dataclass(frozen=True, slots=True)
class StateCase:
    """Rows, a place whose pool is NaN but for their states before them, and these [S, ...]."""

    rows: StateRows
    place: StatePlace
    states: Tensor

    def behind(self, sequence: int) -> Tensor:
        """The state behind a sequence's tokens."""
        return tensor_in(self.place, self.rows.target[sequence], self.states[0])

    def again(self) -> "StateCase":
        """The same, with a pool of its own."""
        return replace(self, place=replace(self.place, pool=self.place.pool.clone()))


def state_case(
    rows: Sequence[Row],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    unit_bytes: int = 320,
    offset: int = 192,
    shared: bool = False,
    seed: int = 0,
) -> StateCase:
    """Random states of ``shape``, each ``offset`` bytes behind the beginning of its sequence's run.
    ``shared``: all sequences continue one state.
    """
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(rows), *shape, generator=generator).to(dtype)
    width = math.ceil((offset + math.prod(shape) * dtype.itemsize + 64) / unit_bytes)
    count = 2 * len(rows) * width + 2
    pool = torch.full((count, unit_bytes), 0xFF, dtype=torch.uint8)
    units = torch.randperm(count, generator=generator)[: 2 * len(rows) * width]
    source, target = units.view(2, len(rows), width).clone()
    if shared:
        source, states = source[:1].expand_as(source).clone(), states[:1].expand_as(states)
    place = StatePlace(pool, offset)
    for sequence, row in enumerate(rows):
        if row.begins and not shared:
            states[sequence] = 0
        else:
            put_tensor(place, source[sequence], states[sequence])
    counts = torch.tensor([0, *(row.count for row in rows)])
    packed = StateRows(
        counts.cumsum(0),
        torch.tensor([row.prompt for row in rows], dtype=torch.int64),
        torch.tensor([row.begins for row in rows], dtype=torch.bool),
        source,
        target,
    )
    return StateCase(packed, place, states)


def tensor_in(place: StatePlace, units: Tensor, like: Tensor) -> Tensor:
    """What lies there, in the type and shape of another tensor."""
    run = place.pool[units].reshape(-1)
    return run[place.offset : place.offset + like.nbytes].view(like.dtype).view(like.shape).clone()


def put_tensor(place: StatePlace, units: Tensor, tensor: Tensor) -> None:
    run = place.pool[units].reshape(-1)
    run[place.offset : place.offset + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    place.pool[units] = run.view(len(units), -1)
