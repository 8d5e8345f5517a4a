"""Block-wise attention: one program computes one row of mask tiles for one head.

    out[q] = sum over kept k of softmax_k(scale * <q, k> [softcap] [+ bias]) * v[k]

The program walks the kept tiles of its row with an online softmax (fp32, base 2). What the mask
does not have is absent from the compiled kernel: part tiles, full tiles, padding, bias, softcap,
ragged edges, separate planes and each piece of a band.

Rows without keys need no guard when there is no bias: scores are finite, masked ones are -inf and
the running maximum starts at a finite value, so exp2(-inf - maximum) is exactly 0 and the row ends
with a sum of 0, for which 0 and a log-sum-exp of -inf are stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .limits import (
    fits_registers,
    shared_memory_bytes,
    shared_memory_limit,
    tf32_allowed,
)
from .mask_tiles import band_bounds, band_tile, bitmap_tile, split_program_id
from .problem import (
    TileMask,
    band_arguments,
    band_flags,
    broadcast_strides,
    check_problem,
    empty_result,
    launchable,
    next_power_of_two,
    on_device,
    outer_strides,
    score_constants,
)
from .softmax import attention_scores, finish_softmax, softmax_step, starting_maximum


@triton.jit
def _part_mask(
    s, t, middle, first_k, lower, upper, head, bitmap_id, bitmap, m_idx, k_len,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr, LOOPS: tl.constexpr,
    BAND: tl.constexpr, HAS_LO: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_HEAD: tl.constexpr,
):  # fmt: skip
    """Set the scores of masked elements of a tile to -inf; entries from ``middle`` on are full."""
    if BAND:
        low = lower
        high = upper
        if LOOPS == 4:
            low = tl.where(t < middle, lower, 0)
            high = tl.where(t < middle, upper, k_len)
        keep = band_tile(low, high, head, first_k, BLOCK_N, HAS_LO, HAS_UPPER, HAS_HEAD)
    else:
        kept = bitmap_tile(bitmap, tl.load(bitmap_id + t), m_idx, BLOCK_M, BLOCK_N)
        if LOOPS == 4:
            kept = kept | (t >= middle).to(tl.int32)
        keep = kept != 0
    return tl.where(keep, s, float("-inf"))


@triton.jit
def _attend_tiles(
    acc, total, maximum, q_tile, begin, middle, end,
    k_head, step_k, v_head, step_v, col_idx, bitmap_id, bitmap,
    lower, upper, head, padding_head, bias_ptrs, stride_bn, m_valid, k_len,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr,
    LOOPS: tl.constexpr, PREFETCH: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_HEAD: tl.constexpr,
):  # fmt: skip
    """Add tiles col_idx[begin:end] to the running softmax; only MASKED loops look at the mask."""
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    # a 32-bit offset in the tile beside a scalar 64-bit tile address: half the registers of
    # pointers
    k_off = n_idx[:, None] * step_k + d_idx[None, :]
    v_off = n_idx[:, None] * step_v + dv_idx[None, :]
    col_next = begin
    if PREFETCH:
        col_next = tl.load(col_idx + begin, mask=begin < end, other=0)
    for t in range(begin, end):
        if PREFETCH:
            col = col_next
            col_next = tl.load(col_idx + t + 1, mask=t + 1 < end, other=0)
        else:
            col = tl.load(col_idx + t)
        first_k = col * BLOCK_N
        n_valid = n_idx < (k_len - first_k)

        # -- scores ----
        k_at = k_head + (col.to(tl.int64) * BLOCK_N) * step_k + k_off
        if (EVEN_K or not MASKED) and BLOCK_D == HEAD_DIM:
            k_tile = tl.load(k_at)
        elif EVEN_K or not MASKED:
            k_tile = tl.load(k_at, mask=d_idx[None, :] < HEAD_DIM, other=0.0)
        else:
            k_mask = n_valid[:, None] & (d_idx[None, :] < HEAD_DIM)
            k_tile = tl.load(k_at, mask=k_mask, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s = attention_scores(s, SCALE, SOFTCAP, LINEAR)
        if HAS_BIAS:
            bias_at = bias_ptrs + first_k.to(tl.int64) * stride_bn
            bias_tile = tl.load(bias_at, mask=m_valid[:, None] & n_valid[None, :], other=0.0)
            s += bias_tile.to(tl.float32)

        # -- mask ----
        if MASKED:
            if LOOPS == 5:
                if t < middle:
                    s = _part_mask(
                        s, t, middle, first_k, lower, upper, head, bitmap_id, bitmap, m_idx, k_len,
                        BLOCK_M, BLOCK_N, EVEN_K, LOOPS, BAND, HAS_LO, HAS_UPPER, HAS_HEAD,
                    )  # fmt: skip
            else:
                s = _part_mask(
                    s, t, middle, first_k, lower, upper, head, bitmap_id, bitmap, m_idx, k_len,
                    BLOCK_M, BLOCK_N, EVEN_K, LOOPS, BAND, HAS_LO, HAS_UPPER, HAS_HEAD,
                )  # fmt: skip
        if HAS_PADDING:
            padding = tl.load(padding_head + first_k + n_idx, mask=n_valid, other=0)
            s = tl.where((padding != 0)[None, :], s, float("-inf"))

        # -- online softmax ----
        p, alpha, maximum = softmax_step(s, maximum, MULT, HAS_BIAS)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]

        # -- values ----
        v_at = v_head + (col.to(tl.int64) * BLOCK_N) * step_v + v_off
        if (EVEN_K or not MASKED) and BLOCK_DV == VALUE_DIM:
            v_tile = tl.load(v_at)
        elif EVEN_K or not MASKED:
            v_tile = tl.load(v_at, mask=dv_idx[None, :] < VALUE_DIM, other=0.0)
        else:
            v_mask = n_valid[:, None] & (dv_idx[None, :] < VALUE_DIM)
            v_tile = tl.load(v_at, mask=v_mask, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, total, maximum


@triton.jit
def _attention_block_kernel(
    q, stride_qb, stride_qh, stride_qm,
    k, stride_kb, stride_kh, stride_kn,
    v, stride_vb, stride_vh, stride_vn,
    out, lse,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order,
    key_keep, stride_pb,
    bias, stride_bb, stride_bh, stride_bm, stride_bn,
    batch_heads, heads, q_len, k_len, rows, q_offset,
    band_lo, band_hi, global_q, global_k, band_cap,
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
):  # fmt: skip
    """Program (tile row, batch, head) on a one-dimensional grid of rows * batch * heads."""
    b, h, slot = split_program_id(rows, batch_heads, heads, HEADS_FAST)
    # These loads stay in the kernel's own body: torch.compile decides from it what the kernel
    # writes, follows a value loaded in a called function back to its tensor, and would clone that
    # tensor.
    base = 0
    if not SINGLE_PLANE:
        base = tl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * rows
    row = slot
    if HEAVY_FIRST:
        row = tl.load(row_order + base + slot)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = (h // GROUP).to(tl.int64)
    first_q = row.to(tl.int64) * BLOCK_M

    # -- tiles of this row ----
    start = tl.load(row_ptr + base + row)
    middle = tl.load(full_start + base + row)
    stop = tl.load(row_ptr + base + row + 1)

    # -- query tile, kept for the whole row ----
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    q_head = q + (b64 * stride_qb + h64 * stride_qh + first_q * stride_qm) * VEC
    q_ptrs = q_head + (m_idx[:, None] * (stride_qm * VEC) + d_idx[None, :])
    m_valid = m_idx < (q_len - row * BLOCK_M)
    if EVEN_Q and BLOCK_D == HEAD_DIM:
        q_tile = tl.load(q_ptrs)
    else:
        q_tile = tl.load(q_ptrs, mask=m_valid[:, None] & (d_idx[None, :] < HEAD_DIM), other=0.0)

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

    # Two loops, part tiles then full tiles; or one over both, because on short rows a second loop
    # drains and refills the load pipeline. LOOPS: 1 part, 2 full, 3 part then full, 4 one loop with
    # the mask neutralised on full tiles, 5 one loop with the mask under a branch.
    if LOOPS == 1 or LOOPS == 3:
        acc, total, maximum = _attend_tiles(
            acc, total, maximum, q_tile, start, middle, middle,
            k_head, stride_kn * VEC, v_head, stride_vn * VEC,
            col_idx, bitmap_id, bitmap, lower, upper, head,
            padding_head, bias_ptrs, stride_bn, m_valid, k_len,
            SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            PRECISION, EVEN_K, HAS_PADDING, HAS_BIAS, True, LOOPS, PREFETCH, BAND,
            HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K,
        )  # fmt: skip
    if LOOPS == 2 or LOOPS == 3:
        acc, total, maximum = _attend_tiles(
            acc, total, maximum, q_tile, middle, middle, stop,
            k_head, stride_kn * VEC, v_head, stride_vn * VEC,
            col_idx, bitmap_id, bitmap, lower, upper, head,
            padding_head, bias_ptrs, stride_bn, m_valid, k_len,
            SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            PRECISION, EVEN_K, HAS_PADDING, HAS_BIAS, False, LOOPS, PREFETCH, BAND,
            HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K,
        )  # fmt: skip
    if LOOPS == 4 or LOOPS == 5:
        acc, total, maximum = _attend_tiles(
            acc, total, maximum, q_tile, start, middle, stop,
            k_head, stride_kn * VEC, v_head, stride_vn * VEC,
            col_idx, bitmap_id, bitmap, lower, upper, head,
            padding_head, bias_ptrs, stride_bn, m_valid, k_len,
            SCALE, SOFTCAP, MULT, LINEAR, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            PRECISION, EVEN_K, HAS_PADDING, HAS_BIAS, True, LOOPS, PREFETCH, BAND,
            HAS_LO, HAS_HI or HAS_CAP or not EVEN_K, HAS_GLOBAL_K,
        )  # fmt: skip

    # -- result: out [batch, q_len, heads, VALUE_DIM], lse [batch, heads, q_len] ----
    inverse, log_sum = finish_softmax(maximum, total, MULT)
    acc = acc * inverse[:, None]
    out_row = (b64 * q_len + first_q) * heads + h64
    out_ptrs = out + out_row * VALUE_DIM
    out_ptrs = out_ptrs + (m_idx[:, None] * (heads * VALUE_DIM) + dv_idx[None, :])
    result = acc.to(out.dtype.element_ty)
    if EVEN_Q and BLOCK_DV == VALUE_DIM:
        tl.store(out_ptrs, result)
    else:
        tl.store(out_ptrs, result, mask=m_valid[:, None] & (dv_idx[None, :] < VALUE_DIM))
    if RETURN_LSE:
        lse_row = lse + (b64 * heads + h64) * q_len + first_q
        tl.store(lse_row + m_idx, log_sum, mask=m_valid)


KERNELS = (_attention_block_kernel,)


class BlockConfig(NamedTuple):
    """How the block-wise kernel is launched; a list of it is the operator's ``config`` argument.

    ``loops`` and ``heavy_first`` must fit the mask: 1 promises that it has no full tile, 2 that it
    has no part tile.
    """

    block_q: int = 64  # query rows of a tile, as in the block mask
    block_k: int = 64  # keys of a tile, as in the block mask
    num_warps: int = 4
    num_stages: int = 3  # depth of the load pipeline
    loops: int = 3  # 1 part, 2 full, 3 part then full, 4 one loop, 5 one loop with a branch
    heads_fast: int = 0  # 1: neighbouring programs work on the same row of other heads
    heavy_first: int = 1  # 1: rows in row_order, 0: rows in their own order (one load less)
    prefetch: int = 0  # 1: read a column index one tile ahead
    tf32: int = 0  # 1: fp32 matrix products may use TF32


# Tile (rows, keys) and warps worth trying, the best on sparse masks first.
_TILES = (
    (64, 64, 4),
    (128, 128, 8),
    (128, 64, 8),
    (64, 64, 8),
    (64, 32, 4),
    (64, 32, 8),
    (32, 32, 4),
    (32, 32, 8),
    (16, 16, 2),
    (16, 16, 4),
)
_MAX_TILES = 3  # tile shapes offered for one problem


def configs(
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    value_dim: int | None = None,
    has_part: bool = True,
    has_full: bool = True,
    q_len: int | None = None,
) -> list[BlockConfig]:
    """Configs worth timing, pruned by shared memory and registers; the likely best first.

    Args:
        head_dim: of q and k.
        dtype: of q, k and v.
        capability: (major, minor) of the device.
        value_dim: of v, head_dim if None.
        has_part: whether the mask has tiles that are partly kept.
        has_full: whether it has tiles that are kept whole.
        q_len: query length; tiles of more rows than that (rounded up) are not offered.
    """
    itemsize = dtype.itemsize
    block_d = next_power_of_two(head_dim)
    block_dv = next_power_of_two(value_dim or head_dim)
    limit = shared_memory_limit(capability)
    tf32 = int(dtype == torch.float32 and tf32_allowed())
    tallest = 128 if q_len is None else next_power_of_two(q_len)
    tiles = [
        (block_q, block_k, warps)
        for block_q, block_k, warps in _TILES
        if block_q <= tallest
        and fits_registers(block_q, block_k, block_d, block_dv, warps, itemsize, capability)
        and shared_memory_bytes(block_q, block_k, block_d, block_dv, 2, itemsize) <= limit
    ][:_MAX_TILES]
    loops = (4, 3, 5) if has_part and has_full else (1,) if has_part else (2,)
    found = []
    for rank, (block_q, block_k, warps) in enumerate(tiles):
        for stages in (2, 3):
            if shared_memory_bytes(block_q, block_k, block_d, block_dv, stages, itemsize) > limit:
                continue
            for loop in loops if rank == 0 else loops[:2]:
                found.append(BlockConfig(block_q, block_k, warps, stages, loop, tf32=tf32))
    # heads as the fastest axis let the heavy rows of all heads start together
    return found + [config._replace(heads_fast=1) for config in found[:2]]


def attention_block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    config: Sequence[int],
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the block-wise kernel.

    Args:
        q: [batch, heads, q_len, head_dim], fp16, bf16 or fp32, any strides.
        k: [batch, kv_heads, k_len, head_dim]; heads is a multiple of kv_heads.
        v: [batch, kv_heads, k_len, value_dim].
        mask: arrays of the block mask; its tiles are config's block_q x block_k.
        key_keep: bool [batch or 1, k_len], True where the key may be attended, or None.
        bias: added to the scores, broadcastable to [batch, heads, q_len, k_len], or None.
        scale: factor of the dot products.
        softcap: c > 0 replaces a score x by c * tanh(x / c); 0 for none.
        q_offset: position of the first query among the keys; used by ``band``.
        band: [] to mask part tiles from the bitmap, else (lo, hi, global_q, global_k, cap).
        config: fields of BlockConfig.
        return_lse: also return the log-sum-exp of the masked scores.

    Returns:
        out: logical [batch, heads, q_len, value_dim] in [batch, q_len, heads, value_dim] memory.
        lse: fp32 [batch, heads, q_len], natural logarithm, -inf on rows without keys; [0] if not
            asked.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = BlockConfig(*config)
    arrays = TileMask(*mask)
    problem = check_problem(q, k, v, arrays, key_keep, bias, how.block_q, how.block_k)
    out, lse = empty_result(q, problem.value_dim, return_lse)
    if out.numel() == 0:
        return out.transpose(1, 2), lse
    p = problem
    per_head = p.batch * p.heads
    vec_strides = [[s // p.vec for s in outer_strides(t)] for t in (p.q, p.k, p.v)]
    bias_strides = [0, 0, 0, 0] if p.bias is None else broadcast_strides(p.bias)
    with on_device(q):
        launchable(_attention_block_kernel, q)[(p.rows * per_head,)](
            p.q, *vec_strides[0],
            p.k, *vec_strides[1],
            p.v, *vec_strides[2],
            out, lse,
            arrays.plane_map, *broadcast_strides(arrays.plane_map),
            arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.bitmap_id, arrays.bitmap,
            arrays.row_order,
            arrays.row_ptr if p.key_keep is None else p.key_keep,
            0 if p.key_keep is None else broadcast_strides(p.key_keep)[0],
            arrays.row_ptr if p.bias is None else p.bias, *bias_strides,
            per_head, p.heads, p.q_len, p.k_len, p.rows, q_offset,
            *band_arguments(band),
            **score_constants(scale, softcap, p.bias is not None),
            HEAD_DIM=p.head_dim,
            VALUE_DIM=p.value_dim,
            BLOCK_M=how.block_q,
            BLOCK_N=how.block_k,
            BLOCK_D=next_power_of_two(p.head_dim),
            BLOCK_DV=next_power_of_two(p.value_dim),
            GROUP=p.group,
            VEC=p.vec,
            PRECISION="tf32" if how.tf32 else "ieee",
            EVEN_Q=p.q_len % how.block_q == 0,
            EVEN_K=p.k_len % how.block_k == 0,
            HAS_PADDING=p.key_keep is not None,
            HAS_BIAS=p.bias is not None,
            RETURN_LSE=return_lse,
            SINGLE_PLANE=p.single_plane,
            HEADS_FAST=bool(how.heads_fast),
            HEAVY_FIRST=bool(how.heavy_first),
            LOOPS=how.loops,
            PREFETCH=bool(how.prefetch),
            **band_flags(band),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
    return out.transpose(1, 2), lse
