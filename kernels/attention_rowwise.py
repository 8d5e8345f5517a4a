"""Row-wise attention: one program computes one query row for the heads that share a key head.

    out[q] = sum over kept k of softmax_k(scale * <q, k> [softcap] [+ bias]) * v[k]

It walks the kept tiles of the row's tile row, several tiles at once, and reads only their keys. The
storage is that of the block-wise kernel, best with small tiles; no list of single columns is
derived from it, since a tile of 16 keys is already about the least a memory transaction and a
vector unit can use, and one storage keeps one builder, one cache and one backward pass. The kernel
is for rows that see few keys and for decoding (one query), where a block-wise program would compute
a tile of mostly absent rows.

Heads of a group are rows of a matrix product where there are several; a single head multiplies and
sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .limits import shared_memory_bytes, shared_memory_limit, tf32_allowed, without_spills
from .mask_tiles import band_bounds, split_program_id
from .overlap_kernel import start_after_previous
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
def _kept_keys(
    tiles, valid, middle, row_in_tile, keys, lower, upper, head, bitmap_id, bitmap, k_len,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_GLOBAL_K: tl.constexpr,
):  # fmt: skip
    """Boolean [TILES * BLOCK_N]: which keys of the tiles this row keeps; full tiles keep all."""
    full = tiles >= middle
    if BAND:
        inside = keys <= upper
        if HAS_LO:
            inside = inside & (keys >= lower)
        if HAS_GLOBAL_K:
            inside = inside | (keys < head)
        kept = tl.reshape(inside, (TILES, BLOCK_N)) | full[:, None]
    else:
        tile_id = tl.load(bitmap_id + tiles, mask=valid & (tiles < middle), other=0)
        group = tl.arange(0, BLOCK_N // 8)
        first = tile_id.to(tl.int64) * (BLOCK_M * (BLOCK_N // 8)) + row_in_tile
        octets = tl.load(
            bitmap.to(tl.pointer_type(tl.uint8)) + (first[:, None] + group[None, :] * BLOCK_M),
            mask=(valid & (tiles < middle))[:, None], other=255,
        ).to(tl.int32)  # fmt: skip
        bit = 1 << tl.arange(0, 8)
        kept = tl.reshape((octets[:, :, None] & bit[None, None, :]) != 0, (TILES, BLOCK_N))
    kept = kept & valid[:, None]
    return tl.reshape(kept, (TILES * BLOCK_N,)) & (keys < k_len)


@triton.jit
def _attention_row_kernel(
    q, stride_qb, stride_qh, stride_qm,
    k, stride_kb, stride_kh, stride_kn,
    v, stride_vb, stride_vh, stride_vn,
    out, lse,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, bitmap,
    key_keep, stride_pb,
    bias, stride_bb, stride_bh, stride_bm, stride_bn,
    batch_heads, heads, plane_heads, q_len, k_len, rows, q_offset,
    band_lo, band_hi, global_q, global_k, band_cap,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULT: tl.constexpr, LINEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr, KV_SHARE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PRECISION:
        tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, RETURN_LSE: tl.constexpr,
    SINGLE_PLANE: tl.constexpr, HEADS_FAST: tl.constexpr, BAND: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_GLOBAL_Q: tl.constexpr,
    HAS_GLOBAL_K: tl.constexpr, HAS_CAP: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Program (query row, batch, plane head): GROUP heads that share k, v and the mask plane.

    ``batch_heads`` and ``plane_heads`` count groups of heads, ``heads`` single ones.
    """
    start_after_previous(PDL)
    b, group_id, row = split_program_id(q_len, batch_heads, plane_heads, HEADS_FAST)
    first_head = group_id * GROUP
    b64 = b.to(tl.int64)
    kv64 = (group_id // KV_SHARE).to(tl.int64)
    row64 = row.to(tl.int64)
    base = 0
    if not SINGLE_PLANE:
        base = tl.load(plane_map + b * plane_stride_b + first_head * plane_stride_h) * rows
    tile_row = base + row // BLOCK_M
    start = tl.load(row_ptr + tile_row)
    middle = tl.load(full_start + tile_row)
    stop = tl.load(row_ptr + tile_row + 1)

    lane = tl.arange(0, LANES)
    head_valid = lane < GROUP
    d_idx = tl.arange(0, BLOCK_D)
    dv_idx = tl.arange(0, BLOCK_DV)
    tile_idx = tl.arange(0, TILES)
    in_tile = tl.arange(0, BLOCK_N)
    q_at = q + (b64 * stride_qb + row64 * stride_qm) * VEC
    q_at = q_at + (first_head + lane[:, None]).to(tl.int64) * (stride_qh * VEC) + d_idx[None, :]
    q_mask = head_valid[:, None] & (d_idx[None, :] < HEAD_DIM)
    q_rows = tl.load(q_at, mask=q_mask, other=0.0)
    k_head = k + (b64 * stride_kb + kv64 * stride_kh) * VEC
    v_head = v + (b64 * stride_vb + kv64 * stride_vh) * VEC
    padding_head = key_keep + b64 * stride_pb
    bias_row = bias + b64 * stride_bb + row64 * stride_bm

    q_pos = row + q_offset
    lower, upper, head = band_bounds(
        q_pos, k_len, band_lo, band_hi, global_q, global_k, band_cap,
        HAS_LO, HAS_HI, HAS_GLOBAL_Q, HAS_GLOBAL_K, HAS_CAP,
    )  # fmt: skip
    maximum = starting_maximum(LANES, HAS_BIAS)
    total = tl.zeros([LANES], dtype=tl.float32)
    acc = tl.zeros([LANES, BLOCK_DV], dtype=tl.float32)

    for at in range(start, stop, TILES):
        tiles = at + tile_idx
        valid = tiles < stop
        col = tl.load(col_idx + tiles, mask=valid, other=0)
        keys = tl.reshape(col[:, None] * BLOCK_N + in_tile[None, :], (TILES * BLOCK_N,))
        keep = _kept_keys(
            tiles, valid, middle, row % BLOCK_M, keys, lower, upper, head, bitmap_id, bitmap, k_len,
            BLOCK_M, BLOCK_N, TILES, BAND, HAS_LO, HAS_GLOBAL_K,
        )  # fmt: skip
        if HAS_PADDING:
            keep = keep & (tl.load(padding_head + keys, mask=keep, other=0) != 0)
        keys64 = keys.to(tl.int64)

        # -- scores: keys that are not kept are not read ----
        k_mask = keep[:, None] & (d_idx[None, :] < HEAD_DIM)
        k_at = k_head + keys64[:, None] * (stride_kn * VEC) + d_idx[None, :]
        k_rows = tl.load(k_at, mask=k_mask, other=0.0)
        if GROUP == 1:
            s = tl.sum(q_rows.to(tl.float32) * k_rows.to(tl.float32), 1)[None, :]
        else:
            s = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        s = attention_scores(s, SCALE, SOFTCAP, LINEAR)
        if HAS_BIAS:
            bias_at = bias_row + (first_head + lane[:, None]) * stride_bh
            bias_at = bias_at + keys64[None, :] * stride_bn
            bias_mask = head_valid[:, None] & keep[None, :]
            s += tl.load(bias_at, mask=bias_mask, other=0.0).to(tl.float32)
        s = tl.where(keep[None, :], s, float("-inf"))

        # -- online softmax and values ----
        p, alpha, maximum = softmax_step(s, maximum, MULT, HAS_BIAS)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_mask = keep[:, None] & (dv_idx[None, :] < VALUE_DIM)
        v_at = v_head + keys64[:, None] * (stride_vn * VEC) + dv_idx[None, :]
        v_rows = tl.load(v_at, mask=v_mask, other=0.0)
        if GROUP == 1:
            weighted = tl.reshape(p, (TILES * BLOCK_N, 1)) * v_rows.to(tl.float32)
            acc += tl.sum(weighted, 0)[None, :]
        else:
            acc = tl.dot(p.to(v_rows.dtype), v_rows, acc, input_precision=PRECISION)

    # -- result: out [batch, q_len, heads, VALUE_DIM], lse [batch, heads, q_len] ----
    inverse, log_sum = finish_softmax(maximum, total, MULT)
    out_head = (b64 * q_len + row64) * heads + first_head
    out_at = out + out_head * VALUE_DIM + (lane[:, None] * VALUE_DIM + dv_idx[None, :])
    out_mask = head_valid[:, None] & (dv_idx[None, :] < VALUE_DIM)
    tl.store(out_at, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=out_mask)
    if RETURN_LSE:
        lse_at = lse + (b64 * heads + first_head) * q_len + row64
        tl.store(lse_at + lane.to(tl.int64) * q_len, log_sum, mask=head_valid)


KERNELS = (_attention_row_kernel,)


class RowConfig(NamedTuple):
    """How the row-wise kernel is launched; a list of it is the operator's ``config`` argument."""

    block_q: int = 16  # query rows of a tile, as in the block mask
    block_k: int = 16  # keys of a tile, as in the block mask
    num_warps: int = 2
    num_stages: int = 2  # depth of the load pipeline
    tiles: int = 4  # tiles read at once, a power of two
    heads_fast: int = 0  # 1: neighbouring programs work on the same row of other heads
    tf32: int = 0  # 1: fp32 matrix products may use TF32


def configs(
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    value_dim: int | None = None,
) -> list[RowConfig]:
    """Configs worth timing; the likely best first.

    Args:
        head_dim: of q and k.
        dtype: of q, k and v.
        capability: (major, minor) of the device.
        value_dim: of v, head_dim if None.
    """
    tf32 = int(dtype == torch.float32 and tf32_allowed())
    block_d = next_power_of_two(head_dim)
    block_dv = next_power_of_two(value_dim or head_dim)
    widest = max(block_d, block_dv)
    limit = shared_memory_limit(capability)
    # operand values of a warp that stay in registers; fp32 products hold theirs there entirely
    per_warp = 1024 if dtype == torch.float32 else 2048
    found = []
    for block_k, warps in ((16, 2), (32, 4), (16, 4), (32, 8)):
        # two warps cannot hold the widest rows, registers no tile of keys of more than 16 KiB
        if widest > 64 * warps or widest * block_k * dtype.itemsize > 16384:
            continue
        tiles = max(1, per_warp * warps // widest // block_k)
        keys = tiles * block_k
        if shared_memory_bytes(16, keys, block_d, block_dv, 1, dtype.itemsize) > limit:
            continue
        found.append(RowConfig(16, block_k, warps, 2, tiles, tf32=tf32))
    return without_spills(found, "row", head_dim, dtype.itemsize, capability) or found


def attention_row_forward(
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
    """Launch the row-wise kernel; arguments and results as ``attention_block_forward``.

    ``config`` holds the fields of RowConfig. Heads that share a key head but not the mask are
    computed in programs of their own.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = RowConfig(*config)
    arrays = TileMask(*mask)
    p = check_problem(q, k, v, arrays, key_keep, bias, how.block_q, how.block_k)
    out, lse = empty_result(q, p.value_dim, return_lse)
    if out.numel() == 0:
        return out.transpose(1, 2), lse
    group = p.group if p.single_plane or arrays.plane_map.shape[1] == 1 else 1
    groups = p.heads // group
    vec_strides = [[s // p.vec for s in outer_strides(t)] for t in (p.q, p.k, p.v)]
    bias_strides = [0, 0, 0, 0] if p.bias is None else broadcast_strides(p.bias)
    with on_device(q):
        launchable(_attention_row_kernel, q)[(p.q_len * p.batch * groups,)](
            p.q, *vec_strides[0],
            p.k, *vec_strides[1],
            p.v, *vec_strides[2],
            out, lse,
            arrays.plane_map, *broadcast_strides(arrays.plane_map),
            arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.bitmap_id, arrays.bitmap,
            arrays.row_ptr if p.key_keep is None else p.key_keep,
            0 if p.key_keep is None else broadcast_strides(p.key_keep)[0],
            arrays.row_ptr if p.bias is None else p.bias, *bias_strides,
            p.batch * groups, p.heads, groups, p.q_len, p.k_len, p.rows, q_offset,
            *band_arguments(band),
            **score_constants(scale, softcap, p.bias is not None),
            HEAD_DIM=p.head_dim,
            VALUE_DIM=p.value_dim,
            BLOCK_M=how.block_q,
            BLOCK_N=how.block_k,
            TILES=how.tiles,
            BLOCK_D=next_power_of_two(p.head_dim),
            BLOCK_DV=next_power_of_two(p.value_dim),
            GROUP=group,
            KV_SHARE=p.group // group,
            LANES=1 if group == 1 else next_power_of_two(group),
            VEC=p.vec,
            PRECISION="tf32" if how.tf32 else "ieee",
            HAS_PADDING=p.key_keep is not None,
            HAS_BIAS=p.bias is not None,
            RETURN_LSE=return_lse,
            SINGLE_PLANE=p.single_plane,
            HEADS_FAST=bool(how.heads_fast),
            **band_flags(band),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
    return out.transpose(1, 2), lse
