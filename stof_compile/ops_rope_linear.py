"""The operator of linear layers with rotary embeddings: schema, fake and the way to the kernel."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stof_compile.launchers import load_launcher

_NAME = "stof::fused_rope_linear"


@torch.library.triton_op(_NAME, mutates_args=())
def fused_rope_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    rotated: int,
    config: Sequence[int],
) -> Tensor:
    """x @ weight.T + bias with its first heads rotated; see kernels/rope_linear.py.

    For inference: it has no gradient.
    """
    return _launcher()(x, weight, bias, cos, sin, head_dim, rotated, config)


@fused_rope_linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    if x.is_cuda:
        _launcher()
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _launcher() -> Callable[..., Tensor]:
    return load_launcher(_NAME, "rope_linear", "fused_rope_linear_forward")
