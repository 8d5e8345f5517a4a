"""Two linear layers in one TileLang kernel: out = act(x @ w1.T + b1) @ w2.T + b2 + residual.

A block computes whole rows; the hidden rows between the layers stay in its shared memory. Each
block reads both weights, so that this is for small weights (``MAX_WEIGHT_BYTES``).
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


class ChainConfig(NamedTuple):
    """How a program is tiled; a list of it is the operator's ``config`` argument."""

    block_m: int  # rows of a block, multiple of 16
    block_h: int  # hidden columns of a step, multiple of 16
    block_n: int  # columns of the result computed at once, multiple of 16
    block_k: int  # depth of a step of the first layer, multiple of 16
    threads: int  # 128 or 256
    stages: int  # depth of the load pipelines


class ChainProblem(NamedTuple):
    """What a program is compiled for."""

    m: int
    k: int
    hidden: int
    n: int
    dtype: torch.dtype
    has_bias1: bool
    has_bias2: bool
    has_residual: bool
    activation: str
    kn1: bool
    kn2: bool


def chain_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    residual: Tensor | None,
    activation: str,
    weight1_kn: bool,
    weight2_kn: bool,
    config: Sequence[int],
    out: Tensor,
) -> None:
    """Write act(x @ weight1.T + bias1) @ weight2.T + bias2 + residual to ``out``.

    Args:
        x: [..., K], fp16 or bf16 on CUDA; K a multiple of 8. Copied if it is not contiguous.
        weight1: [H, K], or [K, H] with ``weight1_kn``; H a multiple of 8.
        bias1: [H] or None.
        weight2: [N, H], or [H, N] with ``weight2_kn``; N a multiple of 8.
        bias2: [N] or None. residual: [..., N] with as many rows as x, or None.
        activation: one of ``ACTIVATIONS``, computed in fp32; the hidden rows are then rounded to
            the dtype of x, as between two layers.
        config: a ChainConfig.
        out: contiguous [..., N], dtype of x.
    Raises:
        ValueError: an argument does not fit the others.
    """
    others = {"weight1": weight1, "bias1": bias1, "weight2": weight2, "bias2": bias2}
    check_alike(x, {**others, "residual": residual, "out": out})
    tiling = ChainConfig(*check_config(config, ChainConfig._fields))
    first, kn1 = as_weight("weight1", weight1, weight1_kn)
    second, kn2 = as_weight("weight2", weight2, weight2_kn)
    depth, hidden = first.shape if kn1 else first.shape[::-1]
    inner, width = second.shape if kn2 else second.shape[::-1]
    require(inner == hidden, f"weight2 must take {hidden} columns", tuple(weight2.shape))
    rows = as_rows("x", x, depth)
    require(out.is_contiguous(), "out must be contiguous", out.stride())
    require(
        out.numel() == rows.shape[0] * width, f"out must end in {width} columns", tuple(out.shape)
    )
    if rows.shape[0] == 0:
        return
    added = None if residual is None else as_rows("residual", residual, width, rows.shape[0])
    problem = ChainProblem(
        rows.shape[0], depth, hidden, width, x.dtype, bias1 is not None, bias2 is not None,
        added is not None, activation, kn1, kn2,
    )  # fmt: skip
    kernel = chain_kernel(problem, tiling, torch.cuda.get_device_capability(x.device))
    bias1, bias2 = as_vector("bias1", bias1, hidden), as_vector("bias2", bias2, width)
    run(kernel, x, rows, first, bias1, second, bias2, added, out.view(-1, width))


@cache
def chain_kernel(problem: ChainProblem, config: ChainConfig, capability: tuple[int, int]) -> Any:
    """The compiled program of a problem (see ``compile_program``); needs no GPU."""
    program = chain_program(problem, config, capability)
    return compile_program(program, capability, portable=True)


def chain_program(problem: ChainProblem, config: ChainConfig, capability: tuple[int, int]) -> Any:
    """The program: x [M, K], weight1, bias1 [H], weight2, bias2 [N], residual [M, N], out.

    To be compiled as ``portable``: its pipelines are inside loops.
    """
    m, k, hidden, n, dtype, has_bias1, has_bias2, has_residual, activation, kn1, kn2 = problem
    block_m, block_h, block_n, block_k, threads, stages = config
    half = NAMES[str(dtype)]
    steps, chunks = -(-k // block_k), -(-hidden // block_h)
    active, ragged = activation != "", hidden % block_h != 0

    @T.prim_func
    def tile_chain(
        x: T.Tensor((m, k), half),  # type: ignore[valid-type]
        weight1: T.Tensor((k, hidden) if kn1 else (hidden, k), half),  # type: ignore[valid-type]
        bias1: T.Tensor((hidden,), half),  # type: ignore[valid-type]
        weight2: T.Tensor((hidden, n) if kn2 else (n, hidden), half),  # type: ignore[valid-type]
        bias2: T.Tensor((n,), half),  # type: ignore[valid-type]
        residual: T.Tensor((m, n), half),  # type: ignore[valid-type]
        out: T.Tensor((m, n), half),  # type: ignore[valid-type]
    ):
        with T.Kernel(-(-m // block_m), threads=threads) as block:
            x_tile = T.alloc_shared((block_m, block_k), half)
            tile1 = T.alloc_shared((block_k, block_h) if kn1 else (block_h, block_k), half)
            tile2 = T.alloc_shared((block_h, block_n) if kn2 else (block_n, block_h), half)
            hidden_tile = T.alloc_shared((chunks, block_m, block_h), half)
            out_tile = T.alloc_shared((block_m, block_n), half)
            if capability[0] < 9:
                T.annotate_layout({out_tile: make_swizzled_layout(out_tile)})
            acc1 = T.alloc_fragment((block_m, block_h), "float32")
            acc2 = T.alloc_fragment((block_m, block_n), "float32")
            row = block * block_m

            # -- first layer: all hidden columns of these rows -------------------------------
            for chunk in T.serial(chunks):
                T.clear(acc1)
                for step in T.Pipelined(steps, num_stages=min(stages, steps)):
                    T.copy(x[row, step * block_k], x_tile)
                    if kn1:
                        T.copy(weight1[step * block_k, chunk * block_h], tile1)
                    else:
                        T.copy(weight1[chunk * block_h, step * block_k], tile1)
                    T.gemm(x_tile, tile1, acc1, transpose_B=not kn1)
                if has_bias1:
                    for i, j in T.Parallel(block_m, block_h):
                        acc1[i, j] += bias1[chunk * block_h + j]
                if active:
                    for i, j in T.Parallel(block_m, block_h):
                        acc1[i, j] = activate(acc1[i, j], activation, half)
                if ragged:  # a row with inf has NaN past the last column, which would spread
                    for i, j in T.Parallel(block_m, block_h):
                        inside = chunk * block_h + j < hidden
                        acc1[i, j] = T.Select(inside, acc1[i, j], T.float32(0.0))
                T.copy(acc1, hidden_tile[chunk, :, :])

            # -- second layer --------------------------------------------------------------
            for part in T.serial(-(-n // block_n)):
                T.clear(acc2)
                for chunk in T.Pipelined(chunks, num_stages=min(stages, chunks)):
                    if kn2:
                        T.copy(weight2[chunk * block_h, part * block_n], tile2)
                    else:
                        T.copy(weight2[part * block_n, chunk * block_h], tile2)
                    T.gemm(hidden_tile[chunk, :, :], tile2, acc2, transpose_B=not kn2)
                if has_bias2:
                    for i, j in T.Parallel(block_m, block_n):
                        acc2[i, j] += bias2[part * block_n + j]
                if has_residual:
                    T.copy(residual[row, part * block_n], out_tile)
                    for i, j in T.Parallel(block_m, block_n):
                        acc2[i, j] += out_tile[i, j]
                T.copy(acc2, out_tile)
                T.copy(out_tile, out[row, part * block_n])

    return tile_chain
