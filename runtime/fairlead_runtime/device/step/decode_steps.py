"""Steps of decodes alone, whose inputs and draws are made on the device.

Owns the way of such a step: the sequence table is brought up to date, attention is planned from the
lengths that the host knows, the device makes ids, positions and slots, computes, samples and
appends each token to its own row. The host waits once, for the tokens; or it launches the next step
first (docs/design/0012). A step with masks is drawn once they are there, and one with a row whose
list of changes has no room is sampled as any other step is (docs/design/0009).

With graphs the step is padded to one of a few sizes, and what the device does from the rows' places
to their tokens is replayed. All that it reads and writes lives as long as this object.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairlead_kernels.interface.attention import DecodeAttention, DecodeRows
from fairlead_kernels.sampling.sample_rows import FindCuts, RowLogprobs
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.host_buffer import Array
from fairlead_runtime.device.model.paged_attention import GroupedPass
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.device_sampler import RowSampler, WaitForMasks
from fairlead_runtime.device.sampling.host_sampler import SampledTokens
from fairlead_runtime.device.sampling.sampling_mode import (
    GENERAL,
    GREEDY,
    HEAVIEST,
    DrawKind,
    SamplingMode,
    merge,
)
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.device.sampling.token_readback import SampledStep, results_of
from fairlead_runtime.device.step.graph_cache import GraphCache
from fairlead_runtime.device.step.pending_step import PendingStep
from fairlead_runtime.scheduling.plan import Result, Row


class _Computed(NamedTuple):
    """How a step is sampled; its logits where that is still to be done, and whether some rows
    count their tokens.
    """

    mode: SamplingMode
    logits: Tensor | None
    counts: bool


# Samples a step's logits in the general mode: the tokens on the device, and how to finish the step.
SampleLogits = Callable[[Tensor], tuple[SampledTokens, Callable[[], dict[int, Result]]]]


def is_decode(row: Row) -> bool:
    """Whether the row computes its sequence's last token, and nothing else."""
    return row.count == 1 and row.samples and not row.sequence.scores_prompt


class DecodeSteps:
    """Runs steps of at most ``sequences`` decodes of sequences of at most ``max_model_len`` tokens.

    ``cache`` must have one unit beyond those that the scheduler knows: its last is for padding.
    ``nbytes`` counts it: bytes on the device, as ``sizing.terms.decode_state`` plans them, without
    what ``graphs`` takes, of which ``held_nbytes`` are here. A row's changes of logits are at most
    ``listed`` ids, by default as many as planned. Graphs are of steps padded to ``sizes``,
    ascending, the last of them at least ``sequences``; plans of attention then hold their
    addresses.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: CacheStorage,
        attention: DecodeAttention,
        *,
        sequences: int,
        max_model_len: int,
        listed: int | None = None,
        graphs: GraphCache | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._graphs = graphs
        self._sizes = tuple(sizes)
        self._model = model
        self._cache = cache
        self._attention = attention
        max_rows = max((sequences, *self._sizes))
        self.sampler = RowSampler.of(
            model,
            cache,
            sequences=sequences,
            max_model_len=max_model_len,
            listed=listed,
            max_rows=max_rows,
        )
        self._places = torch.arange(max_rows, device=model.device)  # each row's among the logits
        # The most blocks of a padded step's rows.
        self._room = max_rows * self.table.tables.shape[2] if graphs is not None else 0
        # The logits of captured steps that are sampled in the general mode: of all sizes at one
        # address, since a graph's own tensors are the next graph's, or lost to all others while
        # they live.
        shape = max_rows, model.logits_width
        self._logits: Tensor | None = None
        if graphs is not None:
            self._logits = torch.zeros(shape, dtype=model.logits_dtype, device=model.device)

    @property
    def table(self) -> SequenceTable:
        return self.sampler.table

    @property
    def nbytes(self) -> int:
        return self.sampler.nbytes + self._places.nbytes

    def drop_graphs(self) -> None:
        """Run every step as it is from now on, without padding."""
        if self._graphs is not None:
            self._graphs.clear()
        self._graphs, self._logits, self._sizes, self._room = None, None, (), 0

    def use_cuts(self, find_cuts: FindCuts) -> None:
        """Find the cuts of filters so from now on. Graphs of steps that filter are dropped, and
        captured again as steps need them.
        """
        self.sampler.find_cuts = find_cuts
        if self._graphs is not None:
            self._graphs.clear(lambda key: key[1].draw is DrawKind.FILTERED)

    @property
    def held_nbytes(self) -> int:
        """Bytes that all graphs share."""
        return 0 if self._logits is None else self._logits.nbytes

    @torch.inference_mode()
    def run(
        self, rows: Sequence[Row], general: SampleLogits, masks: WaitForMasks
    ) -> dict[int, Result]:
        """One step of rows for which ``is_decode`` holds, each of which gets a Result. ``general``
        samples where a row needs more than a draw; ``masks`` gives those of their grammars.
        """
        with self.sampler.forgetting(rows):
            return self._run(rows, general, masks)

    def _run(
        self, rows: Sequence[Row], general: SampleLogits, masks: WaitForMasks
    ) -> dict[int, Result]:
        step = self._compute(rows, self._size(len(rows)))
        if step.logits is None or step.mode is not GENERAL:
            return results_of(rows, self._draw(rows, step, masks))
        sampled, finish = general(step.logits[: len(rows)])
        self.table.advance(self.sampler.index[: len(rows)], sampled.tokens, counts=step.counts)
        return finish()

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row], masks: WaitForMasks) -> PendingStep:
        """Queue the step of decodes that the ``sampler`` takes, behind one that may be in flight.
        It is drawn before the next one is launched, and collected before the next but one.
        """
        with self.sampler.forgetting(rows):
            step = self._compute(rows, self._size(len(rows)))
            if step.mode is GENERAL:
                raise ValueError("rows: one is not sampled on the device")
        return PendingStep(rows, self.sampler, step.mode, lambda: self._draw(rows, step, masks))

    def _draw(self, rows: Sequence[Row], step: _Computed, masks: WaitForMasks) -> SampledStep:
        if step.logits is None:
            return SampledStep(self.sampler.fetch(len(rows), step.mode), {})
        return self.sampler.draw(rows, step.logits[: len(rows)], step.mode, masks)

    def _size(self, count: int) -> int:
        """The rows, with padding, of a step of ``count``."""
        return next((size for size in self._sizes if size >= count), count)

    def _compute(
        self, rows: Sequence[Row], size: int, at_least: SamplingMode = GREEDY
    ) -> _Computed:
        """Queue the step, padded to ``size`` rows: tokens into the sampler's and the table, or for
        GENERAL and masked ones only the logits, which live until the next step. ``at_least``:
        sampled in this mode at least.
        """
        index = self.sampler.index[:size]
        lens, mode, counts, _ = self.table.enter(rows, index)
        mode = merge((mode, at_least))
        plans = self._plan(index, lens)
        captured_logits = None if self._logits is None else self._logits[:size]
        # What is chosen later needs no more than the graph of what the host chooses.
        now = GENERAL if mode.masked else mode

        def step() -> Tensor | None:
            logits = self._forward(index, plans)
            if now is not GENERAL:
                self.sampler.sample(logits, index, mode)
                return None
            return logits if captured_logits is None else captured_logits.copy_(logits)

        if self._graphs is None:
            return _Computed(mode, step(), counts)
        self._graphs.run((size, now), step)
        return _Computed(mode, captured_logits if now is GENERAL else None, counts)

    def capture(self, until: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        """Capture the graphs that most steps need, the largest steps first, one and then more while
        ``until`` is False: yields how many are there, and how many there will be.

        Where the cache of graphs has room for fewer, the others are captured when a step needs one.
        Where it has room for more, the graph that takes most memory is captured before all: the
        others' tensors find room in what it leaves, as when it was measured.
        """
        modes = (
            SamplingMode(DrawKind.GREEDY),
            SamplingMode(DrawKind.PLAIN),
            SamplingMode(DrawKind.FILTERED),
        )
        keys = [(size, mode) for mode in modes for size in reversed(self._sizes)]
        if self._graphs is None:
            return
        if self._graphs.limit > len(keys):
            keys.insert(0, (self._sizes[-1], HEAVIEST))
        keys = keys[: self._graphs.limit]
        for size, mode in keys:
            self.capture_one(size, mode)
            if self._graphs.failure:
                return
            yield len(self._graphs), len(keys)
            if until():
                return

    @torch.inference_mode()
    def capture_one(self, size: int, mode: SamplingMode) -> None:
        """Run a step of padding alone, and capture it if there is room."""
        self._compute((), size, mode)

    @torch.inference_mode()
    def run_and_replay(
        self, rows: Sequence[Row], size: int, mode: SamplingMode
    ) -> tuple[Tensor, Tensor, RowLogprobs]:
        """A step of these rows in a captured ``mode``, padded to ``size``: its logits [B, width]
        without the graph, and what the graph makes of it, tokens int64 [B] and log-probabilities.
        """
        count, index = len(rows), self.sampler.index[:size]
        with self.sampler.forgetting(rows):
            lens, *_ = self.table.enter(rows, index)
            logits = self._forward(index, self._plan(index, lens))[:count].clone()
            self._compute(rows, size, mode)
            tokens, logprobs = self.sampler.newest(count)
        self.table.forget(rows)
        return logits, tokens, logprobs

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

    def _forward(self, index: Tensor, plans: list[Any]) -> Tensor:
        inputs = self.table.inputs(index)
        groups = list(zip(plans, inputs.slots, strict=True))
        step = GroupedPass(self._cache, self._attention, groups, self._places[: len(index)])
        return self._model.run(inputs.ids, inputs.positions, step)
