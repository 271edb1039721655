"""What a recording notes of a module's call."""

import torch
from torch import Tensor, nn

from fairlead_runtime.device.conversion.module_calls import record_calls


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_what_a_module_got_is_recorded_as_it_was_before_the_module_changed_it() -> None:
    module = AddsInPlace()
    with record_calls([module]) as calls:
        module(module(torch.zeros(1, 3)))
    values = [(float(x.unary.input[0, 0]), float(x.unary.output[0, 0])) for x in calls]
    assert values == [(0, 1), (1, 2)]
    module(torch.zeros(1, 3))
    assert len(calls) == 2
