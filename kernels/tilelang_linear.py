"""Linear layer with its epilogue in TileLang: out = act(x @ weight.T + bias) + residual.

One block computes one tile of the result. On Hopper TileLang gives the loads to a warp group of
their own (bulk tensor copies) and the products to the others; before Hopper it pipelines
asynchronous copies.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout
from torch import Tensor

from .tilelang_activation import activate
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
# Tiles of so many rows are worked on column by column before the next rows are begun: their part
# of x and the weight stay in the L2 cache.
_GROUP = 8


class LinearConfig(NamedTuple):
    """How a program is tiled; a list of it is the operator's ``config`` argument."""

    block_m: int  # rows of a tile, multiple of 16
    block_n: int  # columns of a tile, multiple of 16
    block_k: int  # depth of a step, multiple of 16
    threads: int  # that compute: a multiple of 128
    stages: int  # depth of the load pipeline


class LinearProblem(NamedTuple):
    """What a program is compiled for."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    has_bias: bool
    has_residual: bool
    activation: str
    weight_kn: bool


def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    weight_kn: bool,
    config: Sequence[int],
    out: Tensor,
) -> None:
    """Write act(x @ weight.T + bias) + residual to ``out``.

    Args:
        x: [..., K], fp16 or bf16 on CUDA; K a multiple of 8. Copied if it is not contiguous.
        weight: [N, K], or [K, N] with ``weight_kn``; N a multiple of 8.
        bias: [N] or None. residual: [..., N] with as many rows as x, or None.
        activation: one of ``ACTIVATIONS``; computed in fp32, as is the sum with the residual.
        config: a LinearConfig.
        out: contiguous [..., N], dtype of x.
    Raises:
        ValueError: an argument does not fit the others.
    """
    check_alike(x, {"weight": weight, "bias": bias, "residual": residual, "out": out})
    tiling = LinearConfig(*check_config(config, LinearConfig._fields))
    matrix, kn = as_weight("weight", weight, weight_kn)
    depth, width = matrix.shape if kn else matrix.shape[::-1]
    rows = as_rows("x", x, depth)
    require(out.is_contiguous(), "out must be contiguous", out.stride())
    require(
        out.numel() == rows.shape[0] * width, f"out must end in {width} columns", tuple(out.shape)
    )
    if rows.shape[0] == 0:
        return
    added = None if residual is None else as_rows("residual", residual, width, rows.shape[0])
    problem = LinearProblem(
        rows.shape[0], width, depth, x.dtype, bias is not None, added is not None, activation, kn
    )
    kernel = linear_kernel(problem, tiling, torch.cuda.get_device_capability(x.device))
    run(kernel, x, rows, matrix, as_vector("bias", bias, width), added, out.view(-1, width))


@cache
def linear_kernel(problem: LinearProblem, config: LinearConfig, capability: tuple[int, int]) -> Any:
    """The compiled program of a problem (see ``compile_program``); needs no GPU."""
    program = linear_program(problem, config, capability)
    return compile_program(program, capability, portable=problem.k <= config.block_k)


def linear_program(
    problem: LinearProblem, config: LinearConfig, capability: tuple[int, int]
) -> Any:
    """The program, as TileLang takes it: x [M, K], weight, bias [N], residual [M, N], out."""
    m, n, k, dtype, has_bias, has_residual, activation, weight_kn = problem
    block_m, block_n, block_k, threads, stages = config
    half = NAMES[str(dtype)]
    steps = -(-k // block_k)
    row_tiles, col_tiles = -(-m // block_m), -(-n // block_n)
    depth_first = (block_k, block_n) if weight_kn else (block_n, block_k)
    hopper, active = capability[0] >= 9, activation != ""
    # whole rows for a warp group: its products then read the other operand once. Warps with
    # products of their own do better with squarer parts.
    whole_rows = hopper and block_m >= 64
    policy = T.GemmWarpPolicy.FullRow if whole_rows else T.GemmWarpPolicy.Square

    @T.prim_func
    def tile_linear(
        x: T.Tensor((m, k), half),  # type: ignore[valid-type]
        weight: T.Tensor((k, n) if weight_kn else (n, k), half),  # type: ignore[valid-type]
        bias: T.Tensor((n,), half),  # type: ignore[valid-type]
        residual: T.Tensor((m, n), half),  # type: ignore[valid-type]
        out: T.Tensor((m, n), half),  # type: ignore[valid-type]
    ):
        with T.Kernel(row_tiles * col_tiles, threads=threads) as block:
            if hopper and threads == 128:
                # one warp group computes: let two blocks share a multiprocessor in place of
                # giving all registers to one
                T.no_set_max_nreg()
                T.annotate_min_blocks_per_sm(2)
            x_tile = T.alloc_shared((block_m, block_k), half)
            weight_tile = T.alloc_shared(depth_first, half)
            bias_tile = T.alloc_shared((block_n,), half)
            out_tile = T.alloc_shared((block_m, block_n), half)
            if not hopper:
                T.annotate_layout({out_tile: make_swizzled_layout(out_tile)})
            acc = T.alloc_fragment((block_m, block_n), "float32")

            group = block // (_GROUP * col_tiles)
            inside = block % (_GROUP * col_tiles)
            height = T.min(row_tiles - group * _GROUP, _GROUP) if row_tiles % _GROUP else _GROUP
            row = (group * _GROUP + inside % height) * block_m
            col = (inside // height) * block_n

            # -- product ---------------------------------------------------------------------
            if has_bias:
                T.copy(bias[col], bias_tile)
            T.clear(acc)
            for step in T.Pipelined(steps, num_stages=min(stages, steps)):
                T.copy(x[row, step * block_k], x_tile)
                if weight_kn:
                    T.copy(weight[step * block_k, col], weight_tile)
                else:
                    T.copy(weight[col, step * block_k], weight_tile)
                T.gemm(x_tile, weight_tile, acc, transpose_B=not weight_kn, policy=policy)

            # -- epilogue: through shared memory, so that rows are read and written whole -----
            if has_bias:
                for i, j in T.Parallel(block_m, block_n):
                    acc[i, j] += bias_tile[j]
            if active:
                for i, j in T.Parallel(block_m, block_n):
                    acc[i, j] = activate(acc[i, j], activation, half)
            if has_residual:
                T.copy(residual[row, col], out_tile)
                for i, j in T.Parallel(block_m, block_n):
                    acc[i, j] += out_tile[i, j]
            T.copy(acc, out_tile)
            T.copy(out_tile, out[row, col])

    return tile_linear
