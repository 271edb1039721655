"""Faults of attention: of a decoder layer that is run again on what was recorded of it, and of all
layers at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlead_runtime.device.conversion.module_calls import Call
from fairlead_runtime.device.model.batch import Batch, BatchBuilder
from fairlead_runtime.device.model.paged_attention import CURRENT_PASS, AttentionCall
from fairlead_runtime.device.model.paged_model import PagedModel, ProbePass
from fairlead_runtime.scheduling.plan import Row


class Attention(ProbePass):
    """A pass whose attention gives something else."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(torch.tensor([0]))
        self._change = change

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        return self._change(super().attend(layer, query, key, value, call))


def run(
    layer: Any, call: Call, change: Callable[[Tensor], Tensor] = lambda x: x, **more: Any
) -> Tensor:
    token = CURRENT_PASS.set(Attention(change))
    try:
        with torch.inference_mode():
            out: Tensor = layer(call.inputs[0], **{**call.arguments, **more})[0]
            return out
    finally:
        CURRENT_PASS.reset(token)


def scale_a_head(out: Tensor) -> Tensor:
    return torch.cat([out[:, :1] * 1.01, out[:, 1:]], dim=1)


def change_the_base(model: PagedModel) -> None:
    """Of the rotary embeddings, to its 1.3th power."""
    for name, buffer in model.model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            buffer.copy_(buffer**1.3)


def hide_each_token_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is off by one, in every layer, where a prompt goes on."""
    build = BatchBuilder.build

    def build_short(self: BatchBuilder, rows: Sequence[Row], **how: Any) -> Batch:
        batch = build(self, rows, **how)
        batch.ragged[0].kv_lens.sub_(torch.tensor([int(row.start > 0) for row in rows]))
        return batch

    monkeypatch.setattr(BatchBuilder, "build", build_short)
