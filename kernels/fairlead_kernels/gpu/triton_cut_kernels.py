"""The cuts of sampled rows as one Triton kernel: the smallest score that min-p, top-k and top-p
leave of each.

Owns the kernel's source. Imported only where Triton is. A program has one row. It adds integers
alone, so that no result depends on the order of its sums. Scores are at most 0, so the bits of
their magnitudes order them; a cut is found a few bits at a time, the highest first.
docs/design/0017-cuts-on-gpus.md has the reasons.
"""

import triton
import triton.language as tl


@triton.jit
def _reached(
    scores,
    exponentials,
    width,
    largest,
    target,
    share,
    MASS: tl.constexpr,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest magnitude, as its bits in uint32, up to which ``target`` of a row's scores are;
    with MASS the smallest up to which ``share`` of their mass is. Scores of a magnitude above
    ``largest`` do not count.
    """
    cut = tl.full((), 0, tl.int64)
    step = tl.full((), 1 << (32 - BITS), tl.int64)
    for number in range(32 // BITS):
        # The ends of the parts of what is left: the cut is in the first part whose end suffices.
        ends = cut + step * (1 + tl.arange(0, 1 << BITS)).to(tl.int64) - 1
        ends = tl.minimum(ends, largest.to(tl.int64)).to(tl.uint32)[:, None]
        # Each thread has sums of its own until the end of the row.
        sums = tl.zeros((1 << BITS, BLOCK), dtype=tl.int64 if MASS else tl.int32)
        for begin in range(0, width, BLOCK):
            place = begin + tl.arange(0, BLOCK)[None, :]
            inside = place < width
            score = tl.load(scores + place, mask=inside, other=0.0)
            if MASS:
                exponential = tl.load(exponentials + place, mask=inside, other=0.0)
                weight = (exponential * UNIT).to(tl.int64)
            else:
                weight = inside.to(tl.int32)
            sums += tl.where(tl.abs(score).to(tl.uint32, bitcast=True) <= ends, weight, 0)
        reached = tl.sum(sums, 1)
        if MASS:
            if number == 0:  # the last end is beyond all that count
                total = tl.max(reached, 0)
                # float64 may round up beyond the total.
                target = tl.minimum(tl.ceil(total.to(tl.float64) * share).to(tl.int64), total)
        cut += step * tl.sum((reached < target).to(tl.int64), 0)
        step = step >> BITS
    return cut.to(tl.uint32)


# A launch must not depend on where a row's parameters are: those of some rows of a table are a view
# of it, and another view would compile again.
@triton.jit(
    do_not_specialize=["min_cut_step", "top_k_step", "top_p_step"],
    do_not_specialize_on_alignment=["min_cut", "top_k", "top_p"],
)
def find_cuts(
    scores,
    exponentials,
    min_cut,
    top_k,
    top_p,
    cuts,
    width,
    min_cut_step,
    top_k_step,
    top_p_step,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``sample_rows.cut_of`` for dense ``scores`` [R, width] and their ``exponentials``: a program
    has one row, reads BLOCK scores at a time, and finds BITS bits of a cut in each pass over them.
    A filter that is off costs no pass. An exponential of 1 is UNIT units of mass; from one row's
    parameter to the next are ``..._step`` elements.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * width
    exponentials += row * width
    count = tl.minimum(tl.load(top_k + row * top_k_step), width)
    share = tl.load(top_p + row * top_p_step)
    cut = tl.abs(tl.load(min_cut + row * min_cut_step)).to(tl.uint32, bitcast=True)
    if count > 0:
        largest = tl.full((), 0x7FFFFFFF, tl.uint32)
        kth = _reached(
            scores, exponentials, width, largest, count, share, False, UNIT, BITS, BLOCK
        )  # fmt: skip
        cut = tl.minimum(cut, kth)
    if share < 1:
        cut = _reached(scores, exponentials, width, cut, count, share, True, UNIT, BITS, BLOCK)
    tl.store(cuts + row, -cut.to(tl.float32, bitcast=True))
