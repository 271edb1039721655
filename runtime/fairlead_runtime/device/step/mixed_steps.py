"""Launched steps that contain prompts. The next step is launched before their tokens are known. A
model sharded over ranks uses only these.

Owns what such a step does beyond any other: ids that the host does not know yet come from the
sequence table, as all blocks do, and tokens are sampled, appended and sent by its rows. So decodes
in it follow from a step in flight, and the next from it (docs/design/0012).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import Batch, BatchBuilder
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.device_sampler import RowSampler, WaitForMasks
from fairlead_runtime.device.sampling.sampling_mode import GENERAL, SamplingMode
from fairlead_runtime.device.step.follower_ranks import Followers
from fairlead_runtime.device.step.pending_step import PendingStep
from fairlead_runtime.scheduling.plan import Row


class MixedSteps:
    """``batches``: the builders of its steps, which share the sampler's block tables where
    attention reads those. ``followers`` hold the other shards of the model, and get all ids on
    their devices.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: CacheStorage,
        attention: AttentionBackend,
        sampler: RowSampler,
        batches: tuple[BatchBuilder, BatchBuilder],
        followers: Followers | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._sampler = sampler
        self._followers = followers
        # The newest step's first; the other's copies may be under way.
        self._batches = list(batches)

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row], masks: WaitForMasks) -> PendingStep:
        """Queue the step of rows that the sampler takes, behind one that may be in flight. It is
        drawn before the next one is launched, collected before the next but one, and has a Result
        for each row that samples.
        """
        sampling = [row for row in rows if row.samples]
        self._batches.reverse()
        with self._sampler.forgetting(rows), self._batches[0].forgetting(rows):
            mode, logits = self._queue(rows, sampling)
        draw = self._sampler.draw
        return PendingStep(
            sampling, self._sampler, mode, lambda: draw(sampling, logits, mode, masks)
        )

    def _queue(self, rows: Sequence[Row], sampling: Sequence[Row]) -> tuple[SamplingMode, Tensor]:
        """How the rows that sample are sampled, and their logits."""
        index, device = self._sampler.index[: len(sampling)], self._model.device
        entered = self._sampler.table.enter(rows, index)
        if entered.mode is GENERAL:
            raise ValueError("rows: one is not sampled on the device")
        growth = entered.growth if self._batches[0].shares_rows else None
        batch = self._batches[0].build(rows, ahead=True, growth=growth)
        # A copy on a CPU, too: the host's batch, which other ranks get, keeps what the host knows.
        ids = batch.input_ids.to(device, non_blocking=True, copy=True)
        last = batch.sample_index.to(device, non_blocking=True)
        if sampling:
            ids.index_copy_(0, last, self._sampler.table.last_tokens(index))
        mode = entered.mode
        return mode, self._forward(batch, replace(batch, input_ids=ids, sample_index=last))

    def _forward(self, batch: Batch, on_device: Batch) -> Tensor:
        """The logits of a batch, of which ``on_device`` is the copy with all ids."""
        if self._followers is None:
            return self._model.forward(on_device, self._cache, self._attention)
        self._followers.forward(batch, None, ahead=True)
        try:
            self._followers.share(on_device.input_ids)
            return self._model.forward(on_device, self._cache, self._attention)
        except Exception as error:
            raise self._followers.failure(error) from error
