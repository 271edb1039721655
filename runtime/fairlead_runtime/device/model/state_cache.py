"""What a mixer of transformers takes for its cache: the states of a few sequences in one layer.

Owns the methods of transformers' caches that mixers call, on tensors of ours. A mixer may change
what it reads in place, so the tensors are copies of what the pool holds; ``states`` has them after
the call. A convolution keeps the K - 1 inputs that its next output needs, where transformers keeps
K: all forms of its code read the last K - 1 alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairlead_runtime.sizing.states import StatePart

CONV, RECURRENT = "conv", "recurrent"


def name_of(kind: str, index: int) -> str:
    """The name of a layer's state, as ``sizing.states`` has it: its kind, and the index behind it
    of a further one.
    """
    return f"{kind}{index or ''}"


class StateCache:
    """The states [B, ...] of B sequences in one layer, by name: those of a call's first token, then
    those behind its last.
    """

    def __init__(self, states: dict[str, Tensor]) -> None:
        self.states = states

    def get_conv_state(self, *_: Any, state_idx: int = 0) -> Tensor | None:
        """The last inputs [B, channels, K - 1] of a convolution."""
        return self.states[name_of(CONV, state_idx)]

    def update_conv_state(
        self, conv_states: Tensor, *_: Any, state_idx: int = 0, **_settings: Any
    ) -> Tensor:
        """The kept inputs with those [B, channels, t] of this call behind them, of which the last
        are kept.
        """
        name = name_of(CONV, state_idx)
        kept = self.states[name]
        inputs = torch.cat([kept.to(conv_states.dtype), conv_states], dim=-1)
        self.states[name] = inputs[..., inputs.shape[-1] - kept.shape[-1] :]
        return inputs

    def get_recurrent_state(self, *_: Any, state_idx: int = 0) -> Tensor | None:
        """The recurrent state [B, ...]."""
        return self.states[name_of(RECURRENT, state_idx)]

    def update_recurrent_state(
        self, recurrent_states: Tensor, *_: Any, state_idx: int = 0, **_settings: Any
    ) -> Tensor:
        """Keep this state [B, ...] behind the call's last token."""
        self.states[name_of(RECURRENT, state_idx)] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, *_: Any) -> Tensor | None:
        """The recurrent state in the words of MiniMax's own cache."""
        return self.get_recurrent_state()

    def set_linear_cache(self, _layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache)

    def is_recording_past(self, *_: Any) -> bool:
        """Whether old inputs of convolutions are kept: never."""
        return False


def parts_of(states: Mapping[str, Tensor]) -> tuple[StatePart, ...]:
    """What a layer keeps of one sequence, of states [1, ...]: those of convolutions first."""
    return tuple(
        StatePart(name, tuple(state.shape[1:]), str(state.dtype).removeprefix("torch."))
        for name, state in sorted(states.items())
    )


class FirstStates(StateCache):
    """No states yet: what a mixer keeps of a first call, with the shapes and types that it has."""

    def __init__(self) -> None:
        super().__init__({})

    def get_conv_state(self, *_: Any, state_idx: int = 0) -> Tensor | None:
        return self.states.get(name_of(CONV, state_idx))

    def get_recurrent_state(self, *_: Any, state_idx: int = 0) -> Tensor | None:
        return self.states.get(name_of(RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        *_: Any,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_settings: Any,
    ) -> Tensor:
        if conv_kernel_size is None:
            raise ValueError("conv_kernel_size: a layer does not say how long its convolution is")
        *batch, _tokens = conv_states.shape
        zeros = conv_states.new_zeros(*batch, conv_kernel_size - 1)
        self.states.setdefault(name_of(CONV, state_idx), zeros)
        return super().update_conv_state(conv_states, state_idx=state_idx)
