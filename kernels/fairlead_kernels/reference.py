"""Reference implementations in plain torch, which tests compare the backends with.

Slow on purpose: one token at a time, in float64, straight from the definitions in ``attention``.
Never on a hot path.
"""

import torch

from fairlead_kernels.attention import LayerSpec, RaggedRows


def attend(
    ragged: RaggedRows,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    spec: LayerSpec,
) -> torch.Tensor:
    """``AttentionBackend.run`` by its definition, with the same shapes."""
    starts, lens = ragged.query_starts.tolist(), ragged.kv_lens.tolist()
    group = query.shape[1] // key_cache.shape[2]
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    for row, length in enumerate(lens):
        count = starts[row + 1] - starts[row]
        for i in range(count):
            position = length - count + i
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            at = [
                (int(ragged.tables[row, p // ragged.block_size]), p % ragged.block_size)
                for p in range(first, position + 1)
            ]
            keys = (
                torch.stack([key_cache[b, o] for b, o in at])
                .double()
                .repeat_interleave(group, dim=1)
            )
            values = (
                torch.stack([value_cache[b, o] for b, o in at])
                .double()
                .repeat_interleave(group, dim=1)
            )
            out[starts[row] + i] = _attend_one(
                query[starts[row] + i].double(), keys, values, spec
            ).to(out.dtype)
    return out


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: LayerSpec
) -> torch.Tensor:
    """One token: query [H, D], keys [L, H, D], values [L, H, Dv] → [H, Dv]."""
    scores = torch.einsum("hd,lhd->hl", query, keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks.double()[:, None]], dim=1)
    weights = torch.softmax(scores, dim=1)[:, : keys.shape[0]]
    return torch.einsum("hl,lhd->hd", weights, values)


def write(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """``cache_write.write``, one token at a time."""
    size = key_cache.shape[1]
    for i, slot in enumerate(slots.tolist()):
        key_cache[slot // size, slot % size] = key[i]
        value_cache[slot // size, slot % size] = value[i]
