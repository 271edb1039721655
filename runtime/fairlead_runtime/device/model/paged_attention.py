"""Our paged attention as transformers' attention function.

Owns the function registered with transformers and the context of one forward pass that it reads.
Metadata is passed in a context variable, not by keyword arguments: some families (stablelm,
nemotron) drop those before they reach the attention. The registered name has no mask function, so
transformers builds no mask at all. A probe has a name of its own with one: it keeps the rules by
which the model's own code would mask each layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from fairlead_kernels.interface.attention import AttentionBackend, LayerSpec
from fairlead_kernels.interface.cache_write import write
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.state_layers import StateMixer, StateStep, step_of

# transformers treats names with "flash", "/" or "paged|" as its own kernels.
NAME = "fairlead_paged"
PROBE_NAME = "fairlead_probe"
RULE = "fairlead_rule"  # the attribute of a probe's mask

# Transformers' mask of a layer: of the places of a sequence and of a head and the positions of a
# query and of a key, all int64, whether that query sees that key.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class ForwardPass(Protocol):
    """One forward pass, as the attention function sees it."""

    keep: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: "AttentionCall"
    ) -> Tensor:
        """query, key, value [T, heads, dim] of one layer → [T, query heads, value dim]."""
        ...

    def mix(self, layer: int, mixer: StateMixer, hidden: Tensor) -> Tensor:
        """Hidden states [1, T, hidden] of one layer that keeps a state → the same shape."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The arguments of attention, besides tensors, that a model's layer passes."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class CachedLayer(NamedTuple):
    """The caches [blocks, block_size, kv heads, dim] of one layer and the slots int64 [T] of the
    step's tokens. ``keeps``: it writes them; else an earlier layer has.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    keeps: bool = True


class CachedPass(ABC):
    """A forward pass with a cache. A fused layer writes keys and values itself (``cached``), then
    calls ``attend_cached``; for the others ``attend`` does both. ``states``: those of its rows,
    of a model that keeps some.
    """

    keep: Tensor
    states: StateStep | None = None

    @abstractmethod
    def cached(self, layer: int) -> CachedLayer:
        """The place of this step's keys and values of a layer."""

    @abstractmethod
    def attend_cached(self, layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        """Query [T, heads, dim] over the layer's cache → [T, query heads, value dim]."""

    def mix(self, layer: int, mixer: StateMixer, hidden: Tensor) -> Tensor:
        """Hidden states [1, T, hidden] of one layer that keeps a state → the same shape. Raises
        RuntimeError in a pass that has no states.
        """
        if self.states is None:
            raise RuntimeError(f"layer {layer} keeps a state, and this pass has none")
        return self.states.run(layer, mixer, hidden)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        cached = self.cached(layer)
        if cached.keeps:
            write(cached.keys, cached.values, cached.slots, key, value)
        return self.attend_cached(layer, query, call)


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
    """Transformers' attention signature: [1, heads, T, dim] in, [1, T, heads, dim] out; a batch in
    a pass of several ``sequences``.
    """
    current = CURRENT_PASS.get()
    batch = getattr(current, "sequences", 1)
    if current is None or attention_mask is not None or query.shape[0] != batch:
        raise RuntimeError(
            "paged attention runs only inside PagedModel.forward, on packed rows without a mask"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(scale, sliding_window, softcap, s_aux)
    # An int, though torch types every attribute of a module as a tensor or a module.
    layer: Any = module.layer_idx
    each = zip(query, key, value, strict=True)
    outs = [current.attend(layer, _packed(q), _packed(k), _packed(v), call) for q, k, v in each]
    return torch.stack(outs) if batch > 1 else outs[0][None], None


def _probed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """As ``_attention``, of a pass that keeps the ``rules`` of the layers' masks, too."""
    current: Any = CURRENT_PASS.get()
    layer: Any = module.layer_idx
    current.rules[layer] = getattr(attention_mask, RULE, None)
    return _attention(module, query, key, value, None, **settings)


def _mask(
    q_length: int, kv_length: int, mask_function: MaskRule, device: torch.device, **_: Any
) -> Tensor:
    """Transformers' signature of what makes masks: one that nobody reads, with its rule."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    setattr(mask, RULE, mask_function)
    return mask


def _packed(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


class GroupedPass(CachedPass):
    """One step over the cache: keys and values go into their slots.

    ``groups``: per layer group the plan of attention and the slots int64 [T].
    """

    def __init__(
        self,
        cache: CacheStorage,
        backend: AttentionBackend,
        groups: Sequence[tuple[Any, Tensor]],
        keep: Tensor,
    ) -> None:
        self.cache = cache
        self.backend = backend
        self.groups = groups
        self.keep = keep

    def cached(self, layer: int) -> CachedLayer:
        keys, values, group = self.cache.layer(layer)
        return CachedLayer(keys, values, self.groups[group][1], self.cache.keeps(layer))

    def attend_cached(self, layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        keys, values, group = self.cache.layer(layer)
        spec = spec_of(call, self.cache.groups[group].window)
        return self.backend.run(self.groups[group][0], query, keys, values, spec)


class PagedPass(GroupedPass):
    """The step of a batch on the host, which is planned here. ``stands_for``: tokens of the larger
    step whose memory is measured by this one; ``measures``: only its memory counts, so of layers
    that have their buffers in common the first one runs.
    """

    def __init__(
        self,
        batch: Batch,
        cache: CacheStorage,
        backend: AttentionBackend,
        keep: Tensor,
        stands_for: int = 0,
        *,
        measures: bool = False,
    ) -> None:
        self.stands_for = stands_for
        self.measures = measures
        slots = (slots.to(cache.device, non_blocking=True) for slots in batch.slots)
        groups = [
            (backend.plan(ragged), place) for ragged, place in zip(batch.ragged, slots, strict=True)
        ]
        if cache.states is not None and batch.states is not None:
            self.states = step_of(batch.states, cache.states, cache.device)
        super().__init__(cache, backend, groups, keep)


def spec_of(call: AttentionCall, window: int | None) -> LayerSpec:
    """The layer's settings with the window of its group, not the call's: some models pass a window
    that their mask ignores.
    """
    return LayerSpec(call.scale, window, call.softcap, call.sinks)


def register() -> None:
    """Register the attention function with transformers as NAME, a probe's as PROBE_NAME. A second
    call changes nothing.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(PROBE_NAME, _probed)
    AttentionMaskInterface.register(PROBE_NAME, _mask)
