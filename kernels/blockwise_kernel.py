"""Device code of block-wise attention; ``attention_blockwise.py`` says what it computes.

The program walks the kept tiles of its row with an online softmax (fp32, base 2). What the mask
does not have is absent from the compiled kernel: part tiles, full tiles, padding, bias, softcap,
ragged edges, separate planes and each piece of a band.

Rows without keys need no guard when there is no bias: scores are finite, masked ones are -inf and
the running maximum starts at a finite value, so exp2(-inf - maximum) is exactly 0 and the row ends
with a sum of 0, for which 0 and a log-sum-exp of -inf are stored.
"""

import triton
import triton.language as tl

from .band_walk import band_tiles
from .mask_tiles import band_bounds, mask_part_tile, split_program_id
from .overlap_kernel import start_after_previous
from .softmax import (
    LN2,
    attention_scores,
    finish_softmax,
    lazy_step,
    rescaled,
    softmax_step,
    starting_maximum,
)

# Weights are at most 1: times 256 they use the whole range of e4m3, from 2 ** -9 to 448.
FP8_SHIFT: tl.constexpr = tl.constexpr(8)
FP8_SUMS: tl.constexpr = tl.constexpr(16)  # ONES of rounding.py: as narrow as a product can be
FP8_UNSHIFT: tl.constexpr = tl.constexpr(2.0**-8)


@triton.jit
def _columns(
    at, row_valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Columns FIRST to FIRST + WIDTH of a tile of rows of DIM values, 0 beyond both; ``at`` points
    to the first of them. EVEN: all rows are valid."""
    columns = tl.arange(0, WIDTH)
    if EVEN and FIRST + WIDTH <= DIM:
        tile = tl.load(at)
    elif EVEN:
        tile = tl.load(at, mask=columns[None, :] < DIM - FIRST, other=0.0)
    else:
        mask = row_valid[:, None] & (columns[None, :] < DIM - FIRST)
        tile = tl.load(at, mask=mask, other=0.0)
    return tile


@triton.jit
def _attend_tiles(
    acc, acc_tail, total, maximum, q_tile, q_tail, begin, middle, end,
    k_head, step_k, v_head, step_v, col_idx, bitmap_id, bitmap,
    lower, upper, head, padding_head, bias_ptrs, stride_bn, m_valid, k_len,
    leading, skip, whole_from, whole_to, head_to,
    scale, SOFTCAP: tl.constexpr, mult, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL_D: tl.constexpr, TAIL_DV: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr,
    LOOPS: tl.constexpr, PREFETCH: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_HEAD: tl.constexpr, FP8: tl.constexpr,
    LAZY: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """Add tiles col_idx[begin:end] to the running softmax; only MASKED loops look at the mask.

    From LOOPS 6 on the columns are computed (see ``band_tiles``) and not read. With FP8 the rows
    of v are dimensions, ``step_v`` apart, its keys fill the last tile, and behind its dimensions
    there are FP8_SUMS of ones; ``total`` has as many columns.
    """
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    # a 32-bit offset in the tile beside a scalar 64-bit tile address: half the registers of
    # pointers
    k_off = n_idx[:, None] * step_k + d_idx[None, :]
    v_off = n_idx[:, None] * step_v + dv_idx[None, :]
    if FP8:
        v_off = n_idx[:, None] + dv_idx[None, :] * step_v
        sum_idx = VALUE_DIM + tl.arange(0, FP8_SUMS)
        ones_off = n_idx[:, None] + sum_idx[None, :] * step_v
    col_next = begin
    if PREFETCH and LOOPS < 6:
        col_next = tl.load(col_idx + begin, mask=begin < end, other=0)
    for t in range(begin, end):
        if LOOPS >= 6:
            col = t + tl.where(t < leading, 0, skip)
        elif PREFETCH:
            col = col_next
            col_next = tl.load(col_idx + t + 1, mask=t + 1 < end, other=0)
        else:
            col = tl.load(col_idx + t)
        first_k = col * BLOCK_N
        n_valid = n_idx < (k_len - first_k)
        if HAS_BIAS:  # on its way while the product runs
            bias_at = bias_ptrs + first_k.to(tl.int64) * stride_bn
            if EVEN_Q and EVEN_K:
                bias_tile = tl.load(bias_at)
            else:
                bias_tile = tl.load(bias_at, mask=m_valid[:, None] & n_valid[None, :], other=0.0)

        # -- scores ----
        k_tile_at = k_head + (col.to(tl.int64) * BLOCK_N) * step_k
        k_tile = _columns(k_tile_at + k_off, n_valid, 0, BLOCK_D, HEAD_DIM, EVEN_K or not MASKED)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if TAIL_D > 0:
            tail_idx = BLOCK_D + tl.arange(0, TAIL_D)
            tail_at = k_tile_at + (n_idx[:, None] * step_k + tail_idx[None, :])
            k_tail = _columns(tail_at, n_valid, BLOCK_D, TAIL_D, HEAD_DIM, EVEN_K or not MASKED)
            s = tl.dot(q_tail, tl.trans(k_tail), s, input_precision=PRECISION)
        s = attention_scores(s, scale, SOFTCAP, LINEAR)
        if HAS_BIAS:
            s += bias_tile.to(tl.float32)

        # -- mask ----
        if MASKED:
            if LOOPS == 5:
                if t < middle:
                    s = mask_part_tile(
                        s, t, middle, first_k, lower, upper, head, bitmap_id, bitmap, m_idx, k_len,
                        BLOCK_M, BLOCK_N, EVEN_K, LOOPS, BAND, HAS_LO, HAS_UPPER, HAS_HEAD,
                    )  # fmt: skip
            elif LOOPS == 7:
                whole = (first_k >= whole_from) & (first_k + (BLOCK_N - 1) <= whole_to)
                if HAS_HEAD:
                    whole = whole | (first_k + BLOCK_N <= head_to)
                if not whole:
                    s = mask_part_tile(
                        s, t, middle, first_k, lower, upper, head, bitmap_id, bitmap, m_idx, k_len,
                        BLOCK_M, BLOCK_N, EVEN_K, LOOPS, BAND, HAS_LO, HAS_UPPER, HAS_HEAD,
                    )  # fmt: skip
            else:
                s = mask_part_tile(
                    s, t, middle, first_k, lower, upper, head, bitmap_id, bitmap, m_idx, k_len,
                    BLOCK_M, BLOCK_N, EVEN_K, LOOPS, BAND, HAS_LO, HAS_UPPER, HAS_HEAD,
                )  # fmt: skip
        if HAS_PADDING:
            padding = tl.load(padding_head + first_k + n_idx, mask=n_valid, other=0)
            s = tl.where((padding != 0)[None, :], s, float("-inf"))

        # -- online softmax ----
        if FP8:
            p, alpha, maximum = softmax_step(s, maximum, mult, HAS_BIAS, FP8_SHIFT)
            p = p.to(tl.float8e4nv)
        elif LAZY and REGISTERS > 0:
            p, alpha, maximum, total = lazy_step(s, maximum, total, mult)
            acc = rescaled(acc, alpha)
        else:
            p, alpha, maximum = softmax_step(s, maximum, mult, HAS_BIAS)
            total = total * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]

        # -- values ----
        if FP8:
            v_tile_at = v_head + col.to(tl.int64) * BLOCK_N
            v_tile = _columns(v_tile_at + v_off, n_valid, 0, BLOCK_DV, VALUE_DIM, True)
            # tensor cores add e4m3 products in fewer bits than fp32: no longer than over a tile
            acc = tl.fma(acc, alpha[:, None], tl.dot(p, v_tile))
            # the sum of what is multiplied: an average of equal values is that value
            total = tl.fma(total, alpha[:, None], tl.dot(p, tl.load(v_tile_at + ones_off)))
        else:
            v_tile_at = v_head + (col.to(tl.int64) * BLOCK_N) * step_v
            v_tile = _columns(
                v_tile_at + v_off, n_valid, 0, BLOCK_DV, VALUE_DIM, EVEN_K or not MASKED
            )
            p = p.to(v_tile.dtype)
            acc = tl.dot(p, v_tile, acc, input_precision=PRECISION)
        if TAIL_DV > 0:
            tail_dv_idx = BLOCK_DV + tl.arange(0, TAIL_DV)
            tail_at = v_tile_at + (n_idx[:, None] * step_v + tail_dv_idx[None, :])
            v_tail = _columns(tail_at, n_valid, BLOCK_DV, TAIL_DV, VALUE_DIM, EVEN_K or not MASKED)
            acc_tail = tl.dot(p, v_tail, acc_tail * alpha[:, None], input_precision=PRECISION)
    return acc, acc_tail, total, maximum


@triton.jit
def attention_block_kernel(
    q, stride_qb, stride_qh, stride_qm,
    k, stride_kb, stride_kh, stride_kn,
    v, stride_vb, stride_vh, stride_vn,
    q_scale, k_scale, v_scale,
    out, lse,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order,
    key_keep, stride_pb,
    bias, stride_bb, stride_bh, stride_bm, stride_bn,
    batch_heads, heads, q_len, k_len, rows, q_offset,
    band_lo, band_hi, global_q, global_k, band_cap,
    partial, partial_stats, heavy_rows, pieces,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, RETURN_LSE: tl.constexpr,
    SINGLE_PLANE: tl.constexpr, HEADS_FAST: tl.constexpr, HEAVY_FIRST: tl.constexpr,
    LOOPS: tl.constexpr, PREFETCH: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_GLOBAL_Q: tl.constexpr,
    HAS_GLOBAL_K: tl.constexpr, HAS_CAP: tl.constexpr,
    TAIL_D: tl.constexpr = 0, TAIL_DV: tl.constexpr = 0, SPLIT: tl.constexpr = False,
    FP8: tl.constexpr = False,
    LAZY: tl.constexpr = False,
    PDL: tl.constexpr = False, REGISTERS: tl.constexpr = 0,  # REGISTERS: for the assembler
):  # fmt: skip
    """Program (tile row, batch, head) on a one-dimensional grid of rows * batch * heads.

    With SPLIT each of the first ``heavy_rows`` of ``row_order`` is ``pieces`` programs, which
    leave their part of the row to ``merge_rows_kernel``. With FP8 q, k and v are e4m3, v with its
    keys side by side (``stride_vn`` is from one dimension to the next), and each head has scales.
    """
    start_after_previous(PDL)
    piece = -1
    if SPLIT:
        slots = rows + heavy_rows * (pieces - 1)
        b, h, slot = split_program_id(slots, batch_heads, heads, HEADS_FAST)
        piece = tl.where(slot < heavy_rows * pieces, slot % pieces, -1)
        slot = tl.where(piece >= 0, slot // pieces, slot - heavy_rows * (pieces - 1))
    else:
        b, h, slot = split_program_id(rows, batch_heads, heads, HEADS_FAST)
    # These loads stay in the kernel's own body: torch.compile decides from it what the kernel
    # writes, follows a value loaded in a called function back to its tensor, and would clone that
    # tensor.
    base = 0
    if not SINGLE_PLANE:
        base = tl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * rows
    row = slot
    if HEAVY_FIRST:
        if LOOPS < 6:
            row = tl.load(row_order + base + slot)
        elif not HAS_LO:  # rows of a causal mask grow; others are even, or heavy at the start
            row = rows - 1 - slot
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = (h // GROUP).to(tl.int64)
    first_q = row.to(tl.int64) * BLOCK_M

    # -- tiles of this row ----
    start = 0
    middle = 0
    leading = 0
    skip = 0
    whole_from = 0
    whole_to = 0
    head_to = 0
    if LOOPS >= 6:
        stop, leading, skip, whole_from, whole_to, head_to = band_tiles(
            row, q_len, k_len, q_offset, band_lo, band_hi, global_q, global_k, band_cap,
            BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, HAS_GLOBAL_Q, HAS_GLOBAL_K, HAS_CAP,
        )  # fmt: skip
    else:
        start = tl.load(row_ptr + base + row)
        middle = tl.load(full_start + base + row)
        stop = tl.load(row_ptr + base + row + 1)
    if SPLIT:
        count = stop - start
        stop = tl.where(piece >= 0, start + count * (piece + 1) // pieces, stop)
        start = tl.where(piece >= 0, start + count * piece // pieces, start)
        middle = tl.minimum(tl.maximum(middle, start), stop)

    # -- query tile, kept for the whole row ----
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    q_head = q + (b64 * stride_qb + h64 * stride_qh + first_q * stride_qm) * VEC
    q_ptrs = q_head + (m_idx[:, None] * (stride_qm * VEC) + d_idx[None, :])
    m_valid = m_idx < (q_len - row * BLOCK_M)
    if EVEN_Q and BLOCK_D <= HEAD_DIM:
        q_tile = tl.load(q_ptrs)
    else:
        q_tile = tl.load(q_ptrs, mask=m_valid[:, None] & (d_idx[None, :] < HEAD_DIM), other=0.0)
    q_tail = q_tile
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        tail_ptrs = q_head + (m_idx[:, None] * (stride_qm * VEC) + tail[None, :])
        q_tail = tl.load(tail_ptrs, mask=m_valid[:, None] & (tail[None, :] < HEAD_DIM), other=0.0)

    k_head = k + (b64 * stride_kb + kv64 * stride_kh) * VEC
    v_head = v + (b64 * stride_vb + kv64 * stride_vh) * VEC
    padding_head = key_keep + b64 * stride_pb
    bias_head = bias + (b64 * stride_bb + h64 * stride_bh + first_q * stride_bm)
    bias_ptrs = bias_head + (m_idx[:, None] * stride_bm + n_idx[None, :] * stride_bn)

    q_pos = row * BLOCK_M + m_idx + q_offset
    lower, upper, head = band_bounds(
        q_pos, k_len, band_lo, band_hi, global_q, global_k, band_cap,
        HAS_LO, HAS_HI, HAS_GLOBAL_Q, HAS_GLOBAL_K, HAS_CAP,
    )  # fmt: skip

    maximum = starting_maximum(BLOCK_M, HAS_BIAS)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    acc_tail = total
    if FP8:
        total = tl.zeros([BLOCK_M, FP8_SUMS], dtype=tl.float32)
    elif LAZY and REGISTERS > 0:
        total = tl.zeros([BLOCK_M, 8], dtype=tl.float32)
    if TAIL_DV > 0:
        acc_tail = tl.zeros([BLOCK_M, TAIL_DV], dtype=tl.float32)

    if FP8:
        head_number = b64 * heads + h64
        kv_number = b64 * (heads // GROUP) + kv64
        unit = tl.load(q_scale + head_number) * tl.load(k_scale + kv_number)
        v_factor = tl.load(v_scale + kv_number)
        scale = unit * SCALE
        mult = unit * MULT if LINEAR else unit * 0 + MULT
    else:
        scale: tl.constexpr = SCALE  # type: ignore[no-redef]
        mult: tl.constexpr = MULT  # type: ignore[no-redef]

    # Two loops, part tiles then full tiles; or one over both, because on short rows a second loop
    # drains and refills the load pipeline. LOOPS: 1 part, 2 full, 3 part then full, 4 one loop with
    # the mask neutralised on full tiles, 5 one loop with the mask under a branch; 6 and 7 the same
    # over tiles that are computed from the band, which saves three dependent loads per program.
    if LOOPS == 1 or LOOPS == 3:
        acc, acc_tail, total, maximum = _attend_tiles(
            acc, acc_tail, total, maximum, q_tile, q_tail, start, middle, middle,
            k_head, stride_kn * VEC, v_head, stride_vn * VEC,
            col_idx, bitmap_id, bitmap, lower, upper, head,
            padding_head, bias_ptrs, stride_bn, m_valid, k_len,
            leading, skip, whole_from, whole_to, head_to,
            scale, SOFTCAP, mult, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            TAIL_D, TAIL_DV, PRECISION, EVEN_Q, EVEN_K, HAS_PADDING, HAS_BIAS, True, LOOPS,
            PREFETCH, BAND, HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K, FP8,
            LAZY, REGISTERS,
        )  # fmt: skip
    if LOOPS == 2 or LOOPS == 3:
        acc, acc_tail, total, maximum = _attend_tiles(
            acc, acc_tail, total, maximum, q_tile, q_tail, middle, middle, stop,
            k_head, stride_kn * VEC, v_head, stride_vn * VEC,
            col_idx, bitmap_id, bitmap, lower, upper, head,
            padding_head, bias_ptrs, stride_bn, m_valid, k_len,
            leading, skip, whole_from, whole_to, head_to,
            scale, SOFTCAP, mult, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            TAIL_D, TAIL_DV, PRECISION, EVEN_Q, EVEN_K, HAS_PADDING, HAS_BIAS, False, LOOPS,
            PREFETCH, BAND, HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K, FP8,
            LAZY, REGISTERS,
        )  # fmt: skip
    if LOOPS >= 4:
        acc, acc_tail, total, maximum = _attend_tiles(
            acc, acc_tail, total, maximum, q_tile, q_tail, start, middle, stop,
            k_head, stride_kn * VEC, v_head, stride_vn * VEC,
            col_idx, bitmap_id, bitmap, lower, upper, head,
            padding_head, bias_ptrs, stride_bn, m_valid, k_len,
            leading, skip, whole_from, whole_to, head_to,
            scale, SOFTCAP, mult, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            TAIL_D, TAIL_DV, PRECISION, EVEN_Q, EVEN_K, HAS_PADDING, HAS_BIAS, True, LOOPS,
            PREFETCH, BAND, HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K, FP8,
            LAZY, REGISTERS,
        )  # fmt: skip

    # -- result: out [batch, q_len, heads, VALUE_DIM], lse [batch, heads, q_len] ----
    if FP8:
        total = tl.max(total, 1) * FP8_UNSHIFT
    elif LAZY and REGISTERS > 0:
        total = tl.sum(total, 1)
    inverse, log_sum = finish_softmax(maximum, total, mult)
    if FP8:
        inverse = inverse * (v_factor * FP8_UNSHIFT)
    out_row = (b64 * q_len + first_q) * heads + h64
    out_head = out + out_row * VALUE_DIM
    out_ptrs = out_head + (m_idx[:, None] * (heads * VALUE_DIM) + dv_idx[None, :])
    if SPLIT:
        split = m_idx * 0 + piece >= 0
        m_valid = m_valid & (m_idx * 0 + piece < 0)
        number = ((b64 * heads + h64) * heavy_rows + slot) * pieces + piece
        part_ptrs = partial + (number * BLOCK_M + m_idx[:, None]) * (BLOCK_DV + TAIL_DV)
        tl.store(part_ptrs + dv_idx[None, :], acc * inverse[:, None], mask=split[:, None])
        if TAIL_DV > 0:
            tail_at = part_ptrs + (BLOCK_DV + tl.arange(0, TAIL_DV))[None, :]
            tl.store(tail_at, acc_tail * inverse[:, None], mask=split[:, None])
        stat_ptrs = partial_stats + (number * (2 * BLOCK_M) + m_idx)
        tl.store(stat_ptrs, maximum * (mult * LN2), mask=split)
        tl.store(stat_ptrs + BLOCK_M, total, mask=split)
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    if EVEN_Q and BLOCK_DV <= VALUE_DIM and not SPLIT:
        tl.store(out_ptrs, result)
    else:
        tl.store(out_ptrs, result, mask=m_valid[:, None] & (dv_idx[None, :] < VALUE_DIM))
    if TAIL_DV > 0:
        tail_dv = BLOCK_DV + tl.arange(0, TAIL_DV)
        tail_out = out_head + (m_idx[:, None] * (heads * VALUE_DIM) + tail_dv[None, :])
        result = (acc_tail * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(tail_out, result, mask=m_valid[:, None] & (tail_dv[None, :] < VALUE_DIM))
    if RETURN_LSE:
        lse_row = lse + (b64 * heads + h64) * q_len + first_q
        tl.store(lse_row + m_idx, log_sum, mask=m_valid)
