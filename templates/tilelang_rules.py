"""What the TileLang templates share: which devices and recipes of linear layers they take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from stof_compile.templates.linear_operands import (
    Layer,
    LinearOperands,
    dtype_refusal,
    read_layers,
)

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

HALF_TYPES = (torch.float16, torch.bfloat16)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
# Elements of a half type in 16 bytes, on which every row has to start.
LANES = 8


def read_tiled_layers(recipe: Recipe, count: int) -> tuple[Layer, ...] | str:
    """Read ``count`` linear layers that TileLang kernels can run, or say why they cannot."""
    layers = read_layers(recipe, count)
    if isinstance(layers, str):
        return layers
    for _, end in layers:
        if end.activation not in ("", *ACTIVATIONS):
            return f"the activation {end.activation} is not among {', '.join(ACTIVATIONS)}"
        if end.factor is not None:
            return "it has no place for a step 'mul'"
    return tile_refusal(recipe, [product for product, _ in layers]) or layers


def tile_refusal(recipe: Recipe, products: Sequence[LinearOperands]) -> str | None:
    """Why TileLang kernels cannot read the operands of a recipe of such products."""
    reason = dtype_refusal(recipe)
    if reason is not None:
        return reason
    if recipe.result.dtype not in HALF_TYPES:
        return f"the result is {recipe.result.dtype}; fp16 or bf16 throughout is taken"
    weights = {product.weight for product in products}
    for number, spec in enumerate(recipe.operands):
        turned = replace(spec, shape=spec.shape[::-1], stride=spec.stride[::-1])
        if not (spec.contiguous or (number in weights and turned.contiguous)):
            return f"operand {number} has strides {list(spec.stride)}: not contiguous"
    for product in products:
        if product.n % LANES or product.k % LANES:
            sizes = f"{product.k} or {product.n}"
            return f"rows of {sizes} elements are no multiples of 16 bytes"
    return None


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


@cache
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
