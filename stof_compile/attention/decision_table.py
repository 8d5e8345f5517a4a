"""Decision table: the kernel and tile sizes used when nothing may be measured."""

from __future__ import annotations

from stof_compile.attention.problem import AttentionProblem

CPU_BLOCK = 32
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
            return "sdpa", (), f"{density:.0%} of the tiles are touched: too dense for a sparse kernel"
    return kernel, configs[0], f"{density:.0%} of the tiles are touched"


def plausible_configs(problem: AttentionProblem, kernel: str) -> list[tuple[int, ...]]:
    """Return the configs of a kernel worth timing on this problem, the likely best first."""
    if kernel in ("flex", "gather"):
        return [(CPU_BLOCK, CPU_BLOCK)]
    from stof_compile.kernels import attention_blockwise, attention_rowwise

    module = attention_blockwise if kernel == "block" else attention_rowwise
    capability = _capability(problem)
    return [tuple(c) for c in module.configs(problem.head_dim, problem.q.dtype, capability)]


def _capability(problem: AttentionProblem) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(problem.device)
