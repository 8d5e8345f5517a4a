"""Which tiles a GEMM kernel should try: what fits a device, ranked by an estimate of its time
(``gemm_estimate.py``); the search measures those."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from stof_compile.templates.gemm_estimate import (
    FEW_ROWS,
    Product,
    Tile,
    estimate_us,
    group_products,
    in_parts,
    pays_to_copy,
    programs_at_once,
    turns_weights,
    unfit,
)
from stof_compile.templates.space import ConfigSpace, Value

from stof_compile.device import DeviceFacts

MAX_CONFIGS = 48
"""Configs of one space."""

_SAME_TILE = 2  # configs of one tile and way to run it, so that others are tried as well
# Behind a copy of the weight or on the weight as it is: so many of the form that is estimated to be
# the slower one are offered, and the best of them in this place or before.
_OTHER_FORM, _OTHER_FORM_PLACE = 8, 3


def tile_space(product: Product, device: DeviceFacts, names: Sequence[str]) -> ConfigSpace:
    """The best tiles of a product as a space, the one estimated to be fastest first.

    Args:
        names: the fields of :class:`Tile` that are dimensions; the others keep their defaults.
    """
    ranked = ranked_tiles(product, device, names)
    kept = tuple(dict.fromkeys(tuple(tile.config(names).values()) for tile in ranked))
    dims = {name: tuple(sorted({getattr(tile, name) for tile in ranked})) for name in names}

    def refusal(config: Mapping[str, Value]) -> str | None:
        if tuple(config[name] for name in names) in kept:
            return None
        tile = Tile(**{name: int(config[name]) for name in names})
        return unfit(tile, product, device) or "others are estimated to be faster"

    return ConfigSpace(dims, refusal, kept)


def ranked_tiles(product: Product, device: DeviceFacts, names: Sequence[str] = ()) -> list[Tile]:
    """At most :data:`MAX_CONFIGS` tiles that fit, the one estimated to be fastest first."""
    return list(_ranked(product, device, tuple(names), product.exact_fp32))


@lru_cache(maxsize=256)  # a search asks for the same products many times
def _ranked(
    product: Product, device: DeviceFacts, names: Sequence[str], exact_fp32: bool
) -> tuple[Tile, ...]:
    fitting = [
        tile
        for tile in _with_copies(product, device)
        if unfit(tile, product, device) is None and _expressible(tile, names)
    ]
    if not fitting:  # the smallest tile fits every device and every product
        fitting = [Tile(16, max(16, product.column_step), 16, 2, 2)]
    fitting.sort(key=lambda tile: estimate_us(tile, product, device))
    choose = _of_both_forms if turns_weights(product, device) else _different
    found = choose(fitting, MAX_CONFIGS - 2)
    best = found[0]
    if product.m > 16 * best.block_m and (not names or "group_m" in names):
        found += [replace(best, group_m=group) for group in (4, 16)]
    return tuple(found)


def _different(tiles: Iterable[Tile], most: int) -> list[Tile]:
    """The first of the tiles, few of each kind."""
    found: list[Tile] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for tile in tiles:
        if seen[tile.kind] < _SAME_TILE and len(found) < most:
            seen[tile.kind] += 1
            found.append(tile)
    return found


def _of_both_forms(tiles: Sequence[Tile], most: int) -> list[Tile]:
    """``_different`` with some behind a copy of the weight and some not, wherever both fit."""
    first = tiles[0].depth_first
    others = _different((t for t in tiles if t.depth_first != first), _OTHER_FORM)
    own = _different((t for t in tiles if t.depth_first == first), most - len(others))
    chosen = {*own, *others}
    found = [tile for tile in tiles if tile in chosen]
    if others and found.index(others[0]) > _OTHER_FORM_PLACE:
        found.remove(others[0])
        found.insert(_OTHER_FORM_PLACE, others[0])
    return found


def _with_copies(product: Product, device: DeviceFacts) -> Iterable[Tile]:
    """What is offered, each also behind a copy of the weight where that may pay."""
    for tile in _offered(product, device):
        yield tile
        if pays_to_copy(tile, product, device):
            yield replace(tile, depth_first=1)


def _offered(product: Product, device: DeviceFacts) -> Iterable[Tile]:
    """Combinations an expert would think of, before what fits and what is fast."""
    edges_m, edges_n, depths, warps, stages = _edges(product, device)
    copies = device.capability is not None and device.capability >= (9, 0)
    parts = in_parts(product, device)
    for sizes in itertools.product(edges_m, edges_n, depths, warps, stages):
        block_m, block_n, _, num_warps, _ = sizes
        # of a thread: enough to feed the matrix units, and what its registers hold
        sums = product.sums * block_m * block_n // (32 * num_warps)
        if not 8 <= sums <= (32 if num_warps < 4 else 128):
            continue
        if num_warps > 4 and block_m * block_n < 4096:
            continue
        # flat tiles read much for what they compute, and spill a few bytes
        if not parts and product.exact_fp32 and block_n > (4 if block_m == 16 else 2) * block_m:
            continue
        tile = Tile(*sizes)
        # eight warps without products of warp groups spill beside many sums
        group = group_products(tile, product, device)
        if parts and sums > (64 if num_warps == 4 or group else 32):
            continue
        yield tile
        tiles = ceil(product.m / block_m) * ceil(product.n / block_n)
        for split in (2, 3, 4, 6, 8):
            if tiles < device.units and tiles * split <= 4 * device.units:
                yield replace(tile, split_k=split)
        if product.m <= FEW_ROWS or product.exact_fp32:
            continue
        for persistent in (1, 2):
            walking = replace(tile, persistent=persistent)
            if persistent > 1 and programs_at_once(walking, product, device) < persistent:
                continue
            if tiles > persistent * device.units:
                yield walking
            if copies and (persistent == 1 or tiles > device.units):
                yield replace(walking, tma=1)


def _edges(product: Product, device: DeviceFacts) -> tuple[tuple[int, ...], ...]:
    """Values of block_m, block_n, block_k, num_warps and num_stages."""
    depths: tuple[int, ...]
    if product.exact_fp32:
        deep = (16, 32, 64) if in_parts(product, device) else (16, 32)
        depths = deep if product.sums == 1 else (16,)  # of two products more would spill
        return (16, 32, 64, 128), (32, 64, 128), depths, (4, 8), (2, 3)
    if product.m <= FEW_ROWS:
        return (16, 32, 64, 128), (32, 64, 128, 256), (64, 128, 256), (2, 4, 8), (3, 4, 5, 6)
    depths = (64, 128) if device.shared_memory_bytes > 200_000 else (32, 64)
    return (64, 128, 256), (64, 128, 256), depths, (4, 8), (3, 4, 5)


def _expressible(tile: Tile, names: Sequence[str]) -> bool:
    """Whether the fields a template lacks have their defaults."""
    standard = Tile(0, 0, 0, 0, 0)
    return not names or all(
        getattr(tile, name) == getattr(standard, name)
        for name in ("split_k", "persistent", "tma", "depth_first")
        if name not in names
    )
