"""What recipes of linear layers read and do, in the terms of the operators that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from stof_compile.templates.norm_operands import DTYPES, added_kind, device_refusal

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, SpineStep, TensorSpec

_Read = TypeVar("_Read")
_COUNTS = ("one product", "two products", "three products or more")


@dataclass(frozen=True)
class LinearOperands:
    """The product of a linear step, by operand numbers of the recipe.

    Args:
        x: None where the product reads the value before it.
        weight: [N, K], or [K, N] if ``kn``.
        bias: third input of the step, or None.
        n, k: columns and depth of the product.
    """

    x: int | None
    weight: int
    kn: bool
    bias: int | None
    n: int
    k: int


@dataclass
class LinearEnd:
    """What follows a product: ``activation(v + bias) [* factor] [+ residual]``; operand numbers."""

    bias: int | None = None
    activation: str = ""
    factor: int | None = None
    residual: int | None = None


Layer = tuple[LinearOperands, LinearEnd]
"""A product and what follows it."""


def linear_refusal(recipe: Recipe, device: DeviceFacts) -> str | None:
    """Why no Triton kernel of linear layers runs on a device or takes a recipe's dtypes."""
    return device_refusal(device) or dtype_refusal(recipe)


def dtype_refusal(recipe: Recipe) -> str | None:
    """Why no kernel of linear layers takes a recipe's dtypes, devices or size."""
    dtype = recipe.result.dtype
    if dtype not in DTYPES:
        return f"the result is {dtype}; fp16, bf16 and fp32 are taken"
    for number, operand in enumerate(recipe.operands):
        if operand.device != "cuda":
            return f"operand {number} is on {operand.device}"
        if operand.dtype != dtype:
            return f"operand {number} is {operand.dtype}, the result {dtype}"
    for step in recipe.steps:
        if step.dtype != dtype:
            return f"a step '{step.kind}' gives {step.dtype}, the result is {dtype}"
    if not recipe.result.shape or not prod(recipe.result.shape):
        return "the result is empty or has no rows"
    return None


def accepted(read: _Read | str) -> _Read:
    """What was read of a recipe that is known to be taken."""
    assert not isinstance(read, str), f"the recipe was not accepted: {read}"
    return read


def read_layer(recipe: Recipe) -> Layer | str:
    """Read a straight recipe of one product, or say why it cannot be read."""
    layers = read_layers(recipe, 1)
    return layers if isinstance(layers, str) else layers[0]


def read_half_layer(recipe: Recipe, device: DeviceFacts) -> Layer | str:
    """One product of fp16 or bf16 that a kernel on this device takes, or why there is none."""
    reason = linear_refusal(recipe, device)
    if reason is not None:
        return reason
    if recipe.result.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes fp16 and bf16, not {recipe.result.dtype}"
    return read_layer(recipe)


def read_layers(recipe: Recipe, count: int) -> tuple[Layer, ...] | str:
    """Read a straight recipe of ``count`` products, each with what follows it.

    Returns:
        What was read, or why it cannot be read.
    """
    steps: Sequence[SpineStep] = recipe.spine() or ()
    if not steps:
        return "its steps are no straight line"
    layers: list[Layer] = []
    while steps:
        product = read_product(recipe, steps[0], first=not layers)
        if isinstance(product, str):
            return product
        read = read_end(recipe, steps[1:], product.n, product.bias)
        if isinstance(read, str):
            return read
        end, steps = read
        layers.append((product, end))
    if len(layers) != count:
        return f"it has {_COUNTS[min(len(layers), len(_COUNTS)) - 1]} (steps 'linear')"
    return tuple(layers)


def read_product(recipe: Recipe, step: SpineStep, *, first: bool) -> LinearOperands | str:
    """Read a linear step of a spine, the first one or one that reads the value before it."""
    if step.kind != "linear":
        return f"it starts with '{step.kind}'" if first else f"'{step.kind}' is no product"
    if not first and step.passed != 0:
        return "the value is the weight of a product"
    x, rest = (step.operands[0], step.operands[1:]) if first else (None, step.operands)
    return product_of(recipe, x, rest, bool(step.attr("weight_kn", False)))


def by_columns(recipe: Recipe, product: LinearOperands) -> bool:
    """Whether a weight has no unit stride along the depth of its product, however it is written."""
    along_depth = recipe.operands[product.weight].stride[0 if product.kn else 1]
    return product.k > 1 and along_depth != 1


def product_of(
    recipe: Recipe, x: int | None, rest: Sequence[int], kn: bool
) -> LinearOperands | str:
    """Check the operands of a product: ``rest`` is the weight and, if there is one, the bias."""
    weight = recipe.operands[rest[0]]
    if len(weight.shape) != 2 or 0 in weight.shape:
        return f"the weight is {list(weight.shape)}"
    if 1 not in weight.stride and 1 not in weight.shape:
        return f"the weight has strides {list(weight.stride)}, none of them 1"
    n, k = reversed(weight.shape) if kn else weight.shape
    bias = rest[1] if len(rest) > 1 else None
    if bias is not None and not is_vector(recipe.operands[bias], n):
        return f"the bias is {list(recipe.operands[bias].shape)}, not [{n}]"
    return LinearOperands(x, rest[0], kn, bias, n, k)


def read_end(
    recipe: Recipe, steps: Sequence[SpineStep], n: int, bias: int | None
) -> tuple[LinearEnd, Sequence[SpineStep]] | str:
    """Read what follows a product of ``n`` columns, up to the next product.

    Returns:
        What was read and the steps from the next product on, or why it cannot be read.
    """
    rows = prod(recipe.result.shape[:-1])
    end = LinearEnd(bias=bias)
    for index, step in enumerate(steps):
        if step.kind == "linear":
            return end, steps[index:]
        if step.kind == "cast":
            continue  # of a dtype to itself: the dtypes are all the same
        reason = _read_step(recipe, step, end, rows, n)
        if reason is not None:
            return reason
    return end, ()


def is_vector(operand: TensorSpec, n: int) -> bool:
    """Whether an operand is [N], or [1, ..., N]."""
    return operand.shape[-1:] == (n,) and prod(operand.shape) == n


def transposing(op: Callable[..., Any], *positions: int) -> Callable[..., Any]:
    """An operator that takes [K, N] weights at some positions as they are stored."""
    if not positions:
        return op

    def call(*arguments: Any) -> Any:
        given = [a.t() if i in positions else a for i, a in enumerate(arguments)]
        return op(*given)

    return call


def _read_step(recipe: Recipe, step: SpineStep, end: LinearEnd, rows: int, n: int) -> str | None:
    """Take a step into ``end``, or say why it has no place there."""
    if step.kind == "activation":
        if end.activation or end.factor is not None or end.residual is not None:
            return "an activation stands behind another step of the end"
        end.activation = str(step.attr("name"))
        return None
    if step.kind not in ("add", "mul"):
        return f"a step '{step.kind}' stands behind a product"
    if step.attr("number") is not None:
        return f"a step '{step.kind}' has a number"
    (other,) = step.operands
    spec = recipe.operands[other]
    kind = added_kind(spec, rows, n)
    if kind is None:
        return f"'{step.kind}' reads {list(spec.shape)}, neither [{n}] nor {rows} rows of it"
    plain = not end.activation and end.factor is None
    if step.kind == "add" and is_vector(spec, n) and plain and end.bias is None:
        end.bias = other
    elif kind == "vector" and rows > 1:
        return f"a vector stands at '{step.kind}' behind the bias"
    elif step.kind == "add" and end.residual is None:
        end.residual = other
    elif step.kind == "mul" and end.factor is None and end.residual is None:
        end.factor = other
    else:
        return f"there is no place for a step '{step.kind}'"
    return None
