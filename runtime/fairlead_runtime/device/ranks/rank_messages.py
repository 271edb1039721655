"""A step as plain values, from the rank that schedules to those that only compute.

Owns the two messages of a step: its copies, and a forward pass as the batch's tensors. A follower
keeps nothing between two steps but its cache, so that no state can differ between the ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.interface.attention import AttentionBackend, RaggedRows
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.sizing.groups import LayerGroup

Message = dict[str, Any]
COPIES, FORWARD, AHEAD = "copies", "forward", "ahead"


def copies(work: Work) -> Message:
    return {COPIES: [work.offload, work.restore, work.copies]}


def forward(batch: Batch, keep: Tensor | None, *, ahead: bool = False) -> Message:
    """``keep``: the packed tokens whose logits are computed, if not those that sample. ``ahead``:
    the leader's device alone has all ids, and shares them in the pass.
    """
    indices = batch.sample_index if keep is None else keep
    tensors = [batch.input_ids, batch.positions, indices]
    rows = batch.ragged[0]
    tensors += [rows.query_starts, rows.kv_lens, *batch.slots]
    tensors += [ragged.tables for ragged in batch.ragged]
    return {FORWARD: [tensor.numpy().tobytes() for tensor in tensors], AHEAD: ahead}


@torch.inference_mode()
def follow(
    message: Message,
    model: PagedModel,
    cache: CacheStorage,
    attention: AttentionBackend,
    group: RankGroup,
) -> None:
    """Do what a message of the leader says. On a GPU the work is queued, and nobody waits for it:
    the leader may be a step ahead.
    """
    if COPIES in message:
        offload, restore, forks = message[COPIES]
        cache.copy(Work(0, offload=offload, restore=restore, copies=forks))
    else:
        pinned = model.device.type == "cuda"
        batch = _batch(message[FORWARD], cache.groups, cache.block_size, pinned=pinned)
        if message[AHEAD]:
            ids = batch.input_ids.to(model.device, non_blocking=True)
            batch = replace(batch, input_ids=group.broadcast(ids))
        model.forward(batch, cache, attention)


def _batch(
    parts: Sequence[bytes], groups: Sequence[LayerGroup], block_size: int, *, pinned: bool
) -> Batch:
    """``pinned``: a large copy to a device waits for what runs there unless its source is."""

    def sent(part: bytes) -> Tensor:
        tensor = _tensor(part, torch.int64)
        return tensor.pin_memory() if pinned else tensor

    ids, positions, indices = map(sent, parts[:3])
    starts, lens = (_tensor(part, torch.int32) for part in parts[3:5])
    slots = tuple(map(sent, parts[5 : 5 + len(groups)]))
    tables = [_tensor(part, torch.int32).view(len(lens), -1) for part in parts[5 + len(groups) :]]
    ragged = tuple(
        RaggedRows(starts, lens, table, block_size, group.window, group.index)
        for table, group in zip(tables, groups, strict=True)
    )
    return Batch(ids, positions, slots, ragged, indices, [])


def _tensor(part: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(part), dtype=dtype) if part else torch.empty(0, dtype=dtype)
