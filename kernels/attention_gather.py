"""Gathering attention: one program computes one row of tiles of one head, over packed columns.

    out[q] = sum over kept k of softmax_k(scale * <q, k> [softcap] [+ bias]) * v[k]

The columns that some query of a tile row keeps are packed side by side (``PackedColumns`` of
stof_compile/masks), so that the work follows kept columns and not touched tiles: what pays for
global tokens, vertical lines and keys picked by their content. Columns that are dense anyhow come
as full tiles and are read as they lie. Tall tiles share more reads, low ones keep fewer columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .gather_kernel import attention_gather_kernel
from .limits import (
    exact_products,
    fits_registers,
    fp32_precision,
    products_of,
    shared_memory_bytes,
    shared_memory_limit,
    without_spills,
)
from .problem import (
    TileMask,
    broadcast_strides,
    check_problem,
    empty_result,
    launchable,
    next_power_of_two,
    on_device,
    outer_strides,
    score_constants,
)

KERNELS = (attention_gather_kernel,)


class GatherConfig(NamedTuple):
    """How the gathering kernel is launched; a list of it is the operator's ``config`` argument."""

    block_q: int = 64  # query rows of a tile, as in the block mask
    block_k: int = 64  # keys of a tile, as in the block mask
    num_warps: int = 4
    num_stages: int = 3  # depth of the load pipeline: column numbers come before keys
    heads_fast: int = 0  # 1: neighbouring programs work on the same row of other heads
    tf32: int = 0  # how fp32 numbers are multiplied, by place in PRECISIONS


# Tile (rows, keys) and warps worth trying, the likely best first.
_TILES = (
    (64, 64, 4),
    (128, 64, 8),
    (16, 64, 2),
    (32, 64, 4),
    (64, 32, 4),
    (32, 32, 4),
    (16, 32, 2),
)
_TILES_FP32 = ((32, 32, 8), (16, 32, 4), (16, 16, 2), (16, 16, 4))  # by the ordinary units
# fp32 numbers as products of their parts, by the largest width of a head. None spills with 3.9.
_TILES_PARTS = {
    64: ((16, 32, 2), (64, 32, 4), (32, 32, 4), (16, 64, 4)),
    128: ((16, 32, 2), (16, 64, 4), (16, 32, 4), (16, 16, 4)),
}
_MAX_TILES = 4  # tile shapes offered for one problem


def configs(
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    value_dim: int | None = None,
    q_len: int | None = None,
) -> list[GatherConfig]:
    """Configs worth timing; the likely best first.

    Args:
        head_dim: of q and k.
        dtype: of q, k and v.
        capability: (major, minor) of the device.
        value_dim: of v, head_dim if None.
        q_len: query length; taller tiles (rounded up) are not offered.
    """
    itemsize = dtype.itemsize
    block_d, block_dv = next_power_of_two(head_dim), next_power_of_two(value_dim or head_dim)
    limit = shared_memory_limit(capability)
    width = max(block_d, block_dv)
    tf32 = fp32_precision(dtype, width)
    tallest = 128 if q_len is None else next_power_of_two(q_len)
    by_parts = itemsize == 4 and exact_products(width) != "ieee"
    tiles = _TILES_FP32 if itemsize == 4 else _TILES
    if by_parts:
        tiles = _TILES_PARTS[max(64, width)]
    fitting = []
    for block_q, block_k, warps in tiles:
        size = (block_q, block_k, block_d, block_dv)
        if not (by_parts or fits_registers(*size, warps, itemsize, capability)):
            continue
        fitting += [
            GatherConfig(block_q, block_k, warps, stages, tf32=tf32)
            for stages in ((2,) if by_parts else (3, 2))
            if shared_memory_bytes(*size, stages, itemsize) <= limit
        ]
    fitting = without_spills(fitting, "gather", head_dim, itemsize, capability) or fitting
    fitting = list({config[:3]: config for config in reversed(fitting)}.values())[::-1]
    found = [config for config in fitting if config.block_q <= tallest] or fitting
    return found[:_MAX_TILES]


def attention_gather_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    packed: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    config: Sequence[int],
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the gathering kernel; arguments and results as ``attention_block_forward``.

    Args:
        packed: arrays of the mask's ``PackedColumns``.
        config: fields of GatherConfig.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = GatherConfig(*config)
    arrays = TileMask(*mask)
    p = check_problem(q, k, v, arrays, key_keep, bias, how.block_q, how.block_k)
    pack_ptr, pack_columns, pack_id, pack_bitmap = packed
    _check_packed(arrays, packed, how)
    out, lse = empty_result(q, p.value_dim, return_lse)
    if out.numel() == 0:
        return out.transpose(1, 2), lse
    per_head = p.batch * p.heads
    vec_strides = [[s // p.vec for s in outer_strides(t)] for t in (p.q, p.k, p.v)]
    bias_strides = [0, 0, 0, 0] if p.bias is None else broadcast_strides(p.bias)
    with on_device(q):
        launchable(attention_gather_kernel, q)[(p.rows * per_head,)](
            p.q, *vec_strides[0],
            p.k, *vec_strides[1],
            p.v, *vec_strides[2],
            out, lse,
            arrays.plane_map, *broadcast_strides(arrays.plane_map),
            arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.row_order,
            pack_ptr, pack_columns, pack_id, pack_bitmap,
            arrays.row_ptr if p.key_keep is None else p.key_keep,
            0 if p.key_keep is None else broadcast_strides(p.key_keep)[0],
            arrays.row_ptr if p.bias is None else p.bias, *bias_strides,
            per_head, p.heads, p.q_len, p.rows,
            **score_constants(scale, softcap, p.bias is not None),
            HEAD_DIM=p.head_dim,
            VALUE_DIM=p.value_dim,
            BLOCK_M=how.block_q,
            BLOCK_N=how.block_k,
            BLOCK_D=next_power_of_two(p.head_dim),
            BLOCK_DV=next_power_of_two(p.value_dim),
            GROUP=p.group,
            VEC=p.vec,
            PRECISION=products_of(how.tf32),
            EVEN_Q=p.q_len % how.block_q == 0,
            HAS_PADDING=p.key_keep is not None,
            HAS_BIAS=p.bias is not None,
            RETURN_LSE=return_lse,
            SINGLE_PLANE=p.single_plane,
            HEADS_FAST=bool(how.heads_fast),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
    return out.transpose(1, 2), lse


def _check_packed(mask: TileMask, packed: Sequence[Tensor], how: GatherConfig) -> None:
    pack_ptr, pack_columns, pack_id, pack_bitmap = packed
    tiles, words = pack_id.shape[0], how.block_q // 8 * (how.block_k // 8)
    fits = (
        pack_ptr.shape == mask.row_ptr.shape
        and pack_columns.shape == (tiles, how.block_k)
        and pack_bitmap.dim() == 2
        and pack_bitmap.shape[1] == words
        and pack_bitmap.dtype == torch.int64
        and all(t.dtype == torch.int32 for t in (pack_ptr, pack_columns, pack_id))
        and all(t.is_contiguous() and t.device == mask.row_ptr.device for t in packed)
    )
    if not fits:
        raise ValueError(
            "attention kernel: packed columns must be those of the mask, for tiles of "
            f"{how.block_q} x {how.block_k}; got {[tuple(t.shape) for t in packed]}"
        )
