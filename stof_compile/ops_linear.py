"""The operators of fused linear layers: schema, fake and the way to the kernels.

For inference: they have no gradient. Configs travel as lists of integers, in the order of the
fields of the named tuples beside the launchers. Kernels, and with them Triton, are imported when an
operator first meets a device that needs them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stof_compile.launchers import load_launcher

_LAUNCHERS = {
    "stof::fused_linear": ("linear", "fused_linear_forward"),
    "stof::fused_linear_marked": ("linear", "fused_linear_forward"),
    "stof::fused_gated_linear": ("gated_linear", "fused_gated_linear_forward"),
    "stof::fused_linear_chain": ("linear_chain", "fused_linear_chain_forward"),
}


@torch.library.triton_op("stof::fused_linear", mutates_args=())
def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    activation: str,
    config: Sequence[int],
) -> Tensor:
    """activation(x @ weight.T + bias) [* factor] [+ residual]; see kernels/linear.py."""
    return _launcher("stof::fused_linear")(x, weight, bias, residual, factor, activation, config)


@torch.library.triton_op("stof::fused_linear_marked", mutates_args={"marks"})
def fused_linear_marked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    factor: Tensor | None,
    activation: str,
    config: Sequence[int],
    marks: Tensor,
    mark: int,
) -> Tensor:
    """``stof::fused_linear``; marks[mark] becomes 1 if an element of the result is infinite."""
    return _launcher("stof::fused_linear_marked")(
        x, weight, bias, residual, factor, activation, config, marks, mark
    )


@torch.library.triton_op("stof::fused_gated_linear", mutates_args=())
def fused_gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    config: Sequence[int],
) -> Tensor:
    """activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias); see kernels/gated_linear.py."""
    return _launcher("stof::fused_gated_linear")(
        x, gate, up, gate_bias, up_bias, activation, config
    )


@torch.library.triton_op("stof::fused_linear_chain", mutates_args=())
def fused_linear_chain(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    activation: str,
    w2: Tensor,
    b2: Tensor | None,
    residual: Tensor | None,
    config: Sequence[int],
) -> Tensor:
    """activation(x @ w1.T + b1) @ w2.T + b2 [+ residual]; see kernels/linear_chain.py."""
    return _launcher("stof::fused_linear_chain")(x, w1, b1, activation, w2, b2, residual, config)


def mark_step() -> int:
    """Words from one mark of a graph to the next."""
    from stof_compile.kernels.operand_checks import MARK_STEP

    return MARK_STEP


@fused_linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return _fake("stof::fused_linear", x, weight)


@fused_linear_marked.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return _fake("stof::fused_linear_marked", x, weight)


@fused_gated_linear.register_fake
def _(x: Tensor, gate: Tensor, *rest: object) -> Tensor:
    return _fake("stof::fused_gated_linear", x, gate)


@fused_linear_chain.register_fake
def _(
    x: Tensor, w1: Tensor, b1: Tensor | None, activation: str, w2: Tensor, *rest: object
) -> Tensor:
    return _fake("stof::fused_linear_chain", x, w2)


def _fake(operator: str, x: Tensor, last_weight: Tensor) -> Tensor:
    if x.is_cuda:
        _launcher(operator)
    return x.new_empty((*x.shape[:-1], last_weight.shape[0]))


def _launcher(operator: str) -> Callable[..., Tensor]:
    return load_launcher(operator, *_LAUNCHERS[operator])
