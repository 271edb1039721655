"""Steps of decodes alone, whose inputs and draws are made on the device.

Owns the way of such a step: the slot table is brought up to date, attention is planned from the
lengths that the host knows, the device makes ids, positions and slots, computes, samples and
appends each token to its own row. The host waits once, for the tokens; or it launches the next step
first (docs/design/0012). A step whose rows change their logits or want log-probabilities is sampled
as any other step is; docs/design/0009 says why.

With graphs the step is padded to one of a few sizes, and what the device does from the rows' places
to their tokens is replayed. All that it reads and writes lives as long as this object.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fairlead_kernels import sample, sample_rows
from fairlead_kernels.attention import DecodeAttention, DecodeRows
from fairlead_runtime.device.attention import GroupedPass
from fairlead_runtime.device.graphs import GraphCache
from fairlead_runtime.device.kv_cache import CacheStorage
from fairlead_runtime.device.paged_model import PagedModel
from fairlead_runtime.device.sampling import NON_FINITE, SampledTokens
from fairlead_runtime.device.slot_table import Array, Draw, SlotTable
from fairlead_runtime.scheduling.plan import Result, Row

# Samples a step's logits by the general way: the tokens on the device, and how to finish the step.
SampleLogits = Callable[[Tensor], tuple[SampledTokens, Callable[[], dict[int, Result]]]]


class _Fetched:
    """Host memory for the tokens of one step of at most ``most`` rows."""

    def __init__(self, most: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tokens = torch.empty(most, dtype=torch.int64, pin_memory=on_gpu)
        # torch does not annotate it.
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._count = 0

    def fetch(self, tokens: Tensor) -> None:
        """Queue the copy of ``tokens`` [B], which may be written again behind it."""
        self._count = len(tokens)
        self._tokens[: self._count].copy_(tokens, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        values: list[int] = self._tokens[: self._count].tolist()
        return values


def is_decode(row: Row) -> bool:
    """Whether the row computes its sequence's last token, and nothing else."""
    return row.count == 1 and row.samples and not row.sequence.scores_prompt


class DecodeSteps:
    """Runs steps of at most ``sequences`` decodes of sequences of at most ``max_model_len`` tokens.

    ``cache`` must have one unit beyond those that the scheduler knows: its last is for padding.
    ``nbytes`` counts it: bytes on the device, as ``sizing.terms.decode_state`` plans them, without
    what ``graphs`` takes. Graphs are of steps padded to ``sizes``, ascending, the last of them at
    least ``sequences``; plans of attention then hold their addresses.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: CacheStorage,
        attention: DecodeAttention,
        *,
        sequences: int,
        max_model_len: int,
        graphs: GraphCache | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._graphs = graphs
        self._sizes = tuple(sizes)
        self._model = model
        self._cache = cache
        self._attention = attention
        self.table = SlotTable(
            cache.groups,
            cache.block_size,
            sequences=sequences,
            blocks=-(-max_model_len // cache.block_size),
            padding_unit=cache.units - 1,
            device=model.device,
        )
        most = max((sequences, *self._sizes))
        # The table's row of each row of the step, their tokens, and each row's place among them.
        self._index = torch.zeros(most, dtype=torch.int64, device=model.device)
        self._tokens = torch.zeros_like(self._index)
        self._places = torch.arange(most, device=model.device)
        # The newest step's first; nobody may have looked at the other's tokens yet.
        self._fetched = [_Fetched(most, model.device) for _ in range(2)]
        # The most blocks of a padded step's rows.
        self._room = most * self.table.tables.shape[2] if graphs is not None else 0
        self._held: dict[int, Tensor] = {}  # by size, the logits that its graph computes
        self._hashes = sample.hash_tokens(model.logits_width, model.device)

    @property
    def nbytes(self) -> int:
        cache = self._cache
        tensors = self._index, self._tokens, self._places, self._hashes
        unit = cache.unit_bytes(cache.groups, cache.heads, cache.block_size)
        return self.table.nbytes + sum(tensor.nbytes for tensor in tensors) + unit

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], general: SampleLogits) -> dict[int, Result]:
        """One step of rows for which ``is_decode`` holds, each of which gets a Result. ``general``
        samples where a row needs more than a draw.
        """
        with self._forgetting(rows):
            return self._run(rows, general)

    @contextmanager
    def _forgetting(self, rows: Sequence[Row]) -> Iterator[None]:
        """A step of these rows that raises may have run or not."""
        try:
            yield
        except BaseException:
            self.table.forget(rows)
            raise

    def _run(self, rows: Sequence[Row], general: SampleLogits) -> dict[int, Result]:
        logits = self._compute(rows, self._size(len(rows)))
        if logits is not None:
            sampled, finish = general(logits[: len(rows)])
            self.table.advance(self._index[: len(rows)], sampled.tokens)
            return finish()
        return _results(rows, self._fetch(len(rows)))

    def launches(self, rows: Sequence[Row]) -> bool:
        """Whether these are decodes that are all sampled on the device: no other is launched."""
        return bool(rows) and all(
            is_decode(row) and self.table.draw_of(row.sequence) < Draw.GENERAL for row in rows
        )

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Callable[[], Mapping[int, Result]]:
        """Queue the step of rows that ``launches`` takes, behind one that may be in flight. The
        returned function waits for its tokens; it is called before the next step but one.
        """
        with self._forgetting(rows):
            if self._compute(rows, self._size(len(rows))) is not None:
                raise ValueError("rows: one is not sampled on the device")
            fetched = self._fetch(len(rows))

        def collect() -> Mapping[int, Result]:
            with self._forgetting(rows):
                return _results(rows, fetched)

        return collect

    def _fetch(self, count: int) -> _Fetched:
        """Queue the copy of the newest step's tokens to the host."""
        self._fetched.reverse()
        self._fetched[0].fetch(self._tokens[:count])
        return self._fetched[0]

    def _size(self, count: int) -> int:
        """The rows, with padding, of a step of ``count``."""
        return next((size for size in self._sizes if size >= count), count)

    def _compute(self, rows: Sequence[Row], size: int, least: Draw = Draw.GREEDY) -> Tensor | None:
        """Queue the step, padded to ``size`` rows: tokens into ``_tokens`` and the table, or for
        GENERAL only the logits, which are returned and live until the next step. ``least``: sampled
        at least in this way.
        """
        index = self._index[:size]
        lens, draw = self.table.enter(rows, index)
        draw = max(draw, least)
        plans = self._plan(index, lens)
        made: list[Tensor] = []  # logits: of the step that runs, and of the one that is recorded

        def step() -> None:
            logits = self._logits(index, plans)
            if draw is Draw.GENERAL:
                made.append(logits)
                return
            tokens = self._choose(logits, index, draw)
            self._tokens[:size].copy_(tokens)
            self.table.advance(index, tokens)

        if self._graphs is None:
            step()
        else:
            self._graphs.run((size, draw), step)
        if draw is not Draw.GENERAL:
            return None
        if len(made) > 1:
            self._held[size] = made[1]
        return made[0] if made else self._held[size]

    def capture(self, until: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        """Capture the graphs that most steps need, the largest steps first, one and then more while
        ``until`` is False: yields how many are there, and how many there will be.

        Where the cache of graphs has room for fewer, the others are captured when a step needs one.
        """
        draws = Draw.GREEDY, Draw.PLAIN, Draw.FILTERED
        keys = [(size, draw) for draw in draws for size in reversed(self._sizes)]
        if self._graphs is None:
            return
        keys = keys[: self._graphs.limit]
        for size, draw in keys:
            self.capture_one(size, draw)
            if self._graphs.failure:
                return
            yield len(self._graphs), len(keys)
            if until():
                return

    @torch.inference_mode()
    def capture_one(self, size: int, draw: Draw) -> None:
        """Run a step of padding alone, and capture it if there is room."""
        self._compute((), size, draw)

    def _plan(self, index: Tensor, lens: Array) -> list[Any]:
        """Attention's plan per layer group, of rows of these lengths."""
        on_device, kv_lens = self.table.lens(index), torch.from_numpy(lens)
        return [
            self._attention.plan_decodes(
                DecodeRows(
                    kv_lens,
                    on_device,
                    self.table.tables[group.index],
                    index,
                    self._cache.block_size,
                    group.window,
                    group.index,
                ),
                self._room,
            )
            for group in self._cache.groups
        ]

    def _logits(self, index: Tensor, plans: list[Any]) -> Tensor:
        inputs = self.table.inputs(index)
        groups = list(zip(plans, inputs.slots, strict=True))
        step = GroupedPass(self._cache, self._attention, groups, self._places[: len(index)])
        return self._model.run(inputs.ids, inputs.positions, step)

    def _choose(self, logits: Tensor, index: Tensor, draw: Draw) -> Tensor:
        parameters = None if draw is Draw.GREEDY else self.table.parameters(index)
        filters = draw is Draw.FILTERED
        return sample_rows.choose(logits, parameters, self._hashes, filters=filters)


def _results(rows: Sequence[Row], fetched: _Fetched) -> dict[int, Result]:
    tokens = fetched.wait()  # the one wait for the device
    return {
        row.sequence.id: Result(token) if token >= 0 else Result(-1, error=NON_FINITE)
        for row, token in zip(rows, tokens, strict=True)
    }
