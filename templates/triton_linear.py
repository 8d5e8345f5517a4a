"""Template: a linear layer with bias, activation, factor and residual in its epilogue (Triton)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.gemm_estimate import Product
from stof_compile.templates.gemm_tiles import ranked_tiles, tile_space
from stof_compile.templates.linear_operands import (
    accepted,
    by_columns,
    linear_refusal,
    read_layer,
    transposing,
)
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

DIMENSIONS = (
    "block_m",
    "block_n",
    "block_k",
    "num_warps",
    "num_stages",
    "group_m",
    "split_k",
    "persistent",
    "tma",
    "depth_first",
)
"""As the fields of ``LinearConfig`` (kernels/linear.py), in their order."""


class TritonLinear(Template):
    """``activation(x @ weight.T + bias) [* factor] [+ residual]`` as ``stof::fused_linear``."""

    name = "triton_linear"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        reason = linear_refusal(recipe, device)
        if reason is not None:
            return reason
        read = read_layer(recipe)
        return read if isinstance(read, str) else None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """The tiles estimated to be fastest (see ``gemm_tiles``)."""
        return tile_space(_product(recipe), device, DIMENSIONS)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The tile estimated to be fastest."""
        return ranked_tiles(_product(recipe), device, DIMENSIONS)[0].config(DIMENSIONS)

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        product, end = accepted(read_layer(recipe))
        assert product.x is not None, "the first product reads an operand"
        return Call(
            transposing(torch.ops.stof.fused_linear.default, *([1] if product.kn else [])),
            (
                Slot(product.x),
                Slot(product.weight),
                slot(end.bias),
                slot(end.residual),
                slot(end.factor),
                end.activation,
                [int(config[name]) for name in DIMENSIONS],
            ),
            recipe.result.shape,
        )


def _product(recipe: Recipe) -> Product:
    linear, _ = accepted(read_layer(recipe))
    rows = prod(recipe.result.shape[:-1])
    kn = by_columns(recipe, linear)
    return Product(rows, linear.n, linear.k, recipe.result.dtype, kn=kn)
