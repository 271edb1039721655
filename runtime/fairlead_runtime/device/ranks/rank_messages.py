"""A step as plain values, from the rank that schedules to those that only compute.

Writes and reads the two messages of a step. A follower keeps nothing between two steps but its
cache, so that no state can differ between the ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fairlead_kernels.interface.attention import AttentionBackend, RaggedRows
from fairlead_runtime.child.frames import Message
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.ranks.step_messages import Copies, Forward
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.sizing.groups import LayerGroup


def copies(work: Work) -> Copies:
    return Copies(work.offload, work.restore, work.copies)


def forward(batch: Batch, keep: Tensor | None, *, ahead: bool = False) -> Forward:
    """``keep``: the packed tokens whose logits are computed, if not those that sample. ``ahead``:
    the leader's device alone has all ids, and shares them in the pass.
    """
    indices = batch.sample_index if keep is None else keep
    tensors = [batch.input_ids, batch.positions, indices]
    rows = batch.ragged[0]
    tensors += [rows.query_starts, rows.kv_lens, *batch.slots]
    tensors += [ragged.tables for ragged in batch.ragged]
    return Forward([tensor.numpy().tobytes() for tensor in tensors], ahead)


@torch.inference_mode()
def follow(
    message: Message,
    model: PagedModel,
    cache: CacheStorage,
    attention: AttentionBackend,
    ranks: RankGroup,
) -> None:
    """Do what a message of the leader says. On a GPU the work is queued, and nobody waits for it:
    the leader may be a step ahead.
    """
    match message:
        case Copies(offload, restore, forks):
            cache.copy(Work(0, offload=offload, restore=restore, copies=forks))
        case Forward(tensors, ahead):
            pinned = model.device.type == "cuda"
            batch = _batch(tensors, cache.groups, cache.block_size, pinned=pinned)
            if ahead:
                ids = batch.input_ids.to(model.device, non_blocking=True)
                batch = replace(batch, input_ids=ranks.broadcast(ids))
            model.forward(batch, cache, attention)


def _batch(
    buffers: Sequence[bytes], groups: Sequence[LayerGroup], block_size: int, *, pinned: bool
) -> Batch:
    """``pinned``: a large copy to a device waits for what runs there unless its source is."""

    def sent(raw: bytes) -> Tensor:
        tensor = _tensor(raw, torch.int64)
        return tensor.pin_memory() if pinned else tensor

    ids, positions, indices = map(sent, buffers[:3])
    starts, lens = (_tensor(raw, torch.int32) for raw in buffers[3:5])
    slots = tuple(map(sent, buffers[5 : 5 + len(groups)]))
    tables = [_tensor(raw, torch.int32).view(len(lens), -1) for raw in buffers[5 + len(groups) :]]
    ragged = tuple(
        RaggedRows(starts, lens, table, block_size, group.window, group.index)
        for table, group in zip(tables, groups, strict=True)
    )
    return Batch(ids, positions, slots, ragged, indices, [])


def _tensor(raw: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
