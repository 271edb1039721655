"""Paged attention in plain torch, made for CPUs; it runs on any device.

Owns the work of one layer: gather, ``scaled_dot_product_attention``, scatter. A mask covers one
row's keys and a strip of its queries, so a step costs the sum of its rows, not their square.

Three ideas, each measured on two cores:

- Rows with one query (decodes) are batched. Their keys are gathered by *token*, not by block, so
  that no byte which the row does not own is ever read.
- A gather stays below GATHER_BYTES. Above it, freshly mapped pages cost ten times the attention
  itself (64 MB of keys: 100 ms to gather, 6 ms to attend); small gathers stay in the CPU's cache
  and in reused scratch memory.
- A row whose blocks are consecutive is read in place, without a gather.

An fp8 cache is gathered as it is and widened to the query's type in scratch memory of its own,
rows in place too: the tokens of a piece, never the cache.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from fairlead_kernels.formats.quantize import FP8
from fairlead_kernels.interface.attention import Heads, LayerSpec, RaggedRows
from fairlead_kernels.interface.cache_write import raw
from fairlead_kernels.plain import strips, torch_plan
from fairlead_kernels.plain.torch_plan import Decodes, Keys, Prefill, TorchPlan

# Keys one batched gather may take: about half of a server core's second-level cache.
GATHER_BYTES = 1 << 20


class Scratch:
    """Memory for gathered or widened keys or values, kept between layers and steps; grows, never
    shrinks.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def read(self, cache: torch.Tensor, keys: Keys) -> torch.Tensor:
        """The tokens of ``keys`` [n · length, kv heads, dim]: a view of the cache where they are
        consecutive, else a copy that lives until the next read.
        """
        flat = raw(cache).view(-1, *cache.shape[2:])
        if keys.start is not None:
            rows = flat[keys.start : keys.start + keys.length]
        elif keys.slots is None:
            raise ValueError("keys: has neither start nor slots")
        else:
            shape = torch.Size((keys.slots.shape[0], *flat.shape[1:]))
            out = self._room(shape, flat.dtype, flat.device)
            rows = torch.index_select(flat, 0, keys.slots, out=out)
        return rows.view(cache.dtype)

    def widen(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of ``x`` in another type that lives until the next call."""
        return self._room(x.shape, dtype, x.device).copy_(x)

    def _room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        needed = shape.numel()
        if self._buffer is None or self._buffer.numel() < needed or self._buffer.dtype != dtype:
            self._buffer = torch.empty(needed, dtype=dtype, device=device)
        return self._buffer[:needed].view(shape)


class TorchAttention:
    """``AttentionBackend`` in plain torch. The module says how it works, ``reference`` what it
    computes. ``heads``: of the model's largest layer; ``run`` takes each layer's from its tensors,
    so one object serves layers of several sizes.
    """

    name = "torch"

    def __init__(self, heads: Heads, device: torch.device) -> None:
        self.heads = heads
        self.device = device
        self._keys, self._values = Scratch(), Scratch()
        self._wide_keys, self._wide_values = Scratch(), Scratch()
        token_bytes = heads.kv * max(heads.dim, heads.value_dim) * heads.dtype.itemsize
        self._gather_tokens = max(1, GATHER_BYTES // token_bytes)

    def plan(self, ragged: RaggedRows) -> TorchPlan:
        return torch_plan.plan(ragged, self.device, self.heads.dtype, self._gather_tokens)

    def run(
        self,
        plan: TorchPlan,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: LayerSpec,
    ) -> torch.Tensor:
        spec.check_window(plan.window)
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
        for decodes in plan.decodes:
            self._run_decodes(decodes, query, key_cache, value_cache, spec, out)
        for prefill in plan.prefills:
            self._run_prefill(prefill, query, key_cache, value_cache, spec, out)
        return out

    def _read(
        self, keys: Keys, key_cache: torch.Tensor, value_cache: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a piece; from an fp8 cache in ``dtype``."""
        key, value = self._keys.read(key_cache, keys), self._values.read(value_cache, keys)
        if key.dtype is FP8:
            key, value = self._wide_keys.widen(key, dtype), self._wide_values.widen(value, dtype)
        return key, value

    def _run_decodes(
        self,
        piece: Decodes,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: LayerSpec,
        out: torch.Tensor,
    ) -> None:
        n, length = piece.tokens.shape[0], piece.keys.length
        key, value = self._read(piece.keys, key_cache, value_cache, query.dtype)
        heads, kv = query.shape[1], key.shape[1]
        # The queries that share a key head take the place of positions, so no key is repeated.
        q = query.index_select(0, piece.tokens).view(n, kv, heads // kv, -1)
        k = key.view(n, length, kv, -1).transpose(1, 2)
        v = value.view(n, length, kv, -1).transpose(1, 2)
        mask = None if piece.mask is None else piece.mask.to(query.dtype)
        if spec.softcap is None and spec.sinks is None:
            attended = F.scaled_dot_product_attention(
                q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=spec.scale
            )
        else:
            sinks = None if spec.sinks is None else spec.sinks.view(1, kv, heads // kv, 1)
            attended = _explicit(q, k.to(q.dtype), v.to(q.dtype), mask, spec, sinks)
        out.index_copy_(0, piece.tokens, attended.reshape(n, heads, -1))

    def _run_prefill(
        self,
        piece: Prefill,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: LayerSpec,
        out: torch.Tensor,
    ) -> None:
        count = piece.end - piece.begin
        key, value = self._read(piece.keys, key_cache, value_cache, query.dtype)
        kv = key.shape[1]
        per_kv = query.shape[1] // kv
        q = query[piece.begin : piece.end].view(count, kv, per_kv, -1).permute(1, 2, 0, 3)
        k = key.to(q.dtype).transpose(0, 1)[:, None].expand(-1, per_kv, -1, -1)
        v = value.to(q.dtype).transpose(0, 1)[:, None].expand(-1, per_kv, -1, -1)
        target = out[piece.begin : piece.end].view(count, kv, per_kv, -1).permute(1, 2, 0, 3)
        fused = spec.softcap is None and spec.sinks is None
        if fused and piece.plain_causal:
            target.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale))
            return
        sinks = None if spec.sinks is None else spec.sinks.view(kv, per_kv, 1, 1)
        high = strips.STRIP if fused else strips.scored_strip(kv * per_kv, key.shape[0])
        for strip in piece.strips(high):
            mask = strip.mask(q.dtype, q.device)
            queries, visible = slice(strip.begin, strip.end), slice(strip.low, strip.high)
            tensors = q[:, :, queries], k[:, :, visible], v[:, :, visible]
            target[:, :, queries] = (
                F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=spec.scale)
                if fused
                else _explicit(*tensors, mask, spec, sinks)
            )


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with explicit scores, for what the fused operator lacks. Softmax in float32.

    query [a, b, m, D], key [a, b, L, D], value [a, b, L, Dv], mask and sinks broadcast against the
    scores [a, b, m, L].
    """
    scores = (query @ key.transpose(2, 3)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(query.dtype)
    return weights @ value
