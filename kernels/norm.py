"""LayerNorm and RMSNorm of rows, behind a bias and a residual: checks and launch.

out = norm(x [+ bias] [+ residual]) [* norm_weight] [+ norm_bias]
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .norm_kernel import norm_rows_kernel
from .operand_checks import Rows, check_input, check_power_of_two, require, rows_of, vector_of
from .problem import launchable, on_device

KERNELS = (norm_rows_kernel,)
_NAME = "stof::fused_norm"
NORMS = ("layer_norm", "rms_norm")
MAX_NORM_WIDTH = 16384  # elements of a row: a program holds whole rows in registers


class NormConfig(NamedTuple):
    """How the norm kernel is launched; a list of it is the operator's ``config`` argument."""

    rows: int = 1  # rows of a program, a power of two
    num_warps: int = 4


class NormOperands(NamedTuple):
    """Checked operands of a norm: vectors are 1-D and contiguous, the residual is [rows, N]."""

    bias: Tensor | None
    residual: Rows | None
    weight: Tensor | None
    shift: Tensor | None


def norm_forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
    config: Sequence[int],
) -> Tensor:
    """Launch the norm kernel.

    Args:
        x: [..., N], fp16, bf16 or fp32, any strides; N <= 16384.
        bias: N elements, added to every row, or None.
        residual: [..., N] with as many rows as x, added to x, or None.
        norm_weight, norm_bias: N elements each, factor and offset of the normalised rows, or None;
            an RMSNorm takes an offset too. Bias, residual, weight and offset may have other
            floating-point dtypes than x.
        norm: "layer_norm" or "rms_norm"; statistics are fp32, the variance that of the centred
            row.
        eps: added to the variance, or to the mean square.
        config: fields of NormConfig.
    Returns:
        Contiguous [..., N] in the dtype of x.
    Raises:
        ValueError: an argument does not fit the others.
    """
    how = NormConfig(*config)
    check_input(x, _NAME)
    n = x.shape[-1]
    out = x.new_empty(x.shape)
    operands = check_norm(x, n, bias, residual, norm_weight, norm_bias, norm, _NAME)
    if out.numel() == 0:
        return out
    launch_norm(rows_of("x", x, x, n, _NAME), 1, operands, out, norm, eps, how, _NAME)
    return out


def check_norm(
    x: Tensor,
    n: int,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    operator: str,
) -> NormOperands:
    """Check what a norm of rows of n elements, as many as x has, reads beside them; form it.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    require(norm in NORMS, operator, f"norm must be one of {', '.join(NORMS)}", norm)
    rule = f"rows must have at most {MAX_NORM_WIDTH} elements; leave it fused by torch.compile"
    require(n <= MAX_NORM_WIDTH, operator, rule, n)
    added = None
    if residual is not None:
        added = rows_of("residual", residual, x, n, operator, own_dtype=True)
    return NormOperands(
        vector_of("bias", bias, x, n, operator),
        added,
        vector_of("norm_weight", norm_weight, x, n, operator),
        vector_of("norm_bias", norm_bias, x, n, operator),
    )


def launch_norm(
    x: Rows,
    partials: int,
    operands: NormOperands,
    out: Tensor,
    norm: str,
    eps: float,
    config: NormConfig,
    operator: str,
) -> None:
    """Write ``norm(sum of x's planes + bias + residual)`` to ``out``.

    Args:
        x: [rows, N], or contiguous [partials * rows, N].
        partials: planes of x.
        operands: what ``check_norm`` returned for [rows, N].
        out: contiguous, rows * N elements, not empty.
        norm, eps, config: as for ``norm_forward``. operator: named in errors.
    Raises:
        ValueError: the config is impossible.
    """
    check_power_of_two(operator, rows=config.rows, num_warps=config.num_warps)
    held, n = x.tensor, x.tensor.shape[1]
    rows = held.shape[0] // partials
    bias, residual, weight, shift = operands
    with on_device(held):
        launchable(norm_rows_kernel, held)[(-(-rows // config.rows),)](
            held,
            held if bias is None else bias,
            held if residual is None else residual.tensor,
            held if weight is None else weight,
            held if shift is None else shift,
            out,
            rows,
            STRIDE_X=x.stride,
            STRIDE_R=0 if residual is None else residual.stride,
            PARTIALS=partials,
            N=n,
            EPS=float(eps),
            RMS=norm == "rms_norm",
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_NORM_BIAS=shift is not None,
            ROWS=config.rows,
            BLOCK_N=1 << (n - 1).bit_length(),
            EVEN_ROWS=rows % config.rows == 0,
            num_warps=config.num_warps,
        )


def norm_bytes(x: Tensor, *others: Tensor | None) -> int:
    """Bytes moved if x, the other operands and the result each pass memory once."""
    read = sum(t.numel() * t.element_size() for t in others if t is not None)
    return read + 2 * x.numel() * x.element_size()


def norm_flops(rows: int, n: int) -> int:
    """Floating-point operations of a LayerNorm with weight and offset; the rest adds little."""
    return 8 * rows * n
