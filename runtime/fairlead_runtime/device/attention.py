"""Our paged attention as transformers' attention function.

Owns the function registered with transformers and the context of one forward pass that it reads.
Metadata is passed in a context variable, not by keyword arguments: some families (stablelm,
nemotron) drop those before they reach the attention. The registered name has no mask function, so
transformers builds no mask at all.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from fairlead_kernels.attention import AttentionBackend, LayerSpec
from fairlead_kernels.cache_write import write
from fairlead_runtime.device.batch import Batch
from fairlead_runtime.device.kv_cache import CacheStorage

# transformers treats names with "flash", "/" or "paged|" as its own kernels.
NAME = "fairlead_paged"


class ForwardPass(Protocol):
    """One forward pass, as the attention function sees it."""

    keep: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: "AttentionCall"
    ) -> Tensor:
        """query, key, value [T, heads, dim] of one layer → [T, query heads, value dim]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The arguments of attention, besides tensors, that a model's layer passes."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


CURRENT_PASS: ContextVar[ForwardPass | None] = ContextVar("fairlead_pass", default=None)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: [1, heads, T, dim] in, [1, T, heads, dim] out."""
    current = CURRENT_PASS.get()
    if current is None or attention_mask is not None or query.shape[0] != 1:
        raise RuntimeError(
            "paged attention runs only inside PagedModel.forward, on packed rows without a mask"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(scale, sliding_window, softcap, s_aux)
    # An int, though torch types every attribute of a module as a tensor or a module.
    layer: Any = module.layer_idx
    out = current.attend(layer, _packed(query), _packed(key), _packed(value), call)
    return out[None], None


def _packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


class PagedPass:
    """One step: writes keys and values into their slots, then attends over the cache."""

    def __init__(
        self, batch: Batch, cache: CacheStorage, backend: AttentionBackend, keep: Tensor
    ) -> None:
        self._cache = cache
        self._backend = backend
        self._slots = [slots.to(cache.device, non_blocking=True) for slots in batch.slots]
        self._plans = [backend.plan(ragged) for ragged in batch.ragged]
        self._windows = [ragged.window for ragged in batch.ragged]
        self.keep = keep

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        keys, values, group = self._cache.layer(layer)
        write(keys, values, self._slots[group], key, value)
        # The group's window, not the call's: some models pass a window that their mask ignores.
        spec = LayerSpec(call.scale, self._windows[group], call.softcap, call.sinks)
        return self._backend.run(self._plans[group], query, keys, values, spec)


def register() -> None:
    """Register the attention function with transformers as NAME. A second call changes nothing."""
    AttentionInterface.register(NAME, _attention)
