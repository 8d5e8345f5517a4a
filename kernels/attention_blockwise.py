"""Block-wise attention: one program computes one row of mask tiles for one head.

    out[q] = sum over kept k of softmax_k(scale * <q, k> [softcap] [+ bias]) * v[k]

Here: how the kernel of ``blockwise_kernel.py`` is configured and launched.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_hopper import hopper_refusal
from .block_tiles import FEW_PROGRAMS, LEAST_SUM, NARROW, block_tiles, padded_widths
from .blockwise_kernel import attention_block_kernel
from .bound_launch import Repeat
from .hopper_forms import SHIFTED_DIMS, hopper_forms
from .limits import (
    fp32_precision,
    product_widths,
    products_of,
    shared_memory_bytes,
    shared_memory_limit,
    without_spills,
)
from .long_rows import merge_rows, new_pieces
from .merge_kernel import merge_rows_kernel
from .problem import (
    AttentionProblem,
    Rounded,
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

KERNELS = (attention_block_kernel, merge_rows_kernel)


class BlockConfig(NamedTuple):
    """How the block-wise kernel is launched; a list of it is the operator's ``config`` argument.

    ``loops`` must fit the mask: 1 promises that it has no full tile, 2 that it has no part tile; 6
    and 7 that the mask is its band and nothing else (``BlockMask.is_band``); 3, 4 and 5 are right
    for any.
    """

    block_q: int = 64  # query rows of a tile, as in the block mask
    block_k: int = 64  # keys of a tile, as in the block mask
    num_warps: int = 4
    num_stages: int = 3  # depth of the load pipeline
    # 1 part, 2 full, 3 part then full, 4 one loop, 5 one loop with a branch; 6 and 7 as 4 and 5
    # with the tiles computed from the band instead of read
    loops: int = 3
    # 1: neighbouring programs work on the same row of other heads (Hopper: of the last heads)
    heads_fast: int = 0
    heavy_first: int = 1  # 1: rows in row_order, 0: rows in their own order (one load less)
    prefetch: int = 0  # 1: read a column index one tile ahead
    tf32: int = 0  # how fp32 numbers are multiplied, by place in PRECISIONS
    # programs per multiprocessor of the Hopper kernel (attention_hopper.py), 0: the portable one;
    # it needs 64 x 64 tiles (64 x 128: one program, tile rows two at a time; 192 or 128 x 64: three
    # or two consumers that share keys) and fragments in place of the bitmap, and reads num_stages
    # besides
    hopper: int = 0
    # so many of the heaviest rows of every head come first (Hopper), and are cut into pieces
    heavy_rows: int = 0
    # of a thread at most, 0: as many as the compiler wants; no limit holds where it would spill
    registers: int = 0
    pieces: int = 1  # programs that share a heavy row, whose results are merged (long_rows.py)
    # 1: part tiles begin where the keys of their rows do (masks/shifted_tiles.py); Hopper, 64 x 64
    shifted: int = 0


# Three programs of this form fit a Hopper multiprocessor, and four where a thread has 128 registers
# at most; five of the narrow ones with a lazy softmax, which else takes more. Nothing spills then
# (Triton 3.6 and 3.9), but with what ``_limit`` leaves out.
_LIMITED, _REGISTERS = (64, 64, 4, 3, 5), {64: 128, 32: 88}  # by keys of a tile
# Tile rows of all heads from which its workers have enough to do to repay their start.
_HOPPER_UNITS, _HOPPER_FIRST_UNITS = 384, 2048


def configs(
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    value_dim: int | None = None,
    has_part: bool = True,
    has_full: bool = True,
    is_band: bool = False,
    q_len: int | None = None,
    planes: int | None = None,
    plain: bool = False,
    narrow: bool = False,
    pairs: bool = False,
    shared: bool = False,
    pairs_first: bool = True,
    shifted: bool = False,
    limits: bool = True,
) -> list[BlockConfig]:
    """Configs worth timing, pruned by shared memory and registers; the likely best first.

    Args:
        head_dim: of q and k.
        dtype: of q, k and v; e4m3 where they are rounded.
        capability: (major, minor) of the device.
        value_dim: of v, head_dim if None.
        has_part: whether the mask has tiles that are partly kept.
        has_full: whether it has tiles that are kept whole.
        is_band: whether the mask is its band and nothing else, for every tile size offered.
        q_len: query length; tiles of more rows than that (rounded up) are not offered.
        planes: batch times heads; with ``q_len`` it tells how many programs there are.
        plain: no padding, no bias, no softcap, a positive scale: what the Hopper kernel takes.
        narrow: whether tiles of 32 keys hold much less than those of 64 do.
        pairs: whether tiles of 128 keys hold little more.
        shared: whether those of the form do whose consumers share keys.
        pairs_first: whether the first of the two is likely the faster one.
        shifted: whether fewer tiles do where they begin with the keys of their rows.
        limits: whether limits of registers hold: not for bands over lengths that are no multiple of
            a tile, see ``_limit``.
    """
    itemsize = dtype.itemsize
    value_dim = head_dim if value_dim is None else value_dim
    operands = head_dim, value_dim, itemsize, capability
    widths = padded_widths(*operands)
    limit = shared_memory_limit(capability)
    tf32 = fp32_precision(dtype)
    tallest = 128 if q_len is None else next_power_of_two(q_len)
    few = q_len is not None and planes is not None and planes * -(-q_len // 64) < FEW_PROGRAMS
    narrow = narrow and not few and itemsize <= 2
    tiles = block_tiles(*operands, tallest=tallest, few=few, narrow=narrow)
    narrow = narrow and NARROW in tiles
    depths = (2,) if itemsize == 4 and torch.version.hip is None else (2, 3)
    problem = ("block", head_dim, itemsize, capability)
    loops = _loops(has_part, has_full, is_band, capability)
    found: list[BlockConfig] = []
    for rank, (block_q, block_k, warps) in enumerate(tiles):
        for stages in reversed(depths) if loops[0] == 5 else depths:
            if shared_memory_bytes(block_q, block_k, *widths, stages, itemsize) > limit:
                continue
            tile = block_q, block_k, warps
            if narrow and loops[0] == 5 and tile == NARROW and (*tile, 3) in {c[:4] for c in found}:
                continue  # two stages: 25.7 us against 22.9 (H200, BERT-base at 8 x 512)
            # a branch around the mask costs registers, of which larger tiles have none left
            branches = rank == 0 or tile == NARROW
            for loop in loops if branches else [loop for loop in loops if loop not in (5, 7)]:
                found.append(BlockConfig(block_q, block_k, warps, stages, loop, tf32=tf32))
    # loops 3 is right for any mask
    instead = list(dict.fromkeys(config._replace(loops=3) for config in found))
    found = without_spills(found, *problem) or without_spills(instead, *problem) or found
    # heads as the fastest axis let the heavy rows of all heads start together
    narrowest = [config for config in found if narrow and config[:3] == NARROW][: len(loops)]
    found += [
        config._replace(heads_fast=1)
        for config in dict.fromkeys((*found[: len(loops) + 1], *narrowest))
    ]
    whole = all(32 < dim <= 64 and dim % 8 == 0 for dim in (head_dim, value_dim))
    hopper = capability[0] == 9 and torch.version.hip is None
    if hopper and limits and plain and itemsize == 2 and whole:
        slim = [config for config in found if config[:5] == _LIMITED]
        slim += [config._replace(num_stages=3, heads_fast=1) for config in narrowest[:2]]
        found += [config._replace(registers=_REGISTERS[config.block_k]) for config in slim]
    units = 0 if q_len is None or planes is None else planes * -(-q_len // 64)
    if not hopper_pays(head_dim, value_dim, dtype, capability, units, plain=plain):
        return found
    forms = hopper_forms(head_dim, pairs=pairs, shared=shared, pairs_first=pairs_first)
    groups = [BlockConfig(rows, keys, 4, stages, hopper=p) for rows, keys, p, stages in forms]
    if shifted and head_dim <= SHIFTED_DIMS:
        square = [config for config in groups if config[:2] == (64, 64)]
        groups = [config._replace(shifted=1) for config in square] + groups
    return groups + found if units >= _HOPPER_FIRST_UNITS else found + groups


def hopper_pays(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    units: int,
    *,
    plain: bool,
) -> bool:
    """Whether the Hopper kernel runs a problem, and has enough to do: arguments as those of
    ``hopper_refusal``."""
    if units < _HOPPER_UNITS:
        return False
    return hopper_refusal(head_dim, value_dim, dtype, capability, units, plain=plain) is None


def _loops(
    has_part: bool, has_full: bool, is_band: bool, capability: tuple[int, int]
) -> tuple[int, ...]:
    """Loop forms worth timing on a kind of mask, the likely best first."""
    if is_band and has_full:
        return (7, 6, 3) if capability >= (9, 0) else (6, 3)
    if is_band:
        return (6, 1)
    if has_part and has_full:
        return (5, 3, 4)
    return (1,) if has_part else (2,)


def honest_loops(loops: int, *, has_part: bool, has_full: bool, is_band: bool) -> int:
    """``loops`` where a mask keeps what it promises, else 3, which is right for any mask."""
    kept = {1: not has_full, 2: not has_part, 6: is_band, 7: is_band}
    return loops if kept.get(loops, True) else 3


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
    rounded: Rounded | None = None,
    launched: Callable[[Repeat, AttentionProblem], None] | None = None,
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
        rounded: q, k and v are e4m3 with these scales; the keys of v lie side by side, and zeros
            behind them up to the end of the last tile.
        launched: told of the launch where it can be had again, outside of traces.

    Returns:
        out: logical [batch, heads, q_len, value_dim] in [batch, q_len, heads, value_dim] memory.
        lse: fp32 [batch, heads, q_len], natural logarithm, -inf on rows without keys; [0] if not
            asked.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = BlockConfig(*config)
    if how.hopper:
        raise ValueError("a config with hopper set belongs to attention_hopper_forward")
    if how.loops >= 6 and not band:
        raise ValueError(f"loops {how.loops} computes tiles from a band, and none is given")
    split = how.pieces > 1 and how.heavy_rows > 0
    if split and (how.loops >= 6 or not how.heavy_first):
        raise ValueError("pieces of rows need tile lists (loops up to 5) and heavy_first")
    arrays = TileMask(*mask)
    problem = check_problem(
        q, k, v, arrays, key_keep, bias, how.block_q, how.block_k, rounded=rounded
    )
    if split and how.loops == 5 and max(problem.head_dim, problem.value_dim) > 64:
        how = how._replace(loops=3)  # a branch and pieces can take more registers than there are
    if how.loops == 4 and not band and arrays.bitmap.shape[0] == 0:
        how = how._replace(loops=2)  # no part tile, and no bitmap that every tile could read
    dtype = None if rounded is None else rounded.dtype
    out, lse = empty_result(q, problem.value_dim, return_lse, dtype)
    if out.numel() == 0:
        return out.transpose(1, 2), lse
    p = problem
    per_head = p.batch * p.heads
    values = p.v if rounded is None else rounded.values  # the last stride is 1 of all three
    vec_strides = [[s // p.vec for s in outer_strides(t)] for t in (p.q, p.k, values)]
    scales = (arrays.row_ptr,) * 3 if rounded is None else rounded[:3]
    bias_strides = [0, 0, 0, 0] if p.bias is None else broadcast_strides(p.bias)
    capability = (9, 0)
    if q.is_cuda and (max(p.head_dim, p.value_dim) > 128 or how.registers):
        capability = torch.cuda.get_device_capability(q.device)  # else it makes no difference
    itemsize = q.element_size()
    block_d, tail_d = product_widths(p.head_dim, capability, itemsize)
    block_dv, tail_dv = product_widths(p.value_dim, capability, itemsize)
    if rounded is not None:
        block_d = max(block_d, LEAST_SUM)
    heavy_rows = min(how.heavy_rows, p.rows) if split else 0
    width, programs = block_dv + tail_dv, p.rows
    held = None
    if split:
        held = new_pieces(q, per_head, heavy_rows, how.pieces, how.block_q, width)
        programs += heavy_rows * (how.pieces - 1)
    with on_device(q):
        kernel = launchable(attention_block_kernel, q, launched is not None and not split)
        repeat = kernel[(programs * per_head,)](
            p.q, *vec_strides[0],
            p.k, *vec_strides[1],
            values, *vec_strides[2],
            *scales,
            out, lse,
            arrays.plane_map, *broadcast_strides(arrays.plane_map),
            arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.bitmap_id, arrays.bitmap,
            arrays.row_order,
            arrays.row_ptr if p.key_keep is None else p.key_keep,
            0 if p.key_keep is None else broadcast_strides(p.key_keep)[0],
            arrays.row_ptr if p.bias is None else p.bias, *bias_strides,
            per_head, p.heads, p.q_len, p.k_len, p.rows, q_offset,
            *band_arguments(band),
            arrays.row_ptr if held is None else held.values,
            arrays.row_ptr if held is None else held.stats,
            heavy_rows, how.pieces if split else 1,
            **score_constants(scale, softcap, p.bias is not None),
            HEAD_DIM=p.head_dim,
            VALUE_DIM=p.value_dim,
            BLOCK_M=how.block_q,
            BLOCK_N=how.block_k,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            TAIL_D=tail_d,
            TAIL_DV=tail_dv,
            SPLIT=split,
            FP8=rounded is not None,
            GROUP=p.group,
            VEC=p.vec,
            PRECISION=products_of(how.tf32),
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
            REGISTERS=_limit(how, p, band, softcap, return_lse),
            LAZY=_is_lazy(how, p, capability),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
        if held is not None:
            merge_rows(held, arrays, out, lse)
        elif repeat is not None and launched is not None:
            launched(repeat, p)
    return out.transpose(1, 2), lse


def _is_lazy(how: BlockConfig, p: AttentionProblem, capability: tuple[int, int]) -> bool:
    """Whether the softmax is lazy where a limit holds: ``rescaled`` needs 16 rows in a warp."""
    whole = next_power_of_two(p.value_dim) == 64 and how.block_q == 16 * how.num_warps >= 64
    on_hopper = p.q.is_cuda and torch.version.hip is None and capability[0] == 9
    return how.registers > 0 and whole and on_hopper and p.q.element_size() == 2


def _limit(
    how: BlockConfig,
    p: AttentionProblem,
    band: Sequence[int],
    softcap: float,
    return_lse: bool,
) -> int:
    """Registers of a thread, 0 for any number: where the config's limit would spill."""
    more = return_lse or softcap > 0 or p.bias is not None or p.key_keep is not None
    more = more or how.pieces > 1
    ragged = p.q_len % how.block_q or p.k_len % how.block_k
    return 0 if more or (band and ragged) else how.registers
