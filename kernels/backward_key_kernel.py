"""Device code of dK and dV, the second of the two kernels of the gradient;
``attention_backward.py`` says what they compute.

It walks the key columns over the transposed lists. The program that owns a piece of a column adds
up the query heads of its group: nothing is added atomically, and every run gives the same bits.
Weights and pieces: ``backward_tiles.py``.
"""

import triton
import triton.language as tl

from .backward_tiles import (
    kept_by_bitmap,
    load_stats,
    softcap_slope,
    weights_of,
)
from .mask_tiles import band_bounds, grouped_program_id
from .softmax import attention_scores


@triton.jit
def _kept_by_band_keys_first(
    lower, upper, head, first_k, BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_HEAD: tl.constexpr,
):  # fmt: skip
    """``band_tile`` with the keys along the first dimension."""
    n = tl.arange(0, BLOCK_N)[:, None]
    if HAS_UPPER:
        keep = n <= (upper - first_k)[None, :]
        if HAS_LO:
            keep = keep & (n >= (lower - first_k)[None, :])
    else:
        keep = n >= (lower - first_k)[None, :]
    if HAS_HEAD:
        keep = keep | (n < (head - first_k)[None, :])
    return keep


@triton.jit
def _key_pieces(
    dk, dv, k_tile, v_tile, kept_keys, begin, end, first_k, key_in_tile,
    q_head, step_q, grad_head, step_g, stats_head, inverse_head,
    row_idx, bitmap_id, bitmap, bias_ptrs, stride_bm, n_valid, q_len, k_len, q_offset,
    band_lo, band_hi, global_q, global_k, band_cap,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STATS_N: tl.constexpr, PRECISION: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_GLOBAL_Q: tl.constexpr,
    HAS_GLOBAL_K: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Add tiles begin..end of a column to dK (without the scale) and dV; scores are [keys, rows].

    Keys past the end are not masked: their rows of dK and dV are not stored.
    """
    m_idx = tl.arange(0, BLOCK_M)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    q_off = m_idx[:, None] * step_q + d_idx[None, :]
    grad_off = m_idx[:, None] * step_g + dv_idx[None, :]
    PIECES: tl.constexpr = TILE_M // BLOCK_M
    row_next = tl.load(row_idx + begin, mask=begin < end, other=0)
    for i in range(begin * PIECES, end * PIECES):
        t = i // PIECES
        in_tile = i % PIECES * BLOCK_M
        first_q = row_next * TILE_M + in_tile
        # a piece early: what is loaded next does not wait for its own address
        t_next = (i + 1) // PIECES
        row_next = tl.load(row_idx + t_next, mask=t_next < end, other=0)
        m_valid = m_idx < (q_len - first_q)

        # -- weights ----
        q_at = q_head + first_q.to(tl.int64) * step_q + q_off
        if (EVEN_Q or not MASKED) and BLOCK_D == HEAD_DIM:
            q_tile = tl.load(q_at)
        else:
            q_tile = tl.load(q_at, mask=m_valid[:, None] & (d_idx[None, :] < HEAD_DIM), other=0.0)
        row_lse, row_delta = load_stats(
            stats_head + first_q.to(tl.int64) * STATS_N, BLOCK_M, STATS_N
        )
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        s = attention_scores(s, SCALE, SOFTCAP, LINEAR)
        if SOFTCAP > 0:
            slope = softcap_slope(s, SOFTCAP)
        if HAS_BIAS:
            bias_at = bias_ptrs + first_q.to(tl.int64) * stride_bm
            bias_tile = tl.load(bias_at, mask=n_valid[:, None] & m_valid[None, :], other=0.0)
            s += bias_tile.to(tl.float32)
        if MASKED:
            if BAND:
                lower, upper, head = band_bounds(
                    m_idx + (first_q + q_offset), k_len, band_lo, band_hi, global_q, global_k,
                    band_cap, HAS_LO, HAS_HI, HAS_GLOBAL_Q, HAS_GLOBAL_K, HAS_CAP,
                )  # fmt: skip
                keep = _kept_by_band_keys_first(
                    lower, upper, head, first_k, BLOCK_N,
                    HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K,
                )  # fmt: skip
            else:
                tile = tl.load(bitmap_id + t)
                keep = kept_by_bitmap(
                    bitmap, tile, in_tile + m_idx, key_in_tile, TILE_M, TILE_N, BLOCK_N, True
                )
            s = tl.where(keep, s, float("-inf"))
        if HAS_PADDING:
            s = tl.where(kept_keys[:, None], s, float("-inf"))
        p = weights_of(s, row_lse[None, :], MULT, HAS_BIAS)
        if HAS_BIAS:
            row_inverse = tl.load(inverse_head + first_q + m_idx)
            p = p * row_inverse[None, :]

        # -- gradient of the values, then of the scores and the keys ----
        grad_at = grad_head + first_q.to(tl.int64) * step_g + grad_off
        if (EVEN_Q or not MASKED) and BLOCK_DV == VALUE_DIM:
            grad_tile = tl.load(grad_at)
        else:
            grad_mask = m_valid[:, None] & (dv_idx[None, :] < VALUE_DIM)
            grad_tile = tl.load(grad_at, mask=grad_mask, other=0.0)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        if SOFTCAP > 0:
            ds = ds * slope
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _place(
    pid, plane_map, plane_stride_b, plane_stride_h, key_ptr, ptr_stride,
    planes, heads, heavy, together, cols,
    BLOCK_N: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, SINGLE_PLANE: tl.constexpr,
):  # fmt: skip
    """(batch, key head, first key in the column, column) of a program."""
    b, kv, slot = grouped_program_id(pid, cols * PIECES, planes, heads, heavy, together)
    base = 0
    if not SINGLE_PLANE:  # in any order every column has its program: that of the first head
        base = tl.load(plane_map + b * plane_stride_b + kv * GROUP * plane_stride_h) * cols
    col = tl.load(key_ptr + 2 * ptr_stride + base + slot // PIECES)
    return b, kv, slot % PIECES * BLOCK_N, col


@triton.jit(do_not_specialize=["heavy", "together"])
def attention_backward_key_kernel(
    q, stride_qb, stride_qh, stride_qm,
    k, stride_kb, stride_kh, stride_kn,
    v, stride_vb, stride_vh, stride_vn,
    grad, stride_gb, stride_gh, stride_gm,
    stats, inverse, dk, dv,
    plane_map, plane_stride_b, plane_stride_h,
    key_ptr, ptr_stride, key_tiles, tiles_stride, bitmap,
    key_keep, stride_pb,
    bias, stride_bb, stride_bh, stride_bm, stride_bn,
    batch_heads, heads, heavy, together, q_len, padded_q_len, k_len, cols, q_offset,
    band_lo, band_hi, global_q, global_k, band_cap,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr, VEC: tl.constexpr, STATS_N: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,
    SINGLE_PLANE: tl.constexpr, HAS_PART: tl.constexpr,
    BAND: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_GLOBAL_Q: tl.constexpr,
    HAS_GLOBAL_K: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Program (piece of a tile column, batch, key head): dK and dV; batch_heads, heads are k's."""
    PIECES: tl.constexpr = TILE_N // BLOCK_N
    b, kv, in_tile, col = _place(
        tl.program_id(0), plane_map, plane_stride_b, plane_stride_h, key_ptr, ptr_stride,
        batch_heads, heads, heavy, together, cols, BLOCK_N, PIECES, GROUP, SINGLE_PLANE,
    )  # fmt: skip
    first_k = col * TILE_N + in_tile
    k64 = first_k.to(tl.int64)
    b64 = b.to(tl.int64)
    kv64 = kv.to(tl.int64)
    plane = b * heads + kv

    # -- key and value tiles, kept for the whole column ----
    n_idx = tl.arange(0, BLOCK_N)
    m_idx = tl.arange(0, BLOCK_M)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    n_valid = n_idx < (k_len - first_k)
    k_mask = n_valid[:, None] & (d_idx[None, :] < HEAD_DIM)
    v_mask = n_valid[:, None] & (dv_idx[None, :] < VALUE_DIM)
    k_at = k + (b64 * stride_kb + kv64 * stride_kh + k64 * stride_kn) * VEC
    k_tile = tl.load(k_at + (n_idx[:, None] * (stride_kn * VEC) + d_idx[None, :]), k_mask, 0.0)
    v_at = v + (b64 * stride_vb + kv64 * stride_vh + k64 * stride_vn) * VEC
    v_tile = tl.load(v_at + (n_idx[:, None] * (stride_vn * VEC) + dv_idx[None, :]), v_mask, 0.0)
    kept_keys = n_valid
    if HAS_PADDING:
        kept_keys = tl.load(key_keep + b64 * stride_pb + k64 + n_idx, n_valid, 0) != 0

    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    base = 0
    for member in range(GROUP):
        h = kv * GROUP + member
        h64 = h.to(tl.int64)
        if not SINGLE_PLANE:
            base = tl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * cols
        begin = tl.load(key_ptr + base + col)
        middle = tl.load(key_ptr + ptr_stride + base + col)
        end = tl.load(key_ptr + base + col + 1)
        q_head = q + (b64 * stride_qb + h64 * stride_qh) * VEC
        grad_head = grad + (b64 * stride_gb + h64 * stride_gh) * VEC
        of_head = (plane * GROUP + member).to(tl.int64) * padded_q_len
        bias_head = bias + (b64 * stride_bb + h64 * stride_bh + k64 * stride_bn)
        bias_ptrs = bias_head + (n_idx[:, None] * stride_bn + m_idx[None, :] * stride_bm)
        if HAS_PART:
            dk_tile, dv_tile = _key_pieces(
                dk_tile, dv_tile, k_tile, v_tile, kept_keys, begin, middle, first_k, in_tile,
                q_head, stride_qm * VEC, grad_head, stride_gm * VEC,
                stats + STATS_N * of_head, inverse + of_head,
                key_tiles, key_tiles + tiles_stride, bitmap, bias_ptrs, stride_bm, n_valid,
                q_len, k_len, q_offset, band_lo, band_hi, global_q, global_k, band_cap,
                SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STATS_N, PRECISION, EVEN_Q, EVEN_K,
                HAS_PADDING, HAS_BIAS, True, BAND,
                HAS_LO, HAS_HI, HAS_GLOBAL_Q, HAS_GLOBAL_K, HAS_CAP,
            )  # fmt: skip
        dk_tile, dv_tile = _key_pieces(
            dk_tile, dv_tile, k_tile, v_tile, kept_keys, middle, end, first_k, in_tile,
            q_head, stride_qm * VEC, grad_head, stride_gm * VEC,
            stats + STATS_N * of_head, inverse + of_head,
            key_tiles, key_tiles + tiles_stride, bitmap, bias_ptrs, stride_bm, n_valid,
            q_len, k_len, q_offset, band_lo, band_hi, global_q, global_k, band_cap,
            SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STATS_N, PRECISION, EVEN_Q, EVEN_K,
            HAS_PADDING, HAS_BIAS, False, BAND,
            HAS_LO, HAS_HI, HAS_GLOBAL_Q, HAS_GLOBAL_K, HAS_CAP,
        )  # fmt: skip

    if BLOCK_D + BLOCK_DV > 128:
        # beside sums this wide the place would spill: it is found again, and the compiler must not
        # know that what it reads there is 0
        again = tl.load(key_ptr, volatile=True)
        b, kv, in_tile, col = _place(
            tl.program_id(0) + again, plane_map, plane_stride_b, plane_stride_h, key_ptr,
            ptr_stride, batch_heads, heads, heavy, together, cols, BLOCK_N, PIECES, GROUP,
            SINGLE_PLANE,
        )  # fmt: skip
        first_k = col * TILE_N + in_tile
        plane = b * heads + kv
        n_valid = n_idx < (k_len - first_k)
        k_mask = n_valid[:, None] & (d_idx[None, :] < HEAD_DIM)
        v_mask = n_valid[:, None] & (dv_idx[None, :] < VALUE_DIM)
    of_key = plane.to(tl.int64) * k_len + first_k
    dk_at = dk + of_key * HEAD_DIM + (n_idx[:, None] * HEAD_DIM + d_idx[None, :])
    tl.store(dk_at, (dk_tile * SCALE).to(dk.dtype.element_ty), mask=k_mask)
    dv_at = dv + of_key * VALUE_DIM + (n_idx[:, None] * VALUE_DIM + dv_idx[None, :])
    tl.store(dv_at, dv_tile.to(dv.dtype.element_ty), mask=v_mask)
