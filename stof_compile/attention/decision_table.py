"""Decision table: the kernel and tile sizes used when nothing may be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stof_compile.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from stof_compile.kernels.attention_blockwise import BlockConfig
    from stof_compile.kernels.attention_cpu import CpuKernel

SPARSE_WINS_BELOW = 0.6  # tile density under which a sparse kernel is taken without measuring


def _tile_density(problem: AttentionProblem) -> float:
    stats = problem.statistics
    touched = stats["full_tiles"] + stats["part_tiles"]
    return float(touched / max(1, touched + stats["empty_tiles"]))


def decide(problem: AttentionProblem) -> tuple[str, tuple[int, ...], str]:
    """Return kernel, config and the reason, from the problem alone."""
    if problem.spec is None and problem.softcap <= 0:
        return "sdpa", (), "no mask: the library kernels are the best dense ones"
    kernel = "block" if problem.device.type == "cuda" else "flex"
    configs = plausible_configs(problem, kernel)
    density = _tile_density(problem)
    if problem.softcap <= 0:
        if problem.training:
            return "sdpa", (), "training without measurements stays with SDPA's own backward"
        if not configs:
            return "sdpa", (), f"no {kernel} configuration fits head dim {problem.head_dim}"
        if density > SPARSE_WINS_BELOW:
            return (
                "sdpa",
                (),
                f"{density:.0%} of the tiles are touched: too dense for a sparse kernel",
            )
    return kernel, configs[0], f"{density:.0%} of the tiles are touched"


def plausible_configs(problem: AttentionProblem, kernel: str) -> list[tuple[int, ...]]:
    """Return the configs of a kernel worth timing on this problem, the likely best first."""
    if kernel in ("flex", "gather"):
        return [
            tuple(found.config)
            for found in _cpu(problem)
            if found.kernel == kernel and not found.refusal
        ]
    from stof_compile.kernels import attention_blockwise, attention_rowwise

    capability = torch.cuda.get_device_capability(problem.device)
    value_dim = problem.v.shape[3]
    if kernel == "row":
        rows = attention_rowwise.configs(
            problem.head_dim, problem.q.dtype, capability, value_dim=value_dim
        )
        return [tuple(config) for config in rows]
    block_mask = problem.block_mask((64, 64))
    # whether a tile is full depends on its size: the promises "no full tile" and "no part tile" are made per size
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
