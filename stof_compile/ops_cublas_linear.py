"""The operator of a linear layer whose activation cuBLAS computes in the product's epilogue.

Opaque to torch.compile, whose decomposition of ``aten::_addmm_activation`` would take product and
activation apart again. For inference, like ``stof::hopper_linear``.
"""

from math import prod

import torch
from torch import Tensor

ACTIVATIONS = ("relu", "gelu_tanh")

_LIBRARY = torch.library.Library("stof", "FRAGMENT")
_LIBRARY.define(
    "cublas_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``activation(x @ weight.T + bias)``.

    Args:
        x: [..., K]. weight: [N, K], any strides. bias: [N], [1, ..., N] or [1]; zeros if
            None.
        activation: one of ``ACTIVATIONS``.
    Raises:
        ValueError: there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"cublas_linear: activation {activation!r}, not one of {ACTIVATIONS}")
    n, k = weight.shape
    added = x.new_zeros(n) if bias is None else bias.flatten().expand(n)
    rows = x.reshape(prod(x.shape[:-1]), k)
    tanh = activation == "gelu_tanh"
    if x.is_cuda:  # its GELU is the one by tanh there, and the exact one on a CPU
        out: Tensor = torch.ops.aten._addmm_activation(added, rows, weight.t(), use_gelu=tanh)
    else:
        out = torch.addmm(added, rows, weight.t())
        out = torch.nn.functional.gelu(out, approximate="tanh") if tanh else out.relu()
    return out.reshape(*x.shape[:-1], n)


_LIBRARY.impl("cublas_linear", _forward, "CUDA")
_LIBRARY.impl("cublas_linear", _forward, "CPU")


@torch.library.register_fake("stof::cublas_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
