"""Recipes: what a segment computes, written so that a template can read it.

A recipe has no node and no name: operands are numbered in the order of their first use, as in the
segment's key, and steps refer to operands and to earlier steps. Equal segments have equal recipes.
Every spelling of an operation is one step (``F.linear``, ``addmm`` of a Conv1D and ``x @ w`` are
all ``linear``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stof_compile.fusion.rotate import rotated

Attribute = int | float | str | bool | tuple[int, ...]

# Binary steps and what they compute; a number among the inputs is the attribute "number", and
# "number_first" tells its side.
BINARY: Mapping[str, Any] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
}
UNARY: Mapping[str, Any] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
}
ACTIVATIONS: Mapping[str, Any] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Ref:
    """A value a step reads: operand ``index``, or the result of step ``index``."""

    kind: Literal["operand", "step"]
    index: int


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor looks like; sizes and strides are fixed."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, each once (expanded dimensions count as one)."""
        sizes = [n for n, s in zip(self.shape, self.stride, strict=True) if s != 0 or n == 0]
        return prod(sizes) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Step:
    """One operation of a recipe.

    Args:
        kind: ``linear`` | ``activation`` | ``layer_norm`` | ``rms_norm`` | ``cast`` | ``reshape`` |
            ``softmax`` | ``rope`` | a key of :data:`BINARY` or :data:`UNARY`.
        inputs: what it reads. ``linear``: x [..., K], weight [N, K] ([K, N] with the attribute
            ``weight_kn``), bias [N] if there is a third. Norms: x, weight and bias as the
            attributes ``has_weight`` and ``has_bias`` tell. ``rope``: x [..., N] and the tables
            cos and sin [T, head_dim] (see ``rotate.py``). Binary steps: both sides, or one and
            the attribute ``number``.
        shape, dtype: of its result.
        attrs: (name, value) pairs, sorted: ``name`` of an activation, ``eps`` and ``width`` of a
            norm (width: elements of a normalised row), ``number`` and ``number_first`` of a
            binary step, ``head_dim`` and ``heads`` of a rope.
    """

    kind: str
    inputs: tuple[Ref, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    attrs: tuple[tuple[str, Attribute], ...] = ()

    def attr(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, ``default`` where it has none."""
        return dict(self.attrs).get(name, default)


@dataclass(frozen=True)
class SpineStep:
    """A step of a straight recipe (see :meth:`Recipe.spine`).

    Args:
        kind, attrs, dtype: as of the step.
        operands: operand numbers it reads beside the value passed on, in order; of the first step
            all of them.
        passed: place of the value passed on among its inputs (0 or 1); tells ``a - v`` from
            ``v - a``. 0 for the first step.
    """

    kind: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    attrs: tuple[tuple[str, Attribute], ...] = ()
    passed: int = 0

    def attr(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, ``default`` where it has none."""
        return dict(self.attrs).get(name, default)


@dataclass(frozen=True)
class Recipe:
    """What a segment computes; its result is that of the last step.

    Args:
        operands: the tensors it reads from outside.
        steps: at least one; each reads operands and earlier steps only.
    """

    operands: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]

    @cached_property
    def key(self) -> str:
        """sha256 of all it says: the key of its trials, the same in every process."""
        operands = [[o.shape, o.stride, str(o.dtype), o.device] for o in self.operands]
        steps = [
            [s.kind, [(r.kind, r.index) for r in s.inputs], s.shape, str(s.dtype), s.attrs]
            for s in self.steps
        ]
        told = [operands, steps, fp32_products()] if self._is_single else [operands, steps]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @property
    def _is_single(self) -> bool:
        """Whether it multiplies fp32 values, which PyTorch may be told to do in TF32."""
        return any(s.kind == "linear" and s.dtype == torch.float32 for s in self.steps)

    @property
    def result(self) -> Step:
        """The last step: shape and dtype of what the segment returns."""
        return self.steps[-1]

    @property
    def contractions(self) -> int:
        """Number of compute-intensive steps."""
        return sum(step.kind == "linear" for step in self.steps)

    @property
    def flops(self) -> int:
        """Multiplications and additions of its contractions."""
        total = 0
        for step in self.steps:
            if step.kind == "linear":
                total += 2 * prod(step.shape) * self.shape(step.inputs[0])[-1]
        return total

    @property
    def nbytes(self) -> int:
        """Bytes it has to move when nothing inside goes to memory: operands once, result once."""
        result = prod(self.result.shape) * self.result.dtype.itemsize
        return sum(operand.nbytes for operand in self.operands) + result

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Shape of what a reference names."""
        held = self.operands if ref.kind == "operand" else self.steps
        return held[ref.index].shape

    def dtype(self, ref: Ref) -> torch.dtype:
        """Dtype of what a reference names."""
        held = self.operands if ref.kind == "operand" else self.steps
        return held[ref.index].dtype

    def spine(self) -> tuple[SpineStep, ...] | None:
        """The recipe as a straight line, None when it is none.

        In a straight recipe each step but the first reads exactly one earlier result, once, and
        that is the one just before it. Reshapes that keep the last dimension are left out: they
        only regroup rows.
        """
        found: list[SpineStep] = []
        previous = -1
        for index, step in enumerate(self.steps):
            inner = [i for i, ref in enumerate(step.inputs) if ref.kind == "step"]
            if index == 0:
                if inner:
                    return None
            elif len(inner) != 1 or step.inputs[inner[0]].index != previous:
                return None
            previous = index
            grown = inner and prod(step.shape) != prod(self.shape(step.inputs[inner[0]]))
            if grown and step.kind != "linear":
                return None  # the other side is the larger one: the value is broadcast
            if step.kind == "reshape":
                if step.shape[-1:] != self.shape(step.inputs[0])[-1:]:
                    return None
                if index == 0 and len(self.steps) > 1:
                    return None
                continue
            operands = tuple(ref.index for ref in step.inputs if ref.kind == "operand")
            passed = inner[0] if inner else 0
            found.append(SpineStep(step.kind, operands, step.dtype, step.attrs, passed))
        return tuple(found)


def fp32_products() -> str:
    """How PyTorch multiplies fp32 matrices on CUDA now: "ieee", or "tf32" where that is allowed."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def run_recipe(
    recipe: Recipe, operands: Sequence[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Compute a recipe step by step: the definition that every template is checked against.

    Args:
        operands: tensors as ``recipe.operands`` describes them, on any device.
        dtype: compute all floating-point values in this dtype (fp64 for an oracle) in place of
            their own, casts included; None = as written.
    Returns:
        The result, in ``dtype`` or the recipe's own.
    """
    given = [t.to(dtype) if dtype is not None and t.is_floating_point() else t for t in operands]
    results: list[Tensor] = []
    for step in recipe.steps:
        values = [(given if r.kind == "operand" else results)[r.index] for r in step.inputs]
        results.append(_run_step(step, values, dtype))
    return results[-1]


def _run_step(step: Step, values: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    kind = step.kind
    if kind == "linear":
        x, weight, *bias = values
        weight = weight.t() if step.attr("weight_kn", False) else weight
        return F.linear(x, weight, *bias)
    if kind == "activation":
        done: Tensor = ACTIVATIONS[step.attr("name")](values[0])
        return done
    if kind in ("layer_norm", "rms_norm"):
        x, *rest = values
        factor = rest.pop(0) if step.attr("has_weight") else None
        width, eps = (int(step.attr("width")),), step.attr("eps")
        if kind == "rms_norm":
            normalised: Tensor = F.rms_norm(x, width, factor, eps)
            return normalised
        return F.layer_norm(x, width, factor, rest[0] if step.attr("has_bias") else None, eps)
    if kind == "cast":
        return values[0] if dtype is not None else values[0].to(step.dtype)
    if kind == "reshape":
        return values[0].reshape(step.shape)
    if kind == "softmax":
        return values[0].softmax(-1)
    if kind == "rope":
        return _rope(step, *values)
    if kind in UNARY:
        alone: Tensor = UNARY[kind](values[0])
        return alone
    assert kind in BINARY, f"no step of kind {kind!r}"
    number = step.attr("number")
    result: Tensor
    if number is not None:
        pair = (number, values[0]) if step.attr("number_first") else (values[0], number)
        if kind == "pow" or not step.attr("number_first"):
            result = BINARY[kind](*pair)
        else:  # torch.sub and the like want a tensor first
            result = BINARY[kind](torch.full_like(values[0], number), values[0])
        return result
    result = BINARY[kind](*values)
    return result


def _rope(step: Step, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    sizes = prod(x.shape[:-1]), x.shape[-1], cos.shape[0]
    head_dim, heads = int(step.attr("head_dim")), step.attr("heads")
    parts = rotated(x.reshape(sizes[:2]), cos, sin, sizes, head_dim, heads)
    return torch.cat(parts, -1).reshape(x.shape)
