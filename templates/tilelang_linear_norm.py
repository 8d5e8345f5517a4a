"""Template: a linear layer with bias, residual and the norm of its rows (TileLang)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from stof_compile.templates.base import Call, Template
from stof_compile.templates.linear_operands import LinearOperands, accepted, read_product
from stof_compile.templates.norm_operands import NormTail, norm_tail, slot
from stof_compile.templates.space import Config, ConfigSpace, Value
from stof_compile.templates.tilelang_rules import device_refusal, rows_of, tile_refusal
from stof_compile.templates.tilelang_time import (
    ITEMSIZE,
    SLACK_BYTES,
    block_clocks,
    next_power_of_two,
)

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe
from stof_compile.ops_tilelang import tile_linear_norm

DIMS: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64),
    "block_k": (16, 32, 64, 128),
    "threads": (128, 256),
    "stages": (2, 3, 4),
}
"""In the order of ``NormConfig`` (kernels/tilelang_linear_norm.py)."""
MAX_WIDTH = 1024
_WIDTH_STEP = 64  # eight warps side by side, each with at least 8 columns
_MAX_TILES = 4  # (block_m, threads) offered for one recipe, each with several pipelines
_DEPTH = range(96, 256 + 1)  # elements of depth on their way
_DEPTH_AT_LEAST = range(32, 256 + 1)  # where shared memory has no room for that
# Sums of a row block that a thread keeps: a warp group of Hopper reads its operands from shared
# memory and has more registers left.
_MAX_SUMS, _MAX_SUMS_HOPPER = 128, 192


class TileLangLinearNorm(Template):
    """``norm(x @ weight.T + bias + residual)`` as ``stof::tile_linear_norm_out``."""

    name = "tilelang_linear_norm"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        read = _read(recipe)
        if isinstance(read, str):
            return read
        width = read[0].n
        if width % _WIDTH_STEP or width > MAX_WIDTH:
            return f"rows of {width}: a multiple of {_WIDTH_STEP} up to {MAX_WIDTH} is taken"
        reason = device_refusal(device)
        if reason is None and not _ranked(recipe, device):
            return f"no row block of {width} fits {device.shared_memory_bytes} bytes"
        return reason

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """Pipelines of the row blocks that are estimated to be fastest."""
        depth, ranked = _depth(recipe, device), _ranked(recipe, device)
        tiles = set(ranked[:_MAX_TILES])

        def refusal(config: Mapping[str, Value]) -> str | None:
            reason = _unfit(recipe, device, depth, config)
            return reason or (None if _tile(config) in tiles else "other tiles should be faster")

        return ConfigSpace(dict(DIMS), refusal)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The row block estimated to be fastest, with steps of 64 if they fit."""
        best = _ranked(recipe, device)[0]
        fitting = [c for c in self.space(recipe, device).configs() if _tile(c) == best]
        return min(fitting, key=lambda c: (abs(int(c["block_k"]) - 64), abs(int(c["stages"]) - 3)))

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        product, tail = accepted(_read(recipe))
        shape = recipe.result.shape
        numbers = [int(config[name]) for name in DIMS]
        arguments = (
            slot(product.x), slot(product.weight), slot(tail.bias),
            slot(tail.fulls[0] if tail.fulls else None), tail.norm, slot(tail.weight),
            slot(tail.shift), tail.eps, product.kn, numbers, shape,
        )  # fmt: skip
        return Call(tile_linear_norm, arguments, shape)


def _read(recipe: Recipe) -> tuple[LinearOperands, NormTail] | str:
    """The product of a recipe and its norm, or why it has no such."""
    spine = recipe.spine()
    if not spine:
        return "its steps are no straight line"
    product = read_product(recipe, spine[0], first=True)
    if isinstance(product, str):
        return product
    refused = tile_refusal(recipe, [product])
    if refused is not None:
        return refused
    steps = [step for step in spine[1:] if step.kind != "cast"]  # the dtypes are all the same
    tail = norm_tail(recipe, steps, product.n, after=True, bias=product.bias)
    if isinstance(tail, str):
        return tail
    if len(tail.fulls) > 1:
        return f"it adds {len(tail.fulls)} tensors of {rows_of(recipe)} rows, one is taken"
    return product, tail


def _tile(config: Mapping[str, Value]) -> tuple[int, int]:
    return int(config["block_m"]), int(config["threads"])


def _depth(recipe: Recipe, device: DeviceFacts) -> range:
    """Depths of pipelines to offer: shallow ones only where no other fits."""
    fitting = ConfigSpace(dict(DIMS), partial(_unfit, recipe, device, _DEPTH)).configs()
    return _DEPTH if fitting else _DEPTH_AT_LEAST


def _ranked(recipe: Recipe, device: DeviceFacts) -> list[tuple[int, int]]:
    """Row blocks (block_m, threads) that fit, the one estimated to be fastest first."""
    refusal = partial(_unfit, recipe, device, _depth(recipe, device))
    fitting = ConfigSpace(dict(DIMS), refusal).configs()
    return sorted({_tile(config) for config in fitting}, key=partial(_clocks, recipe, device))


def _clocks(recipe: Recipe, device: DeviceFacts, tile: tuple[int, int]) -> float:
    block_m, _ = tile
    product, _ = accepted(_read(recipe))
    blocks = -(-rows_of(recipe) // block_m)
    read = (block_m + product.n) * product.k * ITEMSIZE
    products = block_m * product.n * product.k
    return block_clocks(blocks, products, read, 1, block_m, device)


def _unfit(
    recipe: Recipe, device: DeviceFacts, depth: range, config: Mapping[str, Value]
) -> str | None:
    """Why a config cannot run, or is no better than another whatever the sizes."""
    block_m, block_k, threads, stages = (int(config[name]) for name in DIMS)
    product, _ = accepted(_read(recipe))
    if block_m > next_power_of_two(rows_of(recipe), 16):
        return f"blocks of {block_m} rows, the result has {rows_of(recipe)}"
    sums = block_m * product.n // threads
    groups = device.capability is not None and device.capability[0] == 9 and block_m >= 64
    if sums > (_MAX_SUMS_HOPPER if groups and threads == 256 else _MAX_SUMS):
        return f"{sums} sums a thread do not fit the registers"
    if threads == 256 and sums < 16:
        return f"{sums} sums a thread: fewer threads do"
    if block_k * stages not in depth:
        return f"{stages} stages of {block_k} are too few or too many"
    if stages > max(2, -(-product.k // block_k)):
        return f"{stages} stages, the product has fewer steps"
    needed = max(stages * (block_m + product.n) * block_k, block_m * product.n) * ITEMSIZE
    needed += 3 * product.n * ITEMSIZE + SLACK_BYTES
    if needed > device.shared_memory_bytes:
        return f"{needed} bytes of shared memory, the device has {device.shared_memory_bytes}"
    return None
