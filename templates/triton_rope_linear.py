"""Template: a linear layer whose epilogue rotates the heads of Q and K (Triton)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.gemm_estimate import Product
from stof_compile.templates.gemm_tiles import ranked_tiles, tile_space
from stof_compile.templates.linear_operands import (
    LinearOperands,
    accepted,
    by_columns,
    linear_refusal,
    product_of,
    transposing,
)
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value
from stof_compile.templates.triton_linear import DIMENSIONS

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

HEAD_DIMS = (32, 64, 128, 256)
"""Head dims that the search may choose; the operator takes 16 as well."""


@dataclass(frozen=True)
class _Rope:
    """A product and its rotation; ``cos`` and ``sin`` are operand numbers."""

    product: LinearOperands
    cos: int
    sin: int
    head_dim: int
    columns: int


class TritonRopeLinear(Template):
    """``rope(x @ weight.T + bias)`` as ``stof::fused_rope_linear``."""

    name = "triton_rope_linear"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        reason = linear_refusal(recipe, device)
        if reason is not None:
            return reason
        read = _read(recipe)
        return read if isinstance(read, str) else None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """The tiles of whole heads estimated to be fastest (see ``gemm_tiles``)."""
        return tile_space(_product(recipe), device, DIMENSIONS)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The tile estimated to be fastest."""
        return ranked_tiles(_product(recipe), device, DIMENSIONS)[0].config(DIMENSIONS)

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        rope = accepted(_read(recipe))
        assert rope.product.x is not None, "the product reads an operand"
        return Call(
            transposing(
                torch.ops.stof.fused_rope_linear.default, *([1] if rope.product.kn else [])
            ),
            (
                Slot(rope.product.x),
                Slot(rope.product.weight),
                slot(rope.product.bias),
                Slot(rope.cos),
                Slot(rope.sin),
                rope.head_dim,
                rope.columns,
                [int(config[name]) for name in DIMENSIONS],
            ),
            recipe.result.shape,
        )


def _read(recipe: Recipe) -> _Rope | str:
    """Read a product and the rotation behind it, or say why the recipe is none."""
    if [step.kind for step in recipe.steps] != ["linear", "rope"]:
        return "it is no product with a rotation behind it"
    linear, rope = recipe.steps
    value, *tables = rope.inputs
    outside = (*linear.inputs, *tables)
    if value.kind != "step" or any(ref.kind != "operand" for ref in outside):
        return "the rotation reads something other than the product and two tables"
    x, *rest = (ref.index for ref in linear.inputs)
    product = product_of(recipe, x, rest, bool(linear.attr("weight_kn", False)))
    if isinstance(product, str):
        return product
    head_dim, heads = int(rope.attr("head_dim")), tuple(rope.attr("heads"))
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} elements; {', '.join(map(str, HEAD_DIMS))} are taken"
    columns = sum(heads) * head_dim
    if product.n % head_dim or not 0 < columns <= product.n:
        return f"{product.n} columns are not whole heads, or {columns} of them cannot be rotated"
    rows = prod(recipe.result.shape[:-1])
    cos, sin = (ref.index for ref in tables)
    for name, number in (("cos", cos), ("sin", sin)):
        shape = recipe.operands[number].shape
        if len(shape) != 2 or shape[1] != head_dim or shape[0] == 0 or rows % shape[0]:
            return f"{name} is {list(shape)}, not [T, {head_dim}] with T a divisor of {rows}"
    if recipe.operands[cos].shape != recipe.operands[sin].shape:
        return "cos and sin have different shapes"
    return _Rope(product, cos, sin, head_dim, columns)


def _product(recipe: Recipe) -> Product:
    rope = accepted(_read(recipe))
    rows = prod(recipe.result.shape[:-1])
    n, k = rope.product.n, rope.product.k
    dtype, kn = recipe.result.dtype, by_columns(recipe, rope.product)
    return Product(rows, n, k, dtype, column_step=rope.head_dim, kn=kn)
