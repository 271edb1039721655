"""A decoder layer's operations as Triton kernels: those between torch's matrix products, and the
products with weights in integers.

Owns the kernels' source. Imported only where Triton is (``triton_operations.load``), which compiles
a kernel for each combination of types and upper-case arguments at its first launch. A program
computes a tile of ROWS rows; what a tile has beyond the data is masked. All arithmetic is in
float32, each result is rounded once, and a row's result does not depend on the tile that it is in.
Pointers are to dense tensors.
"""

import triton
import triton.language as tl


@triton.jit
def _normal(x, valid, width, eps, CENTERED: tl.constexpr):
    """The mean of each row, 0 without CENTERED, and one over the root of the mean square of the
    deviations from it.
    """
    mean = 0.0
    if CENTERED:
        mean = tl.sum(x, 1)[:, None] / width
        x = tl.where(valid, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1)[:, None] / width + eps)
    return mean, scale


@triton.jit(do_not_specialize=["count"])
def norm(
    x,
    residual,
    weight,
    bias,
    out,
    count,
    width,
    eps,
    offset,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``LayerOperations.norm`` of ``count`` rows. With RESIDUAL the sum replaces ``residual``, and
    the norm is that of the rounded sum.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    valid = (row < count) & (column < width)
    at = row * width + column
    total = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual_rows = tl.load(residual + at, mask=valid, other=0.0)
        added = (total + residual_rows.to(tl.float32)).to(residual_rows.dtype)
        tl.store(residual + at, added, mask=valid)
        total = added.to(tl.float32)
    mean, scale = _normal(total, valid, width, eps, CENTERED)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    result = (total - mean) * scale * factor
    if BIAS:
        result += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _normal_heads(
    x,
    partner,
    chosen,
    valid,
    place,
    partner_place,
    weight,
    bias,
    dim,
    eps,
    offset,
    BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """The norm of each ``chosen`` head x, and of the same head in the order of its partners; the
    other heads as they are.
    """
    mean, scale = _normal(x, valid, dim, eps, CENTERED)
    inside = place < dim
    factor = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) + offset
    normal = (x - mean) * scale * factor
    factor = tl.load(weight + partner_place, mask=inside, other=0.0).to(tl.float32) + offset
    normal_partner = (partner - mean) * scale * factor
    if BIAS:
        normal += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        normal_partner += tl.load(bias + partner_place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(chosen, normal, x), tl.where(chosen, normal_partner, partner)


@triton.jit
def _as_fp8(x):
    """The bits of float32 ``x`` as float8_e4m3fn, as ``cache_write.rounded`` gives them: to
    nearest, ties to even, at most 448, NaN for NaN. By integers, since Triton has this type from
    compute capability 8.9 on only.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    size = tl.where(size > 448.0, 448.0, size)
    size_bits = size.to(tl.int32, bitcast=True)
    # Of 23 bits behind the point 3 stay; the exponent's bias becomes 7 from 127.
    normal = (size_bits - (120 << 23) + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20
    # Below 2^-6 numbers are multiples of 2^-9, to which adding 2^14 rounds.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    result = tl.where(size < 0.015625, small, normal)
    result = tl.where(magnitude > 0x7F800000, 0x7F, result)
    return (result | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit(do_not_specialize=["count"])
def rope_write(
    qkv,
    cos,
    sin,
    slots,
    keys,
    values,
    query,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    count,
    queries,
    kv,
    dim,
    rotated,
    q_eps,
    q_offset,
    k_eps,
    k_offset,
    Q_NORM: tl.constexpr,
    Q_BIAS: tl.constexpr,
    Q_CENTERED: tl.constexpr,
    K_NORM: tl.constexpr,
    K_BIAS: tl.constexpr,
    K_CENTERED: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``LayerOperations.rope_write`` of ``count`` tokens with ``queries`` and ``kv`` heads of
    ``dim`` elements, of which the first ``rotated`` turn. A row of the tile is one head of one
    token. With FP8_CACHE the caches are the bytes of 8-bit floats.
    """
    heads = queries + 2 * kv
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, COLUMNS)[None, :]
    valid = (row < count * heads) & (place < dim)
    token, head = row // heads, row % heads
    is_query, is_value = head < queries, head >= queries + kv
    is_key = (head >= queries) & (head < queries + kv)

    half = rotated // 2
    partner_place = tl.where(place < half, place + half, place - half)
    partner_place = tl.where(place < rotated, partner_place, place)
    x = tl.load(qkv + row * dim + place, mask=valid, other=0.0).to(tl.float32)
    partner = tl.load(qkv + row * dim + partner_place, mask=valid, other=0.0).to(tl.float32)
    if Q_NORM:
        x, partner = _normal_heads(
            x, partner, is_query, valid, place, partner_place, q_weight, q_bias, dim, q_eps,
            q_offset, Q_BIAS, Q_CENTERED,
        )  # fmt: skip
    if K_NORM:
        x, partner = _normal_heads(
            x, partner, is_key, valid, place, partner_place, k_weight, k_bias, dim, k_eps,
            k_offset, K_BIAS, K_CENTERED,
        )  # fmt: skip
    turns = valid & (place < rotated) & (head < queries + kv)
    c = tl.load(cos + token * rotated + place, mask=turns, other=1.0)
    s = tl.load(sin + token * rotated + place, mask=turns, other=0.0)
    turned = x * c + tl.where(place < half, -partner, partner) * s
    x = tl.where(turns, turned, x)

    at = (token * queries + head) * dim + place
    tl.store(query + at, x.to(query.dtype.element_ty), mask=valid & is_query)
    # A key or value is rounded as a result before the cache may round it further.
    x = x.to(qkv.dtype.element_ty)
    slot = tl.load(slots + token, mask=row < count * heads, other=0)
    at = (slot * kv + head - queries) * dim + place
    if FP8_CACHE:
        entry = _as_fp8(x.to(tl.float32))
    else:
        entry = x.to(keys.dtype.element_ty)
    tl.store(keys + at, entry, mask=valid & is_key)
    tl.store(values + at - kv * dim, entry, mask=valid & is_value)


@triton.jit(do_not_specialize=["count"])
def activate(
    x,
    out,
    count,
    width,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``LayerOperations.activate`` of ``count`` rows of ``width`` elements; with GATED its
    ``gated``, for rows of twice as many.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    valid = (row < count) & (column < width)
    at = row * (2 * width if GATED else width) + column
    y = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z.
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    else:
        y = tl.where(y < 0, 0.0, y)  # of a NaN a NaN
        if ACTIVATION == "relu2":
            y = y * y
    if GATED:
        y *= tl.load(x + at + width, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["count"])
def multiply_int8(
    x,
    weight,
    scales,
    bias,
    out,
    count,
    rows,
    columns,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``LayerOperations.linear`` of ``count`` tokens with int8 weights [rows, columns]: a program
    has TOKENS of the tokens and ROWS of the rows, and reads COLUMNS columns at a time. Integers
    become numbers of x's type, which holds them exactly, or with WIDE both are float32.
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
            weight + row * columns + down, mask=(row < rows) & (down < columns), other=0
        )
        if WIDE:
            total += tl.dot(inputs.to(tl.float32), numbers.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(inputs, numbers.to(inputs.dtype))
    result = total * tl.load(scales + row, mask=row < rows, other=0.0)
    if BIAS:
        result += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + token * rows + row, result, mask=(token < count) & (row < rows))


@triton.jit(do_not_specialize=["count"])
def multiply_int4(
    x,
    weight,
    scales,
    zeros,
    order,
    bias,
    out,
    count,
    rows,
    columns,
    size,
    stride,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``LayerOperations.linear`` of ``count`` tokens with 4-bit weights [rows, columns], scales and
    zero points of groups of ``size`` columns; from one group, or token of ``out``, to the next are
    ``stride`` elements. With ORDERED weights multiply the columns of x in this order. A program
    reads BYTES bytes of a row at a time, which are of one group: integers minus their zero point
    are numbers of x's type, or with WIDE float32, without rounding, and sums get the scale.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    half = columns // 2
    total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for first in range(0, half, BYTES):
        across = first + tl.arange(0, BYTES)[None, :]
        down = first + tl.arange(0, BYTES)[:, None]
        even, odd = 2 * across, 2 * across + 1
        if ORDERED:
            even = tl.load(order + even, mask=across < half, other=0)
            odd = tl.load(order + odd, mask=across < half, other=0)
        valid = (token < count) & (across < half)
        x_even = tl.load(x + token * columns + even, mask=valid, other=0.0)
        x_odd = tl.load(x + token * columns + odd, mask=valid, other=0.0)
        pairs = tl.load(weight + row * half + down, mask=(row < rows) & (down < half), other=0)
        scale_at = (2 * first // size) * stride + row
        zero = tl.load(zeros + scale_at, mask=row < rows, other=0).to(tl.int32)
        low = (pairs & 15).to(tl.int32) - zero
        high = (pairs >> 4).to(tl.int32) - zero
        if WIDE:
            product = tl.dot(x_even.to(tl.float32), low.to(tl.float32), input_precision="ieee")
            product += tl.dot(x_odd.to(tl.float32), high.to(tl.float32), input_precision="ieee")
        else:
            product = tl.dot(x_even, low.to(x_even.dtype))
            product += tl.dot(x_odd, high.to(x_odd.dtype))
        total += product * tl.load(scales + scale_at, mask=row < rows, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + token * stride + row, total, mask=(token < count) & (row < rows))
