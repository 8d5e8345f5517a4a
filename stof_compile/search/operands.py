"""Random tensors that the operands of a recipe could be."""

from __future__ import annotations

import torch
from torch import Tensor

from stof_compile.fusion.recipe import Recipe, TensorSpec


def random_operand(
    recipe: Recipe, index: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """A tensor that an operand could be: weights scaled by their fan-in, all else unit normal."""
    spec = recipe.operands[index]
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    values = torch.randn(_stored(spec), device=device, dtype=torch.float32, generator=generator)
    for step in recipe.steps:
        places = [r.index for r in step.inputs[1:2] if r.kind == "operand"]
        if step.kind == "linear" and index in places:
            fan_in = recipe.shape(step.inputs[0])[-1]
            values = values * max(fan_in, 1) ** -0.5
    tensor.as_strided(_stored(spec), _stored_stride(spec)).copy_(values)
    return tensor


def _stored(spec: TensorSpec) -> tuple[int, ...]:
    """Sizes without repetition: an expanded dimension is stored once."""
    return tuple(1 if s == 0 else n for n, s in zip(spec.shape, spec.stride, strict=True))


def _stored_stride(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(spec.stride)
