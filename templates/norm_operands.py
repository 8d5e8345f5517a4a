"""What the end of a straight recipe adds to its rows and how it normalises them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from stof_compile.templates.base import Slot

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, SpineStep, TensorSpec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NORMS = ("layer_norm", "rms_norm")
MAX_NORM_WIDTH = 16384
"""Longest row, elements: a program holds whole rows in registers (kernels/norm.py)."""


@dataclass(frozen=True)
class NormTail:
    """``norm(value + bias + residual)``, by operand numbers of the recipe.

    Args:
        fulls: operands of the value's own shape, in order; the rows themselves are among them
            where no step comes before.
        bias: vector that is added to every row, or None.
        weight, shift: of the norm, or None.
        norm: "layer_norm" or "rms_norm". eps: of the norm.
    """

    fulls: tuple[int, ...]
    bias: int | None
    weight: int | None
    shift: int | None
    norm: str
    eps: float


def device_refusal(device: DeviceFacts) -> str | None:
    """Why Triton templates do not run on a device, None where they do."""
    if not device.is_cuda or device.capability is None or device.runtime.startswith("rocm"):
        return f"Triton templates run on CUDA devices, not on {device.kind} ({device.name})"
    if device.capability < (8, 0):
        return f"Triton templates need compute capability 8.0, {device.name} has {device.arch}"
    return None


def operand_refusal(recipe: Recipe) -> str | None:
    """Why the operands or the result of a recipe have a dtype that no template computes in."""
    for number, operand in enumerate(recipe.operands):
        if operand.dtype not in DTYPES:
            return f"operand {number} is {operand.dtype}; fp16, bf16 and fp32 are taken"
        if operand.device != recipe.operands[0].device:
            return f"operand {number} is on {operand.device}, others are not"
    if recipe.result.dtype not in DTYPES:
        return f"the result is {recipe.result.dtype}; fp16, bf16 and fp32 are taken"
    return None


def norm_tail(
    recipe: Recipe,
    steps: Sequence[SpineStep],
    width: int,
    *,
    after: bool = False,
    bias: int | None = None,
) -> NormTail | str:
    """Read the adds and the norm at the end of a straight recipe.

    Args:
        recipe: the recipe. steps: its spine from the first add, or the norm, on.
        width: elements of a row.
        after: whether ``steps`` go on from a step before; else the first one reads the rows.
        bias: a vector that is added already (of a linear), or None.
    Returns:
        The tail, or why it is none.
    """
    rows = prod(recipe.result.shape) // max(1, width)
    fulls: list[int] = []
    vectors = [] if bias is None else [bias]
    norm: SpineStep | None = None
    for number, step in enumerate(steps):
        if step.kind in NORMS:
            if norm is not None:
                return "it has two norms"
            if step.passed != 0:
                return "the value is the weight of the norm"
            norm = step
        elif step.kind == "cast":
            if step.dtype != torch.float32 and number != len(steps) - 1:
                return f"it rounds to {step.dtype} before the end"
            fulls.extend(step.operands)  # the first step's: the rows
        elif step.kind == "add" and norm is None:
            if step.attr("number") is not None:
                return "it adds a number"
            for operand in step.operands:
                kind = added_kind(recipe.operands[operand], rows, width)
                if kind is None:
                    shape = recipe.operands[operand].shape
                    return f"it adds {shape}, neither [{width}] nor {rows} rows of it"
                (vectors if kind == "vector" else fulls).append(operand)
        else:
            place = "before" if norm is None else "behind"
            return f"a step '{step.kind}' stands {place} the norm"
    if norm is None:
        return f"it has no norm ({' or '.join(NORMS)})"
    if len(vectors) > 1:
        return f"it adds {len(vectors)} vectors, one is taken"
    return _read_norm(norm, not after and steps[0] is norm, fulls, vectors, width)


def _read_norm(
    norm: SpineStep, reads_rows: bool, fulls: list[int], vectors: list[int], width: int
) -> NormTail | str:
    read = list(norm.operands)
    if reads_rows:
        fulls = [read.pop(0)]
    weight = read.pop(0) if norm.attr("has_weight") else None
    shift = read.pop(0) if norm.attr("has_bias") else None
    eps = norm.attr("eps")
    if norm.attr("width") != width:
        return f"the norm goes over {norm.attr('width')} elements, a row has {width}"
    if not isinstance(eps, int | float):
        return "the norm has no eps of its own"
    bias = vectors[0] if vectors else None
    return NormTail(tuple(fulls), bias, weight, shift, norm.kind, float(eps))


def added_kind(operand: TensorSpec, rows: int, width: int) -> str | None:
    """Whether an operand is a "vector" of a row or "full" rows; None if it is neither."""
    if prod(operand.shape) == rows * width and operand.shape[-1:] == (width,) and rows != 1:
        return "full"
    if prod(operand.shape) == width and operand.shape[-1:] == (width,):
        return "full" if rows == 1 and len(operand.shape) > 1 else "vector"
    return None


def rows_refusal(recipe: Recipe, operands: Sequence[int]) -> str | None:
    """Why an operand cannot be read as rows with one stride between them."""
    for number in operands:
        operand = recipe.operands[number]
        if not has_row_stride(operand):
            return f"operand {number} of strides {operand.stride} would have to be copied"
    return None


def has_row_stride(operand: TensorSpec) -> bool:
    """Whether [..., N] is rows of unit stride, all the same distance apart."""
    if operand.shape[-1:] != (1,) and operand.stride[-1:] != (1,):
        return False
    outer = [(n, s) for n, s in zip(operand.shape[:-1], operand.stride[:-1], strict=True) if n != 1]
    return all(
        stride == inner_stride * inner_size
        for (_, stride), (inner_size, inner_stride) in pairwise(outer)
    )


def slot(operand: int | None) -> Slot | None:
    """The place of an operand in a call, None where there is none."""
    return None if operand is None else Slot(operand)
