"""The operator of a linear layer with its epilogue on Hopper GPUs.

Opaque to torch.compile: its TMA descriptors are made at the call. Defined in a library and not as a
custom operator, which would take as long to get through as the rest of the launch. For inference:
called by hand with gradients recorded it gives none, with a warning of torch; the back end leaves
such graphs alone (``fusion_refusal``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("stof", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY.define(
    "hopper_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, "
    "int[] config) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "hopper_linear_marked(Tensor x, Tensor weight, Tensor? residual, str activation, int[] config, "
    "Tensor(a!) marks, int mark) -> Tensor",
    tags=_TAGS,
)


def _on_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: Sequence[int],
) -> Tensor:
    from stof_compile.kernels.hopper_linear import hopper_linear_forward

    return hopper_linear_forward(x, weight, bias, residual, activation, config)


def _marked_on_cuda(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    activation: str,
    config: Sequence[int],
    marks: Tensor,
    mark: int,
) -> Tensor:
    """Without a bias; marks[mark] becomes 1 if an element of the result is infinite."""
    from stof_compile.kernels.hopper_linear import hopper_linear_forward

    return hopper_linear_forward(x, weight, None, residual, activation, config, marks, mark)


_LIBRARY.impl("hopper_linear", _on_cuda, "CUDA")
_LIBRARY.impl("hopper_linear_marked", _marked_on_cuda, "CUDA")


@torch.library.register_fake("stof::hopper_linear")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: Sequence[int],
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("stof::hopper_linear_marked")
def _(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    activation: str,
    config: Sequence[int],
    marks: Tensor,
    mark: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
