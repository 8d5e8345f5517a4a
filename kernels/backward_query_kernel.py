"""Device code of dQ, the first of the two kernels of the gradient; ``attention_backward.py`` says
what they compute.

It walks the query rows over the lists of the forward pass, and leaves what the second kernel needs
of every query row (``store_stats``). Weights and pieces: ``backward_tiles.py``.
"""

import triton
import triton.language as tl

from .backward_tiles import (
    kept_by_bitmap,
    prepared_lse,
    softcap_slope,
    store_stats,
    weights_of,
)
from .mask_tiles import band_bounds, band_tile, grouped_program_id
from .softmax import attention_scores


@triton.jit
def _query_pieces(
    dq, total, q_tile, grad_tile, row_lse, row_inverse, row_delta, begin, end,
    k_head, step_k, v_head, step_v, col_idx, bitmap_id, bitmap, rows_in_tile,
    lower, upper, head, padding_head, bias_ptrs, stride_bn, m_valid, k_len,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr, HAS_PADDING: tl.constexpr,
    HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, ONLY_TOTAL: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_HEAD: tl.constexpr,
):  # fmt: skip
    """Add tiles begin..end of a row to dQ, or with ONLY_TOTAL their weights to ``total``."""
    n_idx = tl.arange(0, BLOCK_N)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    k_off = n_idx[:, None] * step_k + d_idx[None, :]
    v_off = n_idx[:, None] * step_v + dv_idx[None, :]
    PIECES: tl.constexpr = TILE_N // BLOCK_N
    col_next = tl.load(col_idx + begin, mask=begin < end, other=0)
    for i in range(begin * PIECES, end * PIECES):
        t = i // PIECES
        in_tile = i % PIECES * BLOCK_N
        first_k = col_next * TILE_N + in_tile
        # a piece early: what is loaded next does not wait for its own address
        t_next = (i + 1) // PIECES
        col_next = tl.load(col_idx + t_next, mask=t_next < end, other=0)
        n_valid = n_idx < (k_len - first_k)

        # -- weights ----
        k_at = k_head + first_k.to(tl.int64) * step_k + k_off
        if (EVEN_K or not MASKED) and BLOCK_D == HEAD_DIM:
            k_tile = tl.load(k_at)
        else:
            k_tile = tl.load(k_at, mask=n_valid[:, None] & (d_idx[None, :] < HEAD_DIM), other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s = attention_scores(s, SCALE, SOFTCAP, LINEAR)
        if SOFTCAP > 0:
            slope = softcap_slope(s, SOFTCAP)
        if HAS_BIAS:
            bias_at = bias_ptrs + first_k.to(tl.int64) * stride_bn
            bias_tile = tl.load(bias_at, mask=m_valid[:, None] & n_valid[None, :], other=0.0)
            s += bias_tile.to(tl.float32)
        if MASKED:
            if BAND:
                keep = band_tile(
                    lower, upper, head, first_k, BLOCK_N, HAS_LO, HAS_UPPER, HAS_HEAD
                )  # fmt: skip
            else:
                tile = tl.load(bitmap_id + t)
                keep = kept_by_bitmap(
                    bitmap, tile, rows_in_tile, in_tile, TILE_M, TILE_N, BLOCK_N, False
                )
            s = tl.where(keep, s, float("-inf"))
        if HAS_PADDING:
            padding = tl.load(padding_head + first_k + n_idx, mask=n_valid, other=0)
            s = tl.where((padding != 0)[None, :], s, float("-inf"))
        p = weights_of(s, row_lse[:, None], MULT, HAS_BIAS)

        # -- gradient of the scores, then of the queries ----
        if ONLY_TOTAL:
            total += tl.sum(p, 1)
        else:
            if HAS_BIAS:
                p = p * row_inverse[:, None]
            v_at = v_head + first_k.to(tl.int64) * step_v + v_off
            if (EVEN_K or not MASKED) and BLOCK_DV == VALUE_DIM:
                v_tile = tl.load(v_at)
            else:
                v_mask = n_valid[:, None] & (dv_idx[None, :] < VALUE_DIM)
                v_tile = tl.load(v_at, mask=v_mask, other=0.0)
            dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = p * (dp - row_delta[:, None])
            if SOFTCAP > 0:
                ds = ds * slope
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq, total


@triton.jit(do_not_specialize=["heavy", "together"])
def attention_backward_query_kernel(
    q, stride_qb, stride_qh, stride_qm,
    k, stride_kb, stride_kh, stride_kn,
    v, stride_vb, stride_vh, stride_vn,
    out, stride_ob, stride_oh, stride_om,
    grad, stride_gb, stride_gh, stride_gm,
    lse, grad_lse, stats, inverse, dq,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order,
    key_keep, stride_pb,
    bias, stride_bb, stride_bh, stride_bm, stride_bn,
    batch_heads, heads, heavy, together, q_len, padded_q_len, k_len, rows, q_offset,
    band_lo, band_hi, global_q, global_k, band_cap,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    STATS_M: tl.constexpr, STATS_N: tl.constexpr, SINGLE_PLANE: tl.constexpr,
    HAS_PART: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_GLOBAL_Q: tl.constexpr,
    HAS_GLOBAL_K: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Program (piece of a tile row, batch, head): dQ, and of the rows what the other needs."""
    PIECES: tl.constexpr = TILE_M // BLOCK_M
    b, h, slot = grouped_program_id(
        tl.program_id(0), rows * PIECES, batch_heads, heads, heavy, together
    )  # fmt: skip
    base = 0
    if not SINGLE_PLANE:
        base = tl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * rows
    row = tl.load(row_order + base + slot // PIECES)
    in_tile = slot % PIECES * BLOCK_M
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = (h // GROUP).to(tl.int64)
    first_q = row * TILE_M + in_tile
    q64 = first_q.to(tl.int64)
    begin = tl.load(row_ptr + base + row)
    middle = tl.load(full_start + base + row)
    end = tl.load(row_ptr + base + row + 1)

    # -- what belongs to the rows ----
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    m_valid = m_idx < (q_len - first_q)
    q_mask = m_valid[:, None] & (d_idx[None, :] < HEAD_DIM)
    v_mask = m_valid[:, None] & (dv_idx[None, :] < VALUE_DIM)
    q_at = q + (b64 * stride_qb + h64 * stride_qh + q64 * stride_qm) * VEC
    q_tile = tl.load(q_at + (m_idx[:, None] * (stride_qm * VEC) + d_idx[None, :]), q_mask, 0.0)
    grad_at = grad + (b64 * stride_gb + h64 * stride_gh + q64 * stride_gm) * VEC
    grad_at = grad_at + (m_idx[:, None] * (stride_gm * VEC) + dv_idx[None, :])
    grad_tile = tl.load(grad_at, v_mask, 0.0)
    out_at = out + (b64 * stride_ob + h64 * stride_oh + q64 * stride_om) * VEC
    out_at = out_at + (m_idx[:, None] * (stride_om * VEC) + dv_idx[None, :])
    out_tile = tl.load(out_at, v_mask, 0.0)

    # -- delta = sum over values of dO * O, less the gradient of the log-sum-exp ----
    of_row = (b64 * heads + h64) * q_len + q64
    row_lse = tl.load(lse + of_row + m_idx, mask=m_valid, other=float("-inf"))
    without_keys = row_lse == float("-inf")
    row_lse = prepared_lse(row_lse, HAS_BIAS)
    row_delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        row_delta -= tl.load(grad_lse + of_row + m_idx, mask=m_valid, other=0.0)
    row_delta = tl.where(without_keys, 0.0, row_delta)
    of_stats = (b64 * heads + h64) * padded_q_len + q64
    stats_head = stats + STATS_N * (of_stats - q64)
    store_stats(stats_head, first_q + m_idx, row_lse, row_delta, STATS_M, STATS_N)

    k_head = k + (b64 * stride_kb + kv64 * stride_kh) * VEC
    v_head = v + (b64 * stride_vb + kv64 * stride_vh) * VEC
    padding_head = key_keep + b64 * stride_pb
    bias_head = bias + (b64 * stride_bb + h64 * stride_bh + q64 * stride_bm)
    bias_ptrs = bias_head + (m_idx[:, None] * stride_bm + n_idx[None, :] * stride_bn)
    rows_in_tile = in_tile + m_idx
    lower, upper, head = band_bounds(
        first_q + m_idx + q_offset, k_len, band_lo, band_hi, global_q, global_k, band_cap,
        HAS_LO, HAS_HI, HAS_GLOBAL_Q, HAS_GLOBAL_K, HAS_CAP,
    )  # fmt: skip

    # -- tiles: with a bias first the sum of the weights. Beside the lowest finite score the
    # log-sum-exp is no more than that score, and exp(x - lse) of every key would be 1.
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_inverse = total + 1.0
    for step in tl.static_range(0 if HAS_BIAS else 1, 2):
        if step == 1 and HAS_BIAS:
            row_inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
            tl.store(inverse + of_stats + m_idx, row_inverse)
        if HAS_PART:
            dq_tile, total = _query_pieces(
                dq_tile, total, q_tile, grad_tile, row_lse, row_inverse, row_delta, begin, middle,
                k_head, stride_kn * VEC, v_head, stride_vn * VEC, col_idx, bitmap_id, bitmap,
                rows_in_tile, lower, upper, head, padding_head, bias_ptrs, stride_bn, m_valid,
                k_len, SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, BLOCK_N,
                BLOCK_D, BLOCK_DV, PRECISION, EVEN_K, HAS_PADDING, HAS_BIAS, True, step == 0, BAND,
                HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K,
            )  # fmt: skip
        dq_tile, total = _query_pieces(
            dq_tile, total, q_tile, grad_tile, row_lse, row_inverse, row_delta, middle, end,
            k_head, stride_kn * VEC, v_head, stride_vn * VEC, col_idx, bitmap_id, bitmap,
            rows_in_tile, lower, upper, head, padding_head, bias_ptrs, stride_bn, m_valid,
            k_len, SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, BLOCK_N,
            BLOCK_D, BLOCK_DV, PRECISION, EVEN_K, HAS_PADDING, HAS_BIAS, False, step == 0, BAND,
            HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K,
        )  # fmt: skip

    dq_at = dq + of_row * HEAD_DIM + (m_idx[:, None] * HEAD_DIM + d_idx[None, :])
    tl.store(dq_at, (dq_tile * SCALE).to(dq.dtype.element_ty), mask=q_mask)
