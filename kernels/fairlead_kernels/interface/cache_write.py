"""Writing a step's keys and values into their slots, in the cache's type."""

import torch

from fairlead_kernels.formats.quantize import FP8

LARGEST = torch.finfo(FP8).max  # 448


def write(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Put ``key`` and ``value`` [T, kv heads, dim] into ``slots`` int64 [T] of [blocks, block_size,
    kv heads, dim] caches.

    Slots are distinct, so the order of writing cannot matter. One flat index copy each: no host
    synchronisation, no shape that depends on data, the same on every device, and safe inside a
    captured graph. Rounds to the cache's dtype.
    """
    for cache, entries in ((key_cache, key), (value_cache, value)):
        flat = raw(cache).view(-1, *cache.shape[2:])
        flat.index_copy_(0, slots, raw(rounded(entries, cache.dtype)))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in the type of a cache. What is too large for float8_e4m3fn becomes its largest number,
    448. torch 2.15's cast does so by itself, on CPUs; older ones make a NaN of it, and one NaN in a
    key spoils its whole sequence.
    """
    return (x.clamp(-LARGEST, LARGEST) if dtype is FP8 else x).to(dtype)


def raw(cache: torch.Tensor) -> torch.Tensor:
    """A view of the cache as elements that torch can move: 8-bit floats as integers, since not
    every operation that copies elements takes them.
    """
    return cache.view(torch.int8) if cache.dtype is FP8 else cache
