"""transformers' cache of keys and values, rounded to fp8 before attention reads them.

Owns what an fp8 cache of ours must equal: the self-test compares with it.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from fairlead_kernels.formats.quantize import FP8
from fairlead_kernels.interface.cache_write import rounded


class RoundedCache(DynamicCache):  # type: ignore[misc] # transformers' is untyped
    """Keys and values of one pass, in the model's type with fp8's precision. Attention reads these
    for the tokens of the pass itself, too, as it does on a paged cache.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = (rounded(x, FP8).to(x.dtype) for x in (key_states, value_states))
        stored: tuple[Tensor, Tensor] = super().update(key, value, layer_idx, *args, **kwargs)
        return stored
