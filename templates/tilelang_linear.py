"""Template: a linear layer with bias, activation and residual in its epilogue (TileLang)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from stof_compile.templates.base import Call, Template
from stof_compile.templates.space import Config, ConfigSpace, Value
from stof_compile.templates.tilelang_rules import (
    Layer,
    Refused,
    Spine,
    device_refusal,
    rows_of,
    slot,
)
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
        try:
            _read(recipe)
        except Refused as refused:
            return str(refused)
        return device_refusal(device)

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
        layer, activation, residual = _read(recipe)
        shape = recipe.result.shape
        numbers = [int(config[name]) for name in DIMS]
        arguments = (
            slot(layer.x), slot(layer.weight), slot(layer.bias), slot(residual), activation,
            layer.weight_kn, numbers, shape,
        )  # fmt: skip
        return Call(tile_linear, arguments, shape)


def _read(recipe: Recipe) -> tuple[Layer, str, int | None]:
    """Layer, activation and residual of an accepted recipe; ``Refused`` for another."""
    spine = Spine(recipe)
    layer = spine.linear()
    activation, residual = spine.activation(), spine.residual(layer.width)
    spine.end()
    return layer, activation, residual


def _tile(config: Mapping[str, Value]) -> tuple[int, int, int]:
    return int(config["block_m"]), int(config["block_n"]), int(config["threads"])


def _ranked(recipe: Recipe, device: DeviceFacts) -> list[tuple[int, int, int]]:
    """Tiles (block_m, block_n, threads) that fit, the one estimated to be fastest first."""
    fitting = ConfigSpace(dict(DIMS), partial(_unfit, recipe, device)).configs()
    return sorted({_tile(config) for config in fitting}, key=partial(_clocks, recipe, device))


def _clocks(recipe: Recipe, device: DeviceFacts, tile: tuple[int, int, int]) -> float:
    block_m, block_n, threads = tile
    layer, _, _ = _read(recipe)
    blocks = -(-rows_of(recipe) // block_m) * -(-layer.width // block_n)
    read = (block_m + block_n) * layer.depth * ITEMSIZE
    resident = 256 // threads
    products = block_m * block_n * layer.depth
    return block_clocks(blocks, products, read, resident, block_m, device)


def _unfit(recipe: Recipe, device: DeviceFacts, config: Mapping[str, Value]) -> str | None:
    """Why a config cannot run, or is no better than another whatever the sizes."""
    block_m, block_n, block_k, threads, stages = (int(config[name]) for name in DIMS)
    layer, activation, residual = _read(recipe)
    if block_m > next_power_of_two(rows_of(recipe), 16):
        return f"tiles of {block_m} rows, the result has {rows_of(recipe)}"
    if block_n > next_power_of_two(layer.width, 64):
        return f"tiles of {block_n} columns, the result has {layer.width}"
    area = block_m * block_n
    if area > _AREA if threads == 128 else area < _AREA:
        return f"{threads} threads are too few or too many for {area} sums"
    if area >= 128 * 256 and activation and residual is not None:
        return "the registers spill with an activation and a residual"
    if block_k * stages not in _DEPTH or (block_k > 64 and layer.depth < 2 * block_k):
        return f"{stages} stages of {block_k} are too few or too many"
    if stages > max(3, -(-layer.depth // block_k)):
        return f"{stages} stages, the product has fewer steps"
    needed = max(stages * (block_m + block_n) * block_k, area) * ITEMSIZE
    needed += block_n * ITEMSIZE + SLACK_BYTES
    if needed > device.shared_memory_bytes:
        return f"{needed} bytes of shared memory, the device has {device.shared_memory_bytes}"
    return None
