"""Tiles that the block-wise kernel is worth trying with."""

import torch

from .limits import (
    fits_registers,
    multiplies_by_groups,
    product_widths,
    shared_memory_bytes,
    shared_memory_limit,
    without_spills,
)

Tile = tuple[int, int, int]  # rows, keys, warps

# The best on sparse masks first.
_TILES = (
    (64, 64, 4),
    (128, 128, 8),
    (128, 64, 8),
    (64, 64, 8),
    (64, 32, 4),
    (64, 32, 8),
    (32, 32, 4),
    (32, 32, 8),
    (16, 16, 2),
    (16, 16, 4),
)
# The same where head dims over 128 leave four warps the registers for the first of them.
_TILES_WIDE = ((64, 64, 4), (64, 32, 4), (128, 64, 8))
# Where 64 rows a program leave most of the GPU idle, smaller programs shorten the critical path.
_TILES_FEW_ROWS = ((16, 128, 4), (64, 64, 4), (16, 64, 2), (32, 64, 4))
# fp32 on AMD GPUs runs on the ordinary units: small tiles, whose operands fit the registers.
_TILES_FP32_HIP = ((32, 32, 4), (32, 32, 8), (64, 32, 8), (16, 16, 2), (16, 16, 4))
# fp32 on CUDA, by the first number of the compute capability (8 for others) and the largest sum of
# product widths. Eight warps take 128 rows: beside each other they are slow. Larger ones spill.
_TILES_FP32: dict[int, dict[int, tuple[Tile, ...]]] = {
    9: {
        64: ((64, 64, 4), (128, 64, 8), (32, 64, 4)),
        96: ((64, 32, 4), (16, 32, 2), (128, 32, 8)),
        128: ((16, 32, 2), (16, 32, 4)),
        256: ((16, 32, 4), (16, 16, 4)),
    },
    10: {
        64: ((64, 32, 4), (32, 64, 4), (16, 32, 2)),
        128: ((16, 32, 2), (16, 32, 4)),
        256: ((16, 32, 4), (16, 16, 4)),
    },
    8: {
        64: ((32, 64, 4), (128, 32, 8), (16, 32, 2)),
        128: ((16, 32, 2), (16, 32, 4)),
        256: ((16, 32, 4), (16, 16, 4)),
    },
}
_TILES_FP32_FEW_ROWS: dict[int, tuple[Tile, ...]] = {
    64: ((16, 32, 2), (16, 64, 4), (32, 64, 4)),
    128: ((16, 32, 2), (16, 32, 4)),
    256: ((16, 32, 4), (16, 16, 4)),
}
LEAST_SUM = 32  # so many products of e4m3 numbers are added at least
FEW_PROGRAMS = 264  # two for every multiprocessor of the largest Hopper part
_MAX_TILES = 3  # tile shapes offered for one problem, and the narrow one
# Half as many keys: less of the tiles lies outside of narrow windows and short global parts, and
# with 80 to 92 registers a thread six programs fit a Hopper multiprocessor in place of three.
NARROW = (64, 32, 4)


def padded_widths(
    head_dim: int, value_dim: int, itemsize: int, capability: tuple[int, int]
) -> tuple[int, int]:
    """Columns of a tile of keys and of values that a program holds."""
    block_d, block_dv = (
        sum(product_widths(dim, capability, itemsize)) for dim in (head_dim, value_dim)
    )
    return max(block_d, LEAST_SUM if itemsize == 1 else 0), block_dv


def block_tiles(
    head_dim: int,
    value_dim: int,
    itemsize: int,
    capability: tuple[int, int],
    *,
    tallest: int,
    few: bool,
    narrow: bool,
) -> list[Tile]:
    """(rows, keys, warps) worth trying, the best first, within shared memory and registers.

    Args:
        head_dim: of q and k. value_dim: of v. itemsize: bytes of an element; 1 for e4m3.
        capability: (major, minor) of the device.
        tallest: rows of a tile at most, where there is one.
        few: 64 rows a program would leave most of the GPU idle.
        narrow: tiles of 32 keys hold much less than those of 64 do.
    """
    widths = padded_widths(head_dim, value_dim, itemsize, capability)
    limit = shared_memory_limit(capability)
    single = itemsize == 4
    by_parts = single and torch.version.hip is None  # a product is three of TF32
    every: tuple[Tile, ...] = _TILES_FP32_HIP if single else _TILES
    quick: tuple[Tile, ...] = every if single else _TILES_FEW_ROWS
    if by_parts:
        quick = _of_width(_TILES_FP32_FEW_ROWS, max(widths))
        every = _of_width(_TILES_FP32.get(capability[0], _TILES_FP32[8]), max(widths))
        every = tuple(dict.fromkeys((*every, *quick)))
    # lower tiles of e4m3 would multiply in fp16 where tiles of 64 rows do not
    fp8 = itemsize == 1
    least = (64 if multiplies_by_groups(capability) else 16, LEAST_SUM) if fp8 else (16, 16)
    fitting = [
        (block_q, block_k, warps)
        for block_q, block_k, warps in dict.fromkeys((*every, *quick))
        if (by_parts or fits_registers(block_q, block_k, *widths, warps, itemsize, capability))
        and shared_memory_bytes(block_q, block_k, *widths, 2, itemsize) <= limit
        and (block_q >= least[0] and block_k >= least[1])
    ]
    fitting = without_spills(fitting, "block", head_dim, itemsize, capability) or fitting
    if max(widths) > 128 and itemsize < 4 and _TILES_WIDE[0] in fitting:
        every = tuple(dict.fromkeys((*_TILES_WIDE, *_TILES)))
    tiles = [tile for tile in (quick if few else every) if tile in fitting and tile[0] <= tallest]
    if not tiles:  # too tall or too many keys is slow, but right
        rest = [tile for tile in every if tile in fitting]
        tiles = [tile for tile in rest if tile[0] <= tallest] or rest
    tiles = tiles[: len(quick) if few else _MAX_TILES]
    if narrow and not few and itemsize <= 2 and NARROW in fitting and NARROW[0] <= tallest:
        tiles = list(dict.fromkeys((tiles[0], NARROW, *tiles[1:])))
    return tiles


def _of_width(by_width: dict[int, tuple[Tile, ...]], width: int) -> tuple[Tile, ...]:
    return next((tiles for limit, tiles in sorted(by_width.items()) if width <= limit), ())
