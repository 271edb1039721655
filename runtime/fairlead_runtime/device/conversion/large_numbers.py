"""What a recorded part of a layer does with numbers that its recording does not reach.

Owns how much larger these are, and what must follow from them. A part that limits numbers, as some
families' MLPs and projections are, gives what one without a limit gives until some reach it, in the
tokens that a start compares on, too. So modules with weights are played back with many times what
they gave (``module_calls.play_back``), which costs no product, and what lies between them must give
as many times as much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fairlead_runtime.device.conversion.closeness import same_rows
from fairlead_runtime.device.conversion.module_calls import ModuleCall

LARGE = 1e4  # times the numbers of a recording


PlayBack = Callable[[float], Sequence[ModuleCall]]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The calls of a layer's modules where those before its attention gave LARGE times what they
    gave, and those after it just that; the queries, keys and values [T, heads, dim] that attention
    got, and what it returned.
    """

    calls: Sequence[ModuleCall]
    attention: tuple[Tensor, ...]


def mlp_is_same(
    calls: Sequence[ModuleCall],
    inputs: Mapping[nn.Module, Tensor],
    outputs: Mapping[nn.Module, Tensor],
) -> bool:
    """Whether in these calls modules got these inputs [T, K] and gave these outputs [T, N]."""
    got = {call.module: call for call in calls}
    return (
        {*inputs, *outputs} <= {*got}
        and all(same_rows(got[module].input, want) for module, want in inputs.items())
        and all(same_rows(got[module].output, want) for module, want in outputs.items())
    )


def attention_is_same(replay: Replay, recorded: Sequence[Tensor], after: nn.Module) -> bool:
    """Whether attention got LARGE times the queries, keys and values ``recorded``, and the module
    after it what attention returned.
    """
    if len(replay.attention) != len(recorded) + 1:
        return False
    *large, attended = replay.attention
    reads = [call.input for call in replay.calls if call.module is after]
    return all(
        same_rows(got, LARGE * want) for got, want in zip(large, recorded, strict=True)
    ) and all(same_rows(x, attended.flatten(1)) for x in reads)
