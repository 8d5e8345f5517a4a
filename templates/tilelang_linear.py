"""Template: a linear layer with bias, activation and residual in its epilogue (TileLang)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from stof_compile.templates.base import Call, Template
from stof_compile.templates.linear_operands import Layer, accepted
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value
from stof_compile.templates.tilelang_rules import device_refusal, read_tiled_layers, rows_of
from stof_compile.templates.tilelang_time import (
    ITEMSIZE,
    SLACK_BYTES,
    block_clocks,
    next_power_of_two,
)

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe
from stof_compile.ops_tilelang import tile_linear

DIMS: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (64, 128, 256),
    "block_k": (64, 128),
    "threads": (128, 256),
    "stages": (2, 3, 4, 6),
}
"""In the order of ``LinearConfig`` (kernels/tilelang_linear.py)."""
_MAX_TILES = 5  # tiles offered for one recipe, each with several pipelines
# Pipelines, in elements of depth on their way: fewer do not hide the latency, more gain nothing.
_DEPTH = range(192, 384 + 1)
# Sums of a tile up to which 128 threads compute it, and from which on 256: with 64 a thread, two
# blocks of 128 threads still share the registers of a multiprocessor.
_AREA = 128 * 64


class TileLangLinear(Template):
    """``activation(x @ weight.T + bias) + residual`` as ``stof::tile_linear_out``."""

    name = "tilelang_linear"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        read = read_tiled_layers(recipe, 1)
        return read if isinstance(read, str) else device_refusal(device)

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """Pipelines of the tiles that are estimated to be fastest."""
        tiles = set(_ranked(recipe, device)[:_MAX_TILES])

        def refusal(config: Mapping[str, Value]) -> str | None:
            reason = _unfit(recipe, device, config)
            return reason or (None if _tile(config) in tiles else "other tiles should be faster")

        return ConfigSpace(dict(DIMS), refusal)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The tile estimated to be fastest, with four stages if they fit."""
        best = _ranked(recipe, device)[0]
        fitting = [c for c in self.space(recipe, device).configs() if _tile(c) == best]
        return min(fitting, key=lambda c: (c["block_k"], abs(int(c["stages"]) - 4)))

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        product, end = _read(recipe)
        shape = recipe.result.shape
        numbers = [int(config[name]) for name in DIMS]
        arguments = (
            slot(product.x), slot(product.weight), slot(end.bias), slot(end.residual),
            end.activation, product.kn, numbers, shape,
        )  # fmt: skip
        return Call(tile_linear, arguments, shape)


def _read(recipe: Recipe) -> Layer:
    """The product of an accepted recipe and what follows it."""
    return accepted(read_tiled_layers(recipe, 1))[0]


def _tile(config: Mapping[str, Value]) -> tuple[int, int, int]:
    return int(config["block_m"]), int(config["block_n"]), int(config["threads"])


def _ranked(recipe: Recipe, device: DeviceFacts) -> list[tuple[int, int, int]]:
    """Tiles (block_m, block_n, threads) that fit, the one estimated to be fastest first."""
    fitting = ConfigSpace(dict(DIMS), partial(_unfit, recipe, device)).configs()
    return sorted({_tile(config) for config in fitting}, key=partial(_clocks, recipe, device))


def _clocks(recipe: Recipe, device: DeviceFacts, tile: tuple[int, int, int]) -> float:
    block_m, block_n, threads = tile
    product, _ = _read(recipe)
    blocks = -(-rows_of(recipe) // block_m) * -(-product.n // block_n)
    read = (block_m + block_n) * product.k * ITEMSIZE
    resident = 256 // threads
    products = block_m * block_n * product.k
    return block_clocks(blocks, products, read, resident, block_m, device)


def _unfit(recipe: Recipe, device: DeviceFacts, config: Mapping[str, Value]) -> str | None:
    """Why a config cannot run, or is no better than another whatever the sizes."""
    block_m, block_n, block_k, threads, stages = (int(config[name]) for name in DIMS)
    product, end = _read(recipe)
    if block_m > next_power_of_two(rows_of(recipe), 16):
        return f"tiles of {block_m} rows, the result has {rows_of(recipe)}"
    if block_n > next_power_of_two(product.n, 64):
        return f"tiles of {block_n} columns, the result has {product.n}"
    area = block_m * block_n
    if area > _AREA if threads == 128 else area < _AREA:
        return f"{threads} threads are too few or too many for {area} sums"
    if area >= 128 * 256 and end.activation and end.residual is not None:
        return "the registers spill with an activation and a residual"
    if block_k * stages not in _DEPTH or (block_k > 64 and product.k < 2 * block_k):
        return f"{stages} stages of {block_k} are too few or too many"
    if stages > max(3, -(-product.k // block_k)):
        return f"{stages} stages, the product has fewer steps"
    needed = max(stages * (block_m + block_n) * block_k, area) * ITEMSIZE
    needed += block_n * ITEMSIZE + SLACK_BYTES
    if needed > device.shared_memory_bytes:
        return f"{needed} bytes of shared memory, the device has {device.shared_memory_bytes}"
    return None
