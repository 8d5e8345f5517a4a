"""Template: a linear layer with activation and residual in its epilogue (Gluon, Hopper GPUs)."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.linear_operands import (
    accepted,
    linear_refusal,
    read_layer,
    transposing,
)
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

MIN_ROWS = 512  # with fewer, most multiprocessors have no tile
ACTIVATIONS = ("", "gelu", "gelu_tanh", "relu", "silu")
BLOCK_N, BLOCK_K = 128, 64
RESERVED_BYTES = 1024  # of shared memory: barriers and small tables


class HopperLinear(Template):
    """``activation(x @ weight.T + bias) [+ residual]`` as ``stof::hopper_linear``.

    One persistent program a multiprocessor; what follows the product overlaps the next tile.
    """

    name = "hopper_linear"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        reason = linear_refusal(recipe, device)
        if reason is not None:
            return reason
        if device.capability is None or device.capability[0] != 9:
            return "it needs a Hopper GPU"
        if recipe.result.dtype not in (torch.float16, torch.bfloat16):
            return f"it takes fp16 and bf16, not {recipe.result.dtype}"
        read = read_layer(recipe)
        if isinstance(read, str):
            return read
        product, end = read
        if end.activation not in ACTIVATIONS or end.factor is not None:
            return "it has no such epilogue"
        rows = prod(recipe.result.shape[:-1])
        if rows < MIN_ROWS:
            return f"{rows} rows leave most of the GPU idle"
        n, k = product.n, product.k
        if n % 8 or k % 8 or n < 64 or k < 2 * BLOCK_K:
            return f"it takes weights of 64 x 128 and more in steps of 8, not {n} x {k}"
        return None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """Both tiles, with every depth of the ring that fits."""
        product, end = accepted(read_layer(recipe))
        finishing = end.activation != "" or end.residual is not None

        def refusal(config: Mapping[str, Value]) -> str | None:
            block_m, stages = int(config["block_m"]), int(config["stages"])
            tiles = 2 if finishing and block_m == 128 else 1  # as kernels/hopper_linear.py
            needed = stages * (block_m + BLOCK_N) * BLOCK_K * 2  # the ring
            needed += tiles * block_m * BLOCK_N * 2 + 4 * BLOCK_N + RESERVED_BYTES
            if needed > device.shared_memory_bytes:
                held = device.shared_memory_bytes
                return f"{needed} bytes of shared memory, the device has {held}"
            return "more stages than steps" if ceil(product.k / BLOCK_K) < stages else None

        return ConfigSpace(
            {"block_m": (128, 256), "stages": (2, 3, 4, 5, 6), "group_m": (4, 8, 16)}, refusal
        )

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The small tile with a deep ring."""
        product, _ = accepted(read_layer(recipe))
        return {"block_m": 128, "stages": min(5, ceil(product.k / BLOCK_K)), "group_m": 8}

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
                [int(config["block_m"]), BLOCK_N, int(config["stages"]), int(config["group_m"])],
            ),
            recipe.result.shape,
        )
