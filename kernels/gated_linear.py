"""Gated linear layer: both products of a gated MLP in one launch.

    y = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)

Here: how the kernel of ``gated_linear_kernel.py`` is configured and launched.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .gated_linear_kernel import gated_linear_kernel
from .linear_problem import (
    check_activation,
    describable,
    ensure_scratch_allocator,
    pieces,
    precision_of,
    processors,
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

KERNELS = (gated_linear_kernel,)
_NAME = "stof::fused_gated_linear"


class GatedLinearConfig(NamedTuple):
    """How the kernel is launched; a list of it is the operator's ``config`` argument.

    A program sums two tiles of block_m x block_n.
    """

    block_m: int = 64  # rows of a tile
    block_n: int = 64  # columns of a tile
    block_k: int = 64  # depth of a load
    num_warps: int = 4
    num_stages: int = 3  # depth of the load pipeline
    group_m: int = 8  # rows of tiles that are walked together (L2)
    persistent: int = 0  # programs per multiprocessor that walk over the tiles; 0: one for a tile
    tma: int = 0  # 1: tensor descriptors (Hopper and newer; plain loads where rows are not aligned)


def fused_gated_linear_forward(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    config: Sequence[int],
) -> Tensor:
    """Launch the gated linear layer.

    Args:
        x: [..., K], fp16, bf16 or fp32, any strides (copied unless its rows have one stride).
        gate, up: [N, K], unit stride along K or along N.
        gate_bias, up_bias: [N] or None.
        activation: of the gate; '' or a name of ``ACTIVATIONS`` (kernels/linear_epilogue.py).
        config: fields of GatedLinearConfig.

    Returns:
        [..., N], contiguous, dtype of x. Sums and epilogue are fp32, rounded once.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = GatedLinearConfig(*config)
    check_input(x, _NAME)
    check_activation(activation, _NAME)
    check_power_of_two(_NAME, 16, block_m=how.block_m, block_n=how.block_n, block_k=how.block_k)
    k = x.shape[-1]
    g = weight_of("gate", gate, x, k, _NAME)
    u = weight_of("up", up, x, k, _NAME)
    n = gate.shape[0]
    require(up.shape[0] == n, _NAME, f"up must be [{n}, {k}] like gate", tuple(up.shape))
    gate_bias = bias_of("gate_bias", gate_bias, x, n, _NAME)
    up_bias = bias_of("up_bias", up_bias, x, n, _NAME)
    rows = rows_of("x", x, x, k, _NAME)
    m = rows.tensor.shape[0]
    out = x.new_empty((m, n))
    if out.numel() == 0:
        return out.view(*x.shape[:-1], n)
    tma = bool(how.tma) and all(describable(held.tensor, held.stride) for held in (rows, g, u))
    if tma:
        ensure_scratch_allocator()
    programs = -(-m // how.block_m) * -(-n // how.block_n)
    if how.persistent:
        programs = min(programs, how.persistent * processors(x))
    with on_device(x):
        launchable(gated_linear_kernel, x)[(programs,)](
            rows.tensor, gate, up,
            rows.tensor if gate_bias is None else gate_bias,
            rows.tensor if up_bias is None else up_bias,
            out, m,
            stride_x=rows.stride,
            stride_gate=g.stride,
            stride_up=u.stride,
            N=n,
            K=k,
            GATE_KN=g.kn,
            UP_KN=u.kn,
            ACTIVATION=activation,
            HAS_GATE_BIAS=gate_bias is not None,
            HAS_UP_BIAS=up_bias is not None,
            BLOCK_M=how.block_m,
            BLOCK_N=how.block_n,
            BLOCK_K=how.block_k,
            GROUP_M=how.group_m,
            PERSISTENT=bool(how.persistent),
            TMA=tma,
            PIECES=pieces(
                how.block_m, 2 * how.block_n, how.num_warps, bool(how.persistent), False
            ),
            EVEN_M=m % how.block_m == 0,
            EVEN_N=n % how.block_n == 0,
            EVEN_K=k % how.block_k == 0,
            PRECISION=precision_of(x),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], n)


def gated_linear_flops(rows: int, n: int, k: int) -> int:
    """Multiplications and additions of both products."""
    return 4 * rows * n * k


def gated_linear_bytes(x: Tensor, gate: Tensor, up: Tensor) -> int:
    """Bytes moved if x, both weights and the result pass memory once."""
    out = x.numel() // x.shape[-1] * gate.shape[0]
    return (x.numel() + gate.numel() + up.numel() + out) * x.element_size()
