"""A mixer's code called once for a whole packed row, on operations that keep its sequences apart.

Owns which functions of transformers' modeling files touch a state, and what takes their place: all
of a mixer's code but these works token by token, so it may have the tokens of all sequences at
once. A mixer is given no states (its code then takes its way for several tokens, with one token,
too): the operations read and write them where they lie.

    packed row   [ a | b | c c c | d | e e ]
    calls        [ a   b   c c c   d   e e ] as [1, T]
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairlead_kernels.interface.states import StateOperations, StatePlace, StateRows
from fairlead_runtime.device.model.state_cache import CONV, RECURRENT
from fairlead_runtime.device.model.state_scans import calls, forward_with, function_of
from fairlead_runtime.sizing.states import StatePart

Function = Callable[..., Any]


class PackedStates(NamedTuple):
    """The rows of a step and where the states of one layer lie, by name."""

    rows: StateRows
    places: Mapping[str, StatePlace]


class Role(NamedTuple):
    """A state, transformers' function that computes several tokens with it, that for one token,
    which is not called, and what makes a function in the first one's place.
    """

    state: str
    several: str
    single: str
    make: Callable[[StateOperations, Callable[[], PackedStates]], Function]


class PackedCache:
    """A cache without states: a mixer takes its way for the first tokens of a sequence. Inputs of
    convolutions stay what they are, and what it gives back is ignored.
    """

    def get_conv_state(self, *_: Any, **_settings: Any) -> Tensor | None:
        return None

    def get_recurrent_state(self, *_: Any, **_settings: Any) -> Tensor | None:
        return None

    def update_conv_state(self, conv_states: Tensor, *_: Any, **_settings: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, *_: Any, **_settings: Any) -> Any:
        return recurrent_states

    def is_recording_past(self, *_: Any) -> bool:
        return False


class PackedMixer:
    """A mixer whose code runs once a step. Raises ValueError, with the reason, for one that changes
    a state of its ``parts`` in another way than by functions that are known.
    """

    def __init__(
        self, module: nn.Module, parts: tuple[StatePart, ...], operations: StateOperations
    ) -> None:
        functions: dict[str, Function] = {}
        for part in parts:
            role = _role(module, part.name)
            functions[role.several] = role.make(operations, self._states)
            functions[role.single] = _not_called
        self._current: PackedStates | None = None
        self.forward = forward_with(module, **functions)

    def _states(self) -> PackedStates:
        if self._current is None:
            raise RuntimeError("a mixer was called outside of a step")
        return self._current

    def run(self, call: Callable[[], Tensor], states: PackedStates) -> Tensor:
        """What ``call``, which calls ``forward``, returns in a step with these states."""
        self._current = states
        try:
            return call()
        finally:
            self._current = None


def functions_of(module: nn.Module, parts: tuple[StatePart, ...]) -> dict[str, Function]:
    """Transformers' functions by which a mixer computes several tokens with its states, by name."""
    names = (_role(module, part.name).several for part in parts)
    return {name: function_of(module, name) for name in names}


def _role(module: nn.Module, state: str) -> Role:
    for role in ROLES:
        if role.state == state and calls(module, role.several):
            return role
    raise ValueError(f"{type(module).__name__} changes its state {state!r} in a way of its own")


def _not_called(*_: Any, **_settings: Any) -> Any:
    raise RuntimeError("a mixer without a state took its way for a single token")


def _convolution(operations: StateOperations, states: Callable[[], PackedStates]) -> Function:
    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_settings: Any,
    ) -> Tensor:
        """[1, C, T] in and out."""
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"activation: {activation!r} behind a convolution")
        x = hidden_states[0].T.to(weight.dtype)
        current = states()
        out = operations.causal_convolution(
            x,
            weight,
            bias,
            None if activation is None else "silu",
            current.rows,
            current.places[CONV],
        )
        return out.to(hidden_states.dtype).T[None]

    return convolve


def _delta_rule(operations: StateOperations, states: Callable[[], PackedStates]) -> Function:
    def compute(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_settings: Any,
    ) -> tuple[Tensor, None]:
        """[1, T, heads, dim] in and out."""
        current = states()
        out = operations.gated_delta_rule(
            query[0],
            key[0],
            value[0],
            g[0].float(),
            beta[0].float(),
            query.shape[-1] ** -0.5,
            current.rows,
            current.places[RECURRENT],
            normalizes=use_qk_l2norm_in_kernel,
        )
        return out[None].to(query.dtype), None

    return compute


def _scan_of_mamba2(operations: StateOperations, states: Callable[[], PackedStates]) -> Function:
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - as transformers names it
        B: Tensor,  # noqa: N803 - as transformers names it
        C: Tensor,  # noqa: N803 - as transformers names it
        D: Tensor | None = None,  # noqa: N803 - as transformers names it
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        z: Tensor | None = None,
        **_settings: Any,
    ) -> tuple[Tensor, None]:
        """[1, T, heads, dim] in and out. The bounds hold in prompts, as in transformers' code."""
        if z is not None:
            raise ValueError("z: a scan of Mamba 2 with a gate of its own")
        current = states()
        x, dt, b, c = _side_by_side(hidden_states[0], dt[0], B[0], C[0])
        out = operations.ssd(
            *(x, dt, A.float(), b, c),
            current.rows,
            current.places[RECURRENT],
            d=None if D is None else D.float(),
            bias=None if dt_bias is None else dt_bias.float(),
            softplus=dt_softplus,
            bounds=dt_limit,
        )
        return out[None], None

    return scan


def _selective_scan(operations: StateOperations, states: Callable[[], PackedStates]) -> Function:
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - as transformers names it
        B: Tensor,  # noqa: N803 - as transformers names it
        C: Tensor,  # noqa: N803 - as transformers names it
        D: Tensor | None = None,  # noqa: N803 - as transformers names it
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_settings: Any,
    ) -> tuple[Tensor, None]:
        """[1, channels, T] in and out, z too."""
        current = states()
        gate = () if z is None else (z[0].T,)
        x, b, c, *gate_rows = _side_by_side(hidden_states[0].T, B[0].T, C[0].T, *gate)
        out = operations.selective_scan(
            *(x, dt[0].T.to(x.dtype), A.float(), b, c),
            current.rows,
            current.places[RECURRENT],
            d=None if D is None else D.float(),
            z=gate_rows[0] if gate_rows else None,
            bias=None if delta_bias is None else delta_bias.float(),
            softplus=delta_softplus,
        )
        return out.T[None], None

    return scan


def _side_by_side(*inputs: Tensor) -> list[Tensor]:
    """Inputs [T, ...] of one type, a token's elements side by side: mostly themselves."""
    kind = functools.reduce(torch.promote_types, (x.dtype for x in inputs))
    return [
        x if len(x) and x[0].is_contiguous() else x.contiguous()
        for x in (x.to(kind) for x in inputs)
    ]


ROLES = (
    Role(CONV, "causal_conv1d_fn", "causal_conv1d_update", _convolution),
    Role(
        RECURRENT,
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        _delta_rule,
    ),
    Role(RECURRENT, "mamba2_chunk_scan", "mamba2_selective_state_update", _scan_of_mamba2),
    Role(RECURRENT, "mamba_selective_scan", "mamba_selective_state_update", _selective_scan),
)


def rows_of(
    counts: tuple[int, ...],
    prompts: tuple[int, ...],
    begins: tuple[bool, ...],
    source: Tensor,
    target: Tensor,
) -> StateRows:
    """The rows of a step, as the operations take them."""
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(counts, dtype=torch.int64), 0, out=starts[1:])
    return StateRows(
        starts,
        torch.tensor(prompts, dtype=torch.int64),
        torch.tensor(begins, dtype=torch.bool),
        source.contiguous(),
        target.contiguous(),
    )
