"""Writing a step's keys and values into their slots."""

import torch


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
    captured graph. Casts to the cache's dtype.
    """
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value.to(value_cache.dtype))
