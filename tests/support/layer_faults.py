"""A decoder layer run again on what was recorded of it, with a fault in its attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairlead_runtime.device.conversion.module_calls import Call
from fairlead_runtime.device.model.paged_attention import CURRENT_PASS, AttentionCall
from fairlead_runtime.device.model.paged_model import ProbePass


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
