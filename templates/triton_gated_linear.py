"""Template: gate and up of a gated MLP, joined in one epilogue (Triton)."""

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
    is_vector,
    linear_refusal,
    product_of,
    transposing,
)
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, Ref

DIMENSIONS = (
    "block_m",
    "block_n",
    "block_k",
    "num_warps",
    "num_stages",
    "group_m",
    "persistent",
    "tma",
)
"""As the fields of ``GatedLinearConfig`` (kernels/gated_linear.py), in their order."""


@dataclass(frozen=True)
class _Branch:
    """One side of the product of both: ``activation(x @ weight.T + bias)``."""

    product: LinearOperands
    bias: int | None
    activation: str
    steps: frozenset[int]  # that it is made of


class TritonGatedLinear(Template):
    """``activation(x @ gate.T + b) * (x @ up.T + c)`` as ``stof::fused_gated_linear``."""

    name = "triton_gated_linear"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        reason = linear_refusal(recipe, device)
        if reason is not None:
            return reason
        read = _read(recipe)
        return read if isinstance(read, str) else None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """The tiles estimated to be fastest (see ``gemm_tiles``)."""
        return tile_space(_product(recipe), device, DIMENSIONS)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The tile estimated to be fastest."""
        return ranked_tiles(_product(recipe), device, DIMENSIONS)[0].config(DIMENSIONS)

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        gate, up = accepted(_read(recipe))
        assert gate.product.x is not None, "both products read an operand"
        stored = [1] * gate.product.kn + [2] * up.product.kn
        return Call(
            transposing(torch.ops.stof.fused_gated_linear.default, *stored),
            (
                Slot(gate.product.x),
                Slot(gate.product.weight),
                Slot(up.product.weight),
                slot(gate.bias),
                slot(up.bias),
                gate.activation,
                [int(config[name]) for name in DIMENSIONS],
            ),
            recipe.result.shape,
        )


def _read(recipe: Recipe) -> tuple[_Branch, _Branch] | str:
    """(gate, up) of a recipe: the gate has the activation."""
    last, seen = _skip(recipe, Ref("step", len(recipe.steps) - 1))
    if last is None:
        return "it has no product of two branches"
    step = recipe.steps[last]
    if step.kind != "mul" or step.attr("number") is not None:
        return f"it ends with '{step.kind}', not with the product of two branches"
    branches = []
    for side in step.inputs:
        branch = _read_branch(recipe, side)
        if isinstance(branch, str):
            return branch
        branches.append(branch)
    gate, up = branches
    if gate.steps & up.steps:
        return "both branches share a step"
    if len(gate.steps | up.steps | seen) != len(recipe.steps):
        return "it has steps besides the two branches"
    if gate.activation and up.activation:
        return "both branches have an activation"
    if up.activation:
        gate, up = up, gate
    if gate.product.x != up.product.x:
        return "the branches read different inputs"
    if gate.product.n != up.product.n:
        return f"the branches have {gate.product.n} and {up.product.n} columns"
    return gate, up


def _read_branch(recipe: Recipe, ref: Ref) -> _Branch | str:
    activation, bias = "", None
    index, steps = _skip(recipe, ref)
    if index is not None and recipe.steps[index].kind == "activation":
        activation = str(recipe.steps[index].attr("name"))
        index, more = _skip(recipe, recipe.steps[index].inputs[0])
        steps |= more
    if index is not None and recipe.steps[index].kind == "add":
        vectors = [r.index for r in recipe.steps[index].inputs if r.kind == "operand"]
        values = [r for r in recipe.steps[index].inputs if r.kind == "step"]
        if len(vectors) != 1 or len(values) != 1:
            return "a branch adds something that is no bias"
        bias = vectors[0]
        index, more = _skip(recipe, values[0])
        steps |= more
    if index is None or recipe.steps[index].kind != "linear":
        kind = "an operand" if index is None else f"'{recipe.steps[index].kind}'"
        return f"a branch starts with {kind}, not with a product"
    linear = recipe.steps[index]
    if any(r.kind != "operand" for r in linear.inputs):
        return "a product of a branch reads an earlier step"
    x, *rest = (r.index for r in linear.inputs)
    product = product_of(recipe, x, rest, bool(linear.attr("weight_kn", False)))
    if isinstance(product, str):
        return product
    if bias is not None and (
        product.bias is not None or not is_vector(recipe.operands[bias], product.n)
    ):
        return "a branch adds something beside its bias"
    return _Branch(product, product.bias if bias is None else bias, activation, frozenset(steps))


def _skip(recipe: Recipe, ref: Ref) -> tuple[int | None, set[int]]:
    """The step behind casts and regrouped rows (None: an operand), and all steps on the way."""
    seen: set[int] = set()
    while ref.kind == "step":
        step = recipe.steps[ref.index]
        seen.add(ref.index)
        keeps = step.shape[-1:] == recipe.shape(step.inputs[0])[-1:]
        if step.kind == "cast" or (step.kind == "reshape" and keeps):
            ref = step.inputs[0]
            continue
        return ref.index, seen
    return None, seen


def _product(recipe: Recipe) -> Product:
    gate, _ = accepted(_read(recipe))
    rows = prod(recipe.result.shape[:-1])
    return Product(rows, gate.product.n, gate.product.k, recipe.result.dtype, sums=2)
