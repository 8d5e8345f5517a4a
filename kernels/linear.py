"""Fused linear layer: one launch for the product and what follows it element by element.

    y = activation(x @ weight.T + bias) [* factor] [+ residual]

Here: how the kernel of ``linear_kernel.py`` is configured and launched.

TMA descriptors are made on the device: those made on the host are not captured outside of Dynamo;
Inductor's launcher allocates the memory they need.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .linear_handoff import MAX_PARTS
from .linear_kernel import linear_kernel
from .linear_problem import (
    check_activation,
    describable,
    ensure_scratch_allocator,
    honest_parts,
    pieces,
    precision_of,
    processors,
)
from .operand_checks import (
    bias_of,
    check_input,
    check_mark,
    check_power_of_two,
    require,
    rows_of,
    weight_of,
)
from .problem import launchable, on_device

KERNELS = (linear_kernel,)
_NAME = "stof::fused_linear"
# Elements a thread may hold of each operand of the epilogue while the product runs.
_EARLY_PER_THREAD = 16


class LinearConfig(NamedTuple):
    """How the kernel is launched; a list of it is the operator's ``config`` argument."""

    block_m: int = 64  # rows of a tile
    block_n: int = 64  # columns of a tile
    block_k: int = 64  # depth of a load
    num_warps: int = 4
    num_stages: int = 3  # depth of the load pipeline
    group_m: int = 8  # rows of tiles that are walked together (L2)
    split_k: int = 1  # programs that share a tile, each with a part of K
    persistent: int = 0  # programs per multiprocessor that walk over the tiles; 0: one for a tile
    tma: int = 0  # 1: tensor descriptors (Hopper and newer; plain loads where rows are not aligned)
    depth_first: int = 0  # 1: a weight with unit stride along N is copied to have it along K


def fused_linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    activation: str,
    config: Sequence[int],
    marks: Tensor | None = None,
    mark: int = 0,
) -> Tensor:
    """Launch the fused linear layer.

    Args:
        x: [..., K], fp16, bf16 or fp32, any strides (copied unless its rows have one stride).
        weight: [N, K], unit stride along K or along N.
        bias: [N] or None.
        residual: [..., N], added last, as many rows as x, or None.
        factor: [..., N], multiplied with the activation's result, or None.
        activation: '' or a name of ``ACTIVATIONS`` (kernels/linear_epilogue.py).
        config: fields of LinearConfig.
        marks: int32 vector or None; ``marks[mark]`` becomes 1 if an element of the result is
            infinite, and stays what it is otherwise.
        mark: a multiple of ``MARK_STEP`` (kernels/operand_checks.py).

    Returns:
        [..., N], contiguous, dtype of x. Sums and epilogue are fp32, rounded once.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = LinearConfig(*config)
    check_input(x, _NAME)
    check_activation(activation, _NAME)
    check_power_of_two(_NAME, 16, block_m=how.block_m, block_n=how.block_n, block_k=how.block_k)
    require(
        1 <= how.split_k <= MAX_PARTS and not (how.split_k > 1 and how.persistent),
        _NAME,
        f"split_k must be in 1..{MAX_PARTS}, and 1 for persistent programs",
        (how.split_k, how.persistent),
    )
    k = x.shape[-1]
    w = weight_of("weight", weight, x, k, _NAME)
    if how.depth_first and w.kn:
        weight = weight.contiguous()
        w = weight_of("weight", weight, x, k, _NAME)
    n = weight.shape[0]
    rows = rows_of("x", x, x, k, _NAME)
    added = None if residual is None else rows_of("residual", residual, x, n, _NAME)
    times = None if factor is None else rows_of("factor", factor, x, n, _NAME)
    bias = bias_of("bias", bias, x, n, _NAME)
    m = rows.tensor.shape[0]
    if marks is not None:
        check_mark(marks, mark, x, _NAME)
    out = x.new_empty((m, n))
    if out.numel() == 0:
        return out.view(*x.shape[:-1], n)
    tma = bool(how.tma) and describable(rows.tensor, rows.stride) and describable(weight, w.stride)
    if tma:
        ensure_scratch_allocator()
    tiles = -(-m // how.block_m) * -(-n // how.block_n)
    steps = -(-k // how.block_k)
    split = honest_parts(steps, how.split_k)
    parts, flags = rows.tensor, rows.tensor  # of no use without parts
    if split > 1:
        # memory of this launch alone: linear_handoff.py says why it needs no zeros
        parts = x.new_empty((tiles * (split - 1), how.block_m * how.block_n), dtype=torch.float32)
        flags = x.new_empty((tiles * (split - 1),), dtype=torch.int64)
    programs = tiles * split
    if how.persistent:
        programs = min(tiles, how.persistent * processors(x))
    per_thread = how.block_m * how.block_n // (32 * how.num_warps)
    with on_device(x):
        launchable(linear_kernel, x)[(programs,)](
            rows.tensor, weight,
            rows.tensor if bias is None else bias,
            rows.tensor if added is None else added.tensor,
            rows.tensor if times is None else times.tensor,
            out, parts, flags, rows.tensor if marks is None else marks, mark, m,
            stride_x=rows.stride,
            stride_w=w.stride,
            stride_residual=0 if added is None else added.stride,
            stride_factor=0 if times is None else times.stride,
            N=n,
            K=k,
            WEIGHT_KN=w.kn,
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=added is not None,
            HAS_FACTOR=times is not None,
            BLOCK_M=how.block_m,
            BLOCK_N=how.block_n,
            BLOCK_K=how.block_k,
            GROUP_M=how.group_m,
            SPLIT_K=split,
            PERSISTENT=bool(how.persistent),
            TMA=tma,
            PIECES=pieces(
                how.block_m, how.block_n, how.num_warps, bool(how.persistent),
                added is not None or times is not None, split > 1,
            ),
            EARLY=not how.persistent and per_thread <= _EARLY_PER_THREAD,
            EVEN_M=m % how.block_m == 0,
            EVEN_N=n % how.block_n == 0,
            EVEN_K=k % how.block_k == 0,
            PRECISION=precision_of(x),
            MARKS=marks is not None,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], n)


def linear_flops(rows: int, n: int, k: int) -> int:
    """Multiplications and additions of the product."""
    return 2 * rows * n * k


def linear_bytes(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factor: Tensor | None
) -> int:
    """Bytes moved if every operand and the result pass memory once."""
    operands = [t for t in (x, weight, bias, residual, factor) if t is not None]
    out = x.numel() // x.shape[-1] * weight.shape[0]
    return sum(t.numel() * t.element_size() for t in operands) + out * x.element_size()
