"""The recipe of one product with what follows it, read as a formula."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from stof_compile.fusion.recipe import Recipe, SpineStep


@dataclass(frozen=True)
class LinearForm:
    """y = activation(x @ weight.T + bias) [* factor] [+ residual]; operands by number.

    Args:
        x, weight, bias, factor, residual: operands; None where there is none. weight_kn: the
            weight is stored [K, N].
        activation: a name, "" for none.
        m, n, k: rows of x, rows and columns of the weight.
        dtype: of all operands and of the result.
    """

    x: int
    weight: int
    bias: int | None
    factor: int | None
    residual: int | None
    weight_kn: bool
    activation: str
    m: int
    n: int
    k: int
    dtype: torch.dtype


def linear_form(recipe: Recipe) -> LinearForm | str:
    """Read a recipe of one product; the reason where it is another."""
    spine = recipe.spine()
    if spine is None or not spine or spine[0].kind != "linear":
        return "it is no product followed by a line of operations"
    first, *rest = spine
    x, weight, *biases = first.operands
    *rows, k = recipe.operands[x].shape
    n, m = recipe.result.shape[-1], prod(rows)
    bias = biases[0] if biases else None
    activation, factor, residual = "", None, None
    for step in rest:
        other = step.operands[0] if step.operands else None
        if step.kind == "cast" and step.dtype == first.dtype:
            continue
        if step.kind == "activation" and not activation and factor is None and residual is None:
            activation = str(step.attr("name"))
        elif (
            step.kind == "add"
            and _is_vector(recipe, other, n)
            and not _taken(bias, activation, factor, residual)
        ):
            bias = other
        elif step.kind == "mul" and _is_same(recipe, other, m, n) and factor is None:
            if residual is not None:
                return "a factor behind the residual"
            factor = other
        elif step.kind == "add" and _is_same(recipe, other, m, n) and residual is None:
            residual = other
        else:
            return f"no place for '{_words(step)}' behind a product"
    used = [i for i in (x, weight, bias, factor, residual) if i is not None]
    dtypes = {recipe.operands[i].dtype for i in used} | {recipe.result.dtype}
    if len(dtypes) != 1:
        return f"several dtypes: {', '.join(sorted(map(str, dtypes)))}"
    if len(recipe.operands[weight].shape) != 2 or 1 not in recipe.operands[weight].stride:
        return "a weight without unit stride"
    return LinearForm(
        x, weight, bias, factor, residual, bool(first.attr("weight_kn", False)), activation,
        m, n, k, first.dtype,
    )  # fmt: skip


def _taken(bias: int | None, activation: str, factor: int | None, residual: int | None) -> bool:
    return bias is not None or bool(activation) or factor is not None or residual is not None


def _is_vector(recipe: Recipe, operand: int | None, n: int) -> bool:
    return operand is not None and recipe.operands[operand].shape == (n,)


def _is_same(recipe: Recipe, operand: int | None, m: int, n: int) -> bool:
    if operand is None:
        return False
    spec = recipe.operands[operand]
    return spec.shape[-1:] == (n,) and prod(spec.shape[:-1]) == m and 0 not in spec.stride


def _words(step: SpineStep) -> str:
    return f"{step.kind} {step.attr('name', '')}".strip()
