"""A matrix product and the norm of its rows: checks, configs and launch.

out = norm(x @ weight.T [+ bias] [+ residual]) [* norm_weight] [+ norm_bias]
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .linear_norm_kernel import linear_norm_rows_kernel, linear_partials_kernel
from .norm import NormConfig, NormOperands, check_norm, launch_norm
from .norm_kernel import norm_rows_kernel
from .operand_checks import (
    Rows,
    check_input,
    check_power_of_two,
    check_weight,
    require,
    rows_of,
)
from .problem import launchable, on_device

KERNELS = (linear_partials_kernel, norm_rows_kernel, linear_norm_rows_kernel)
_NAME = "stof::fused_linear_norm"
SPLIT_K, FULL_ROW = 0, 1
MAX_FULL_ROW = 1024  # columns of a row that one program holds


class LinearNormConfig(NamedTuple):
    """How the product and its norm are launched; a list of it is the operator's ``config``.

    Form SPLIT_K runs two kernels: many small programs write partial sums of the product to a
    workspace [split_k, rows, N] (fp32; the dtype of x where split_k is 1), which stays in L2, then
    the norm kernel adds the planes in their order, the bias and the residual. Form FULL_ROW runs
    one kernel whose programs hold ``block_m`` whole rows; ``block_n``, ``split_k`` and the norm's
    fields mean nothing to it.
    """

    form: int = SPLIT_K
    block_m: int = 64
    block_n: int = 64
    block_k: int = 64
    split_k: int = 1  # parts of K; a part is whole tiles of block_k
    num_warps: int = 4
    num_stages: int = 3  # depth of the load pipeline
    norm_rows: int = 1  # rows of a program of the norm kernel
    norm_warps: int = 4
    tf32: int = 0  # 1: fp32 products may use TF32


def linear_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
    config: Sequence[int],
) -> Tensor:
    """Launch the product with its norm.

    Args:
        x: [..., K], fp16, bf16 or fp32, any strides; K > 0.
        weight: [N, K] in the dtype of x; unit stride along K or N (others are copied).
        bias: N elements, added to every row of the product, or None.
        residual: [..., N] with as many rows as x, or None.
        norm_weight, norm_bias, norm, eps: as for ``norm_forward``; N <= 16384, in form FULL_ROW
            <= 1024.
        config: fields of LinearNormConfig.
    Returns:
        Contiguous [..., N] in the dtype of x.
    Raises:
        ValueError: an argument does not fit the others.
    """
    how = LinearNormConfig(*config)
    check_input(x, _NAME)
    check_weight("weight", weight, x, x.shape[-1], _NAME)
    n, k = weight.shape
    operands = check_norm(x, n, bias, residual, norm_weight, norm_bias, norm, _NAME)
    _check_config(how, n)
    out = x.new_empty((*x.shape[:-1], n))
    if out.numel() == 0:
        return out
    rows = rows_of("x", x, x, k, _NAME)
    if 1 not in weight.stride():
        weight = weight.contiguous()
    if how.form == FULL_ROW:
        _launch_full_row(rows, weight, operands, out, norm, eps, how)
    else:
        dtype = torch.float32 if how.split_k > 1 else x.dtype
        partials = x.new_empty((how.split_k * rows.tensor.shape[0], n), dtype=dtype)
        _launch_partials(rows, weight, partials, how)
        norm_config = NormConfig(how.norm_rows, how.norm_warps)
        planes = Rows(partials, n)
        launch_norm(planes, how.split_k, operands, out, norm, eps, norm_config, _NAME)
    return out


def linear_norm_flops(rows: int, n: int, k: int) -> int:
    """Floating-point operations of the product; those of the norm add little."""
    return 2 * rows * n * k


def linear_norm_bytes(x: Tensor, weight: Tensor, *others: Tensor | None) -> int:
    """Bytes moved if the operands and the result each pass memory once (the workspace does not)."""
    read = sum(t.numel() * t.element_size() for t in (x, weight, *others) if t is not None)
    return read + x.numel() // x.shape[-1] * weight.shape[0] * x.element_size()


def row_tiles(n: int) -> tuple[int, int]:
    """Columns of the two tiles that hold a row: the largest power of two in n, and the rest.

    The second is 0 where there is no rest, and padded to a power of two >= 16.
    """
    left = max(16, 1 << (n.bit_length() - 1))
    rest = n - left
    return left, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def _check_config(how: LinearNormConfig, n: int) -> None:
    rule = "form must be 0 (split K) or 1 (full row)"
    require(how.form in (SPLIT_K, FULL_ROW), _NAME, rule, how.form)
    check_power_of_two(_NAME, 16, block_m=how.block_m, block_n=how.block_n, block_k=how.block_k)
    check_power_of_two(_NAME, num_warps=how.num_warps)
    require(how.split_k >= 1, _NAME, "split_k must be at least 1", how.split_k)
    if how.form == FULL_ROW:
        rule = f"full rows must have 16 to {MAX_FULL_ROW} columns"
        require(16 <= n <= MAX_FULL_ROW, _NAME, rule, n)


def _launch_partials(held: Rows, weight: Tensor, partials: Tensor, how: LinearNormConfig) -> None:
    x, (n, k) = held.tensor, weight.shape
    rows = x.shape[0]
    tiles_n = -(-n // how.block_n)
    k_tiles = -(-k // how.block_k)
    steps = -(-k_tiles // how.split_k)
    programs = -(-rows // how.block_m) * tiles_n * how.split_k
    with on_device(x):
        launchable(linear_partials_kernel, x)[(programs,)](
            x,
            weight,
            partials,
            rows,
            STRIDE_X=held.stride,
            STRIDE_WN=weight.stride(0),
            STRIDE_WK=weight.stride(1),
            N=n,
            K=k,
            TILES_N=tiles_n,
            STEPS=steps,
            EVEN_M=rows % how.block_m == 0,
            EVEN_N=n % how.block_n == 0,
            EVEN_K=k == how.split_k * steps * how.block_k,
            PRECISION="tf32" if how.tf32 else "ieee",
            BLOCK_M=how.block_m,
            BLOCK_N=how.block_n,
            BLOCK_K=how.block_k,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )


def _launch_full_row(
    held: Rows,
    weight: Tensor,
    operands: NormOperands,
    out: Tensor,
    norm: str,
    eps: float,
    how: LinearNormConfig,
) -> None:
    x, (n, k) = held.tensor, weight.shape
    rows = x.shape[0]
    bias, residual, scale, shift = operands
    left_n, right_n = row_tiles(n)
    with on_device(x):
        launchable(linear_norm_rows_kernel, x)[(-(-rows // how.block_m),)](
            x,
            weight,
            x if bias is None else bias,
            x if residual is None else residual.tensor,
            x if scale is None else scale,
            x if shift is None else shift,
            out,
            rows,
            STRIDE_X=held.stride,
            STRIDE_WN=weight.stride(0),
            STRIDE_WK=weight.stride(1),
            STRIDE_R=0 if residual is None else residual.stride,
            N=n,
            K=k,
            EPS=float(eps),
            RMS=norm == "rms_norm",
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=scale is not None,
            HAS_NORM_BIAS=shift is not None,
            EVEN_M=rows % how.block_m == 0,
            EVEN_K=k % how.block_k == 0,
            PRECISION="tf32" if how.tf32 else "ieee",
            BLOCK_M=how.block_m,
            LEFT_N=left_n,
            RIGHT_N=right_n,
            BLOCK_K=how.block_k,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )
