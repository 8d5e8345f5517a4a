"""The operator of a linear layer with its epilogue on Hopper GPUs."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("stof::hopper_linear", mutates_args=(), device_types="cuda")
def hopper_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: Sequence[int],
) -> Tensor:
    """Multiply and finish; see ``hopper_linear_forward`` in kernels/.

    Opaque to torch.compile: its TMA descriptors are made at the call.
    """
    from stof_compile.kernels.hopper_linear import hopper_linear_forward

    return hopper_linear_forward(x, weight, bias, residual, activation, config)


@hopper_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: Sequence[int],
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
