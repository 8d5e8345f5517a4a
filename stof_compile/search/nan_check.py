"""Whether a library's kernel keeps NaN, which operands of finite numbers do not show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.fusion.recipe import Recipe, run_recipe


def keeps_nan(recipe: Recipe, call: Callable[..., Any], operands: Sequence[Tensor]) -> bool:
    """Whether a call gives NaN where the recipe does, if each operand begins with one.

    Libraries are free to write ReLU as a maximum that drops NaN, in some of their kernels and
    versions: so it is asked of the call itself, on operands of the size it will have.

    Args:
        operands: of the recipe; they are left as they are.
    """
    given = []
    for operand in operands:
        if operand.is_floating_point() and operand.numel():
            operand = operand.clone()
            operand[(0,) * operand.ndim] = torch.nan
        given.append(operand)
    return torch.equal(call(*given).isnan(), run_recipe(recipe, given).isnan())
