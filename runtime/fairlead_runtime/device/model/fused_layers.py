"""Fused decoder layers: chains of operations in the place of a layer's own code.

Owns the order of a layer's operations, its sums over ranks, and the run of layers that is one call
in C++. Which layers are fused, and the proof that they give the same, is in ``fusion``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairlead_kernels.cpu.cpu_attention import CpuAttention
from fairlead_kernels.cpu.cpu_layers import LayerChain
from fairlead_kernels.cpu.cpu_operations import CpuOperations
from fairlead_kernels.cpu.slabs import SLAB
from fairlead_kernels.interface.attention import Heads, LayerSpec
from fairlead_kernels.interface.layer import Layer, LayerOperations, LayerWithoutMlp, Packed
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_attention import (
    CURRENT_PASS,
    AttentionCall,
    CachedPass,
    PagedPass,
)
from fairlead_runtime.device.model.rank_group import RankGroup

Rope = tuple[Tensor, Tensor]  # cosines and sines


def halves_of(pairs: Tensor) -> Tensor:
    """The elements of the last dimension in another order: 0, 2, 4, ..., then 1, 3, 5, ..."""
    return torch.cat([pairs[..., 0::2], pairs[..., 1::2]], dim=-1)


@dataclass(frozen=True, slots=True)
class RopeArgument:
    """The argument of a layer's ``forward`` with the rotary embedding; "" where the layer uses
    none. ``in_pairs``: see ``LayerStructure``.
    """

    name: str
    in_pairs: bool

    def read(self, value: Rope) -> Rope:
        """Cosines and sines [1, T, R] as the model gives them → float32 [T, R] as operations take
        them.
        """
        cos, sin = value[0].float(), value[1].float()
        return (halves_of(cos[0]), halves_of(sin[0])) if self.in_pairs else (cos[0], sin[0])


@dataclass(frozen=True, slots=True, eq=False)
class UnfusedMlp:
    """An MLP that stays a module of the model's own code; the layer adds ``factor`` times what it
    gives. ``reason``: why it is no ``MlpStructure``, as in ``DoesNotFitError``. On several ranks it
    gives the same on each: the sum over them is its own.
    """

    module: nn.Module
    factor: float
    reason: str

    def run(self, x: Tensor) -> Tensor:
        """X [T, hidden] in the type of the module's weights → [T, hidden]."""
        out: Tensor = self.module(x[None])[0]
        return out if self.factor == 1 else out * self.factor


class FusedLayer:
    """One decoder layer as a chain of operations, or all of it but ``unfused_mlp``, which is a
    module of the model's. With ``ranks`` its matrices are one rank's shards: what those give whose
    inputs are split is summed over the ranks, then biases are added. Such a module sums by itself.
    """

    def __init__(
        self,
        index: int,
        layer: LayerWithoutMlp,
        spec: LayerSpec,
        call: AttentionCall,
        rope: RopeArgument,
        operations: LayerOperations,
        ranks: RankGroup | None = None,
        unfused_mlp: UnfusedMlp | None = None,
    ) -> None:
        self.index = index
        self.layer = layer
        self.unfused_mlp = unfused_mlp
        self.spec = spec
        self.rope = rope
        self.call = call
        self._operations = operations
        self._ranks = ranks

    def run(self, x: Tensor, added: list[Tensor], rope: Rope, current: CachedPass) -> Tensor:
        """Hidden states x [T, hidden] and the rotary embedding → hidden states. May change x.

        To x belongs what is in ``added``, one tensor or none. It is taken out, so that nobody holds
        it any longer, and the layer leaves in its place what the next one's norm adds.
        """
        ops, layer = self._operations, self.layer
        if added:
            normed, residual = ops.norm(added.pop(), layer.input_norm, x)
        else:
            normed, residual = ops.norm(x, layer.input_norm)
        branch = self._attention(normed, rope, current)
        if layer.parallel:
            if layer.mlp_norm is not layer.input_norm:
                normed, _ = ops.norm(residual, layer.mlp_norm)
            added.append(self._side_by_side(residual, branch, normed))
            return residual
        branch = self._sum(branch, layer.out_bias)
        if layer.after_attention is not None:
            branch, _ = ops.norm(branch, layer.after_attention)
        normed, residual = ops.norm(branch, layer.mlp_norm, residual)
        del branch  # its memory is free for the MLP
        added.append(self._after_mlp(self._mlp(normed)))
        return residual

    def _side_by_side(self, residual: Tensor, attended: Tensor, normed: Tensor) -> Tensor:
        """What the next layer adds to the residual, to which the rest is added here. Ranks need one
        sum of both branches, unless a norm comes between.
        """
        layer = self.layer
        if self._ranks is None or not isinstance(layer, Layer) or layer.after_mlp is not None:
            residual.add_(self._sum(attended, layer.out_bias))
            return self._after_mlp(self._mlp(normed))
        both = attended.add_(self._mlp(normed))
        return self._sum(both, layer.out_bias, layer.down_bias)

    def _attention(self, normed: Tensor, rope: Rope, current: CachedPass) -> Tensor:
        """What attention adds to the residual, before ``_sum``."""
        ops, layer = self._operations, self.layer
        qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
        cached = current.cached(self.index)
        query = ops.rope_write(
            qkv, *rope, cached.slots, cached.keys, cached.values, layer.q_norm, layer.k_norm
        )
        attended = current.attend_cached(self.index, query, self.call)
        return self._product(attended.flatten(1), layer.out, layer.out_bias)

    def _mlp(self, normed: Tensor) -> Tensor:
        """What the MLP adds to the residual, before ``_sum``."""
        if self.unfused_mlp is not None:
            return self.unfused_mlp.run(normed)
        ops, layer = self._operations, self.with_mlp
        mix = ops.gated if layer.gated else ops.activate
        gated = mix(ops.linear(normed, layer.gate_up, layer.gate_up_bias), layer.activation)
        return self._product(gated, layer.down, layer.down_bias)

    def _after_mlp(self, branch: Tensor) -> Tensor:
        if self.unfused_mlp is None:
            branch = self._sum(branch, self.with_mlp.down_bias)
        if self.layer.after_mlp is not None:
            branch, _ = self._operations.norm(branch, self.layer.after_mlp)
        return branch

    def _product(self, x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
        """The product with the bias, unless the ranks' products are still to be summed."""
        return self._operations.linear(x, weight, None if self._ranks else bias)

    def _sum(self, product: Tensor, *biases: Tensor | None) -> Tensor:
        """All ranks' products and the biases; ``product`` itself if it is whole. May change it."""
        if self._ranks is None:
            return product
        total = self._ranks.sum(product)
        for bias in biases:
            if bias is not None:
                total.add_(bias)
        return total

    @property
    def with_mlp(self) -> Layer:
        """The layer with its MLP. Raises TypeError where that is the model's own."""
        if not isinstance(self.layer, Layer):
            raise TypeError("the layer's MLP is the model's own")
        return self.layer

    @property
    def rounding(self) -> float:
        """The most by which one of its products rounds its inputs, as in ``Packed``."""
        return max(x.rounding for x in self.layer.matrices)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for x in self.layer.matrices for size in (x.rows, x.columns))


class FusedRun:
    """Consecutive fused layers of equal sizes, computed together when the last one is called; the
    others only note their rotary embedding. In C++ they are one call, but for ``sharded`` ones,
    whose sums lie in between; elsewhere one operation after another.
    """

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        heads: Heads,
        operations: LayerOperations,
        *,
        sharded: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.arguments = tuple(layer.rope for layer in layers)
        self._chain: LayerChain | None = None
        self._cache: CacheStorage | None = None  # whose layers the chain has
        model_operations: CpuOperations | None = operations.model_operations
        if model_operations is not None and not sharded:
            whole_layers, specs = [x.with_mlp for x in layers], [x.spec for x in layers]
            self._chain = model_operations.chain(heads, whole_layers, specs)
        self._ropes: list[Rope] = []
        # By the id of the model's own tensor.
        self._known: dict[tuple[int, RopeArgument], Rope] = {}

    def forward_of(self, place: int) -> Callable[..., Tensor]:
        """What takes the place of the ``forward`` of layer ``place`` of this run: hidden states
        [1, T, hidden] in and out.
        """

        def forward(hidden_states: Tensor, *_: Any, **arguments: Any) -> Tensor:
            if place == 0:
                self._forget()  # what a failed pass has left
            rope = self.layers[place].rope
            self._note_rope(rope, arguments.get(rope.name), hidden_states)
            if place + 1 < len(self.layers):
                return hidden_states
            current = CURRENT_PASS.get()
            if not isinstance(current, CachedPass):
                message = "fused layers run only inside PagedModel.forward"
                raise RuntimeError(message)  # noqa: TRY004 - no argument is wrong, the call is
            result = self.compute(hidden_states[0].float(), self._ropes, current)
            self._forget()
            return result[None].to(hidden_states.dtype)

        return forward

    def _forget(self) -> None:
        self._ropes.clear()
        self._known.clear()

    def _note_rope(self, argument: RopeArgument, value: Rope | None, x: Tensor) -> None:
        """Note the tensors of rotary angles, the same for layers that are given the same."""
        key = 0 if value is None else id(value[0]), argument
        if key not in self._known:
            self._known[key] = argument.read(value or (x[..., :0], x[..., :0]))
        self._ropes.append(self._known[key])

    def compute(
        self, x: Tensor, ropes: Sequence[Rope], current: CachedPass, *, all_tokens: bool = True
    ) -> Tensor:
        """Hidden states float32 [T, hidden], with each layer's rotary embedding → those after the
        layers: of all tokens, or of ``current.keep``, which must ascend. May change x.
        """
        keep = None if all_tokens or len(current.keep) == len(x) else current.keep
        if (
            self._chain is not None
            and isinstance(current, PagedPass)
            and isinstance(current.backend, CpuAttention)
        ):
            if self._cache is not current.cache:
                layers = [current.cache.layer(layer.index) for layer in self.layers]
                caches = [(keys, values) for keys, values, _ in layers]
                self._chain.bind(caches, groups=[group for _, _, group in layers])
                self._cache = current.cache
            return self._chain.run(
                x,
                plans=[plan for plan, _ in current.groups],
                slots=[slots for _, slots in current.groups],
                ropes=ropes,
                # In proportion, so that this step's tensors are those of the larger one.
                slab=-(-SLAB * len(x) // max(len(x), current.stands_for)),
                keep=keep,
                layers=1 if current.measures else len(self.layers),
            )
        added: list[Tensor] = []
        for layer, rope in zip(self.layers, ropes, strict=True):
            x = layer.run(x, added, rope, current)
        x.add_(added.pop())
        return x if keep is None else x[keep]
