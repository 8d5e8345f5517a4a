"""Template: a matrix product with bias and residual, and the norm of its rows (Triton)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from stof_compile.templates.base import Call, Template
from stof_compile.templates.linear_norm_configs import DIMS, FORMS, ProductSize, offered_configs
from stof_compile.templates.norm_operands import (
    MAX_NORM_WIDTH,
    NormTail,
    device_refusal,
    norm_tail,
    operand_refusal,
    rows_refusal,
    slot,
)
from stof_compile.templates.space import Config, ConfigSpace, Value
from torch import Tensor

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, SpineStep


class TritonLinearNorm(Template):
    """``norm(x @ weight.T [+ bias] [+ residual])`` as ``stof::fused_linear_norm``."""

    name = "triton_linear_norm"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        return device_refusal(device) or operand_refusal(recipe) or _refusal(recipe)

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """Tiles that fill the device, each with one or two splits of K, and whole rows.

        A pipeline is as deep as its loop and shared memory allow.
        """
        offered = offered_configs(_size(recipe), device)
        kept = tuple(tuple(config[name] for name in DIMS) for config in offered)
        dims = {name: tuple(sorted({config[name] for config in offered})) for name in DIMS}

        def refusal(config: Mapping[str, Value]) -> str | None:
            if tuple(config[name] for name in DIMS) in kept:
                return None
            return "this tile, split and pipeline do not suit the sizes, or do not fit the device"

        return ConfigSpace(dims, refusal, kept)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The first tile whose programs fill the device."""
        return offered_configs(_size(recipe), device)[0]

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        spine = recipe.spine()
        assert spine, "the recipe was not accepted"
        tail = _tail(recipe, spine)
        assert isinstance(tail, NormTail), "the recipe was not accepted"
        numbers = [FORMS.index(str(config["form"])), *(int(config[name]) for name in DIMS[1:])]
        single = recipe.result.dtype == torch.float32
        tf32 = single and torch.backends.cuda.matmul.fp32_precision == "tf32"
        transposed = spine[0].attr("weight_kn", False)
        return Call(
            linear_norm_kn if transposed else torch.ops.stof.fused_linear_norm.default,
            (
                slot(spine[0].operands[0]),
                slot(spine[0].operands[1]),
                slot(tail.bias),
                slot(tail.fulls[0] if tail.fulls else None),
                slot(tail.weight),
                slot(tail.shift),
                tail.norm,
                tail.eps,
                [*numbers, int(tf32)],
            ),
            recipe.result.shape,
        )


def linear_norm_kn(x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """``stof::fused_linear_norm`` of a weight [K, N]; on tensors or fx proxies."""
    return torch.ops.stof.fused_linear_norm.default(x, weight.t(), *rest)


def _size(recipe: Recipe) -> ProductSize:
    n = recipe.result.shape[-1]
    k = recipe.shape(recipe.steps[0].inputs[0])[-1]
    return ProductSize(prod(recipe.result.shape) // n, n, k, recipe.result.dtype.itemsize)


def _tail(recipe: Recipe, spine: tuple[SpineStep, ...]) -> NormTail | str:
    operands = spine[0].operands
    bias = operands[2] if len(operands) > 2 else None
    return norm_tail(recipe, spine[1:], recipe.result.shape[-1], after=True, bias=bias)


def _refusal(recipe: Recipe) -> str | None:
    spine = recipe.spine()
    if not spine:
        return "its steps are no straight line"
    if spine[0].kind != "linear":
        return f"it starts with '{spine[0].kind}', not with a linear"
    if len(recipe.result.shape) < 1 or not prod(recipe.result.shape):
        return "the result is empty or has no rows"
    tail = _tail(recipe, spine)
    if isinstance(tail, str):
        return tail
    x, weight = (recipe.operands[i] for i in spine[0].operands[:2])
    size = _size(recipe)
    produced = weight.shape[1 if spine[0].attr("weight_kn", False) else 0]
    if size.n > MAX_NORM_WIDTH:
        return f"rows have {size.n} elements, at most {MAX_NORM_WIDTH} fit"
    if produced != size.n or prod(x.shape) != size.rows * size.k or size.k == 0:
        return "the product is broadcast to more rows or columns"
    if len(tail.fulls) > 1:
        return f"it adds {len(tail.fulls)} tensors of {size.rows} rows, one is taken"
    if x.dtype != weight.dtype or x.dtype != recipe.result.dtype:
        return f"x is {x.dtype}, weight {weight.dtype}, result {recipe.result.dtype}: not one dtype"
    if 1 not in weight.stride:
        return f"the weight of strides {weight.stride} would have to be copied"
    return rows_refusal(recipe, [spine[0].operands[0], *tail.fulls])
