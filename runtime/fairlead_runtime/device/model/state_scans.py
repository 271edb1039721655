"""Functions that transformers' mixers call, where their own would be wrong behind other tokens.

Owns two corrections, each of which one mixer's forward pass calls in place of the function of that
name: transformers' module stays as it is. Mixers that run once a step (``state_packed``) need
neither.

- A selective scan (Mamba 1) begins from zeros, whatever state the mixer has. What the state adds to
  it fades by itself, so it is added.
- A Mamba 2 mixer with bounds on its time steps keeps them in chunks and not in single steps. A
  prompt's last token may be one by itself; generated tokens have no bounds.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

SCAN = "mamba_selective_scan"
STEP = "mamba2_selective_state_update"


def calls(module: nn.Module, name: str) -> bool:
    """Whether the module's forward pass calls a function of its modeling file by this name."""
    code = inspect.unwrap(type(module).forward)
    return name in code.__code__.co_names and name in code.__globals__


def function_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Transformers' function of this name, as the module's forward pass calls it."""
    function: Callable[..., Any] = inspect.unwrap(type(module).forward).__globals__[name]
    return function


def forward_with(module: nn.Module, **functions: Callable[..., Any]) -> Callable[..., Any]:
    """The module's forward pass, which calls these functions in the place of those of their
    names.
    """
    code = inspect.unwrap(type(module).forward)
    copy = types.FunctionType(
        code.__code__,
        {**code.__globals__, **functions},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    copy.__kwdefaults__ = code.__kwdefaults__
    return types.MethodType(copy, module)


def continued_scan(
    scan: Callable[..., Any], state_of: Callable[[], Tensor]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A selective scan of inputs [B, D, T] from the state [B, D, N] that ``state_of`` gives, by
    ``scan``, which begins from zeros. Returns the outputs [B, D, T] and the last state.
    """

    def continued(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - as transformers names it
        B: Tensor,  # noqa: N803 - as transformers names it
        C: Tensor,  # noqa: N803 - as transformers names it
        D: Tensor | None = None,  # noqa: N803 - as transformers names it
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **settings: Any,
    ) -> tuple[Tensor, Tensor]:
        bounds = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
        settings |= {"return_last_state": True}
        out, last = scan(hidden_states, dt, A, B, C, **bounds, **settings)
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        step = F.softplus(step) if delta_softplus else step
        # What is left of the state behind each token: [B, D, T, N].
        left = torch.exp(step.float().cumsum(-1)[..., None] * A[:, None]) * state_of()[:, :, None]
        out = out + torch.einsum("bdtn,bnt->bdt", left, C.float()).to(out.dtype)
        if D is not None:
            out = out + hidden_states * D[:, None]
        if z is not None:
            out = out * F.silu(z)
        return out, last + left[:, :, -1]

    return continued


def bounded_step(
    update: Callable[..., Tensor], bounds: tuple[float, float]
) -> Callable[..., Tensor]:
    """A single step whose time steps are held within ``bounds``, as those of chunks are."""

    def bounded(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        *matrices: Tensor,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **settings: Any,
    ) -> Tensor:
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = F.softplus(dt) if dt_softplus else dt
        return update(state, hidden_states, dt.clamp(*bounds), *matrices, **settings)

    return bounded
