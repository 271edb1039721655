"""What ``deterministic`` promises: a request's logits are the same bits whatever else is in the
batch, and however its prompt is cut into steps.

Owns which models can keep it, and the canary that shows it at start: one request computed alone, in
one step, and in a crowd, in many. Nothing here runs without the setting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_runtime.device.conversion.fusion import Fusion
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import BatchBuilder
from fairlead_runtime.device.model.fixed_order import FixedOrder, OtherOrderError
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.models.model_error import CanaryError
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing.groups import LayerGroup

BLOCK_SIZE = 16
LENGTH = 150
# How the prompt is cut in the crowd: single tokens as in a decode, chunks within a tile and beyond.
CHUNKS = (1, 40, 1, 1, 70, 2, 1)
# The crowd: rows as (cached tokens, tokens of the step), more of them than a tile of any kernel.
BEFORE = ((300, 1), (0, 45), *((7 + 5 * i, 1) for i in range(12)))
BEHIND = ((90, 1), (33, 31), *((2 + 9 * i, 1) for i in range(12)))
FIX = "use false, or a model of a family whose layers are all fused"


def check(model: PagedModel, fusion: Fusion) -> None:
    """Raise ConfigError for a model of which some part is computed by torch, whose sums have
    another order for another number of rows. Layers with states are transformers' code around
    products and operations in C++: what torch does there is computed in one order from now on.
    """
    name, problem = str(model.model.config.model_type), ""
    if model.states:
        if fusion.states.packed < fusion.states.mixers:
            problem = f"states of {name!r} are computed by torch{fusion.states}"
        model.fixed_order = FixedOrder(model.model.parameters())
    elif fusion.fused < fusion.layers:
        problem = f"layers of {name!r} are computed by torch: {fusion}"
    elif fusion.head_reason or not fusion.head:
        cause = fusion.head_reason or "they are not recognized"
        problem = f"the last norm and the head of {name!r} are computed by torch: {cause}"
    if problem:
        raise ConfigError("deterministic", problem, FIX)


@contextmanager
def refusing(model: PagedModel) -> Iterator[None]:
    """Raise ConfigError where a pass in the ``with`` block makes a sum of which no fixed order is
    known.
    """
    try:
        yield
    except OtherOrderError as error:
        name = str(model.model.config.model_type)
        problem = f"a part of {name!r} is computed by torch: {error}"
        raise ConfigError("deterministic", problem, FIX) from error


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """``tokens`` of one request had the same logits alone and beside ``neighbours``."""

    tokens: int
    neighbours: int

    def __str__(self) -> str:
        return (
            f"canary: {self.tokens} tokens have the same logits alone and beside {self.neighbours} "
            "other requests"
        )


@torch.inference_mode()
def canary(model: PagedModel, attention: AttentionBackend, max_model_len: int) -> CanaryResult:
    """Compare a request's logits bit for bit. Raises CanaryError where one differs."""
    steps = _Steps(model, attention, min(LENGTH, max_model_len), max_model_len)
    alone, begin = steps.alone(), 0
    chunks = [*CHUNKS, len(alone)]
    while begin < len(alone):
        size = min(chunks.pop(0), len(alone) - begin)
        want = alone[begin : begin + size]
        got = steps.crowded(begin, size)
        if not torch.equal(got, want):
            _fail(model, begin, got, want)
        if model.full_pass is not None and model.full_pass.chooses:
            value, token = steps.chosen(begin, size)
            if not (torch.equal(value, want[-1:].amax(1)) and int(token) == int(want[-1].argmax())):
                raise CanaryError(
                    f"canary: the likeliest token {begin + size} of a request is another one "
                    "beside other requests than alone"
                )
        begin += size
    return CanaryResult(len(alone), len(BEFORE) + len(BEHIND))


def _fail(model: PagedModel, begin: int, got: Tensor, want: Tensor) -> None:
    unlike = (got != want).any(dim=1)
    token = begin + int(unlike.int().argmax())
    difference = float((got.float() - want.float()).abs().max())
    raise CanaryError(
        f"canary: logits of {str(model.model.config.model_type)!r} at token {token} differ by "
        f"{difference:.3g} between a request alone and the same one beside others"
    )


class _Steps:
    """One request, alone in one cache and in a crowd in another."""

    def __init__(
        self, model: PagedModel, attention: AttentionBackend, length: int, longest: int
    ) -> None:
        self._model, self._attention = model, attention
        self._groups = model.groups
        generator = np.random.default_rng(0)

        def rows(shapes: tuple[tuple[int, int], ...]) -> list[tuple[Sequence, int, int]]:
            sequences = []
            for before, count in shapes:
                end = min(before + count, longest)
                ids = generator.integers(0, model.vocabulary, end).tolist()
                sequences.append((_sequence(ids), max(0, end - count), min(count, end)))
            return sequences

        self._request = _sequence(generator.integers(0, model.vocabulary, length).tolist())
        self._before, self._behind = rows(BEFORE), rows(BEHIND)

    def alone(self) -> Tensor:
        """The logits of all tokens [L, vocabulary], of one step."""
        request = self._request
        cache = _cache(self._model, self._groups, [request])
        return self._forward(cache, [Row(request, 0, len(request.tokens), samples=True)], 0)

    def crowded(self, begin: int, size: int) -> Tensor:
        """The logits of tokens ``begin``: ``begin + size``, [size, vocabulary]; those before them
        were given to this in order.
        """
        if begin == 0:
            neighbours = [sequence for sequence, _, _ in (*self._before, *self._behind)]
            self._crowd = _cache(self._model, self._groups, [self._request, *neighbours])
        else:  # goes on from the state that its last step wrote
            self._request.turn += 1
        return self._forward(self._crowd, self._rows(begin, size), len(self._before))

    def chosen(self, begin: int, size: int) -> tuple[Tensor, Tensor]:
        """The largest logit of the last of these tokens [1], and its place."""
        batch = BatchBuilder(self._groups, BLOCK_SIZE).build(self._rows(begin, size))
        values, tokens = self._model.likeliest(batch, self._crowd, self._attention)
        at = len(self._before)
        return values[at : at + 1], tokens[at]

    def _rows(self, begin: int, size: int) -> list[Row]:
        before, behind = (
            [Row(*row, samples=True) for row in rows] for rows in (self._before, self._behind)
        )
        return [*before, Row(self._request, begin, size, samples=True), *behind]

    def _forward(self, cache: CacheStorage, rows: list[Row], place: int) -> Tensor:
        """The logits of all tokens of the row at this place."""
        first = sum(row.count for row in rows[:place])
        keep = torch.arange(first, first + rows[place].count)
        batch = BatchBuilder(self._groups, BLOCK_SIZE).build(rows)
        return self._model.forward(batch, cache, self._attention, keep)


def _sequence(ids: list[int]) -> Sequence:
    request = Request("canary", tuple(ids), SamplingParams(), max_tokens=1)
    return Sequence(0, request, 0, ids)


def _cache(
    model: PagedModel, groups: tuple[LayerGroup, ...], sequences: list[Sequence]
) -> CacheStorage:
    """A cache of zeros that holds these sequences, in scattered blocks."""
    counts = [-(-len(sequence.tokens) // BLOCK_SIZE) for sequence in sequences]
    heads, size, layout = model.cache_heads, BLOCK_SIZE, model.state_layout
    states = 0
    if layout is not None:
        states = layout.units(CacheStorage.unit_bytes(groups, heads, size, layout))
    units = sum(counts) * len(groups) + 2 * states * len(sequences)
    free = np.random.default_rng(units).permutation(units).tolist()
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.tables = [[free.pop() for _ in range(count)] for _ in groups]
        sequence.turn = 0
        if states:
            sequence.states = [[free.pop() for _ in range(states)] for _ in range(2)]
    return CacheStorage(
        groups, heads, units=units, block_size=size, device=model.device, states=layout
    )
