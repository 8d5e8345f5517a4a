"""Which kernel attends where nothing was measured: by hand, and with a tuning budget of 0."""

from __future__ import annotations

import torch

# Part of the tiles that may be touched before dense attention is the better guess: fp32 on CUDA, by
# the widest head dim.
FP32_WINS_BELOW = {64: 0.35, 256: 0.16}
ROW_WINS_BELOW = 0.6  # a single query on CUDA


def default_kernel(
    device_type: str,
    tile_density: float,
    q_len: int,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> str:
    """Return the kernel that is taken: see `sparse_attention`.

    On CUDA by these microseconds of an H200 (torch 2.11, Triton 3.6, CUDA-graph replay; SDPA has
    the mask as a bool tensor; ``random`` keeps 90 % of all, ``window`` is of 0.42 of the length to
    either side):

        batch, heads, length, head dim   mask, tiles touched   fp16: block, SDPA   fp32: block, SDPA

    Args:
        device_type: "cuda" or "cpu". tile_density: touched / all tiles of the mask.
        q_len: queries; a single one on CUDA takes the row-wise kernel.
        dtype: of q, k and v. head_dim: of q and k. softcap, return_lse: what SDPA has not.
    """
    if device_type == "cpu":
        from stof_compile.kernels.attention_cpu import preferred_cpu_kernel

        return preferred_cpu_kernel(dtype, tile_density, softcap=softcap, return_lse=return_lse)
    kernel, limit = ("row", ROW_WINS_BELOW) if q_len == 1 else ("block", 1.0)
    if kernel == "block" and dtype == torch.float32:
        limit = next((part for width, part in FP32_WINS_BELOW.items() if head_dim <= width), 0.0)
    needed = softcap > 0 or return_lse
    return kernel if needed or tile_density <= limit else "sdpa"


def sdpa_takes_causal(head_dim: int, on_hopper: bool) -> bool:
    """Whether a mask that is causal and nothing else is left to SDPA, which has kernels for it, on
    CUDA.

    Microseconds of an H200 as above, fp16, block and SDPA:

    Args:
        head_dim: of q and k. on_hopper: the block-wise kernel would be the one for Hopper.
    """
    return head_dim > 64 or not on_hopper
