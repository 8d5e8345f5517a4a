"""Configs of the product with a norm: tiles that fill a device, splits of K, pipelines."""

from __future__ import annotations

from dataclasses import dataclass

from stof_compile.templates.space import Config

from stof_compile.device import DeviceFacts

Tile = tuple[int, int, int, int]
"""block_m, block_n, block_k, num_warps."""

FORMS = ("split_k", "full_row")
DIMS = (
    "form", "block_m", "block_n", "block_k", "split_k", "num_warps", "num_stages", "norm_rows",
    "norm_warps",
)  # fmt: skip

# (block_m, block_n, block_k, num_warps) of the split_k form, the likely best first. Few rows: many
# small programs, each with little of K, so that all loads are on their way at once.
TILES_FEW_ROWS: tuple[Tile, ...] = (
    (64, 64, 128, 4), (64, 64, 64, 4), (64, 32, 128, 4), (128, 32, 128, 4), (32, 64, 128, 4),
    (128, 64, 64, 4), (16, 64, 128, 4), (32, 32, 128, 4), (64, 128, 64, 4), (16, 32, 256, 4),
    (16, 32, 128, 4),
)  # fmt: skip
TILES_MANY_ROWS: tuple[Tile, ...] = (
    (128, 128, 64, 8), (128, 128, 64, 4), (128, 256, 64, 8), (64, 256, 64, 4), (256, 128, 64, 8),
    (128, 64, 64, 4), (64, 128, 64, 4), (64, 64, 64, 4),
)  # fmt: skip
# what spills a few bytes where products read registers (before Hopper), and what does not
BEFORE_HOPPER = {(64, 64, 64, 4): (64, 64, 32, 4), (128, 32, 128, 4): (128, 32, 64, 4)}
# exact fp32 products run on the ordinary units, with their operands in registers
TILES_FP32: tuple[Tile, ...] = (
    (64, 32, 32, 4), (32, 64, 32, 4), (64, 64, 16, 8), (32, 32, 32, 4), (16, 32, 64, 4),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_STAGES = 6
REGISTERS = 65536  # of a unit

# (block_m, block_k, num_warps, num_stages) of the full_row form
FULL_ROWS = (
    (64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 4), (32, 64, 4, 2), (32, 64, 8, 3), (32, 32, 8, 4),
    (32, 32, 8, 2), (16, 64, 4, 3), (16, 128, 8, 2), (16, 64, 8, 4), (16, 32, 8, 2),
    (32, 64, 16, 2),
)  # fmt: skip
FULL_ROWS_FP32 = ((16, 32, 8, 2), (16, 16, 8, 3), (16, 16, 4, 2))
MAX_FULL_ROW = 1024
SMALL_WEIGHT_BYTES = 1 << 18
# fp32 values of the product a thread may hold, by warps: more spill (compiled for sm_80 to sm_100)
ACCUMULATORS = {4: 128, 8: 128, 16: 48}
ACCUMULATORS_BLACKWELL = 96  # they live apart and are copied
ACCUMULATORS_FP32 = 32


@dataclass(frozen=True)
class ProductSize:
    """Sizes of a product [rows, k] x [k, n], and bytes of an element."""

    rows: int
    n: int
    k: int
    itemsize: int


def offered_configs(size: ProductSize, device: DeviceFacts) -> list[Config]:
    """Configs worth timing, the likely best first."""
    full_rows = [] if size.n > MAX_FULL_ROW or size.n < 16 else _full_rows(size, device)
    found = _split_k(size, device)
    return found + full_rows


def _split_k(size: ProductSize, device: DeviceFacts) -> list[Config]:
    few = _cut(size.rows, 128) * _cut(size.n, 128) < device.units
    tiles = TILES_FP32 if size.itemsize == 4 else TILES_FEW_ROWS if few else TILES_MANY_ROWS
    if not _at_least(device, 9):
        tiles = tuple(BEFORE_HOPPER.get(tile, tile) for tile in tiles)
    limit = device.shared_memory_bytes
    fitting = [tile for tile in tiles if _shared(*tile[:3], 2, size, device) <= limit]
    wanted = [tile for tile in fitting if _suits(tile, size)] or fitting[-1:]
    found: list[Config] = []
    # of many rows the norm is a small part, whose warps are not worth a search
    for norm_warps in _norm_warps(size) if few else _norm_warps(size)[:1]:
        for tile in wanted:
            block_m, block_n, block_k, num_warps = tile
            programs = _cut(size.rows, block_m) * _cut(size.n, block_n)
            for split_k in _splits(programs, block_k, size, device):
                stages = _stages(tile, split_k, programs * split_k, size, device)
                values = (
                    "split_k", *tile[:3], split_k, num_warps, stages, 1, norm_warps
                )  # fmt: skip
                found.append(dict(zip(DIMS, values, strict=True)))
    return found


def _suits(tile: Tile, size: ProductSize) -> bool:
    """Whether at most a part of a tile is padding; 16 is the least a product takes."""
    return all(
        block <= max(16, 2 * length - 1)
        for block, length in zip(tile[:3], (size.rows, size.n, size.k), strict=True)
    )


def _splits(programs: int, block_k: int, size: ProductSize, device: DeviceFacts) -> list[int]:
    """One or two splits of K: those that bring the programs nearest to one or two a unit."""
    tiles = _cut(size.k, block_k)
    if programs >= device.units or (size.itemsize == 4 and programs >= device.units // 2):
        return [1]
    possible = []
    for split in SPLITS:
        workspace = 4 * split * size.rows * size.n
        if split <= tiles and (split == 1 or workspace <= max(1 << 20, device.l2_bytes // 2)):
            possible.append(split)
    # splits of equal parts need no masks
    even = [split for split in possible if size.k % (split * block_k) == 0] or possible
    chosen = [
        min(even, key=lambda split: abs(programs * split - goal * device.units)) for goal in (1, 2)
    ]
    return list(dict.fromkeys(chosen))


def _stages(tile: Tile, split_k: int, programs: int, size: ProductSize, device: DeviceFacts) -> int:
    """Depth of the pipeline: all of the loop where shared memory has room for it.

    The room is shared by the programs that a unit runs at once; three stages are worth a program
    less.
    """
    block_m, block_n, block_k, num_warps = tile
    wanted = min(MAX_STAGES, _cut(_cut(size.k, block_k), split_k) + 1)
    registers = (block_m * block_n // (32 * num_warps) + 48) * 32 * num_warps
    resident = min(4, _cut(programs, device.units), max(1, REGISTERS // registers))
    for together in range(resident, 0, -1):
        room = device.shared_memory_bytes // together - 2048
        fitting = [s for s in range(2, wanted + 1) if _shared(*tile[:3], s, size, device) <= room]
        if fitting and fitting[-1] >= min(3, wanted):
            return fitting[-1]
    return 2


def _full_rows(size: ProductSize, device: DeviceFacts) -> list[Config]:
    found: list[Config] = []
    width = sum(row_tiles(size.n))
    for block_m, block_k, warps, stages in FULL_ROWS_FP32 if size.itemsize == 4 else FULL_ROWS:
        values_a_thread = block_m * width / (32 * warps)
        limit = ACCUMULATORS_FP32 if size.itemsize == 4 else ACCUMULATORS[warps]
        if _at_least(device, 10):
            limit = min(limit, ACCUMULATORS_BLACKWELL)
        shared = _shared(block_m, width, block_k, stages, size, device)
        if values_a_thread > limit or shared > device.shared_memory_bytes:
            continue
        if block_m > max(16, size.rows) or block_k > max(16, 2 * size.k - 1):
            continue
        # each program reads the whole weight, at about 0.1 TB/s: a few of them take too long
        idle = 8 * _cut(size.rows, block_m) < device.units
        if idle and size.n * size.k * size.itemsize > SMALL_WEIGHT_BYTES:
            continue
        values = (
            "full_row", block_m, row_tiles(size.n)[0], block_k, 1, warps, stages, 1, warps
        )  # fmt: skip
        found.append(dict(zip(DIMS, values, strict=True)))
    return found


def row_tiles(n: int) -> tuple[int, int]:
    """Columns of the two tiles that hold a row, as in kernels/linear_norm.py."""
    left = max(16, 1 << (n.bit_length() - 1))
    rest = n - left
    return left, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def _norm_warps(size: ProductSize) -> list[int]:
    """Warps for a row of the norm: 8 values a thread, and half as many."""
    wide = min(16, 1 << max(0, (size.n - 1).bit_length() - 8))
    return [wide] if wide == 1 else [wide, wide // 2]


def _shared(
    block_m: int, block_n: int, block_k: int, stages: int, size: ProductSize, device: DeviceFacts
) -> int:
    """Shared memory of a pipeline, bytes; products from registers need a buffer less."""
    buffers = stages if _at_least(device, 9) and block_m >= 64 else max(1, stages - 1)
    return buffers * (block_m + block_n) * block_k * size.itemsize


def _at_least(device: DeviceFacts, major: int) -> bool:
    return device.capability is not None and device.capability >= (major, 0)


def _cut(length: int, block: int) -> int:
    return -(-length // block)
