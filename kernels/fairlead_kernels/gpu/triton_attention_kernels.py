"""Paged attention as two Triton kernels: ``attend`` reads the cache where it is, by block ids, and
``merge`` joins the parts of a row whose keys several programs share.

Owns the kernels' source. Imported only where Triton is (``triton_attention.load``). A *piece* is
some consecutive queries of one row; ``pieces`` int32 [4, stride] has of each the row of ``tables``,
the first query's place among the packed tokens, its position, and the number of queries. A program
computes one piece for heads that share a key-value head, so each key is read once for all of them.
No key is read that none of its queries sees, so neither blocks that a window has passed, nor what
lies behind a row's last token. Scores and sums are float32, exponents have the base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _from_fp8(bits):
    """The float32 that the bits of a float8_e4m3fn stand for. By integers, since Triton has this
    type from compute capability 8.9 on only.
    """
    integer = bits.to(tl.int32)
    size = integer & 0x7F
    # The 3 bits behind the point become the first of 23; the exponent's bias becomes 127 from 7.
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where((integer & 0x80) != 0, -value, value)


# Where pieces and tables begin differs from step to step.
@triton.jit(
    do_not_specialize=["stride", "table_width", "window"],
    do_not_specialize_on_alignment=["pieces", "tables"],
)
def attend(
    query,
    keys,
    values,
    out,
    parts,
    peaks,
    totals,
    pieces,
    tables,
    sinks,
    stride,
    table_width,
    window,
    scale,
    softcap,
    query_token,
    query_head,
    BLOCK: tl.constexpr,
    KV: tl.constexpr,
    PER_KV: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    TALL: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    """A program of the grid (pieces, KV * cdiv(PER_KV, HEADS), SPLITS): TALL // HEADS
    queries at most of each of HEADS heads, over KEYS keys at a time.

    query [T, KV * PER_KV, DIM] with the strides ``query_token`` and ``query_head``; keys [blocks,
    BLOCK, KV, DIM] and values likewise, dense, with FP8_CACHE the bytes of 8-bit floats; out
    [T, KV * PER_KV, VALUE_DIM]. With WINDOW a position p sees the keys p-window+1..p. With one of
    SPLITS the result goes to ``out``, the sinks included; with more each program takes an equal
    share of a piece's keys, LEAST_KEYS at least, and leaves for ``merge`` its unscaled sum of
    values in ``parts`` [pieces, KV * PER_KV, SPLITS, VALUE_DIM], its largest exponent in ``peaks``
    and the sum of its weights in ``totals`` [pieces, KV * PER_KV, SPLITS], which is 0 where it had
    no key.
    With WIDE products are in float32, whatever the types are.
    """
    piece = tl.program_id(0)
    kv = tl.program_id(1) % KV
    split = tl.program_id(2)
    row = tl.load(pieces + piece).to(tl.int64)
    token = tl.load(pieces + stride + piece).to(tl.int64)
    position = tl.load(pieces + 2 * stride + piece)
    queries = tl.load(pieces + 3 * stride + piece)

    place = tl.arange(0, TALL)
    query_place = place // HEADS
    member = (tl.program_id(1) // KV) * HEADS + place % HEADS
    valid = (query_place < queries) & (member < PER_KV)
    head = kv * PER_KV + member
    column = tl.arange(0, COLUMNS)
    value_column = tl.arange(0, VALUE_COLUMNS)
    at_query = (token + query_place) * query_token + head * query_head
    q = tl.load(
        query + at_query[:, None] + column[None, :],
        mask=valid[:, None] & (column < DIM)[None, :],
        other=0.0,
    )
    if WIDE:
        q = q.to(tl.float32)

    end = position + queries
    begin = 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0)
    if SPLITS > 1:
        share = tl.maximum(tl.cdiv(end - begin, SPLITS), LEAST_KEYS)
        begin += split * share
        end = tl.minimum(begin + share, end)

    peak = tl.full((TALL,), float("-inf"), tl.float32)
    total = tl.zeros((TALL,), tl.float32)
    if SINKS and SPLITS == 1:
        peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    result = tl.zeros((TALL, VALUE_COLUMNS), tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = key < end
        block = tl.load(tables + row * table_width + key // BLOCK, mask=inside, other=0)
        slot = (block.to(tl.int64) * BLOCK + key % BLOCK) * KV + kv
        k = tl.load(
            keys + slot[None, :] * DIM + column[:, None],
            mask=inside[None, :] & (column < DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            values + slot[:, None] * VALUE_DIM + value_column[None, :],
            mask=inside[:, None] & (value_column < VALUE_DIM)[None, :],
            other=0.0,
        )
        if FP8_CACHE:
            k = _from_fp8(k).to(q.dtype)
            v = _from_fp8(v).to(q.dtype)
        if WIDE:
            scores = tl.dot(q, k.to(tl.float32), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k) * scale
        if SOFTCAP:
            # softcap * tanh(scores / softcap), without a quotient of two infinities.
            scores = softcap - 2 * softcap / (1 + tl.exp(scores * (2 / softcap)))
        visible = inside[None, :] & (key[None, :] <= (position + query_place)[:, None])
        if WINDOW:
            visible = visible & (key[None, :] > (position + query_place - window)[:, None])
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # Before a query's first key nothing is to be subtracted.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        rescaling = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * rescaling + tl.sum(weights, 1)
        if WIDE:
            added = tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            added = tl.dot(weights.to(v.dtype), v)
        result = result * rescaling[:, None] + added
        peak = higher

    stored = valid[:, None] & (value_column < VALUE_DIM)[None, :]
    if SPLITS == 1:
        at = ((token + query_place) * (KV * PER_KV) + head) * VALUE_DIM
        result = (result / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] + value_column[None, :], result, mask=stored)
    else:
        at = (piece.to(tl.int64) * (KV * PER_KV) + head) * SPLITS + split
        tl.store(peaks + at, peak, mask=valid)
        tl.store(totals + at, total, mask=valid)
        if begin < end:
            at_part = parts + at[:, None] * VALUE_DIM + value_column[None, :]
            tl.store(at_part, result, mask=stored)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["pieces"])
def merge(
    parts,
    peaks,
    totals,
    pieces,
    sinks,
    out,
    stride,
    QUERY_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    """A program of the grid (pieces, QUERY_HEADS): one head of a piece of one query, from its parts
    as ``attend`` left them, and its sink, to ``out`` [T, QUERY_HEADS, VALUE_DIM].
    """
    piece = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(pieces + stride + piece).to(tl.int64)
    at = (piece * QUERY_HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, VALUE_COLUMNS)
    total = tl.load(totals + at)
    had_keys = total != 0  # also where it is NaN
    peak = tl.where(had_keys, tl.load(peaks + at), float("-inf"))
    top = tl.max(peak, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    factor = tl.where(had_keys, tl.exp2(peak - top), 0.0)
    part = tl.load(
        parts + at[:, None] * VALUE_DIM + column[None, :],
        mask=had_keys[:, None] & (column < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(part * factor[:, None], 0)
    weight = tl.sum(total * factor, 0)
    if SINKS:
        weight += tl.exp2(sink - top)
    result = (result / weight).to(out.dtype.element_ty)
    place = (token * QUERY_HEADS + head) * VALUE_DIM + column
    tl.store(out + place, result, mask=column < VALUE_DIM)
