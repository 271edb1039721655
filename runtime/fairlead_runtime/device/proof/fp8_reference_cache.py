"""transformers' cache of keys and values, rounded to fp8 before attention reads them.

Owns what an fp8 cache of ours must equal: the self-test compares with it.
"""

import typing
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fairlead_kernels.formats.quantize import FP8
from fairlead_kernels.interface.cache_write import rounded


class _RoundedKeys:
    """Of a cache of transformers: keys and values of one pass, in the model's type with fp8's
    precision. Attention reads these for the tokens of the pass itself, too, as it does on a paged
    cache.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = (rounded(x, FP8).to(x.dtype) for x in (key_states, value_states))
        whole: Any = super()  # the cache's
        stored: tuple[Tensor, Tensor] = whole.update(key, value, layer_idx, *args, **kwargs)
        return stored


def rounded_cache(model: PreTrainedModel, *, states: bool = False) -> DynamicCache:
    """An empty cache for one pass of a model; with ``states`` of the class that its code takes and
    layers of the kinds that the configuration names, some without keys.
    """
    kind = _class_of(model) if states else DynamicCache
    layers = {"config": model.config} if states and kind is DynamicCache else {}
    return type("RoundedCache", (_RoundedKeys, kind), {})(**layers)


def _class_of(model: PreTrainedModel) -> Any:
    """The class of caches that the decoder's code names, if it is one of its own."""
    named = typing.get_type_hints(type(model.get_decoder()).forward).get("past_key_values")
    kinds = [x for x in typing.get_args(named) if isinstance(x, type)]
    return next((x for x in kinds if issubclass(x, DynamicCache)), DynamicCache)
