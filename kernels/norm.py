"""LayerNorm and RMSNorm of rows, behind a bias and a residual: checks and launch.

out = norm(x [+ bias] [+ residual]) [* norm_weight] [+ norm_bias]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .norm_kernel import norm_rows_kernel
from .problem import DTYPES, launchable, on_device

KERNELS = (norm_rows_kernel,)
NORMS = ("layer_norm", "rms_norm")
MAX_NORM_WIDTH = 16384  # elements of a row: a program holds whole rows in registers


class NormConfig(NamedTuple):
    """How the norm kernel is launched; a list of it is the operator's ``config`` argument."""

    rows: int = 1  # rows of a program, a power of two
    num_warps: int = 4


class NormOperands(NamedTuple):
    """Checked operands of a norm: vectors are 1-D and contiguous, the residual is [rows, N]."""

    bias: Tensor | None
    residual: Tensor | None
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
    require(x.dim() > 0, "x must be [..., N]", tuple(x.shape))
    n = x.shape[-1]
    out = x.new_empty(x.shape)
    operands = check_norm(
        x, x.numel() // max(1, n), n, bias, residual, norm_weight, norm_bias, norm
    )
    if out.numel() == 0:
        return out
    launch_norm(row_view(x, n), 1, operands, out, norm, eps, how)
    return out


def check_norm(
    x: Tensor,
    rows: int,
    n: int,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
) -> NormOperands:
    """Check what a norm of [rows, n] reads beside its rows, and bring it into form.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    require(norm in NORMS, f"norm must be one of {', '.join(NORMS)}", norm)
    require(x.dtype in DTYPES, "x must be fp16, bf16 or fp32", x.dtype)
    require(
        n <= MAX_NORM_WIDTH, f"rows must have at most {MAX_NORM_WIDTH} elements; leave it fused by "
        "torch.compile", n,
    )  # fmt: skip
    vectors = {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    for name, tensor in vectors.items():
        if tensor is not None:
            _check_operand(name, tensor, x)
            require(tensor.numel() == n, f"{name} must have {n} elements", tuple(tensor.shape))
    if residual is not None:
        _check_operand("residual", residual, x)
        require(
            residual.shape[-1:] == (n,) and residual.numel() == rows * n,
            f"residual must be [..., {n}] with {rows} rows", tuple(residual.shape),
        )  # fmt: skip
        residual = row_view(residual, n) if residual.numel() else residual
    flat = [None if t is None else t.reshape(-1).contiguous() for t in vectors.values()]
    return NormOperands(flat[0], residual, flat[1], flat[2])


def launch_norm(
    x: Tensor,
    partials: int,
    operands: NormOperands,
    out: Tensor,
    norm: str,
    eps: float,
    config: NormConfig,
) -> None:
    """Write ``norm(sum of x's planes + bias + residual)`` to ``out``.

    Args:
        x: [rows, N] with unit stride in a row, or contiguous [partials * rows, N].
        partials: planes of x.
        operands: what ``check_norm`` returned for [rows, N].
        out: contiguous, rows * N elements, not empty.
        norm, eps, config: as for ``norm_forward``.
    Raises:
        ValueError: the config is impossible.
    """
    n = x.shape[1]
    rows = x.shape[0] // partials
    check_power_of_two("rows", config.rows)
    check_power_of_two("num_warps", config.num_warps)
    bias, residual, weight, shift = operands
    with on_device(x):
        gpu_kernel(norm_rows_kernel, x)[(-(-rows // config.rows),)](
            x,
            x if bias is None else bias,
            x if residual is None else residual,
            x if weight is None else weight,
            x if shift is None else shift,
            out,
            rows,
            STRIDE_X=row_stride(x),
            STRIDE_R=0 if residual is None else row_stride(residual),
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


def row_view(tensor: Tensor, n: int) -> Tensor:
    """[..., n] as [rows, n] with unit stride in a row; a copy only where no view can do that."""
    rows = tensor.reshape(-1, n)
    return rows if n == 1 or rows.stride(1) == 1 else rows.contiguous()


def row_stride(rows: Tensor) -> int:
    """Elements from one row to the next; a single row has none, and takes its length."""
    return int(rows.stride(0)) if rows.shape[0] > 1 else int(rows.shape[1])


def gpu_kernel(kernel: Any, tensor: Tensor) -> Any:
    """``launchable``, after a check that names the rule for fusion kernels.

    Raises:
        ValueError: the tensor is on a device that has no Triton.
    """
    from triton.runtime.jit import JITFunction

    if isinstance(kernel, JITFunction):
        require(
            tensor.is_cuda,
            "Triton kernels run on a GPU (or under TRITON_INTERPRET=1); leave the operation to "
            "torch.compile elsewhere",
            tensor.device,
        )
    return launchable(kernel, tensor)


def check_power_of_two(name: str, value: int) -> None:
    """Refuse a config value that is no power of two.

    Raises:
        ValueError: it is none.
    """
    require(value > 0 and value & (value - 1) == 0, f"{name} must be a power of two", value)


def require(holds: bool, rule: str, got: object) -> None:
    """Raise a ValueError with the rule and the value got unless the rule holds."""
    if not holds:
        raise ValueError(f"fusion kernel: {rule}; got {got}")


def _check_operand(name: str, tensor: Tensor, x: Tensor) -> None:
    require(tensor.dtype in DTYPES, f"{name} must be fp16, bf16 or fp32", tensor.dtype)
    require(tensor.device == x.device, f"{name} must be on {x.device}", tensor.device)
