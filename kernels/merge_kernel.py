"""Device code that merges the pieces of long attention rows; ``long_rows.py`` launches it."""

import triton
import triton.language as tl

from .overlap_kernel import start_after_previous
from .softmax import LN2, LOG2E


@triton.jit
def merge_rows_kernel(
    partial, partial_stats,
    plane_map, plane_stride_b, plane_stride_h, row_order,
    out, lse,
    heads, q_len, rows, heavy_rows, pieces,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, STEP: tl.constexpr,
    RETURN_LSE: tl.constexpr, SINGLE_PLANE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program (STEP rows of a tile row, tile row, batch and head).

    A piece has averages of values, the maximum its weights are relative to and their sum. A
    log-sum-exp in place of the two would lose the sum of scores as low as a number can be.
    """
    start_after_previous(PDL)
    steps: tl.constexpr = BLOCK_M // STEP
    unit = tl.program_id(0) // steps
    slot = unit % heavy_rows
    bh = unit // heavy_rows
    b = bh // heads
    h = bh % heads
    base = 0
    if not SINGLE_PLANE:
        base = tl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * rows
    row = tl.load(row_order + base + slot)
    m_idx = (tl.program_id(0) % steps) * STEP + tl.arange(0, STEP)
    e_idx = tl.arange(0, BLOCK_E)
    in_width = e_idx < VALUE_DIM
    first = unit.to(tl.int64) * pieces
    maximum = tl.full([STEP], float("-inf"), tl.float32)
    total = tl.zeros([STEP], dtype=tl.float32)
    acc = tl.zeros([STEP, BLOCK_E], dtype=tl.float32)
    for piece in range(0, pieces):
        at = (first + piece) * BLOCK_M + m_idx
        stats = partial_stats + (first + piece) * (2 * BLOCK_M) + m_idx
        values = tl.load(
            partial + (at[:, None] * WIDTH + e_idx[None, :]), mask=in_width[None, :], other=0.0
        )
        highest = tl.load(stats)
        new = tl.maximum(maximum, highest)
        used = tl.where(new == float("-inf"), 0.0, new)  # no piece so far has a key
        alpha = tl.exp2((maximum - used) * LOG2E)
        weight = tl.exp2((highest - used) * LOG2E) * tl.load(stats + BLOCK_M)
        acc = acc * alpha[:, None] + values * weight[:, None]
        total = total * alpha + weight
        maximum = new
    empty = total == 0.0
    filled = tl.where(empty, 1.0, total)
    q_idx = row.to(tl.int64) * BLOCK_M + m_idx
    valid = q_idx < q_len
    out_ptrs = out + (((b.to(tl.int64) * q_len + q_idx) * heads + h) * VALUE_DIM)[:, None]
    result = (acc / filled[:, None]).to(out.dtype.element_ty)
    tl.store(out_ptrs + e_idx[None, :], result, mask=valid[:, None] & in_width[None, :])
    if RETURN_LSE:
        lse_ptrs = lse + (b.to(tl.int64) * heads + h) * q_len + q_idx
        log_sum = tl.where(empty, float("-inf"), maximum + tl.log2(filled) * LN2)
        tl.store(lse_ptrs, log_sum, mask=valid)
