"""Paged attention in plain torch, made for CPUs; it runs on any device.

Owns how the rows of a step are cut into pieces that ``scaled_dot_product_attention`` can take. Never builds a mask
over more than one row's queries and keys, so a step costs the sum of its rows, not their square, and of a row only
STRIP queries high.

Three ideas, each measured on two cores:

- Rows with one query (decodes) are batched. Their keys are gathered by *token*, not by block: padding repeats the
  row's own last token, hence no byte that the row does not own is ever read. A stale NaN in a reused block would
  survive a mask (0 · NaN) and let one request spoil another's.
- A gather is kept under GATHER_BYTES. Beyond it, freshly mapped pages cost ten times the attention itself (64 MB of
  keys: 100 ms to gather, 6 ms to attend); small gathers stay in the cache and in reused scratch memory.
- A row whose blocks happen to be consecutive is read in place, without a gather.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from fairlead_kernels.attention import Heads, LayerSpec, Ragged

# Keys one batched gather may take: about half of a server core's second-level cache.
GATHER_BYTES = 1 << 20
# Queries of one row that are masked together: masks and explicit scores stay this many rows high.
STRIP = 256
# Elements of a row's masks that are kept for the other layers; larger ones are made again.
KEPT_MASK_ELEMENTS = 1 << 24

Index = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Keys:
    """Where the keys of a piece lie: ``start`` of a consecutive run of slots, or ``slots`` int64 [n · length]."""

    length: int
    start: int | None = None
    slots: torch.Tensor | None = None

    def read(self, cache: torch.Tensor, scratch: "Scratch") -> torch.Tensor:
        """[n · length, kv heads, dim], a view of the cache where possible."""
        flat = cache.view(-1, *cache.shape[2:])
        if self.start is not None:
            return flat[self.start : self.start + self.length]
        if self.slots is None:
            raise ValueError("keys: neither a run nor slots")
        return scratch.gather(flat, self.slots)


@dataclass(slots=True, eq=False)
class Decodes:
    """Rows with one query each and similar lengths. ``tokens`` int64 [n]: their places among the packed tokens.

    ``mask`` [n, 1, 1, length]: 0 or -inf, None when all rows have the full length.
    """

    tokens: torch.Tensor
    keys: Keys
    mask: torch.Tensor | None


@dataclass(slots=True, eq=False)
class Prefill:
    """One row with several queries: packed tokens ``begin:end``, the first at ``position``, keys from ``first_key``."""

    begin: int
    end: int
    position: int
    first_key: int
    keys: Keys
    window: int | None
    masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def plain_causal(self) -> bool:
        """True when the mask is the square lower triangle that kernels know by name."""
        count = self.end - self.begin
        return self.keys.length == count and (self.window is None or self.window >= count)

    def strips(self) -> Iterator["Strip"]:
        """The row in strips of queries, each with the keys that any of them sees."""
        for at in range(0, self.end - self.begin, STRIP):
            stop = min(at + STRIP, self.end - self.begin)
            low = 0 if self.window is None else self.position + at - self.window + 1 - self.first_key
            yield Strip(self, at, stop, max(0, low), self.position + stop - self.first_key)


class Strip(NamedTuple):
    """Queries ``begin:end`` of a row and its gathered keys ``low:high``."""

    row: Prefill
    begin: int
    end: int
    low: int
    high: int

    def mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[queries, keys], 0 or -inf; shared by the layers of the step unless it is large."""
        row = self.row
        kept = row.masks.get((self.begin, dtype))
        if kept is not None:
            return kept
        query = torch.arange(row.position + self.begin, row.position + self.end, device=device)[:, None]
        key = torch.arange(row.first_key + self.low, row.first_key + self.high, device=device)[None, :]
        hidden = key > query
        if row.window is not None:
            hidden |= key <= query - row.window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        if (row.end - row.begin) * row.keys.length <= KEPT_MASK_ELEMENTS:
            row.masks[self.begin, dtype] = mask
        return mask


@dataclass(slots=True, eq=False)
class TorchPlan:
    """The pieces of one step for the layers of one group."""

    window: int | None
    decodes: list[Decodes]
    prefills: list[Prefill]


class Scratch:
    """Memory for gathered keys and values, kept between layers and steps; grows, never shrinks."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self.role = "key"

    def gather(self, flat: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``flat[slots]`` into the buffer of the current role; overwritten by the next gather of that role."""
        width = flat[0].numel()
        needed = slots.shape[0] * width
        at = (self.role, flat.dtype, flat.device)
        buffer = self._buffers.get(at)
        if buffer is None or buffer.numel() < needed:
            buffer = torch.empty(needed, dtype=flat.dtype, device=flat.device)
            self._buffers[at] = buffer
        out = buffer[:needed].view(slots.shape[0], *flat.shape[1:])
        return torch.index_select(flat, 0, slots, out=out)


class TorchAttention:
    """``AttentionBackend`` in plain torch. See the module for how it works and ``reference`` for what it computes."""

    name = "torch"

    def __init__(self, heads: Heads, device: torch.device) -> None:
        self.heads = heads
        self.device = device
        self._scratch = Scratch()
        token_bytes = heads.kv * max(heads.dim, heads.value_dim) * heads.dtype.itemsize
        self._gather_tokens = max(1, GATHER_BYTES // token_bytes)

    # -- once a step

    def plan(self, ragged: Ragged) -> TorchPlan:
        starts = ragged.query_starts.numpy().astype(np.int64)
        lens = ragged.kv_lens.numpy().astype(np.int64)
        tables = ragged.tables.numpy()
        counts = np.diff(starts)
        position = lens - counts
        first = np.zeros_like(lens) if ragged.window is None else np.maximum(0, position - ragged.window + 1)
        single = counts == 1
        decodes = self._decodes(np.flatnonzero(single), starts, first, lens, tables, ragged.block_size)
        prefills = [
            Prefill(
                begin=int(starts[row]),
                end=int(starts[row + 1]),
                position=int(position[row]),
                first_key=int(first[row]),
                keys=self._keys_of(tables[row], int(first[row]), int(lens[row]), ragged.block_size),
                window=ragged.window,
            )
            for row in np.flatnonzero(~single)
        ]
        return TorchPlan(ragged.window, decodes, prefills)

    def _decodes(
        self,
        rows: Index,
        starts: Index,
        first: Index,
        lens: Index,
        tables: npt.NDArray[np.int32],
        block_size: int,
    ) -> list[Decodes]:
        pieces: list[Decodes] = []
        spans = lens[rows] - first[rows]
        order = np.argsort(spans, kind="stable")
        for members in _bins(spans[order], self._gather_tokens):
            chosen = rows[order[members]]
            length = int(spans[order[members]].max())
            tokens = torch.from_numpy(starts[chosen]).to(self.device)
            if len(chosen) == 1:
                row = int(chosen[0])
                pieces.append(
                    Decodes(
                        tokens, self._keys_of(tables[row], int(first[row]), int(lens[row]), block_size), None
                    )
                )
                continue
            offsets = np.arange(length)
            # Padding repeats the last token of the same row: see the module.
            at = np.minimum(first[chosen][:, None] + offsets, lens[chosen][:, None] - 1)
            slots = np.take_along_axis(tables[chosen], at // block_size, axis=1).astype(np.int64) * block_size
            slots += at % block_size
            mask = None
            padded = offsets >= spans[order[members]][:, None]
            if padded.any():
                zeros = torch.zeros(padded.shape, dtype=self.heads.dtype)
                mask = zeros.masked_fill_(torch.from_numpy(padded), -torch.inf)[:, None, None, :].to(
                    self.device
                )
            keys = Keys(length, slots=torch.from_numpy(slots.reshape(-1)).to(self.device))
            pieces.append(Decodes(tokens, keys, mask))
        return pieces

    def _keys_of(self, table: npt.NDArray[np.int32], first: int, length: int, block_size: int) -> Keys:
        """The tokens ``first:length`` of one row."""
        blocks = table[first // block_size : -(-length // block_size)].astype(np.int64)
        skip = first % block_size
        if len(blocks) == 1 or (np.diff(blocks) == 1).all():
            return Keys(length - first, start=int(blocks[0]) * block_size + skip)
        slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[
            skip : skip + length - first
        ]
        return Keys(length - first, slots=torch.from_numpy(slots).to(self.device))

    # -- once a layer

    def run(
        self,
        plan: TorchPlan,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: LayerSpec,
    ) -> torch.Tensor:
        if spec.window != plan.window:
            raise ValueError(f"window: the layer has {spec.window}, the plan was made for {plan.window}")
        out = query.new_empty(query.shape[0], self.heads.query, self.heads.value_dim)
        for decodes in plan.decodes:
            self._run_decodes(decodes, query, key_cache, value_cache, spec, out)
        for prefill in plan.prefills:
            self._run_prefill(prefill, query, key_cache, value_cache, spec, out)
        return out

    def _read(
        self, keys: Keys, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._scratch.role = "key"
        key = keys.read(key_cache, self._scratch)
        self._scratch.role = "value"
        return key, keys.read(value_cache, self._scratch)

    def _run_decodes(
        self,
        piece: Decodes,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: LayerSpec,
        out: torch.Tensor,
    ) -> None:
        h, n, length = self.heads, piece.tokens.shape[0], piece.keys.length
        key, value = self._read(piece.keys, key_cache, value_cache)
        # The queries that share a key head stand in the place of positions: no key is repeated.
        q = query.index_select(0, piece.tokens).view(n, h.kv, h.group, h.dim)
        k = key.view(n, length, h.kv, h.dim).transpose(1, 2)
        v = value.view(n, length, h.kv, h.value_dim).transpose(1, 2)
        mask = None if piece.mask is None else piece.mask.to(query.dtype)
        if spec.softcap is None and spec.sinks is None:
            got = F.scaled_dot_product_attention(
                q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=spec.scale
            )
        else:
            sinks = None if spec.sinks is None else spec.sinks.view(1, h.kv, h.group, 1)
            got = _explicit(q, k.to(q.dtype), v.to(q.dtype), mask, spec, sinks)
        out.index_copy_(0, piece.tokens, got.reshape(n, h.query, h.value_dim))

    def _run_prefill(
        self,
        piece: Prefill,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: LayerSpec,
        out: torch.Tensor,
    ) -> None:
        h, count = self.heads, piece.end - piece.begin
        key, value = self._read(piece.keys, key_cache, value_cache)
        q = query[piece.begin : piece.end].view(count, h.kv, h.group, h.dim).permute(1, 2, 0, 3)
        k = key.to(q.dtype).transpose(0, 1)[:, None].expand(-1, h.group, -1, -1)
        v = value.to(q.dtype).transpose(0, 1)[:, None].expand(-1, h.group, -1, -1)
        target = out[piece.begin : piece.end].view(count, h.kv, h.group, h.value_dim).permute(1, 2, 0, 3)
        fused = spec.softcap is None and spec.sinks is None
        if fused and piece.plain_causal:
            target.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale))
            return
        sinks = None if spec.sinks is None else spec.sinks.view(h.kv, h.group, 1, 1)
        for strip in piece.strips():
            mask = strip.mask(q.dtype, q.device)
            queries, seen = slice(strip.begin, strip.end), slice(strip.low, strip.high)
            part = q[:, :, queries], k[:, :, seen], v[:, :, seen]
            target[:, :, queries] = (
                F.scaled_dot_product_attention(*part, attn_mask=mask, scale=spec.scale)
                if fused
                else _explicit(*part, mask, spec, sinks)
            )


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with its scores written out, for what the fused operator lacks. Softmax in float32.

    query [a, b, m, D], key [a, b, L, D], value [a, b, L, Dv], mask and sinks broadcast against the scores [a, b, m, L].
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


def _bins(lengths: Index, limit: int) -> list[slice]:
    """Cut ascending ``lengths`` into runs whose padded size stays within ``limit`` tokens and twice the useful one.

    A run always takes its first row, however long.
    """
    runs: list[slice] = []
    begin = 0
    for i, length in enumerate(lengths.tolist()):
        if i > begin and ((i + 1 - begin) * length > limit or length > max(64, 2 * int(lengths[begin]))):
            runs.append(slice(begin, i))
            begin = i
    if begin < len(lengths):
        runs.append(slice(begin, len(lengths)))
    return runs
