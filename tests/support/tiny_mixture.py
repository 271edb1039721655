"""Layers of LFM3 changed so that one tiny model has what no family has in one: layers with all keys
and with a window, some of which read another one's keys; heads of two numbers; layers with a state,
one of them beside keys; a layer that keeps nothing.

Owns what takes the place of transformers' modules. Their caches serve it as it is: a convolution
beside attention keeps its state under the number of the layer that keeps nothing.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.lfm3.modeling_lfm3 import Lfm3Attention


class _Keys:
    """The cache as one attention sees it: it keeps the keys for another one, or reads them."""

    def __init__(self, attention: "_Attention", cache: Any) -> None:
        self._attention, self._cache = attention, cache

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        (source,) = self._attention.source
        if source is not None:
            return source.made
        cache = self._cache
        made = (key, value) if cache is None else cache.update(key, value, layer)
        self._attention.made = made
        return made


class _Attention(Lfm3Attention):  # type: ignore[misc] # transformers' is untyped
    """With so many heads of keys; ``source``: the one whose keys it reads."""

    def __init__(self, config: Any, layer: int, kv_heads: int, source: "_Attention | None") -> None:
        changed = copy.deepcopy(config)
        changed.num_key_value_heads = kv_heads
        super().__init__(changed, layer)
        self.config = config  # which says how all of them attend
        self.made: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.source = (source,)  # no part of this one

    def forward(self, *args: Any, past_key_values: Any = None, **settings: Any) -> Any:
        keys = _Keys(self, past_key_values)
        return super().forward(*args, past_key_values=keys, **settings)


class _Beside(nn.Module):
    """Attention and a convolution of one input, which are added."""

    def __init__(self, attention: nn.Module, convolution: nn.Module) -> None:
        super().__init__()
        self.attention, self.convolution = attention, convolution

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **settings: Any
    ) -> tuple[Tensor, Any]:
        given = {"hidden_states": hidden_states, "past_key_values": past_key_values}
        attended, weights = self.attention(**given, **settings)
        return attended + self.convolution(**given), weights


class _Nothing(nn.Module):
    def forward(self, hidden_states: Tensor, **_settings: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


def change(
    model: nn.Module,
    *,
    reads: Mapping[int, int],
    narrow: Sequence[int],
    beside: tuple[int, int],
) -> None:
    """Let layers read the keys of the one that ``reads`` has for them, those of ``narrow`` have one
    head of keys, and the first of ``beside`` the convolution of the other, which keeps nothing.
    Weights are filled afterwards.
    """
    inner: Any = model
    config, layers = inner.config, inner.model.layers
    attentions: dict[int, _Attention] = {}
    for index, layer in enumerate(layers):
        if layer.is_attention_layer:
            heads = 1 if index in narrow else config.num_key_value_heads
            source = attentions[reads[index]] if index in reads else None
            attentions[index] = layer.self_attn = _Attention(config, index, heads, source)
    attending, other = (layers[index] for index in beside)
    attending.self_attn = _Beside(attending.self_attn, other.conv)
    other.conv = _Nothing()
