"""Template: LayerNorm or RMSNorm of rows, with a bias and a residual added before (Triton)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from stof_compile.templates.base import Call, Template
from stof_compile.templates.norm_operands import (
    MAX_NORM_WIDTH,
    NormTail,
    device_refusal,
    norm_tail,
    operand_refusal,
    rows_refusal,
    slot,
)
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

ROWS = (1, 2, 4, 8, 16, 32, 64)
NUM_WARPS = (1, 2, 4, 8, 16)
# fp32 values of a row a thread holds; beside them the loaded operands want as many registers again
MIN_PER_THREAD, MAX_PER_THREAD = 4, 64


class TritonNorm(Template):
    """``norm(x [+ bias] [+ residual])`` as ``stof::fused_norm``: adds in any order, at least the
    norm.
    """

    name = "triton_norm"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        return device_refusal(device) or operand_refusal(recipe) or _refusal(recipe)

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """Rows of a program and its warps; tall programs only where enough of them remain."""
        rows, width = _size(recipe)

        def refusal(config: Mapping[str, Value]) -> str | None:
            tall, warps = int(config["rows"]), int(config["num_warps"])
            values = tall * block_of(width) / (32 * warps)
            if values > MAX_PER_THREAD:
                return f"{values:.0f} values a thread do not fit its registers"
            if values < MIN_PER_THREAD and (tall, warps) != (1, 1):
                return f"{values:.0f} values a thread leave its loads narrow"
            if tall > 1 and rows < 2 * device.units * tall:
                return f"{-(-rows // tall)} programs leave most of {device.units} units idle"
            return None

        return ConfigSpace({"rows": ROWS, "num_warps": NUM_WARPS}, refusal)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """Few rows: 16 bytes a thread, to be done early. Many: a warp for each 1,024 elements."""
        rows, width = _size(recipe)
        many = rows >= 8 * device.units
        wanted = 32 if many else 8  # values of a thread
        offered = self.space(recipe, device).configs()
        return min(
            offered,
            key=lambda c: (
                int(c["rows"]) * block_of(width) > 4096 or (not many and int(c["rows"]) > 1),
                abs(int(c["rows"]) * block_of(width) / (32 * int(c["num_warps"])) - wanted),
                int(c["num_warps"]),
            ),
        )

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        tail = _tail(recipe)
        assert isinstance(tail, NormTail), "the recipe was not accepted"
        x, residual = _rows(recipe, tail)
        return Call(
            torch.ops.stof.fused_norm.default,
            (
                slot(x),
                slot(tail.bias),
                slot(residual),
                slot(tail.weight),
                slot(tail.shift),
                tail.norm,
                tail.eps,
                [int(config["rows"]), int(config["num_warps"])],
            ),
            recipe.result.shape,
        )


def block_of(width: int) -> int:
    """Elements of the tile that holds a row: the next power of two."""
    return 1 << (width - 1).bit_length()


def _size(recipe: Recipe) -> tuple[int, int]:
    width = recipe.result.shape[-1]
    return prod(recipe.result.shape) // width, width


def _tail(recipe: Recipe) -> NormTail | str:
    spine = recipe.spine()
    if not spine:
        return "its steps are no straight line"
    if not recipe.result.shape or not prod(recipe.result.shape):
        return "the result is empty or has no rows"
    return norm_tail(recipe, spine, recipe.result.shape[-1])


def _refusal(recipe: Recipe) -> str | None:
    tail = _tail(recipe)
    if isinstance(tail, str):
        return tail
    rows, width = _size(recipe)
    if width > MAX_NORM_WIDTH:
        return f"rows have {width} elements, at most {MAX_NORM_WIDTH} fit"
    if not 1 <= len(tail.fulls) <= 2:
        return f"it adds {len(tail.fulls)} tensors of {rows} rows, at most two are taken"
    if any(prod(recipe.operands[i].shape) != rows * width for i in tail.fulls):
        return "an operand is broadcast to more rows"
    if all(recipe.operands[i].dtype != recipe.result.dtype for i in tail.fulls):
        return f"no operand has the dtype of the result, {recipe.result.dtype}"
    return rows_refusal(recipe, tail.fulls)


def _rows(recipe: Recipe, tail: NormTail) -> tuple[int, int | None]:
    """(x, residual): the result takes the dtype of x."""
    fulls = sorted(tail.fulls, key=lambda i: recipe.operands[i].dtype != recipe.result.dtype)
    return fulls[0], fulls[1] if len(fulls) > 1 else None
