"""Linear layer with residual and norm in TileLang: out = norm(x @ weight.T + bias + residual).

A block computes whole rows, so that their norm needs no second kernel: its accumulators are as
wide as the result. Each block reads the whole weight.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout
from torch import Tensor

from .tilelang_compile import NAMES, compile_program
from .tilelang_operands import (
    as_rows,
    as_vector,
    as_weight,
    check_alike,
    check_config,
    require,
    run,
)

KERNELS = ()  # no Triton kernel
NORMS = ("layer_norm", "rms_norm")
MAX_WIDTH = 1024
# Warps share the columns evenly and their products are at least 8 columns wide.
WIDTH_STEP = 64


class NormConfig(NamedTuple):
    """How a program is tiled; a list of it is the operator's ``config`` argument."""

    block_m: int  # rows of a block, multiple of 16
    block_k: int  # depth of a step, multiple of 16
    threads: int  # that compute: 128 or 256
    stages: int  # depth of the load pipeline


class NormProblem(NamedTuple):
    """What a program is compiled for."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    has_bias: bool
    has_residual: bool
    norm: str
    has_norm_weight: bool
    has_norm_bias: bool
    eps: float
    weight_kn: bool


def linear_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    weight_kn: bool,
    config: Sequence[int],
    out: Tensor,
) -> None:
    """Write norm(x @ weight.T + bias + residual) to ``out``; all in fp32 up to the result.

    Args:
        x: [..., K], fp16 or bf16 on CUDA; K a multiple of 8. Copied if it is not contiguous.
        weight: [N, K], or [K, N] with ``weight_kn``; N a multiple of 64, at most 1024.
        bias: [N] or None. residual: [..., N] with as many rows as x, or None.
        norm: "layer_norm" or "rms_norm", over the last dimension.
        norm_weight, norm_bias: [N] or None. eps: added to the variance or mean square.
        config: a NormConfig.
        out: contiguous [..., N], dtype of x.
    Raises:
        ValueError: an argument does not fit the others.
    """
    vectors = {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    check_alike(x, {"weight": weight, "residual": residual, "out": out, **vectors})
    tiling = NormConfig(*check_config(config, NormConfig._fields))
    require(norm in NORMS, f"norm must be one of {NORMS}", norm)
    matrix, kn = as_weight("weight", weight, weight_kn)
    depth, width = matrix.shape if kn else matrix.shape[::-1]
    require(
        width % WIDTH_STEP == 0 and width <= MAX_WIDTH,
        f"rows must be a multiple of {WIDTH_STEP} wide, at most {MAX_WIDTH}",
        width,
    )
    rows = as_rows("x", x, depth)
    require(out.is_contiguous(), "out must be contiguous", out.stride())
    require(
        out.numel() == rows.shape[0] * width, f"out must end in {width} columns", tuple(out.shape)
    )
    if rows.shape[0] == 0:
        return
    added = None if residual is None else as_rows("residual", residual, width, rows.shape[0])
    problem = NormProblem(
        rows.shape[0], width, depth, x.dtype, bias is not None, added is not None, norm,
        norm_weight is not None, norm_bias is not None, eps, kn,
    )  # fmt: skip
    kernel = linear_norm_kernel(problem, tiling, torch.cuda.get_device_capability(x.device))
    plain = (as_vector(name, vector, width) for name, vector in vectors.items())
    run(kernel, x, rows, matrix, *plain, added, out.view(-1, width))


@cache
def linear_norm_kernel(
    problem: NormProblem, config: NormConfig, capability: tuple[int, int]
) -> Any:
    """The compiled program of a problem (see ``compile_program``); needs no GPU."""
    program = linear_norm_program(problem, config, capability)
    return compile_program(program, capability, portable=problem.k <= config.block_k)


def linear_norm_program(
    problem: NormProblem, config: NormConfig, capability: tuple[int, int]
) -> Any:
    """The program: x [M, K], weight, bias, norm_weight, norm_bias [N], residual [M, N], out."""
    m, n, k, dtype, has_bias, has_residual, norm, has_scale, has_shift, eps, weight_kn = problem
    block_m, block_k, threads, stages = config
    half = NAMES[str(dtype)]
    steps = -(-k // block_k)
    depth_first = (block_k, n) if weight_kn else (n, block_k)
    hopper, centred = capability[0] >= 9, norm == "layer_norm"
    # few accumulators: two blocks may share a multiprocessor
    two_blocks = hopper and threads == 128 and block_m * n <= 64 * threads
    # all warps side by side: each has a part of every row
    policy = T.GemmWarpPolicy.FullCol

    def affine(value: Any, factor: Any, shift: Any, j: Any) -> Any:
        value = value * factor[j] if has_scale else value
        return value + shift[j] if has_shift else value

    @T.prim_func
    def tile_linear_norm(
        x: T.Tensor((m, k), half),  # type: ignore[valid-type]
        weight: T.Tensor((k, n) if weight_kn else (n, k), half),  # type: ignore[valid-type]
        bias: T.Tensor((n,), half),  # type: ignore[valid-type]
        norm_weight: T.Tensor((n,), half),  # type: ignore[valid-type]
        norm_bias: T.Tensor((n,), half),  # type: ignore[valid-type]
        residual: T.Tensor((m, n), half),  # type: ignore[valid-type]
        out: T.Tensor((m, n), half),  # type: ignore[valid-type]
    ):
        with T.Kernel(-(-m // block_m), threads=threads) as block:
            if two_blocks:
                T.no_set_max_nreg()
                T.annotate_min_blocks_per_sm(2)
            x_tile = T.alloc_shared((block_m, block_k), half)
            weight_tile = T.alloc_shared(depth_first, half)
            out_tile = T.alloc_shared((block_m, n), half)
            bias_row = T.alloc_shared((n,), half)
            weight_row = T.alloc_shared((n,), half)
            shift_row = T.alloc_shared((n,), half)
            if not hopper:
                T.annotate_layout({out_tile: make_swizzled_layout(out_tile)})
            acc = T.alloc_fragment((block_m, n), "float32")
            mean = T.alloc_fragment((block_m,), "float32")
            scale = T.alloc_fragment((block_m,), "float32")
            row = block * block_m

            # -- product ---------------------------------------------------------------------
            if has_bias:
                T.copy(bias, bias_row)
            if has_scale:
                T.copy(norm_weight, weight_row)
            if has_shift:
                T.copy(norm_bias, shift_row)
            T.clear(acc)
            for step in T.Pipelined(steps, num_stages=min(stages, steps)):
                T.copy(x[row, step * block_k], x_tile)
                if weight_kn:
                    T.copy(weight[step * block_k, 0], weight_tile)
                else:
                    T.copy(weight[0, step * block_k], weight_tile)
                T.gemm(x_tile, weight_tile, acc, transpose_B=not weight_kn, policy=policy)
            if has_bias:
                for i, j in T.Parallel(block_m, n):
                    acc[i, j] += bias_row[j]
            if has_residual:
                T.copy(residual[row, 0], out_tile)
                for i, j in T.Parallel(block_m, n):
                    acc[i, j] += out_tile[i, j]

            # -- norm: reducers add up in the accumulators' own layout, without a second copy -----
            # the ieee_ products keep TileLang from vectorizing the sums, in vain and with a warning
            if centred:
                sums = T.alloc_reducer((block_m,), "float32", op="sum")
                T.reducer_init(sums)
                for i, j in T.Parallel(block_m, n):
                    T.reducer_update(sums[i], T.ieee_mul(acc[i, j], 1.0))
                T.finalize_reducer(sums, mean)
                for i, j in T.Parallel(block_m, n):
                    acc[i, j] -= mean[i] * (1.0 / n)
            squares = T.alloc_reducer((block_m,), "float32", op="sum")
            T.reducer_init(squares)
            for i, j in T.Parallel(block_m, n):
                T.reducer_update(squares[i], T.ieee_mul(acc[i, j], acc[i, j]))
            T.finalize_reducer(squares, scale)
            for i in T.Parallel(block_m):
                scale[i] = T.rsqrt(scale[i] * (1.0 / n) + eps)
            for i, j in T.Parallel(block_m, n):
                acc[i, j] = affine(acc[i, j] * scale[i], weight_row, shift_row, j)
            T.copy(acc, out_tile)
            T.copy(out_tile, out[row, 0])

    return tile_linear_norm
