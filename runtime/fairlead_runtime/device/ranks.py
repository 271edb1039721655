"""A step as plain values, from the rank that schedules to those that only compute.

Owns the two messages of a step: its copies, and a forward pass as the batch's tensors. A follower
keeps nothing between two steps but its cache, so that no state can differ between the ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairlead_kernels.attention import AttentionBackend, RaggedRows
from fairlead_runtime.device.batch import Batch
from fairlead_runtime.device.kv_cache import CacheStorage
from fairlead_runtime.device.paged_model import PagedModel
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.sizing.groups import LayerGroup

Message = dict[str, Any]
COPIES, FORWARD = "copies", "forward"


def copies(work: Work) -> Message:
    return {COPIES: [work.offload, work.restore, work.copies]}


def forward(batch: Batch, keep: Tensor | None) -> Message:
    """``keep``: the packed tokens whose logits are computed, if not those that sample."""
    kept = batch.sample_index if keep is None else keep
    tensors = [batch.input_ids, batch.positions, kept]
    rows = batch.ragged[0]
    tensors += [rows.query_starts, rows.kv_lens, *batch.slots]
    tensors += [ragged.tables for ragged in batch.ragged]
    return {FORWARD: [tensor.numpy().tobytes() for tensor in tensors]}


@torch.inference_mode()
def follow(
    message: Message, model: PagedModel, cache: CacheStorage, attention: AttentionBackend
) -> None:
    """Do what a message of the leader says."""
    if COPIES in message:
        offload, restore, forks = message[COPIES]
        cache.copy(Work(0, offload=offload, restore=restore, copies=forks))
    else:
        batch = _batch(message[FORWARD], cache.groups, cache.block_size)
        model.forward(batch, cache, attention)


def _batch(parts: Sequence[bytes], groups: Sequence[LayerGroup], block_size: int) -> Batch:
    ids, positions, kept = (_tensor(part, torch.int64) for part in parts[:3])
    starts, lens = (_tensor(part, torch.int32) for part in parts[3:5])
    slots = tuple(_tensor(part, torch.int64) for part in parts[5 : 5 + len(groups)])
    tables = [_tensor(part, torch.int32).view(len(lens), -1) for part in parts[5 + len(groups) :]]
    ragged = tuple(
        RaggedRows(starts, lens, table, block_size, group.window, group.index)
        for table, group in zip(tables, groups, strict=True)
    )
    return Batch(ids, positions, slots, ragged, kept, [])


def _tensor(part: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(part), dtype=dtype) if part else torch.empty(0, dtype=dtype)
