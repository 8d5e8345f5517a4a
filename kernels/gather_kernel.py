"""Device code of gathering attention; ``attention_gather.py`` says what it computes.

Two loops with one online softmax: packed tiles, whose keys are read by their column numbers and
masked from a bitmap, then full tiles, which are neither. What the mask does not have is absent from
the compiled kernel.
"""

import triton
import triton.language as tl

from .mask_tiles import bitmap_tile, split_program_id
from .overlap_kernel import start_after_previous
from .softmax import attention_scores, finish_softmax, softmax_step, starting_maximum


@triton.jit
def _attend_tiles(
    acc, total, maximum, q_tile, begin, end, k_head, step_k, v_head, step_v,
    col_idx, columns, pack_id, pack_bitmap, padding_head, bias_rows, stride_bn, m_valid,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add tiles begin to end to the running softmax; every key they name exists."""
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    for t in range(begin, end):
        if PACKED:
            keys = tl.load(columns + t * BLOCK_N + n_idx)
        else:
            keys = tl.load(col_idx + t) * BLOCK_N + n_idx
        keys64 = keys.to(tl.int64)
        if HAS_BIAS:  # on its way while the product runs
            bias_at = bias_rows[:, None] + (keys64 * stride_bn)[None, :]
            bias_tile = tl.load(bias_at, mask=m_valid[:, None], other=0.0)

        # -- scores ----
        k_at = (k_head + keys64 * step_k)[:, None] + d_idx[None, :]
        if BLOCK_D <= HEAD_DIM:
            k_tile = tl.load(k_at)
        else:
            k_tile = tl.load(k_at, mask=d_idx[None, :] < HEAD_DIM, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s = attention_scores(s, SCALE, SOFTCAP, LINEAR)
        if HAS_BIAS:
            s += bias_tile.to(tl.float32)

        # -- mask ----
        if PACKED:
            kept = bitmap_tile(pack_bitmap, tl.load(pack_id + t), m_idx, BLOCK_M, BLOCK_N)
            s = tl.where(kept != 0, s, float("-inf"))
        if HAS_PADDING:
            real = tl.load(padding_head + keys64)
            s = tl.where((real != 0)[None, :], s, float("-inf"))

        # -- online softmax and values ----
        p, alpha, maximum = softmax_step(s, maximum, MULT, HAS_BIAS)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_at = (v_head + keys64 * step_v)[:, None] + dv_idx[None, :]
        if BLOCK_DV <= VALUE_DIM:
            v_tile = tl.load(v_at)
        else:
            v_tile = tl.load(v_at, mask=dv_idx[None, :] < VALUE_DIM, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, total, maximum


@triton.jit
def attention_gather_kernel(
    q, stride_qb, stride_qh, stride_qm,
    k, stride_kb, stride_kh, stride_kn,
    v, stride_vb, stride_vh, stride_vn,
    out, lse,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, row_order,
    pack_ptr, pack_columns, pack_id, pack_bitmap,
    key_keep, stride_pb,
    bias, stride_bb, stride_bh, stride_bm, stride_bn,
    batch_heads, heads, q_len, rows,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr, EVEN_Q: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, RETURN_LSE: tl.constexpr,
    SINGLE_PLANE: tl.constexpr, HEADS_FAST: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Program (tile row, batch, head) on a one-dimensional grid of rows * batch * heads."""
    start_after_previous(PDL)
    b, h, slot = split_program_id(rows, batch_heads, heads, HEADS_FAST)
    # in the kernel's own body, as in the block-wise kernel: torch.compile reads from it what is
    # written
    base = 0
    if not SINGLE_PLANE:
        base = tl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * rows
    row = tl.load(row_order + base + slot)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = (h // GROUP).to(tl.int64)
    first_q = row.to(tl.int64) * BLOCK_M

    m_idx = tl.arange(0, BLOCK_M)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    q_head = q + (b64 * stride_qb + h64 * stride_qh + first_q * stride_qm) * VEC
    q_ptrs = q_head + (m_idx[:, None] * (stride_qm * VEC) + d_idx[None, :])
    m_valid = m_idx < (q_len - row * BLOCK_M)
    if EVEN_Q and BLOCK_D <= HEAD_DIM:
        q_tile = tl.load(q_ptrs)
    else:
        q_tile = tl.load(q_ptrs, mask=m_valid[:, None] & (d_idx[None, :] < HEAD_DIM), other=0.0)
    k_head = k + (b64 * stride_kb + kv64 * stride_kh) * VEC
    v_head = v + (b64 * stride_vb + kv64 * stride_vh) * VEC
    padding_head = key_keep + b64 * stride_pb
    bias_head = bias + (b64 * stride_bb + h64 * stride_bh + first_q * stride_bm)
    bias_rows = bias_head + m_idx * stride_bm

    maximum = starting_maximum(BLOCK_M, HAS_BIAS)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    start = tl.load(pack_ptr + base + row)
    stop = tl.load(pack_ptr + base + row + 1)
    acc, total, maximum = _attend_tiles(
        acc, total, maximum, q_tile, start, stop,
        k_head, stride_kn * VEC, v_head, stride_vn * VEC,
        col_idx, pack_columns, pack_id, pack_bitmap, padding_head, bias_rows, stride_bn, m_valid,
        SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        PRECISION, HAS_PADDING, HAS_BIAS, True,
    )  # fmt: skip
    start = tl.load(full_start + base + row)
    stop = tl.load(row_ptr + base + row + 1)
    acc, total, maximum = _attend_tiles(
        acc, total, maximum, q_tile, start, stop,
        k_head, stride_kn * VEC, v_head, stride_vn * VEC,
        col_idx, pack_columns, pack_id, pack_bitmap, padding_head, bias_rows, stride_bn, m_valid,
        SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        PRECISION, HAS_PADDING, HAS_BIAS, False,
    )  # fmt: skip

    # -- result: out [batch, q_len, heads, VALUE_DIM], lse [batch, heads, q_len] ----
    inverse, log_sum = finish_softmax(maximum, total, MULT)
    out_head = out + ((b64 * q_len + first_q) * heads + h64) * VALUE_DIM
    out_ptrs = out_head + (m_idx[:, None] * (heads * VALUE_DIM) + dv_idx[None, :])
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    if EVEN_Q and BLOCK_DV <= VALUE_DIM:
        tl.store(out_ptrs, result)
    else:
        tl.store(out_ptrs, result, mask=m_valid[:, None] & (dv_idx[None, :] < VALUE_DIM))
    if RETURN_LSE:
        lse_row = lse + (b64 * heads + h64) * q_len + first_q
        tl.store(lse_row + m_idx, log_sum, mask=m_valid)
