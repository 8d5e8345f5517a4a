"""A template made of torch operations: it stands for kernels where there is no GPU.

It takes every segment of two steps and more that multiplies or normalises, computes it in fp32
(fp64 in fp64) and rounds once, as kernels do, and its times are invented.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.space import ConfigSpace

from stof_compile.compare import Verdict
from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, run_recipe
from stof_compile.measure import Timing
from stof_compile.search import bench

RECIPES: dict[str, Recipe] = {}


@torch.library.custom_op("stof_test::recipe", mutates_args=())
def recipe_op(operands: list[torch.Tensor], key: str, speed: int) -> torch.Tensor:
    recipe = RECIPES[key]
    wide = torch.promote_types(recipe.result.dtype, torch.float32)
    out = run_recipe(recipe, operands, wide).to(recipe.result.dtype).contiguous()
    return out.clone() if any(out.data_ptr() == t.data_ptr() for t in operands) else out


@recipe_op.register_fake
def _(operands, key, speed):
    result = RECIPES[key].result
    return operands[0].new_empty(result.shape, dtype=result.dtype)


class AnyRecipe(Template):
    """Products and norms with whatever stands around them."""

    name = "any_recipe"
    device_kinds = ("cpu",)

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        heavy = any(s.kind in ("linear", "layer_norm", "rms_norm") for s in recipe.steps)
        return None if heavy and len(recipe.steps) > 1 else "a single step"

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        return ConfigSpace({"speed": (1, 2)})

    def first(self, recipe: Recipe, device: DeviceFacts) -> dict[str, Any]:
        return {"speed": 1}

    def build(self, recipe: Recipe, config: Mapping[str, Any]) -> Call:
        RECIPES[recipe.key] = recipe
        slots = [Slot(i) for i in range(len(recipe.operands))]
        op = torch.ops.stof_test.recipe.default
        return Call(op, (slots, recipe.key, config["speed"]), recipe.result.shape)


@contextmanager
def templates_win(packs: bool = True) -> Iterator[list[str]]:
    """Every template beats the library, and with ``packs`` every pack what it packs.

    Candidates are run once each, on operands of their own; the list gets an entry for each.
    """
    timed: list[str] = []

    def time(call, sets, device, budget_s):
        call(*sets[0])
        timed.append(call.__qualname__)
        us = 5.0 if "DeviceBench._call" in call.__qualname__ else 10.0
        return Timing(us, us, us, 3, "clock")

    def rounds(self, fns, operands, rounds):
        for fn in fns:
            fn(*operands)
        return [[[10.0, 10.1]] * rounds, [[5.0, 5.1]] * rounds]

    def library(recipe, operands):
        return lambda *given: run_recipe(recipe, given)

    packing = Verdict("win" if packs else "loss", 2.0, 0.0, 9.0, 9.0, (20, 20), 0.0)
    with (
        mock.patch("stof_compile.fuse.TEMPLATES", (AnyRecipe(),)),
        mock.patch.object(bench, "time_callable", time),
        mock.patch.object(bench, "library_call", library),
        mock.patch.object(bench.DeviceBench, "rounds", rounds),
        mock.patch.object(
            bench.DeviceBench, "compare", lambda self, schemes, long_turns=False: [20.0, 10.0]
        ),
        mock.patch("stof_compile.search.pack_choice.compare", lambda base, new: packing),
    ):
        yield timed
