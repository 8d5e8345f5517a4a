"""Template: a linear layer with activation and residual in its epilogue (Gluon, Hopper GPUs)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.linear_operands import (
    accepted,
    read_half_layer,
    read_layer,
    transposing,
)
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

MIN_ROWS = 512  # with fewer, most multiprocessors have no tile
ACTIVATIONS = ("", "gelu", "gelu_tanh", "relu", "silu")
BLOCK_K = 64
DIMS: dict[str, tuple[Value, ...]] = {
    "block_m": (64, 128),
    "block_n": (128, 256),
    "stages": (3, 4, 5, 6),
    "group_m": (4, 8, 16),
}
LARGEST_TILE = 128 * 128  # the sums of a warp group
RESERVED_BYTES = 1024  # of shared memory: barriers and small tables


class HopperLinear(Template):
    """``activation(x @ weight.T + bias) [+ residual]`` as ``stof::hopper_linear``.

    One persistent program a multiprocessor; what follows a product overlaps the next one.
    """

    name = "hopper_linear"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        read = read_half_layer(recipe, device)
        if isinstance(read, str):
            return read
        if device.capability is None or device.capability[0] != 9:
            return "it needs a Hopper GPU"
        product, end = read
        if end.activation not in ACTIVATIONS or end.factor is not None:
            return "it has no such epilogue"
        rows = prod(recipe.result.shape[:-1])
        if rows < MIN_ROWS:
            return f"{rows} rows leave most of the GPU idle"
        n, k = product.n, product.k
        if n % 8 or k % 8 or n < 64 or k < BLOCK_K:
            return f"it takes weights of 64 x 64 and more in steps of 8, not {n} x {k}"
        return None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """All tiles, with every depth of the ring that fits."""

        def refusal(config: Mapping[str, Value]) -> str | None:
            block_m, block_n, stages = (int(config[d]) for d in ("block_m", "block_n", "stages"))
            if block_m * block_n > LARGEST_TILE:
                return f"a tile of {block_m} x {block_n} does not fit the registers"
            needed = stages * (block_m + block_n) * BLOCK_K * 2  # the ring
            needed += 4 * block_m * block_n + 4 * block_n + RESERVED_BYTES
            if needed > device.shared_memory_bytes:
                held = device.shared_memory_bytes
                return f"{needed} bytes of shared memory, the device has {held}"
            return None

        return ConfigSpace(DIMS, refusal)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The square tile with a deep ring."""
        return {"block_m": 128, "block_n": 128, "stages": 5, "group_m": 8}

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        product, end = accepted(read_layer(recipe))
        assert product.x is not None, "the first product reads an operand"
        return Call(
            transposing(torch.ops.stof.hopper_linear.default, *([1] if product.kn else [])),
            (
                Slot(product.x),
                Slot(product.weight),
                slot(end.bias),
                slot(end.residual),
                end.activation,
                [int(config[dim]) for dim in DIMS],
            ),
            recipe.result.shape,
        )
