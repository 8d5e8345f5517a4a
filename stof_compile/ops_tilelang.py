"""The operators that run TileLang kernels: schema, fake and the way to the kernels.

Each writes to a tensor it is given, so that Inductor plans the memory. The functions here allocate
that tensor and call the operator: two nodes in a graph, and like the operators they take fx proxies
too. For inference: they record no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.launchers import load_launcher

_LIBRARY = torch.library.Library("stof", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def tile_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    weight_kn: bool,
    config: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """act(x @ weight.T + bias) + residual; see ``linear_forward`` in kernels/tilelang_linear.py.

    Args:
        x: [..., K], fp16 or bf16 on CUDA. weight: [N, K], or [K, N] with ``weight_kn``.
        bias: [N] or None. residual: as many rows of N as x has rows, or None.
        activation: "", "gelu", "gelu_tanh", "relu" or "silu".
        config: block_m, block_n, block_k, threads, stages.
        shape: of the result, [..., N].
    Returns:
        A contiguous tensor of that shape and the dtype of x.
    """
    out = x.new_empty(tuple(shape))
    torch.ops.stof.tile_linear_out.default(
        x, weight, bias, residual, activation, weight_kn, config, out
    )
    return out


def tile_linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    weight_kn: bool,
    config: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """norm(x @ weight.T + bias + residual); see kernels/tilelang_linear_norm.py.

    Args:
        x, weight, bias, residual, weight_kn, shape: as in ``tile_linear``; N a multiple of 64, at
            most 1024.
        norm: "layer_norm" or "rms_norm". norm_weight, norm_bias: [N] or None.
        eps: added to the variance or mean square.
        config: block_m, block_k, threads, stages.
    Returns:
        A contiguous tensor of ``shape`` and the dtype of x.
    """
    out = x.new_empty(tuple(shape))
    torch.ops.stof.tile_linear_norm_out.default(
        x, weight, bias, residual, norm, norm_weight, norm_bias, eps, weight_kn, config, out
    )
    return out


def tile_chain(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    residual: Tensor | None,
    activation: str,
    weight1_kn: bool,
    weight2_kn: bool,
    config: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """act(x @ weight1.T + bias1) @ weight2.T + bias2 + residual; see kernels/tilelang_chain.py.

    Args:
        x: [..., K], fp16 or bf16 on CUDA.
        weight1: [H, K], or [K, H] with ``weight1_kn``. bias1: [H] or None.
        weight2: [N, H], or [H, N] with ``weight2_kn``. bias2: [N] or None.
        residual, activation, shape: as in ``tile_linear``.
        config: block_m, block_h, block_n, block_k, threads, stages.
    Returns:
        A contiguous tensor of ``shape`` and the dtype of x.
    """
    out = x.new_empty(tuple(shape))
    torch.ops.stof.tile_chain_out.default(
        x, weight1, bias1, weight2, bias2, residual, activation, weight1_kn, weight2_kn, config, out
    )
    return out


def _define(name: str, arguments: str, module: str, function: str) -> None:
    """An operator that writes to its last argument, ``out``, and returns nothing."""
    _LIBRARY.define(f"{name}({arguments}, Tensor(a!) out) -> ()", tags=_TAGS)
    _LIBRARY.impl(name, _launcher(name, module, function), "CUDA")
    _LIBRARY.impl(name, _nothing, "Meta")


def _launcher(name: str, module: str, function: str) -> Callable[..., None]:
    def launch(*arguments: Any) -> None:
        load_launcher(f"stof::{name}", module, function)(*arguments)

    return launch


def _nothing(*arguments: Any) -> None:
    """The fake: ``out`` is there already."""


_define(
    "tile_linear_out",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, bool weight_kn, "
    "int[] config",
    "tilelang_linear",
    "linear_forward",
)
_define(
    "tile_linear_norm_out",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str norm, Tensor? norm_weight, "
    "Tensor? norm_bias, float eps, bool weight_kn, int[] config",
    "tilelang_linear_norm",
    "linear_norm_forward",
)
_define(
    "tile_chain_out",
    "Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, Tensor? residual, "
    "str activation, bool weight1_kn, bool weight2_kn, int[] config",
    "tilelang_chain",
    "chain_forward",
)
