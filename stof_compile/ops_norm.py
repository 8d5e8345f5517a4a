"""The operators that end in a norm: schema, fake and the way to the kernels.

For inference: they have no gradient. Kernels, and with them Triton, are imported when an operator
first meets a device that needs them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.launchers import load_launcher


@torch.library.triton_op("stof::fused_norm", mutates_args=())
def fused_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
    config: Sequence[int],
) -> Tensor:
    """Normalise the rows of x + bias + residual; see ``norm_forward`` in kernels/norm.py."""
    done: Tensor = _launcher("stof::fused_norm")(
        x, bias, residual, norm_weight, norm_bias, norm, eps, config
    )
    return done


@torch.library.triton_op("stof::fused_linear_norm", mutates_args=())
def fused_linear_norm(
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
    """Normalise the rows of x @ weight.T + bias + residual.

    See ``linear_norm_forward`` in kernels/linear_norm.py.
    """
    done: Tensor = _launcher("stof::fused_linear_norm")(
        x, weight, bias, residual, norm_weight, norm_bias, norm, eps, config
    )
    return done


_LAUNCHERS = {
    "stof::fused_norm": ("norm", "norm_forward"),
    "stof::fused_linear_norm": ("linear_norm", "linear_norm_forward"),
}


def _launcher(operator: str) -> Callable[..., Any]:
    return load_launcher(operator, *_LAUNCHERS[operator])


@fused_norm.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    if x.is_cuda:  # makes the kernels part of torch's cache keys
        _launcher("stof::fused_norm")
    return x.new_empty(x.shape)


@fused_linear_norm.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    if x.is_cuda:
        _launcher("stof::fused_linear_norm")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
