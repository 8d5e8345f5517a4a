"""Template: two linear layers in one launch, for few rows (Triton)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

import torch
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.gemm_estimate import Product, Tile, estimate_us, unfit
from stof_compile.templates.linear_operands import (
    LinearEnd,
    LinearOperands,
    accepted,
    linear_refusal,
    read_layers,
    transposing,
)
from stof_compile.templates.norm_operands import slot
from stof_compile.templates.space import Config, ConfigSpace, Value

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe

DIMENSIONS = (
    "block_m",
    "block_h",
    "block_n",
    "block_k",
    "num_warps",
    "num_stages",
    "split_k",
)
"""As the fields of ``LinearChainConfig`` (kernels/linear_chain.py), in their order."""

MAX_ROWS = 1024
"""More rows fill the device with each layer alone, and the hidden layer would not stay in L2."""
MAX_CONFIGS = 32
MAX_TILES = 1024
"""Tiles of the hidden layer, or of the result, side by side."""
_SAME_TILE = 3  # configs of one tile, so that others are tried as well
_SMALLEST = {"block_m": 16, "block_h": 32, "block_n": 32, "block_k": 32}


@dataclass(frozen=True)
class _Chain:
    first: LinearOperands
    middle: LinearEnd
    second: LinearOperands
    end: LinearEnd


class TritonLinearChain(Template):
    """``activation(x @ w1.T + b1) @ w2.T + b2 [+ residual]`` as ``stof::fused_linear_chain``."""

    name = "triton_linear_chain"

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""
        reason = linear_refusal(recipe, device)
        if reason is not None:
            return reason
        read = _read(recipe)
        if isinstance(read, str):
            return read
        rows = prod(recipe.result.shape[:-1])
        if rows > MAX_ROWS:
            return f"it has {rows} rows; up to {MAX_ROWS} two layers in one launch can pay"
        widest = max(read.first.n, read.second.n)
        if ceil(widest / _SMALLEST["block_h"]) > MAX_TILES:
            return f"a layer of {widest} columns has more than {MAX_TILES} tiles"
        return None

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """The tiles estimated to be fastest in both layers together."""
        hidden, result = _layers(recipe)
        ranked = _ranked(hidden, result, device, hidden.exact_fp32)
        kept = tuple(tuple(config[name] for name in DIMENSIONS) for config in ranked)
        dims = {name: tuple(sorted({config[name] for config in ranked})) for name in DIMENSIONS}

        def refusal(config: Mapping[str, Value]) -> str | None:
            if tuple(config[name] for name in DIMENSIONS) in kept:
                return None
            return _unfit(config, hidden, result, device) or "others are estimated to be faster"

        return ConfigSpace(dims, refusal, kept)

    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The tile estimated to be fastest."""
        hidden, result = _layers(recipe)
        return dict(_ranked(hidden, result, device, hidden.exact_fp32)[0])

    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""
        chain = accepted(_read(recipe))
        assert chain.first.x is not None, "the first product reads an operand"
        stored = [1] * chain.first.kn + [4] * chain.second.kn
        return Call(
            transposing(torch.ops.stof.fused_linear_chain.default, *stored),
            (
                Slot(chain.first.x),
                Slot(chain.first.weight),
                slot(chain.middle.bias),
                chain.middle.activation,
                Slot(chain.second.weight),
                slot(chain.end.bias),
                slot(chain.end.residual),
                [int(config[name]) for name in DIMENSIONS],
            ),
            recipe.result.shape,
        )


def _read(recipe: Recipe) -> _Chain | str:
    layers = read_layers(recipe, 2)
    if isinstance(layers, str):
        return layers
    (first, middle), (second, end) = layers
    if middle.factor is not None or middle.residual is not None:
        return "more than a bias and an activation stand between the products"
    if end.activation or end.factor is not None:
        return "an activation or a factor stands behind the second product"
    return _Chain(first, middle, second, end)


def _layers(recipe: Recipe) -> tuple[Product, Product]:
    chain = accepted(_read(recipe))
    rows, dtype = prod(recipe.result.shape[:-1]), recipe.result.dtype
    return (
        Product(rows, chain.first.n, chain.first.k, dtype),
        Product(rows, chain.second.n, chain.second.k, dtype),
    )


def _tiles(config: Mapping[str, Value]) -> tuple[Tile, Tile]:
    """The tiles of both layers."""
    c = {name: int(config[name]) for name in DIMENSIONS}
    shared = (c["block_k"], c["num_warps"], c["num_stages"])
    return (
        Tile(c["block_m"], c["block_h"], *shared),
        Tile(c["block_m"], c["block_n"], *shared, split_k=c["split_k"]),
    )


def _unfit(
    config: Mapping[str, Value], hidden: Product, result: Product, device: DeviceFacts
) -> str | None:
    first, second = _tiles(config)
    if int(config["block_k"]) > int(config["block_h"]):
        return "block_k is larger than block_h"
    for edge, size in ((first.block_n, hidden.n), (second.block_n, result.n)):
        if ceil(size / edge) > MAX_TILES:
            return f"{ceil(size / edge)} tiles side by side, at most {MAX_TILES} are taken"
    parts = int(config["split_k"])
    tiles = ceil(hidden.n / first.block_n)
    if parts > 1 and ceil(tiles / parts) * (parts - 1) >= tiles:
        return f"{tiles} hidden tiles leave one of {parts} parts without work"
    return unfit(first, hidden, device) or unfit(second, result, device)


@lru_cache(maxsize=256)  # a search asks for the same products many times
def _ranked(
    hidden: Product, result: Product, device: DeviceFacts, exact_fp32: bool
) -> tuple[Config, ...]:
    """At most :data:`MAX_CONFIGS` configs that fit, the one estimated to be fastest first."""

    def time_us(config: Config) -> float:
        first, second = _tiles(config)
        return estimate_us(first, hidden, device) + estimate_us(second, result, device)

    edges: tuple[tuple[int, ...], ...]
    if exact_fp32:
        edges = ((16, 32, 64), (32, 64), (32, 64), (16, 32), (4, 8), (2, 3))
    else:
        edges = ((16, 32, 64, 128), (32, 64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4, 5))
    fitting = []
    for values in itertools.product(*edges, (1, 2, 3, 4, 6)):
        config: Config = dict(zip(DIMENSIONS, values, strict=True))
        tiles = _tiles(config)
        sums = [t.block_m * t.block_n // (32 * t.num_warps) for t in tiles]
        if min(sums) >= 8 and max(sums) <= 64 and _unfit(config, hidden, result, device) is None:
            fitting.append((time_us(config), config))
    fitting.sort(key=lambda timed: timed[0])
    found: list[Config] = []
    seen: dict[tuple[Value, ...], int] = {}
    for _, config in fitting:
        kind = (config["block_m"], config["block_h"], config["block_n"], config["split_k"])
        if seen.get(kind, 0) < _SAME_TILE and len(found) < MAX_CONFIGS:
            seen[kind] = seen.get(kind, 0) + 1
            found.append(config)
    smallest: Config = {**_SMALLEST, "num_warps": 4, "num_stages": 2, "split_k": 1}
    return tuple(found) or (smallest,)  # fits every device and every problem
