"""Template: two small linear layers whose hidden rows stay in shared memory (TileLang)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from stof_compile.templates.base import Call, Template
from stof_compile.templates.linear_operands import Layer, LinearOperands, accepted
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
from stof_compile.ops_tilelang import tile_chain

DIMS: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64),
    "block_h": (64, 128),
    "block_n": (64, 128),
    "block_k": (64,),
    "threads": (128, 256),
    "stages": (2, 3),
}
"""In the order of ``ChainConfig`` (kernels/tilelang_chain.py)."""
# Every block of rows reads both weights: past this two kernels that share them are faster.
MAX_WEIGHT_BYTES = 4 << 20
_MAX_TILES = 10  # offered for one recipe, each with two depths of its pipelines
_SUMS = range(8, 64 + 1)  # of one layer's tile that a thread keeps


class TileLangChain(Template):
    """``activation(x @ w1.T + b1) @ w2.T + b2 + residual`` as ``stof::tile_chain_out``."""

    name = "tilelang_chain"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        read = _read(recipe)
        if isinstance(read, str):
            return read
        (first, _), (second, _) = read
        weights = _products(first, second) * ITEMSIZE
        if weights > MAX_WEIGHT_BYTES:
            return f"weights of {weights} bytes; up to {MAX_WEIGHT_BYTES} are read by every block"
        reason = device_refusal(device)
        if reason is None and not _ranked(recipe, device):
            return f"{first.n} hidden columns do not fit {device.shared_memory_bytes} bytes"
        return reason

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """Pipelines of the tiles that are estimated to be fastest."""
        tiles = set(_ranked(recipe, device)[:_MAX_TILES])

        def refusal(config: Mapping[str, Value]) -> str | None:
            reason = _unfit(recipe, device, config)
            return reason or (None if _tile(config) in tiles else "other tiles should be faster")

        return ConfigSpace(dict(DIMS), refusal)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The tile estimated to be fastest, with the deeper pipeline if it fits."""
        best = _ranked(recipe, device)[0]
        fitting = [c for c in self.space(recipe, device).configs() if _tile(c) == best]
        return max(fitting, key=lambda c: int(c["stages"]))

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        (first, middle), (second, end) = accepted(_read(recipe))
        shape = recipe.result.shape
        numbers = [int(config[name]) for name in DIMS]
        arguments = (
            slot(first.x), slot(first.weight), slot(middle.bias), slot(second.weight),
            slot(end.bias), slot(end.residual), middle.activation, first.kn, second.kn, numbers,
            shape,
        )  # fmt: skip
        return Call(tile_chain, arguments, shape)


def _read(recipe: Recipe) -> tuple[Layer, ...] | str:
    """Both layers of a recipe, or why it has no such."""
    layers = read_tiled_layers(recipe, 2)
    if isinstance(layers, str):
        return layers
    (_, middle), (_, end) = layers
    if middle.residual is not None or end.activation:
        return "it has more than bias and activation between the layers, or an activation behind"
    return layers


def _products(first: LinearOperands, second: LinearOperands) -> int:
    """Multiplications for one row, which is the number of weights too."""
    return first.k * first.n + second.k * second.n


def _tile(config: Mapping[str, Value]) -> tuple[int, ...]:
    return tuple(int(config[name]) for name in DIMS if name != "stages")


def _ranked(recipe: Recipe, device: DeviceFacts) -> list[tuple[int, ...]]:
    """Tiles that fit, the one estimated to be fastest first."""
    fitting = ConfigSpace(dict(DIMS), partial(_unfit, recipe, device)).configs()
    return sorted({_tile(config) for config in fitting}, key=partial(_clocks, recipe, device))


def _clocks(recipe: Recipe, device: DeviceFacts, tile: tuple[int, ...]) -> float:
    block_m, block_h, _, _, _ = tile
    (first, _), (second, _) = accepted(_read(recipe))
    chunks = -(-first.n // block_h)
    read = (_products(first, second) + chunks * block_m * first.k) * ITEMSIZE
    products = block_m * _products(first, second)
    # the kernel multiplies by warps on every device
    return block_clocks(-(-rows_of(recipe) // block_m), products, read, 1, 0, device)


def _unfit(recipe: Recipe, device: DeviceFacts, config: Mapping[str, Value]) -> str | None:
    """Why a config cannot run, or is no better than another whatever the sizes."""
    block_m, block_h, block_n, block_k, threads, stages = (int(config[name]) for name in DIMS)
    (first, _), (second, _) = accepted(_read(recipe))
    if block_m > next_power_of_two(rows_of(recipe), 16):
        return f"blocks of {block_m} rows, the result has {rows_of(recipe)}"
    if block_h > next_power_of_two(first.n, 64):
        return f"steps of {block_h} hidden columns, there are {first.n}"
    if block_n > next_power_of_two(second.n, 64):
        return f"tiles of {block_n} columns, the result has {second.n}"
    for sums in (block_m * block_h // threads, block_m * block_n // threads):
        if sums not in _SUMS:
            return f"{sums} sums a thread are too few or too many"
    chunks = -(-first.n // block_h)
    if stages > max(2, -(-first.k // block_k), chunks):
        return f"{stages} stages, the products have fewer steps"
    loads = stages * (block_m + block_h) * block_k
    loads = max(loads, stages * block_n * block_h + block_m * block_n)
    needed = (chunks * block_m * block_h + loads) * ITEMSIZE + SLACK_BYTES
    if needed > device.shared_memory_bytes:
        return f"{needed} bytes of shared memory, the device has {device.shared_memory_bytes}"
    return None
