"""What a tile of a matrix product needs of a GPU, and an estimate of its time.

The estimate needs no measurement: waves of programs, each bound by the matrix units, by the bytes a
multiprocessor gets from the L2 cache, or by the latency of its loads. It is there to choose among
thousands of combinations the few dozen that an expert would try (``gemm_tiles.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import torch
from stof_compile.templates.space import Config

from stof_compile.device import DeviceFacts

FEW_ROWS = 512
"""Rows up to which a product waits for its weight."""

_CLOCK_GHZ = 1.7
# Multiplications and additions of a multiprocessor in a clock, 16-bit operands and fp32 sums.
_MATRIX_RATE = {8: 1024, 9: 4096, 10: 8192, 12: 1024}
_MATRIX_RATE_SM80 = 2048
_VECTOR_RATE = 256  # of the ordinary units, which multiply fp32 numbers
_IN_PARTS = 6  # an exact fp32 product is three of TF32 numbers, each at half the rate
_REACHED = 0.75  # of the rates, by a loop that waits for nothing
_REACHED_IN_PARTS = 0.55
# With a weight by columns, whose parts Hopper's warp groups turn on their way to shared memory
# (other tiles have not been timed alone), and of a copy by depth: bytes a clock and multiprocessor,
# and what comes to it. An H200 takes 7.4, 15.0 and 18.9 us for 2.4, 7.1 and 9.4 MB.
_TURNED_IN_PARTS = 1.5
_COPY_BYTES, _COPY_US = 5.5, 3.6
_WIDE_IN_PARTS = 1.09  # a tile wider than high: the parts of its weight go through shared memory
# Warp-level products reach less on GPUs made for those of warp groups.
_REACHED_WARP_LEVEL = 0.45
_L2_BYTES_ALONE, _L2_BYTES_SHARED = 64.0, 36.0  # a clock and multiprocessor: one reads, all do
_LOAD_US = 0.8  # from a request to its data
_TILE_US = 1.2  # before the first product and after the last
_NEXT_TILE_US = 0.25  # of that, what persistent programs cannot overlap
_HAND_OVER_US = 1.2  # from the last partial sums to the program that adds them
_REGISTERS = 65536
# Sums and parts of fp32 operands of a thread, of warp-level and of warp-group products.
_MOST_IN_PARTS = 112, 160
# (generation, block_m, block_n, block_k, num_warps, num_stages) that spill nevertheless.
_SPILLS_IN_PARTS = frozenset({(10, 128, 64, 32, 4, 2)})  # 4 bytes
_MAX_THREADS = 2048
_STEP_US = 0.02  # a step of the loop: barriers and addresses
# Of few rows: columns of K in flight below which a program waits for memory, and what 64 less cost.
_ENOUGH_FLYING, _TOO_FEW_FLYING = 384, 0.05


@dataclass(frozen=True)
class Product:
    """Sizes of a matrix product and what computes it.

    Args:
        m, n, k: rows, columns, depth.
        dtype: of operands and result.
        sums: tiles of sums a program keeps (2: gate and up).
        column_step: what block_n has to be a multiple of (a head), a power of two.
        kn: the weight has its unit stride along N, and not along K.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    sums: int = 1
    column_step: int = 1
    kn: bool = False

    @property
    def exact_fp32(self) -> bool:
        """Whether fp32 numbers must not be rounded to TF32."""
        return self.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"


@dataclass(frozen=True)
class Tile:
    """One way to cut a product; fields as in ``LinearConfig`` (kernels/linear.py)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_k: int = 1
    persistent: int = 0
    tma: int = 0
    depth_first: int = 0

    @property
    def kind(self) -> tuple[int, ...]:
        """What makes it a different program rather than a deeper pipeline or one of more warps."""
        sizes = self.block_m, self.block_n, self.block_k
        return *sizes, self.split_k, bool(self.persistent), self.tma, self.depth_first

    def config(self, names: Sequence[str]) -> Config:
        """The fields a template has, as a config."""
        return {name: getattr(self, name) for name in names}


def unfit(tile: Tile, product: Product, device: DeviceFacts) -> str | None:
    """Why a tile cannot run or wastes most of its work, None if it should be considered."""
    if tile.block_n % product.column_step:
        return f"{tile.block_n} columns are no multiple of {product.column_step}"
    for edge, size in ((tile.block_m, product.m), (tile.block_n, product.n)):
        if edge > max(32, _power_of_two(size)):
            return f"a tile edge of {edge} is larger than the problem's {size}"
    if tile.block_k > max(64, _power_of_two(product.k)):
        return f"block_k {tile.block_k} is larger than the depth {product.k}"
    if tile.depth_first and not pays_to_copy(tile, product, device):
        return "a copy of the weight by depth gains nothing"
    steps = ceil(product.k / tile.block_k)
    if tile.split_k > 1 and ceil(steps / tile.split_k) * (tile.split_k - 1) >= steps:
        return f"{steps} steps along K leave one of {tile.split_k} parts without work"
    if tile.num_warps > 4 and tile.block_m <= 64 and in_parts(product, device):
        return "more than four warps over so few rows of fp32 have shown faults in attention"
    shared = shared_bytes(tile, product, device)
    if shared > device.shared_memory_bytes:
        return f"{shared} bytes of shared memory, the device has {device.shared_memory_bytes}"
    return _register_refusal(tile, product, device)


def shared_bytes(tile: Tile, product: Product, device: DeviceFacts) -> int:
    """Shared memory of a program, an upper estimate.

    Load buffers, and the way of a tile to wide stores: its memory is that of the buffers, except
    where the next tile's loads are on their way.
    """
    size = product.dtype.itemsize
    stage = (tile.block_m + product.sums * tile.block_n) * tile.block_k * size
    group = group_products(tile, product, device)
    parts = 0  # of a weight's tile, which the matrix units read
    if group and in_parts(product, device):
        parts = 2 * product.sums * tile.block_n * tile.block_k * size
    buffers = tile.num_stages if group and not parts else tile.num_stages - 1
    buffers = max(1, buffers)
    way_out = tile.block_m * tile.block_n * size
    if tile.split_k > 1:
        way_out = tile.block_m * tile.block_n * 4
    if tile.persistent:
        return buffers * stage + parts + way_out // (2 if way_out >= 128 * 128 * size else 1) + 256
    return max(buffers * stage + parts + 64, way_out + 64)


def registers_of(tile: Tile, product: Product, device: DeviceFacts) -> int:
    """Registers of a thread, an upper estimate; 255 at most where ``_MOST_IN_PARTS`` decides."""
    threads = 32 * tile.num_warps
    sums = product.sums * tile.block_m * tile.block_n // threads
    if in_parts(product, device):
        group = group_products(tile, product, device)
        return min(255, 2 * _held_in_parts(tile, product, group) + (32 if group else 80))
    if product.exact_fp32:
        return 3 * sums + 48
    if group_products(tile, product, device):
        return sums + 56
    operands = (tile.block_m + product.sums * tile.block_n) * 16 // threads // 2
    return sums + 2 * operands + 64


def _register_refusal(tile: Tile, product: Product, device: DeviceFacts) -> str | None:
    """Why registers would spill; the rules beside the count are what compiling has shown."""
    if in_parts(product, device):
        group = group_products(tile, product, device)
        held, most = _held_in_parts(tile, product, group), _MOST_IN_PARTS[group]
        if held > most:
            return f"{held} sums and parts of operands a thread, more than {most} spill"
        sizes = tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages
        if device.capability and (device.capability[0], *sizes) in _SPILLS_IN_PARTS:
            return "compiling has shown that it spills"
    registers = registers_of(tile, product, device)
    if registers > 255:
        return f"{registers} registers a thread, at most 255 exist"
    steps = ceil(product.k / tile.block_k)
    whole = tile.split_k == 1 and not tile.persistent  # the number of steps is a constant
    if whole and tile.block_k >= 256 and steps == 8 and group_products(tile, product, device):
        return "a loop of 8 deep steps is unrolled, and its addresses do not fit"
    threads = 32 * tile.num_warps
    sums = product.sums * tile.block_m * tile.block_n // threads
    if sums < 128 or tile.persistent:
        return None
    stage = (tile.block_m + product.sums * tile.block_n) * tile.block_k * product.dtype.itemsize
    loads = stage // (16 * threads)
    if loads > 16:
        return f"the addresses of {loads} loads a thread do not fit beside {sums} sums"
    group = group_products(tile, product, device)
    if product.sums > 1 and tile.block_k > 32 and not group:
        return f"the operands of two products do not fit beside {sums} sums a thread"
    return None


def estimate_us(tile: Tile, product: Product, device: DeviceFacts) -> float:
    """Time of a tile's kernel without its launch, microseconds, good for comparing only."""
    size = product.dtype.itemsize
    tiles = ceil(product.m / tile.block_m) * ceil(product.n / tile.block_n)
    programs = tiles * tile.split_k
    units = max(1, device.units)
    busy = min(units, programs)
    each = ceil(programs / units)  # programs of the busiest multiprocessor, one after another
    resident = min(each, programs_at_once(tile, product, device))
    depth = ceil(ceil(product.k / tile.block_k) / tile.split_k) * tile.block_k
    # -- one program that has a multiprocessor to itself ------------------------------------------
    clocks = depth * 2 * tile.block_m * tile.block_n * product.sums / _rate(tile, product, device)
    read = depth * (tile.block_m + product.sums * tile.block_n) * size
    rate = min(_L2_BYTES_ALONE, _L2_BYTES_SHARED * units / busy)
    work = max(clocks, read / rate) / (_CLOCK_GHZ * 1000)
    flying = max(1, tile.num_stages - 1) * resident * tile.block_k
    work = max(work, depth / flying * _LOAD_US)
    steps = ceil(depth / tile.block_k)
    total = each * (work + steps * _STEP_US / resident)
    # -- what is not work -------------------------------------------------------------------------
    if tile.persistent:
        total += _TILE_US + (0.4 if tile.tma else 0.0) + (each - 1) * _NEXT_TILE_US
    else:
        total += _TILE_US * ceil(each / resident)
    if tile.split_k > 1:  # every part is written; the last program of a tile reads the others
        part = tile.block_m * tile.block_n * 4 / rate / (_CLOCK_GHZ * 1000)
        total += _HAND_OVER_US + part * (each + tile.split_k - 1)
    if in_parts(product, device) and tile.block_n > tile.block_m:
        total *= _WIDE_IN_PARTS
    if tile.depth_first:
        copied = 2 * product.n * product.k * size / (_COPY_BYTES * units * _CLOCK_GHZ * 1000)
        total += copied + _COPY_US
    elif turns_weights(product, device):
        total *= _TURNED_IN_PARTS
    if tile.tma:
        total *= 0.97  # no threads spent on addresses
    if product.m <= FEW_ROWS and not product.exact_fp32:  # which is no wait for memory
        missing = min(_ENOUGH_FLYING, depth) - (tile.num_stages - 1) * tile.block_k
        total *= 1 + _TOO_FEW_FLYING * max(0, missing) / 64
    # ties: four warps, a shallow pipeline
    return total * (1 + 0.002 * tile.num_stages + 0.01 * abs(log2(tile.num_warps / 4)))


def _rate(tile: Tile, product: Product, device: DeviceFacts) -> float:
    """Multiplications and additions a multiprocessor does for a tile in a clock."""
    parts = in_parts(product, device)
    if product.exact_fp32 and not parts:
        return _VECTOR_RATE * _REACHED
    capability = device.capability or (8, 0)
    rate = _matrix_rate(device)
    group = group_products(tile, product, device)
    if parts:
        reached = _REACHED_IN_PARTS if group or capability[0] < 9 else _REACHED_WARP_LEVEL
        return rate / _IN_PARTS * reached
    if product.dtype == torch.float32:
        rate //= 2
    reached = _REACHED if group or capability[0] < 9 else _REACHED_WARP_LEVEL
    return rate * reached


def _matrix_rate(device: DeviceFacts) -> int:
    """Multiplications and additions a multiprocessor does in a clock, of 16-bit numbers."""
    capability = device.capability or (8, 0)
    return _MATRIX_RATE_SM80 if capability == (8, 0) else _MATRIX_RATE.get(capability[0], 1024)


def group_products(tile: Tile, product: Product, device: DeviceFacts) -> bool:
    """Whether products are those of warp groups, which read shared memory (Hopper and newer)."""
    return (
        device.capability is not None
        and device.capability[0] in (9, 10)
        and tile.block_m >= 64
        and tile.num_warps % 4 == 0
        and (not product.exact_fp32 or in_parts(product, device))
    )


def in_parts(product: Product, device: DeviceFacts) -> bool:
    """Whether a product is three of TF32 numbers: exact ones of fp32 where these pay, as
    ``precision_of`` in kernels/linear_problem.py says."""
    pay = _matrix_rate(device) > _IN_PARTS * _VECTOR_RATE
    return product.exact_fp32 and device.arch.startswith("sm_") and pay


def turns_weights(product: Product, device: DeviceFacts) -> bool:
    """Whether a product has to turn its weight: those of Hopper's warp groups read TF32 numbers by
    depth only. Other GPUs have not been measured."""
    hopper = device.capability is not None and device.capability[0] == 9
    return product.kn and hopper and in_parts(product, device)


def pays_to_copy(tile: Tile, product: Product, device: DeviceFacts) -> bool:
    """Whether a copy of the weight by depth can make a tile faster."""
    return turns_weights(product, device) and group_products(tile, product, device)


def _held_in_parts(tile: Tile, product: Product, group: bool) -> int:
    """Sums of a thread and both parts of its operands; those of a warp group have the weight's in
    shared memory."""
    threads = 32 * tile.num_warps
    sums = product.sums * tile.block_m * tile.block_n // threads
    rows = tile.block_m + (0 if group else product.sums * tile.block_n)
    return sums + 2 * rows * tile.block_k // threads


def programs_at_once(tile: Tile, product: Product, device: DeviceFacts) -> int:
    """Programs a multiprocessor runs at the same time."""
    threads = 32 * tile.num_warps
    held = max(1, device.shared_memory_bytes // max(1, shared_bytes(tile, product, device)))
    registers = min(255, registers_of(tile, product, device))
    count = min(held, _REGISTERS // (registers * threads), _MAX_THREADS // threads)
    if tile.persistent:
        count = min(count, tile.persistent)
    return max(1, count)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
