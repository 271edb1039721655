"""Products and attention as Triton kernels whose sums have one order: a token's result is the same
bits whatever else is in its step, and however its row is cut into steps.

Owns the kernels' source. A program's tile has one size for every number of tokens, so a sum is cut
and ordered by its own length alone, and no program shares a sum with another. Imported only where
Triton is. All sums are float32, each result is rounded once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def multiply(
    x,
    weight,
    bias,
    out,
    count,
    rows,
    columns,
    factor,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``LayerOperations.linear`` of ``count`` tokens with weights [rows, columns] of x's type: a
    program has TOKENS of the tokens and ROWS of the rows, and adds COLUMNS columns at a time, in
    order. With WIDE both become float32.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for first in range(0, columns, COLUMNS):
        across = first + tl.arange(0, COLUMNS)[None, :]
        down = first + tl.arange(0, COLUMNS)[:, None]
        inputs = tl.load(
            x + token * columns + across, mask=(token < count) & (across < columns), other=0.0
        )
        numbers = tl.load(
            weight + row * columns + down, mask=(row < rows) & (down < columns), other=0.0
        )
        if WIDE:
            total += tl.dot(inputs.to(tl.float32), numbers.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(inputs, numbers)
    result = total * factor
    if BIAS:
        result += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(
        out + token * rows + row,
        result.to(out.dtype.element_ty),
        mask=(token < count) & (row < rows),
    )


@triton.jit
def _from_fp8(bits):
    """The numbers whose bits as float8_e4m3fn these bytes are, float32: by integers, since Triton
    has this type from compute capability 8.9 on only.
    """
    byte = bits.to(tl.int32) & 0xFF
    magnitude = byte & 0x7F
    # The exponent's bias becomes 127 from 7; below 2^-6 numbers are multiples of 2^-9.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    small = magnitude.to(tl.float32) * 0.001953125
    size = tl.where(magnitude < 8, small, normal)
    size = tl.where(magnitude == 0x7F, float("nan"), size)
    return tl.where(byte > 0x7F, -size, size)


@triton.jit(do_not_specialize=["width"])
def attend_in_order(
    query,
    keys,
    values,
    tables,
    tiles,
    sinks,
    out,
    width,
    block_size,
    window,
    per_kv,
    kv,
    dim,
    value_dim,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    PER_KV: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``AttentionBackend.run``: a program has up to TOKENS queries of a row, for the ``per_kv``
    heads that share a key-value head, and goes over their keys in order.

    ``tiles`` int32 [N, 4]: a tile's row, its first packed token, that one's position, its count.
    Tiles of keys begin at multiples of KEYS, wherever the row's window begins. A tile that a query
    does not see leaves what it has summed as it is, bit for bit.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles + tile * 4)
    first = tl.load(tiles + tile * 4 + 1)
    position = tl.load(tiles + tile * 4 + 2)
    count = tl.load(tiles + tile * 4 + 3)
    place = tl.arange(0, TOKENS * PER_KV)
    token, member = place // PER_KV, place % PER_KV
    valid = (token < count) & (member < per_kv)
    at = (first + token).to(tl.int64) * kv * per_kv + head * per_kv + member
    d, value_d = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    q = tl.load(
        query + at[:, None] * dim + d[None, :],
        mask=valid[:, None] & (d < dim)[None, :],
        other=0.0,
    )
    if WIDE:
        q = q.to(tl.float32)
    query_position, end, lowest = position + token, position + count, 0
    if WINDOW:
        lowest = tl.maximum(position - window + 1, 0)
    highest = tl.full((TOKENS * PER_KV,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TOKENS * PER_KV,), dtype=tl.float32)
    summed = tl.zeros((TOKENS * PER_KV, VALUE_DIM), dtype=tl.float32)
    for begin in range(lowest // KEYS * KEYS, end, KEYS):
        key = begin + tl.arange(0, KEYS)
        known = (key >= lowest) & (key < end)
        block = tl.load(tables + row.to(tl.int64) * width + key // block_size, mask=known, other=0)
        slot = (block.to(tl.int64) * block_size + key % block_size) * kv + head
        k = tl.load(
            keys + slot[None, :] * dim + d[:, None],
            mask=known[None, :] & (d < dim)[:, None],
            other=0,
        )
        v = tl.load(
            values + slot[:, None] * value_dim + value_d[None, :],
            mask=known[:, None] & (value_d < value_dim)[None, :],
            other=0,
        )
        if FP8_CACHE:
            k, v = _from_fp8(k).to(q.dtype), _from_fp8(v).to(q.dtype)
        if WIDE:
            k, v = k.to(tl.float32), v.to(tl.float32)
            scores = tl.dot(q, k, input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k) * scale
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        visible = known[None, :] & (key[None, :] <= query_position[:, None])
        if WINDOW:
            visible &= key[None, :] > query_position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp(scores - base[:, None])
        rescaled = tl.exp(highest - base)
        total = total * rescaled + tl.sum(weights, 1)
        if WIDE:
            added = tl.dot(weights, v, input_precision="ieee")
        else:
            added = tl.dot(weights.to(v.dtype), v)
        summed = summed * rescaled[:, None] + added
        highest = peak
    if SINKS:
        sink = tl.load(sinks + head * per_kv + member, mask=member < per_kv, other=0.0)
        peak = tl.maximum(highest, sink)
        rescaled = tl.exp(highest - peak)
        total = total * rescaled + tl.exp(sink - peak)
        summed = summed * rescaled[:, None]
    total = tl.where(valid, total, 1.0)
    tl.store(
        out + at[:, None] * value_dim + value_d[None, :],
        (summed / total[:, None]).to(out.dtype.element_ty),
        mask=valid[:, None] & (value_d < value_dim)[None, :],
    )
