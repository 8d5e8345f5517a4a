"""What the TileLang templates share: which devices and recipes they take, how operands are read."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from stof_compile.templates.base import Slot

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, SpineStep, TensorSpec

HALF_TYPES = (torch.float16, torch.bfloat16)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
# Elements of a half type in 16 bytes, on which every row has to start.
LANES = 8


class Refused(Exception):
    """A recipe that a template does not take; its text is the reason."""


@dataclass(frozen=True)
class Layer:
    """A linear step and the vector added to it; operands are numbers of the recipe.

    Args:
        x: operand it reads, None if it reads the step before.
        weight: [N, K], or [K, N] with ``weight_kn``.
        bias: [N] or None.
        depth, width: K and N.
    """

    x: int | None
    weight: int
    weight_kn: bool
    bias: int | None
    depth: int
    width: int


@dataclass(frozen=True)
class Norm:
    """A norm over rows: ``layer_norm`` or ``rms_norm``; operands are numbers of the recipe."""

    kind: str
    weight: int | None
    bias: int | None
    eps: float


class Spine:
    """The steps of a straight recipe, read one after the other.

    Raises:
        Refused: by every method, when the recipe has something that no TileLang kernel takes.
    """

    def __init__(self, recipe: Recipe) -> None:
        steps = recipe.spine()
        if not steps:
            raise Refused("its steps are no straight line")
        if steps[0].kind != "linear":
            raise Refused(f"it starts with '{steps[0].kind}', not with 'linear'")
        self._recipe = recipe
        self._dtype = recipe.result.dtype
        self._rows = prod(recipe.result.shape[:-1])
        # a cast to the dtype a value has already
        self._steps = [s for s in steps if s.kind != "cast" or s.dtype != self._dtype]
        self._count = 0
        if self._rows == 0:
            raise Refused("the result has no rows")

    def linear(self) -> Layer:
        """A linear step with its bias, which may be an addition of its own."""
        first = self._count == 0
        step = self._take("linear")
        operands = list(step.operands)
        x = operands.pop(0) if first else None
        if x is not None:
            self._operand(x)
        elif step.passed != 0:
            raise Refused("the value passed on is a weight")
        weight = self._operand(operands[0], transposable=True)
        if len(weight.shape) != 2:
            raise Refused(f"the weight is {list(weight.shape)}, not a matrix")
        weight_kn = bool(step.attr("weight_kn", False))
        depth, width = weight.shape if weight_kn else weight.shape[::-1]
        if min(depth, width) == 0 or depth % LANES or width % LANES:
            raise Refused(f"rows of {depth} or {width} elements are no multiples of 16 bytes")
        layer = Layer(x, operands[0], weight_kn, None, depth, width)
        if len(operands) == 1:
            return replace(layer, bias=self.added(1, width))
        if prod(self._operand(operands[1]).shape) != width:
            raise Refused(f"operand {operands[1]} is added as a bias, but is no vector of {width}")
        return replace(layer, bias=operands[1])

    def activation(self) -> str:
        """The name of an activation, "" if the next step is none."""
        if self._next_kind() != "activation":
            return ""
        name = str(self._take("activation").attr("name"))
        if name not in ACTIVATIONS:
            raise Refused(f"the activation {name} is not among {', '.join(ACTIVATIONS)}")
        return name

    def residual(self, width: int) -> int | None:
        """Operand as large as the value that is added to it, None if the next step adds none."""
        return self.added(self._rows, width)

    def added(self, rows: int, width: int) -> int | None:
        """Operand of ``rows`` rows that the next step adds, None if it adds no such operand."""
        step = self._steps[self._count] if self._next_kind() == "add" else None
        if step is None or len(step.operands) != 1:
            return None
        shape = self._recipe.operands[step.operands[0]].shape
        if shape[-1:] != (width,) or prod(shape) != rows * width:
            return None
        self._operand(self._take("add").operands[0])
        return step.operands[0]

    def norm(self, width: int) -> Norm:
        """A norm over rows of ``width``."""
        kind = "rms_norm" if self._next_kind() == "rms_norm" else "layer_norm"
        step = self._take(kind)
        eps = step.attr("eps")
        if step.passed != 0 or step.attr("width") != width or eps is None:
            raise Refused("the norm is not over the rows of the product, or has no eps")
        vectors = list(step.operands)
        for operand in vectors:
            if prod(self._operand(operand).shape) != width:
                raise Refused(f"operand {operand} of the norm is no vector of {width}")
        weight = vectors.pop(0) if step.attr("has_weight") else None
        bias = vectors.pop(0) if step.attr("has_bias") else None
        return Norm(kind, weight, bias, float(eps))

    def end(self) -> None:
        """Refuse whatever is left."""
        if self._next_kind():
            raise Refused(f"it has no place for a step '{self._next_kind()}'")

    def _next_kind(self) -> str:
        return self._steps[self._count].kind if self._count < len(self._steps) else ""

    def _take(self, kind: str) -> SpineStep:
        if self._next_kind() != kind:
            raise Refused(f"it has '{self._next_kind() or 'nothing'}' in the place of '{kind}'")
        step = self._steps[self._count]
        if step.dtype != self._dtype or self._dtype not in HALF_TYPES:
            raise Refused(f"'{kind}' gives {step.dtype}; fp16 or bf16 throughout is taken")
        self._count += 1
        return step

    def _operand(self, number: int, transposable: bool = False) -> TensorSpec:
        spec = self._recipe.operands[number]
        if spec.dtype != self._dtype:
            raise Refused(f"operand {number} is {spec.dtype}, the result {self._dtype}")
        if not spec.device.startswith("cuda"):
            raise Refused(f"operand {number} is on {spec.device}")
        turned = replace(spec, shape=spec.shape[::-1], stride=spec.stride[::-1])
        if not (spec.contiguous or (transposable and turned.contiguous)):
            raise Refused(f"operand {number} has strides {list(spec.stride)}: not contiguous")
        return spec


def device_refusal(device: DeviceFacts) -> str | None:
    """Why TileLang kernels cannot run on a device, None if they can."""
    if not device.is_cuda or not device.runtime.startswith("cuda"):
        return f"TileLang kernels run on NVIDIA GPUs, this is {device.runtime}"
    if device.capability is None or device.capability < (8, 0):
        return f"TileLang kernels need compute capability 8.0, this is {device.capability}"
    if find_spec("tilelang") is None:
        return "tilelang is not installed"
    if not _has_nvcc():
        return "tilelang needs nvcc, from a CUDA toolkit or from pip install 'tilelang[nvcc]'"
    return None


def rows_of(recipe: Recipe) -> int:
    """Rows of the result: all dimensions but the last."""
    return prod(recipe.result.shape[:-1])


def slot(operand: int | None) -> Slot | None:
    """The place of an operand in a call, None for an absent one."""
    return None if operand is None else Slot(operand)


def _has_nvcc() -> bool:
    """Whether TileLang will find nvcc, in the places where it looks."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    if shutil.which("nvcc") or any(home and Path(home, "bin/nvcc").exists() for home in homes):
        return True
    try:
        files = distribution("nvidia-cuda-nvcc").files or []
    except PackageNotFoundError:
        return False
    return any(file.name == "nvcc" for file in files)
