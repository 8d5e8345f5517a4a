"""Decision table: the kernel and tile sizes used when nothing may be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stof_compile.attention.call import CUDNN, honest_config
from stof_compile.attention.problem import AttentionProblem
from stof_compile.attention.unmeasured import default_kernel, kernels_take, sdpa_takes_causal
from stof_compile.config_fields import hopper_programs
from stof_compile.errors import StofUnsupportedError
from stof_compile.masks.dense_tensor import dense_bytes
from stof_compile.masks.hopper_arrays import kinds_refusal
from stof_compile.masks.long_rows import row_pieces
from stof_compile.masks.shifted_tiles import SHIFTED_SHARE

if TYPE_CHECKING:
    from stof_compile.kernels.attention_cpu import CpuKernel

TILE, NARROW_TILE = (64, 64), (64, 32)
# Shares of the scores in the kept tiles of TILE: narrow tiles are worth timing where theirs have at
# most the first, tiles of more rows where theirs have at most the second. Half a tile takes two
# thirds of TILE's instructions, which 0.75 would make up for; more programs fit a multiprocessor.
NARROW_SHARE, LARGE_SHARE = 0.85, 1.25
# Two tile rows at a time save loads, not scores: tiles of PAIR_TILE may hold this much more. Up to
# PAIRS_FIRST (dense and causal masks from 2,048 tokens on: 1.00 to 1.03) they are likely the best;
# at 1.06 to 1.11 (packed documents, Longformer) 192 queries that share their keys were faster.
PAIR_TILE, PAIR_SHARE, PAIRS_FIRST = (64, 128), 1.15, 1.04
_LOOPS = 4  # position of the loop form in a block-wise config


def decide(problem: AttentionProblem) -> tuple[str, tuple[int, ...], str]:
    """Return kernel, config and the reason, from the problem alone.

    The kernel is `unmeasured.default_kernel`'s, the config the first that fits.

    Raises:
        StofUnsupportedError: a softcap, which SDPA lacks, on a problem that no kernel takes.
    """
    if problem.fp8:
        found = plausible_configs(problem, "block")
        if not found:
            raise StofUnsupportedError(f"no e4m3 config fits {problem.describe()}")
        return "block", found[0], "fp8 was asked for, which no other kernel has"
    capped = problem.softcap > 0
    if problem.spec is None and not capped:
        return "sdpa", (), "no mask: the library kernels are the best dense ones"
    if problem.training and not capped:
        return "sdpa", (), "training without measurements stays with SDPA's own backward"
    on_gpu = problem.device.type == "cuda"
    widest = max(problem.head_dim, problem.v.shape[3])
    if on_gpu and not capped and not kernels_take(problem.q.dtype, widest):
        return "sdpa", (), f"no sparse kernel takes {problem.describe()}"
    if on_gpu and problem.causal_only and problem.plain:
        first = plausible_configs(problem, "block")[:1]
        q, k, v = problem.q, problem.k, problem.v
        if sdpa_takes_causal(
            q.shape,
            k.shape,
            v.shape[3],
            q.dtype,
            unit_strides=all(t.stride[3] == 1 for t in (q, k, v)),
            on_hopper=bool(first) and hopper_programs(first[0]) > 0,
        ):
            return "sdpa", (), "SDPA has kernels for a causal mask"
    density = _tile_density(problem)
    kernel = default_kernel(
        problem.device.type,
        density,
        problem.q_len,
        dtype=problem.q.dtype,
        head_dim=widest,
        softcap=problem.softcap,
        grouped=problem.k.shape[1] != problem.heads,
        dense_bytes=dense_bytes(problem.block_mask(TILE)) if on_gpu else 0,
    )
    configs = plausible_configs(problem, kernel)
    if configs:
        return kernel, configs[0], f"{density:.0%} of the tiles are touched"
    if capped:
        for other in ("block", "row"):
            found = plausible_configs(problem, other) if on_gpu else []
            if found:
                return other, found[0], f"no config of {kernel} fits, and SDPA has no softcap"
        raise StofUnsupportedError(f"no kernel takes a softcap at {problem.describe()}")
    return "sdpa", (), f"no sparse kernel takes {problem.describe()}"


def _tile_area(problem: AttentionProblem, tile: tuple[int, int]) -> int:
    """Scores in the kept tiles of a size: what a block-wise kernel computes of one head."""
    mask = problem.block_mask(tile)
    return mask.col_idx.numel() // max(1, mask.planes) * tile[0] * tile[1]


def packs_well(problem: AttentionProblem, config: tuple[int, ...]) -> bool:
    """Whether a GPU's gathering kernel is worth timing: where the packed columns hold much less
    than the tiles of a block-wise kernel do."""
    if not problem.may_pack(config[0]):
        return False
    mask = problem.block_mask((config[0], config[1]))
    area = mask.block_q * mask.block_k
    return mask.packed_tiles // max(1, mask.planes) * area <= problem.packed_limit(config[0])


def _tile_density(problem: AttentionProblem) -> float:
    tile = TILE
    if problem.device.type == "cpu":
        from stof_compile.kernels.attention_cpu import default_block

        tile = default_block(problem.q.dtype)
    mask = problem.block_mask(tile)
    return mask.col_idx.numel() / max(1, mask.planes * mask.rows * mask.cols)


def plausible_configs(problem: AttentionProblem, kernel: str) -> list[tuple[int, ...]]:
    """Return the configs of a kernel worth timing on this problem, the likely best first.

    Empty when the kernel cannot run it.
    """
    if problem.fp8 and kernel != "block":
        return []
    if kernel == "sdpa":
        return [] if problem.softcap > 0 else [(), CUDNN] if _cudnn_serves(problem) else [()]
    if problem.device.type == "cpu" and kernel in ("flex", "gather"):
        return [
            tuple(found.config)
            for found in _cpu(problem)
            if found.kernel == kernel and not found.refusal
        ]
    from stof_compile.kernels import attention_blockwise, attention_gather, attention_rowwise
    from stof_compile.kernels.block_tiles import FEW_PROGRAMS
    from stof_compile.kernels.hopper_forms import SHIFTED_DIMS, offered_form

    widest = max(problem.head_dim, problem.v.shape[3])
    if not kernels_take(problem.q.dtype, widest):
        return []
    capability = torch.cuda.get_device_capability(problem.device)
    value_dim = problem.v.shape[3]
    if kernel == "row":
        rows = attention_rowwise.configs(
            problem.head_dim, problem.q.dtype, capability, value_dim=value_dim
        )
        return [tuple(config) for config in rows]
    if kernel == "gather":
        return [
            tuple(config)
            for config in attention_gather.configs(
                problem.head_dim,
                problem.q.dtype,
                capability,
                value_dim=value_dim,
                q_len=problem.q_len,
            )
        ]
    block_mask = problem.block_mask(TILE)
    most = _tile_area(problem, TILE)
    planes = problem.batch * problem.heads
    programs = planes * -(-problem.q_len // TILE[0])
    half = problem.q.dtype.itemsize == 2 and not problem.training
    narrow = half and programs >= FEW_PROGRAMS
    narrow = narrow and _tile_area(problem, NARROW_TILE) <= NARROW_SHARE * most
    # with a log-sum-exp they lack a few registers
    together = half and not problem.fp8
    together = together and attention_blockwise.hopper_pays(
        problem.head_dim, value_dim, problem.q.dtype, capability, programs, plain=problem.plain
    )
    form = offered_form(problem.head_dim) if together else None
    shared = False
    if form is not None:
        tile = form.rows, TILE[1]
        shared = _tile_area(problem, tile) <= form.most_scores * most
        shared = shared and kinds_refusal(problem.block_mask(tile).bitmap.shape[0]) is None
        # long rows are not cut in this form: with few heads all else would wait for them
        shared = (
            shared and row_pieces(problem.block_mask(tile), planes, form.programs, queued=True) == 1
        )
    pairs = together and 96 < problem.head_dim <= 128
    pairs = pairs and _tile_area(problem, PAIR_TILE) <= PAIR_SHARE * most
    pairs_first = pairs and _tile_area(problem, PAIR_TILE) <= PAIRS_FIRST * most
    on_hopper = half and problem.plain and capability[0] == 9
    on_hopper = on_hopper and problem.head_dim <= SHIFTED_DIMS
    shifted = on_hopper and block_mask.shifted_share <= SHIFTED_SHARE
    # whether a tile is full depends on its size, and so does what a loop form may promise
    found: list[tuple[int, ...]] = []
    changed: list[tuple[int, ...]] = []
    for config in attention_blockwise.configs(
        problem.head_dim,
        torch.float8_e4m3fn if problem.fp8 else problem.q.dtype,
        capability,
        value_dim=value_dim,
        has_part=block_mask.has_part,
        has_full=block_mask.has_full,
        is_band=block_mask.is_band,
        q_len=problem.q_len,
        planes=planes,
        plain=problem.plain and not problem.fp8,
        narrow=narrow,
        pairs=pairs,
        shared=shared,
        pairs_first=pairs_first,
        shifted=shifted,
        limits=block_mask.band is None or problem.q_len % TILE[0] == problem.k_len % TILE[1] == 0,
    ):
        tile = config.block_q, config.block_k
        larger = config.block_q > TILE[0] and not config.hopper
        if larger and _tile_area(problem, tile) > LARGE_SHARE * most:
            continue
        fitting = honest_config(problem.block_mask(tile), config, planes)
        (found if fitting[_LOOPS] == config.loops else changed).append(fitting)
    # where no form of a loop keeps what it promises, the one that is right for any mask
    return found or list(dict.fromkeys(changed))


def _cudnn_serves(problem: AttentionProblem) -> bool:
    """Whether cuDNN computes just this: dense or causal, inference, half precision, no groups."""
    return (
        problem.device.type == "cuda"
        and torch.version.hip is None
        and (problem.spec is None or problem.causal_only)
        and not (problem.padding or problem.bias is not None or problem.training)
        and problem.q.dtype in (torch.float16, torch.bfloat16)
        and problem.k.shape[1] == problem.heads
        and problem.head_dim == problem.v.shape[3]
        and problem.head_dim % 8 == 0
        and problem.head_dim <= 128
        and min(problem.q_len, problem.k_len) > 1
    )


def _cpu(problem: AttentionProblem) -> tuple[CpuKernel, ...]:
    from stof_compile.kernels.attention_cpu import cpu_kernels

    return cpu_kernels(
        problem.q.dtype,
        problem.q_len,
        problem.k_len,
        problem.head_dim,
        problem.v.shape[3],
        softcap=problem.softcap,
        has_bias=problem.bias is not None,
        return_lse=False,
    )
