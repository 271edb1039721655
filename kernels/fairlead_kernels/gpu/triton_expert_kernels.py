"""The product of a mixture's experts as one Triton kernel: each row by the weights of its expert.

Owns the kernel's source. Programs find their expert in the ends that are on the device, so a launch
reads nothing on the host. Imported only where Triton is. A sum is float32, cut and ordered by its
own length alone in tiles of one size, and rounded once: a row's result is the same bits whatever
other rows there are.
"""

import triton
import triton.language as tl


@triton.jit
def multiply_experts(
    x,
    weights,
    expert_ends,
    bias,
    out,
    experts,
    rows,
    columns,
    of_expert,
    of_column,
    of_row,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``ExpertProduct``: a program has up to TOKENS tokens of one expert and ROWS of its rows, the
    outputs, and adds COLUMNS columns at a time, in order. EXPERTS: a power of two not below
    ``experts``. From one expert, column or row of the weights to the next are ``of_expert``,
    ``of_column`` or ``of_row`` elements. With WIDE both become float32.
    """
    tile = tl.program_id(0)
    place = tl.arange(0, EXPERTS)
    end = tl.load(expert_ends + place, mask=place < experts, other=0)
    begin = tl.load(expert_ends + place - 1, mask=(place > 0) & (place < experts), other=0)
    tiles = tl.where(place < experts, (end - begin + TOKENS - 1) // TOKENS, 0)
    behind = tl.cumsum(tiles, 0)
    mine = (behind - tiles <= tile) & (tile < behind)
    # The grid has as many programs as any division of the tokens needs: some have none.
    if tl.sum(mine.to(tl.int32), 0) == 0:
        return
    expert = tl.sum(tl.where(mine, place, 0), 0).to(tl.int64)
    first_token = tl.sum(tl.where(mine, begin + (tile - behind + tiles) * TOKENS, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)

    token = first_token.to(tl.int64) + tl.arange(0, TOKENS)[:, None]
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for first in range(0, columns, COLUMNS):
        across = first + tl.arange(0, COLUMNS)[None, :]
        down = first + tl.arange(0, COLUMNS)[:, None]
        inputs = tl.load(
            x + token * columns + across, mask=(token < last) & (across < columns), other=0.0
        )
        numbers = tl.load(
            weights + expert * of_expert + down.to(tl.int64) * of_column + row * of_row,
            mask=(row < rows) & (down < columns),
            other=0.0,
        )
        if WIDE:
            total += tl.dot(inputs.to(tl.float32), numbers.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(inputs, numbers)
    if BIAS:
        total += tl.load(bias + expert * rows + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(
        out + token * rows + row,
        total.to(out.dtype.element_ty),
        mask=(token < last) & (row < rows),
    )
