"""Two linear layers in one launch, for few rows.

    y = activation(x @ w1.T + b1) @ w2.T + b2 [+ residual]

Here: how the kernel of ``linear_chain_kernel.py`` is configured and launched. The hidden layer is
rounded to the dtype of x, as between two layers; it passes through the L2 cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .linear_chain_kernel import linear_chain_kernel
from .linear_handoff import MAX_PARTS
from .linear_problem import (
    check_activation,
    honest_parts,
    pieces,
    precision_of,
)
from .operand_checks import (
    bias_of,
    check_input,
    check_power_of_two,
    require,
    rows_of,
    weight_of,
)
from .problem import launchable, on_device

KERNELS = (linear_chain_kernel,)
_NAME = "stof::fused_linear_chain"
# Flags a program may wait for; the hidden layer has at most so many tiles side by side.
_MAX_TILES = 1024


class LinearChainConfig(NamedTuple):
    """How the kernel is launched; a list of it is the operator's ``config`` argument."""

    block_m: int = 32  # rows of a tile, in both layers
    block_h: int = 64  # columns of a tile of the hidden layer
    block_n: int = 64  # columns of a tile of the result
    block_k: int = 64  # depth of a load; at most block_h
    num_warps: int = 4
    num_stages: int = 4  # depth of the load pipeline
    split_k: int = 1  # programs that share a tile of the result, each with a part of the hidden


def fused_linear_chain_forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    activation: str,
    w2: Tensor,
    b2: Tensor | None,
    residual: Tensor | None,
    config: Sequence[int],
) -> Tensor:
    """Launch two linear layers.

    Args:
        x: [..., K], fp16, bf16 or fp32, any strides (copied unless its rows have one stride).
        w1: [H, K], unit stride along H or along K.
        b1: [H] or None.
        activation: between the layers; '' or a name of ``ACTIVATIONS`` (linear_epilogue.py).
        w2: [N, H], unit stride along N or along H.
        b2: [N] or None.
        residual: [..., N], added last, as many rows as x, or None.
        config: fields of LinearChainConfig.

    Returns:
        [..., N], contiguous, dtype of x. Sums are fp32; the hidden layer is rounded once, and so
        is the result.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = LinearChainConfig(*config)
    check_input(x, _NAME)
    check_activation(activation, _NAME)
    blocks = {name: size for name, size in how._asdict().items() if name.startswith("block_")}
    check_power_of_two(_NAME, 16, **blocks)
    require(
        how.block_k <= how.block_h, _NAME, "block_k must be <= block_h", (how.block_k, how.block_h)
    )
    require(1 <= how.split_k <= MAX_PARTS, _NAME, f"split_k must be in 1..{MAX_PARTS}", how.split_k)
    k = x.shape[-1]
    first = weight_of("w1", w1, x, k, _NAME)
    h = w1.shape[0]
    second = weight_of("w2", w2, x, h, _NAME)
    n = w2.shape[0]
    b1 = bias_of("b1", b1, x, h, _NAME)
    b2 = bias_of("b2", b2, x, n, _NAME)
    rows = rows_of("x", x, x, k, _NAME)
    added = None if residual is None else rows_of("residual", residual, x, n, _NAME)
    m = rows.tensor.shape[0]
    out = x.new_empty((m, n))
    if out.numel() == 0:
        return out.view(*x.shape[:-1], n)
    tiles_m, tiles_h, tiles_n = -(-m // how.block_m), -(-h // how.block_h), -(-n // how.block_n)
    require(
        0 < tiles_h <= _MAX_TILES and tiles_n <= _MAX_TILES,
        _NAME,
        f"H / block_h and N / block_n must be in 1..{_MAX_TILES}",
        (tiles_h, tiles_n),
    )
    split = honest_parts(tiles_h, how.split_k)
    hidden = x.new_empty((m, h))
    # memory of this launch alone: linear_handoff.py says why it needs no zeros
    hidden_flags = x.new_empty((tiles_m * tiles_n * tiles_h,), dtype=torch.int64)
    parts, part_flags = rows.tensor, rows.tensor  # of no use without parts
    if split > 1:
        slots = tiles_m * tiles_n * (split - 1)
        parts = x.new_empty((slots, how.block_m * how.block_n), dtype=torch.float32)
        part_flags = x.new_empty((slots,), dtype=torch.int64)
    with on_device(x):
        launchable(linear_chain_kernel, x)[(tiles_m * (tiles_h + tiles_n * split),)](
            rows.tensor, w1,
            rows.tensor if b1 is None else b1,
            w2,
            rows.tensor if b2 is None else b2,
            rows.tensor if added is None else added.tensor,
            hidden, out, parts, hidden_flags, part_flags, m,
            stride_x=rows.stride,
            stride_w1=first.stride,
            stride_w2=second.stride,
            stride_residual=0 if added is None else added.stride,
            N=n,
            H=h,
            K=k,
            W1_KN=first.kn,
            W2_KN=second.kn,
            ACTIVATION=activation,
            HAS_B1=b1 is not None,
            HAS_B2=b2 is not None,
            HAS_RESIDUAL=added is not None,
            BLOCK_M=how.block_m,
            BLOCK_H=how.block_h,
            BLOCK_N=how.block_n,
            BLOCK_K=how.block_k,
            SPLIT_K=split,
            PIECES=pieces(
                how.block_m, how.block_n, how.num_warps, False, added is not None, split > 1
            ),
            FLAGS=_lanes(-(-tiles_h // split)),
            READERS=_lanes(tiles_n),
            EVEN_M=m % how.block_m == 0,
            EVEN_H=h % how.block_h == 0,
            EVEN_N=n % how.block_n == 0,
            EVEN_K1=k % how.block_k == 0,
            EVEN_K2=h % how.block_k == 0,
            PRECISION=precision_of(x),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], n)


def _lanes(count: int) -> int:
    """A power of two that holds ``count``, at least a warp's."""
    return max(32, 1 << (count - 1).bit_length())


def linear_chain_flops(rows: int, n: int, h: int, k: int) -> int:
    """Multiplications and additions of both products."""
    return 2 * rows * h * (k + n)


def linear_chain_bytes(x: Tensor, w1: Tensor, w2: Tensor, residual: Tensor | None) -> int:
    """Bytes moved if the operands and the result pass memory once, the hidden layer not at all."""
    out = x.numel() // x.shape[-1] * w2.shape[0]
    added = 0 if residual is None else residual.numel()
    return (x.numel() + w1.numel() + w2.numel() + added + out) * x.element_size()
