"""A step as plain values, from the rank that schedules to those that only compute.

Writes and reads the two messages of a step. Between two steps a follower keeps its cache and the
block tables, to which each step adds what the leader adds to its own: it decides nothing about
either.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fairlead_kernels.interface.attention import AttentionBackend
from fairlead_runtime.child.frames import Message
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.block_tables import BlockTables, DeviceTables, HostTables
from fairlead_runtime.device.model.host_buffer import Array
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.model.table_rows import Growth
from fairlead_runtime.device.ranks.step_messages import Copies, Forward
from fairlead_runtime.scheduling.plan import Work


def copies(work: Work) -> Copies:
    return Copies(work.offload, work.restore, work.copies)


def forward(batch: Batch, keep: Tensor | None, *, ahead: bool = False) -> Forward:
    """``keep``: the packed tokens whose logits are computed, if not those that sample. ``ahead``:
    the leader's device alone has all ids, and shares them in the pass.
    """
    indices = batch.sample_index if keep is None else keep
    step, growth = batch.ragged[0], batch.growth
    tensors = batch.input_ids, batch.positions, indices, step.query_starts, step.kv_lens
    arrays = *(tensor.numpy() for tensor in tensors), growth.rows, growth.spans, growth.units
    return Forward([array.tobytes() for array in arrays], ahead)


class Follower:
    """A rank that makes the leader's steps. ``shape``: rows and blocks of the block tables that its
    device keeps; none where attention reads them on the host.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: CacheStorage,
        attention: AttentionBackend,
        ranks: RankGroup,
        shape: tuple[int, int] | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._ranks = ranks
        self._pinned = model.device.type == "cuda"
        groups, size = cache.groups, cache.block_size
        self._tables: BlockTables = HostTables(groups, size, pinned=self._pinned)
        if shape is not None:
            tensor = torch.zeros(len(groups), *shape, dtype=torch.int32, device=model.device)
            self._tables = DeviceTables(groups, size, tensor)

    @torch.inference_mode()
    def follow(self, message: Message) -> None:
        """Do what a message of the leader says. On a GPU the work is queued, and nobody waits for
        it: the leader may be a step ahead.
        """
        match message:
            case Copies(offload, restore, forks):
                self._cache.copy(Work(0, offload=offload, restore=restore, copies=forks))
            case Forward(tensors, ahead):
                batch = self.batch(tensors)
                if ahead:
                    ids = batch.input_ids.to(self._model.device, non_blocking=True)
                    batch = replace(batch, input_ids=self._ranks.broadcast(ids))
                self._model.forward(batch, self._cache, self._attention)

    def batch(self, buffers: Sequence[bytes]) -> Batch:
        """The leader's batch, whose blocks are in this rank's tables from now on."""
        ids, positions, indices, rows, spans = (
            np.frombuffer(buffers[place], dtype=np.int64) for place in (0, 1, 2, 5, 6)
        )
        starts, lens, units = (np.frombuffer(buffers[at], dtype=np.int32) for at in (3, 4, 7))
        groups = len(self._cache.groups)
        growth = Growth(rows.copy(), spans.reshape(-1, 3), units.reshape(groups, -1))
        self._tables.write(growth)
        query_starts, kv_lens = (torch.from_numpy(array.copy()) for array in (starts, lens))
        slots, ragged = self._tables.of(growth.rows, positions, query_starts, kv_lens)
        input_ids, at, index = map(self._sent, (ids, positions, indices))
        return Batch(input_ids, at, slots, ragged, index, [], growth)

    def _sent(self, array: Array) -> Tensor:
        """A large copy to a device waits for what runs there unless its source is pinned."""
        tensor = torch.from_numpy(array.copy())
        return tensor.pin_memory() if self._pinned else tensor
