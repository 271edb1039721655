"""Reference implementations in plain torch, which tests compare the backends with.

Slow on purpose: in float64, attention one token at a time, straight from the definitions in
``attention``, ``layer`` and ``states``. Never on a hot path. The module is a ``LayerOperations``
and a ``StateOperations``.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from fairlead_kernels.formats.int4 import as_int4
from fairlead_kernels.formats.quantize import Quantized, as_quantized
from fairlead_kernels.interface.attention import LayerSpec, RaggedRows
from fairlead_kernels.interface.cache_write import rounded
from fairlead_kernels.interface.layer import Activation, GatedNorm, Norm, Packed
from fairlead_kernels.interface.states import StatePlace, StateRows

name = "reference"
in_float32 = True
rounds = fixed_order = False
int8_rounding = 0.0
model_operations = None
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def attend(
    ragged: RaggedRows,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    spec: LayerSpec,
) -> torch.Tensor:
    """``AttentionBackend.run`` by its definition, with the same shapes."""
    starts, lens = ragged.query_starts.tolist(), ragged.kv_lens.tolist()
    per_kv = query.shape[1] // key_cache.shape[2]
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
            keys = torch.stack([key_cache[b, o].double() for b, o in at]).repeat_interleave(
                per_kv, dim=1
            )
            values = torch.stack([value_cache[b, o].double() for b, o in at]).repeat_interleave(
                per_kv, dim=1
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
        key_cache[slot // size, slot % size] = rounded(key[i], key_cache.dtype)
        value_cache[slot // size, slot % size] = rounded(value[i], value_cache.dtype)


def pack(
    weights: Sequence[torch.Tensor | Quantized],
    *,
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
) -> Packed:
    """``LayerOperations.pack``: row after row."""
    quantized = as_quantized(weights)
    if quantized is not None and (matrices := as_int4(quantized)):
        data = torch.cat([x.dequantize() for x in matrices])
        rows, columns = data.shape
        return Packed(data, rows, columns, torch.full((rows,), factor))
    if quantized is not None:
        data, dtype = torch.cat([x.bits for x in quantized]), quantized[0].numbers.dtype
        scales = torch.cat([x.scales for x in quantized])
        rows, columns = data.shape
        return Packed(data.view(dtype), rows, columns, scales * factor)
    data = torch.cat([x for x in weights if isinstance(x, torch.Tensor)]).to(dtype)
    factors = None if factor == 1 else torch.full((len(data),), factor)
    return Packed(data, data.shape[0], data.shape[1], factors)


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``LayerOperations.linear``."""
    out = x.double() @ weight.data.double().T
    if weight.scales is not None:
        out = out * weight.scales.double()
    return (out if bias is None else out + bias.double()).to(x.dtype)


def likeliest(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``CpuOperations.likeliest``."""
    x = x if norm is None else _normalized(x.double(), norm)
    values, columns = linear(x, weight, bias).max(dim=1)
    return values, columns


def expert_product(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ends: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``experts.ExpertProduct``, but that it reads ``expert_ends`` on the host."""
    out = x.new_zeros(x.shape[0], weights.shape[2])
    begin = 0
    for expert, end in enumerate(expert_ends.tolist()):
        if end > begin:
            total = x[begin:end].double() @ weights[expert].double()
            out[begin:end] = total if bias is None else total + bias[expert].double()
        begin = end
    return out


def embed(
    ids: torch.Tensor,
    weight: Packed,
    factor: float = 1.0,
    positions: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``CpuOperations.embed``."""
    rows = weight.data[ids].double() * factor
    if weight.scales is not None:
        rows = rows * weight.scales[ids].double()[:, None]
    if positions is not None:
        rows = rows + positions[0][positions[1]].double()
    return rows.float()


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``CpuOperations.angles``: the products are float32, as models compute them."""
    products = (positions[:, None].float() * frequencies).double().repeat(1, 2)
    return (products.cos() * scale).float(), (products.sin() * scale).float()


def norm(
    x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``LayerOperations.norm``."""
    total = x if residual is None else (x + residual).to(residual.dtype)
    return _normalized(total.double(), norm).to(norm.weight.dtype), total


def _normalized(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm of the last dimension, in float64."""
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    normal = x * scale * (norm.weight.double() + norm.offset)
    return normal if norm.bias is None else normal + norm.bias.double()


def gated_norm(x: torch.Tensor, gate: torch.Tensor, gated: GatedNorm) -> torch.Tensor:
    """``CpuGatedNorm``."""
    values, factor, norm = x.double(), F.silu(gate.double()), gated.norm
    values = values if gated.gate_last else values * factor
    parts = [
        _normalized(values[..., columns], _part(norm, columns))
        for columns in (
            slice(first, first + gated.group) for first in range(0, x.shape[-1], gated.group)
        )
    ]
    normal = torch.cat(parts, dim=-1)
    return (normal * factor if gated.gate_last else normal).to(x.dtype)


def _part(norm: Norm, columns: slice) -> Norm:
    bias = None if norm.bias is None else norm.bias[columns]
    return replace(norm, weight=norm.weight[columns], bias=bias)


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> torch.Tensor:
    """``LayerOperations.rope_write``."""
    kv, dim = key_cache.shape[2:]
    heads = qkv.double().view(qkv.shape[0], -1, dim)
    query, key, value = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
    query = _rotated(query if q_norm is None else _normalized(query, q_norm), cos, sin)
    key = _rotated(key if k_norm is None else _normalized(key, k_norm), cos, sin)
    write(key_cache, value_cache, slots, key.to(qkv.dtype), value.to(qkv.dtype))
    return query.to(qkv.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, dim] in float64 by cos and sin [T, R]."""
    cos, sin, half = cos.double()[:, None], sin.double()[:, None], cos.shape[1] // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([x[..., : 2 * half] * cos + turned * sin, rest], dim=-1)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``LayerOperations.gated``."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``LayerOperations.activate``."""
    return ACTIVATIONS[activation](x.double()).to(x.dtype)


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    rows: StateRows,
    place: StatePlace,
) -> torch.Tensor:
    """``StateOperations.causal_convolution``."""
    channels, taps = weight.shape
    out = torch.empty_like(x)
    for row, tokens in _sequences(rows):
        kept = _read(rows, place, row, (channels, taps - 1), weight.dtype)
        inputs = torch.cat([kept.T, x[tokens]])
        windows = inputs.double().unfold(0, taps, 1)  # [T, C, K]
        total = (windows * weight.double()).sum(-1)
        total = (total if bias is None else total + bias.double()).to(x.dtype)
        out[tokens] = total if activation is None else activate(total, activation)
        _write(rows, place, row, inputs[len(inputs) - taps + 1 :].T)
    return out


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    rows: StateRows,
    place: StatePlace,
    *,
    normalizes: bool,
) -> torch.Tensor:
    """``StateOperations.gated_delta_rule``."""
    per_key = v.shape[1] // k.shape[1]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for row, tokens in _sequences(rows):
        shape = (v.shape[1], k.shape[2], v.shape[2])
        state = _read(rows, place, row, shape, torch.float32).double()
        for t in range(tokens.start, tokens.stop):
            query, key = (x[t].double().repeat_interleave(per_key, dim=0) for x in (q, k))
            if normalizes:
                query, key = (
                    x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)
                )
            state = state * g[t].double().exp()[:, None, None]
            known = torch.einsum("hkv,hk->hv", state, key)
            change = (v[t].double() - known) * beta[t].double()[:, None]
            state = state + key[:, :, None] * change[:, None]
            out[t] = torch.einsum("hkv,hk->hv", state, query * scale)
        _write(rows, place, row, state.float())
    return out


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rows: StateRows,
    place: StatePlace,
    *,
    d: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softplus: bool = False,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> torch.Tensor:
    """``StateOperations.ssd``, one token at a time."""
    (_, heads, dim), (groups, size) = x.shape, b.shape[1:]
    out = torch.empty(x.shape)
    bs, cs = (m.double().repeat_interleave(heads // groups, dim=1) for m in (b, c))
    for row, tokens in _sequences(rows):
        state = _read(rows, place, row, (heads, dim, size), torch.float32).double()
        for t in range(tokens.start, tokens.stop):
            step = _time_steps(dt[t], bias, softplus=softplus)
            if t - tokens.start < int(rows.prompts[row]):
                step = step.clamp(*bounds)
            added = (step[:, None] * x[t].double())[..., None] * bs[t][:, None]
            state = state * torch.exp(step * a.double())[:, None, None] + added
            result = torch.einsum("hpn,hn->hp", state, cs[t])
            out[t] = result if d is None else result + d.double()[:, None] * x[t].double()
        _write(rows, place, row, state.float())
    return out


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rows: StateRows,
    place: StatePlace,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softplus: bool = False,
) -> torch.Tensor:
    """``StateOperations.selective_scan``, one token at a time."""
    out = torch.empty(x.shape)
    for row, tokens in _sequences(rows):
        state = _read(rows, place, row, tuple(a.shape), torch.float32).double()
        for t in range(tokens.start, tokens.stop):
            step = _time_steps(dt[t], bias, softplus=softplus)[:, None]
            added = step * x[t].double()[:, None] * b[t].double()
            state = state * torch.exp(step * a.double()) + added
            result = state @ c[t].double()
            result = result if d is None else result + d.double() * x[t].double()
            out[t] = result if z is None else result * F.silu(z[t].double())
        _write(rows, place, row, state.float())
    return out


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    steps = dt.double() if bias is None else dt.double() + bias.double()
    return F.softplus(steps) if softplus else steps


def _sequences(rows: StateRows) -> Iterator[tuple[int, slice]]:
    """Each sequence's number and its tokens."""
    starts = rows.starts.tolist()
    yield from enumerate(map(slice, starts[:-1], starts[1:]))


def _read(
    rows: StateRows, place: StatePlace, row: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The state of a sequence."""
    if rows.begins[row]:
        return torch.zeros(shape, dtype=dtype)
    run = place.pool[rows.source[row]].flatten()
    end = place.offset + math.prod(shape) * dtype.itemsize
    return run[place.offset : end].view(dtype).view(shape)


def _write(rows: StateRows, place: StatePlace, row: int, state: torch.Tensor) -> None:
    run = place.pool[rows.target[row]]
    nbytes = state.contiguous().view(-1).view(torch.uint8)
    run.view(-1)[place.offset : place.offset + len(nbytes)] = nbytes
    place.pool[rows.target[row]] = run
