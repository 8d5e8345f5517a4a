"""Template: a linear layer with its activation in the epilogue of cuBLAS's own product."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.linear_operands import (
    accepted,
    read_half_layer,
    read_layer,
    transposing,
)
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe
from stof_compile.ops_cublas_linear import ACTIVATIONS


class CublasLinear(Template):
    """``relu`` or ``gelu`` (by tanh) of ``x @ weight.T + bias`` as ``stof::cublas_linear``.

    cuBLAS has no other activation. It chooses its tiles itself; the config names the activation, by
    which reports tell two such layers apart.
    """

    name = "cublas_linear"
    is_library = True

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        read = read_half_layer(recipe, device)
        if isinstance(read, str):
            return read
        product, end = read
        if end.activation not in ACTIVATIONS:
            return f"cuBLAS has no activation {end.activation!r} in its epilogue"
        if end.factor is not None or end.residual is not None:
            return "cuBLAS has nothing behind the activation"
        if prod(recipe.result.shape[:-1]) == 1 or product.n == 1:
            return "a single row or column takes another path in torch, without an epilogue"
        return None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """One config."""
        return ConfigSpace({name: (value,) for name, value in self.first(recipe, device).items()})

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """That one."""
        _, end = accepted(read_layer(recipe))
        return {"activation": end.activation}

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        product, end = accepted(read_layer(recipe))
        assert product.x is not None, "the first product reads an operand"
        return Call(
            transposing(torch.ops.stof.cublas_linear.default, *([1] if product.kn else [])),
            (Slot(product.x), Slot(product.weight), slot(end.bias), config["activation"]),
            recipe.result.shape,
        )
