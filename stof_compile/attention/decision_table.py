"""Decision table: the kernel and tile sizes used when nothing may be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stof_compile.attention.call import CUDNN
from stof_compile.attention.problem import AttentionProblem
from stof_compile.errors import StofUnsupportedError

if TYPE_CHECKING:
    from stof_compile.kernels.attention_blockwise import BlockConfig
    from stof_compile.kernels.attention_cpu import CpuKernel

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRITON_MAX_HEAD_DIM = 256
PREFERRED = {"cuda": ("block",), "cpu": ("gather", "flex")}  # gather needs no compiler seconds
SPARSE_WINS_BELOW = 0.6  # tile density under which a sparse kernel is taken without measuring


def _tile_density(problem: AttentionProblem) -> float:
    stats = problem.statistics
    touched = stats["full_tiles"] + stats["part_tiles"]
    return float(touched / max(1, touched + stats["empty_tiles"]))


def decide(problem: AttentionProblem) -> tuple[str, tuple[int, ...], str]:
    """Return kernel, config and the reason, from the problem alone.

    Raises:
        StofUnsupportedError: a softcap, which SDPA lacks, on a problem that no kernel takes.
    """
    capped = problem.softcap > 0
    if problem.spec is None and not capped:
        return "sdpa", (), "no mask: the library kernels are the best dense ones"
    kernel, configs = _first_that_fits(problem)
    if not configs and capped:
        raise StofUnsupportedError(f"no kernel takes a softcap at {problem.describe()}")
    if not configs:
        return "sdpa", (), f"no sparse kernel takes {problem.describe()}"
    if problem.training and not capped:
        return "sdpa", (), "training without measurements stays with SDPA's own backward"
    touched = f"{_tile_density(problem):.0%} of the tiles are touched"
    if not capped and _tile_density(problem) > SPARSE_WINS_BELOW:
        return "sdpa", (), f"{touched}: too dense for a sparse kernel"
    return kernel, configs[0], touched


def _first_that_fits(problem: AttentionProblem) -> tuple[str, list[tuple[int, ...]]]:
    for kernel in PREFERRED[problem.device.type]:
        configs = plausible_configs(problem, kernel)
        if configs:
            return kernel, configs
    return "sdpa", []


def plausible_configs(problem: AttentionProblem, kernel: str) -> list[tuple[int, ...]]:
    """Return the configs of a kernel worth timing on this problem, the likely best first.

    Empty when the kernel cannot run it.
    """
    if kernel == "sdpa":
        return [] if problem.softcap > 0 else [(), CUDNN] if _cudnn_serves(problem) else [()]
    if kernel in ("flex", "gather"):
        return [
            tuple(found.config)
            for found in _cpu(problem)
            if found.kernel == kernel and not found.refusal
        ]
    from stof_compile.kernels import attention_blockwise, attention_rowwise

    widest = max(problem.head_dim, problem.v.shape[3])
    if problem.q.dtype not in TRITON_DTYPES or widest > TRITON_MAX_HEAD_DIM:
        return []
    capability = torch.cuda.get_device_capability(problem.device)
    value_dim = problem.v.shape[3]
    if kernel == "row":
        rows = attention_rowwise.configs(
            problem.head_dim, problem.q.dtype, capability, value_dim=value_dim
        )
        return [tuple(config) for config in rows]
    block_mask = problem.block_mask((64, 64))
    # whether a tile is full depends on its size, and so does what a loop form may promise
    found = []
    for config in attention_blockwise.configs(
        problem.head_dim,
        problem.q.dtype,
        capability,
        value_dim=value_dim,
        has_part=block_mask.has_part,
        has_full=block_mask.has_full,
        is_band=block_mask.is_band,
        q_len=problem.q_len,
        planes=problem.batch * problem.heads,
    ):
        if _promise_holds(problem, config):
            found.append(tuple(config))
    return found


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


def _promise_holds(problem: AttentionProblem, config: BlockConfig) -> bool:
    mask = problem.block_mask((config.block_q, config.block_k))
    kept = {1: not mask.has_full, 2: not mask.has_part, 6: mask.is_band, 7: mask.is_band}
    return kept.get(config.loops, True)
