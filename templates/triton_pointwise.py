"""Template: a chain of elementwise steps in one pass over memory (Triton)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.norm_operands import device_refusal, operand_refusal
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import ACTIVATIONS, BINARY, UNARY, Recipe, Ref, Step, TensorSpec

BLOCKS = (128, 256, 512, 1024, 2048, 4096, 8192)
NUM_WARPS = (1, 2, 4, 8, 16)
MIN_PER_THREAD, MAX_PER_THREAD = 4, 32  # elements; 8 halves are one 16-byte load
POWERS = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 4.0)
MAX_STEPS = 64
MAX_OPERANDS = 16


class TritonPointwise(Template):
    """Binary and unary steps, activations and casts, in any order and with any edges."""

    name = "triton_pointwise"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        return device_refusal(device) or operand_refusal(recipe) or _refusal(recipe)

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """Elements of a program and its warps; large programs only where enough of them remain."""
        total = prod(recipe.result.shape)

        def refusal(config: Mapping[str, Value]) -> str | None:
            block, warps = int(config["block"]), int(config["num_warps"])
            elements = block // (32 * warps)
            if not MIN_PER_THREAD <= elements <= MAX_PER_THREAD:
                return f"{elements} elements a thread are too many or too few"
            smallest = block == BLOCKS[0]
            if not smallest and total < block * device.units:
                return f"{-(-total // block)} programs leave part of {device.units} units idle"
            return None

        return ConfigSpace({"block": BLOCKS, "num_warps": NUM_WARPS}, refusal)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """1,024 elements by four warps; fewer where the result is small."""
        offered = self.space(recipe, device).configs()
        return min(
            offered,
            key=lambda c: (
                abs(int(c["block"]).bit_length() - 11),
                abs(int(c["block"]) // (32 * int(c["num_warps"])) - 8),
            ),
        )

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        shape = list(recipe.result.shape)
        return Call(
            torch.ops.stof.fused_pointwise.default,
            (
                [Slot(i) for i in range(len(recipe.operands))],
                program_of(recipe),
                shape,
                [int(config["block"]), int(config["num_warps"])],
            ),
            recipe.result.shape,
        )


def program_of(recipe: Recipe) -> str:
    """A recipe as the program that kernels/pointwise_program.py reads."""
    steps = [
        [step.kind, [_name(ref) for ref in step.inputs], _attrs(step)] for step in recipe.steps
    ]
    return json.dumps({"dtype": _type(recipe.result.dtype), "steps": steps})


def _name(ref: Ref) -> str:
    return f"{'x' if ref.kind == 'operand' else 'v'}{ref.index}"


def _attrs(step: Step) -> dict[str, Any]:
    if step.kind == "cast":
        return {"dtype": _type(step.dtype)}
    if step.kind == "activation":
        return {"name": step.attr("name")}
    if step.attr("number") is None:
        return {}
    number = float(step.attr("number"))
    return {"number": number, "number_first": bool(step.attr("number_first", False))}


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(recipe: Recipe) -> str | None:
    if len(recipe.steps) > MAX_STEPS or not 1 <= len(recipe.operands) <= MAX_OPERANDS:
        return f"{len(recipe.steps)} steps of {len(recipe.operands)} operands are too many"
    shape = recipe.result.shape
    if not prod(shape):
        return "the result is empty"
    for step in recipe.steps:
        reason = _step_refusal(step)
        if reason is not None:
            return reason
    for number, operand in enumerate(recipe.operands):
        if not operand.contiguous:
            return f"operand {number} of strides {operand.stride} is not contiguous"
        if not _one_division(operand, shape):
            return f"operand {number} of shape {operand.shape} is broadcast inside {shape}"
    return None


def _step_refusal(step: Step) -> str | None:
    known = step.kind in BINARY or step.kind in UNARY or step.kind in ("activation", "cast")
    if not known:
        return f"a step '{step.kind}' is not elementwise"
    if step.kind == "activation" and step.attr("name") not in ACTIVATIONS:
        return f"no activation '{step.attr('name')}'"
    number = step.attr("number")
    if step.kind == "pow" and (number not in POWERS or step.attr("number_first")):
        return f"pow takes an exponent of {', '.join(map(str, POWERS))}"
    if step.kind in ("maximum", "minimum") and number is not None:
        return f"'{step.kind}' with a number"
    if step.kind == "cast" and step.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"a cast to {step.dtype}"
    return None


def _one_division(operand: TensorSpec, shape: tuple[int, ...]) -> bool:
    """Whether the operand's own dimensions stand side by side in the result's."""
    aligned = (1,) * (len(shape) - len(operand.shape)) + operand.shape
    own = [i for i, size in enumerate(aligned) if size != 1]
    return len(operand.shape) <= len(shape) and all(
        aligned[i] == shape[i] for i in (range(own[0], own[-1] + 1) if own else ())
    )
