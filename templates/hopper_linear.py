"""Linear, activation and residual in one kernel on Hopper GPUs, for many rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.linear_form import LinearForm, linear_form
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile import ops_hopper_linear  # noqa: F401  (defines the operator)
from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

MIN_ROWS = 512  # with fewer, most multiprocessors have no tile
ACTIVATIONS = ("", "gelu", "gelu_tanh", "relu", "silu")
BLOCK_N, BLOCK_K = 128, 64
_SHARED_BYTES = 231424


class HopperLinear(Template):
    """One persistent program a multiprocessor; what follows the product overlaps the next tile."""

    name = "hopper_linear"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """See :class:`Template`."""
        form = linear_form(recipe)
        if isinstance(form, str):
            return form
        if device.capability is None or device.capability[0] != 9:
            return "it needs a Hopper GPU"
        if form.dtype not in (torch.float16, torch.bfloat16):
            return f"it takes fp16 and bf16, not {form.dtype}"
        if form.activation not in ACTIVATIONS or form.factor is not None:
            return "it has no such epilogue"
        if form.m < MIN_ROWS:
            return f"{form.m} rows leave most of the GPU idle"
        if form.n % 8 or form.k % 8 or form.n < 64 or form.k < 2 * BLOCK_K:
            return f"it takes weights of 64 x 128 and more in steps of 8, not {form.n} x {form.k}"
        return None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """See :class:`Template`."""
        form = linear_form(recipe)
        assert isinstance(form, LinearForm), "only accepted recipes have a space"

        finishing = form.activation != "" or form.residual is not None

        def refusal(config: Mapping[str, Value]) -> str | None:
            block_m, stages = int(config["block_m"]), int(config["stages"])
            tiles = 2 if finishing and block_m == 128 else 1  # as kernels/hopper_linear.py
            ring = stages * (block_m + BLOCK_N) * BLOCK_K * 2
            if ring + tiles * block_m * BLOCK_N * 2 + 4 * BLOCK_N > _SHARED_BYTES:
                return "shared memory"
            return "more stages than steps" if -(-form.k // BLOCK_K) < stages else None

        return ConfigSpace(
            {"block_m": (128, 256), "stages": (2, 3, 4, 5, 6), "group_m": (4, 8, 16)}, refusal
        )

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """See :class:`Template`."""
        form = linear_form(recipe)
        assert isinstance(form, LinearForm), "only accepted recipes have a first config"
        assert self.space(recipe, device).configs(), "an accepted recipe has a config"
        stages = min(5, -(-form.k // BLOCK_K))
        return {"block_m": 128, "stages": stages, "group_m": 8}

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """See :class:`Template`."""
        form = linear_form(recipe)
        assert isinstance(form, LinearForm), "only accepted recipes are built"
        values = [config["block_m"], BLOCK_N, config["stages"], config["group_m"]]
        optional = [None if i is None else Slot(i) for i in (form.bias, form.residual)]
        weight = Slot(form.weight)

        def run(x: object, held: object, *rest: object) -> object:
            return torch.ops.stof.hopper_linear(x, held.t() if form.weight_kn else held, *rest)  # type: ignore[attr-defined]

        args = (Slot(form.x), weight, *optional, form.activation, values)
        return Call(run, args, recipe.result.shape)
