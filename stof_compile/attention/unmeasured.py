"""Which kernel attends where nothing was measured: by hand, and with a tuning budget of 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of the sparse kernels on CUDA
TRITON_MAX_HEAD_DIM = 256
# Part of the tiles that may be touched before dense attention is the better guess: fp32 without
# TF32 on CUDA, by the widest head dim; where gradients are wanted; by the ordinary units (AMD
# GPUs: as measured on an H200 while it used them); a single query on CUDA.
EXACT_WINS_BELOW = {128: 1.0, TRITON_MAX_HEAD_DIM: 0.8}
EXACT_TRAINS_BELOW = {64: 0.9, 128: 0.5, TRITON_MAX_HEAD_DIM: 0.16}
ORDINARY_WINS_BELOW = {64: 0.35, TRITON_MAX_HEAD_DIM: 0.16}
EXACT_CAUSAL_WINS = 96  # the widest head dim where it is faster than SDPA's own causal kernel
HOPPER_CAUSAL_WINS = 128  # the same where a Hopper kernel is the first
HOPPER_CAUSAL_FROM = 2048  # queries where a Hopper kernel is, for heads of over 96 dims
ROW_WINS_BELOW = 0.6
MOST_DENSE = 2**28  # bytes of a dense mask that SDPA is given on CUDA, where a kernel serves


def default_kernel(
    device_type: str,
    tile_density: float,
    q_len: int,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    softcap: float = 0.0,
    return_lse: bool = False,
    grouped: bool = False,
    dense_bytes: int = 0,
    training: bool = False,
) -> str:
    """Return the kernel that is taken: see `sparse_attention`.

    On CUDA by these microseconds of an H200 (torch 2.11, Triton 3.6, CUDA-graph replay), block-wise
    at its first config / SDPA with the mask as a bool tensor. Windows reach as far to either side
    as the touched tiles say; ``random`` keeps 90 % of all pairs:

        batch x heads x length x head dim   mask     touched   fp16         fp32
        8 x 12 x 512 x 64                   window   0.34                   64 / 238
                                            window   0.81      24 / 42      139 / 239
                                            random   1.00      31 / 43      160 / 240
        4 x 12 x 2048 x 64                  window   0.21                   257 / 1784
                                            window   0.70      107 / 223    825 / 1775
                                            random   1.00      209 / 222    1179 / 1792
        2 x 16 x 2048 x 128                 window   0.21                   329 / 1807
                                            window   0.70      129 / 225    1166 / 1806
                                            random   1.00      254 / 222    1775 / 1823
        2 x 12 x 2048 x 80                  window   0.70      104 / 176    755 / 1246
                                            random   1.00      196 / 177    1058 / 1249
        4 x 16 x 512 x 192                  window   0.81                   305 / 385
                                            random   1.00                   422 / 388
        4 x 16 x 512 x 256                  window   0.81      76 / 93      383 / 428
                                            random   1.00      99 / 92      534 / 430

    bf16 is as fp16. Where fp32 products may be TF32, the block-wise kernel takes 702 and 1024 for
    ``random`` at 2,048 tokens and head dims 64 and 128, and 304 at 256; SDPA as long as before.

    Args:
        device_type: "cuda" or "cpu". tile_density: touched / all tiles of the mask.
        q_len: queries; a single one on CUDA takes the row-wise kernel.
        dtype: of q, k and v. head_dim: the widest. softcap, return_lse: what SDPA has not.
        grouped: heads share keys. dense_bytes: of the mask as a bool tensor.
        training: gradients are wanted, from the sparse kernels or from SDPA. Both passes over every
            tile in fp32, from the times of each kernel (docs/kernels.md): 6.1 ms and 6.0 at
            4 x 12 x 2048 x 64, 12.8 and 7.1 at 2 x 16 x 2048 x 128.

    Returns:
        On CUDA "sdpa" for all that no sparse kernel takes, also with a softcap or a log-sum-exp.
    """
    if device_type == "cpu":
        from stof_compile.kernels.attention_cpu import preferred_cpu_kernel

        return preferred_cpu_kernel(dtype, tile_density, softcap=softcap, return_lse=return_lse)
    if not kernels_take(dtype, head_dim):
        return "sdpa"
    kernel, limit = ("row", ROW_WINS_BELOW) if q_len == 1 else ("block", 1.0)
    # heads that share keys: no fused kernel of SDPA takes them in fp32, the others hold all scores
    if kernel == "block" and _is_exact(dtype) and not grouped:
        limits = EXACT_TRAINS_BELOW if training else EXACT_WINS_BELOW
        if not _by_parts():
            limits = ORDINARY_WINS_BELOW
        limit = next(part for width, part in limits.items() if head_dim <= width)
    needed = softcap > 0 or return_lse or dense_bytes > MOST_DENSE
    return kernel if needed or tile_density <= limit else "sdpa"


def _is_exact(dtype: torch.dtype) -> bool:
    """Whether products are of fp32 numbers and not of these rounded to TF32."""
    if dtype != torch.float32:
        return False
    from stof_compile.kernels.limits import tf32_allowed

    return not tf32_allowed()


def _by_parts() -> bool:
    """Whether products of fp32 numbers are three of TF32."""
    from stof_compile.kernels.limits import exact_products

    return exact_products() != "ieee"


def kernels_take(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the sparse kernels on CUDA take a dtype and a (widest) head dim."""
    return dtype in TRITON_DTYPES and head_dim <= TRITON_MAX_HEAD_DIM


def sdpa_takes_causal(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    value_dim: int,
    dtype: torch.dtype,
    *,
    unit_strides: bool,
    on_hopper: bool,
) -> bool:
    """Whether a mask that is causal and nothing else is left to SDPA on CUDA where no gradient is
    wanted: where that has a fused kernel for it, which the host launches in a fraction of the time.

    Microseconds of an H200 as above, fp16, block-wise / SDPA: 19 / 21 at 8 x 12 x 512 x 64, 85 / 79
    at 4 x 12 x 2048 x 64, 87 / 69 at head dim 80, 104 / 86 at 128 and 61 / 36 at 256; by the Hopper
    kernels 944 / 1024 at 16 x 12 x 4096 x 64 and, in lasting replays of 2026-11-30 at head dims of
    80, 96 and 128, 61 / 81, 68 / 84 and 92 / 88 at 32 x 12 x 512, 97 / 128, 107 / 133 and 132 / 139
    at 16 x 12 x 1024, 170 / 221, 188 / 229 and 212 / 238 at 8 x 12 x 2048, 599 / 753, 682 / 817 and
    715 / 822 at 2 x 12 x 8192. They come first with 2,048 tile rows of all heads (with 12 heads of
    2,048 queries 32 / 45, 34 / 45 and 36 / 45, but they are not asked there).
    fp32: 110 / 161 and 652 / 926 for the first two, then 635 / 654, 628 / 654 at 96, 946 / 901 and
    301 / 302; with TF32, which SDPA does not use, 370 for the second, 526 at 128 and 174 at 256.

    Args:
        q_shape: [batch, heads, q_len, head_dim]. k_shape: [batch, kv_heads, k_len, head_dim].
        value_dim: of v. dtype: of q, k and v. unit_strides: their last strides are 1.
        on_hopper: the block-wise kernel would be the one for Hopper.
    """
    _, heads, q_len, head_dim = q_shape
    sparse = not _is_exact(dtype) or (_by_parts() and head_dim <= EXACT_CAUSAL_WINS)
    if dtype == torch.float32 and sparse:
        return False
    fused = unit_strides and head_dim == value_dim and head_dim % 8 == 0
    if heads != k_shape[1]:
        fused = fused and dtype != torch.float32 and q_len == k_shape[2]
    least = 0 if head_dim <= 96 else HOPPER_CAUSAL_FROM
    return fused and not (on_hopper and head_dim <= HOPPER_CAUSAL_WINS and q_len >= least)
