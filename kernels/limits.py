"""What a GPU holds and what a tile needs: configs are pruned by this before any launch."""

from typing import TypeVar

import torch

from .problem import next_power_of_two
from .rounding import DIM_STEP

_Config = TypeVar("_Config", bound=tuple[int, ...])

PRECISIONS = ("ieee", "tf32", "tf32x3")  # of fp32 products, by the field ``tf32`` of a config

# Shared memory one program may use, bytes, by CUDA compute capability.
_SHARED_BYTES = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
_SHARED_BYTES_HIP = 65536

# 32-bit values that a thread may hold beside the mask; beyond it registers spill. Hopper and data
# centre Blackwell read the query tile from shared memory (tiles of 64 rows, warps in fours); other
# products hold it in registers, beside the addresses of the tile they load. fp32 on the ordinary
# units holds its operands there too.
_VALUES_PER_THREAD = 140
_VALUES_PER_THREAD_HOPPER = 165
_VALUES_PER_THREAD_BLACKWELL = 155  # the accumulator lives apart and is copied to be rescaled
_VALUES_PER_THREAD_FP32 = 36

# What fits by the counts above, or is a tile for fp32 of block_tiles.py, and still spills a few
# bytes, by CUDA capability, head dim and bytes of an element. Made with Triton 3.9 from what
# test_every_config_anywhere of tests/kernels/test_compile_only.py compiles (STOF_FULL_COMPILE=1),
# of which a part has been run; add what it lists. That of one byte (e4m3; head dims in steps of
# 16) is from Triton 3.6 as well. An entry is the beginning of a config: a tile (rows, keys, warps)
# where the others do without it, with stages and loops where the tile is good otherwise or the
# last.
_SPILLS: dict[str, dict[tuple[tuple[int, int], int, int], tuple[tuple[int, ...], ...]]] = {
    "block": {
        ((8, 0), 32, 2): (
            (64, 64, 4, 2, 3), (64, 64, 4, 2, 4), (64, 64, 4, 3, 3), (128, 64, 8), (64, 64, 8),
            (32, 64, 4),
        ),
        ((8, 0), 192, 2): ((64, 64, 8, 2, 4), (32, 64, 4), (32, 32, 4), (16, 16, 2)),
        ((8, 0), 32, 4): ((32, 64, 4, 2, 6),),
        ((8, 0), 256, 4): ((16, 32, 4, 2, 4),),
        ((8, 6), 32, 2): ((64, 64, 4, 3, 4), (128, 64, 8)),
        ((8, 6), 32, 4): ((32, 64, 4, 2, 6),),
        ((8, 6), 64, 4): ((128, 32, 8, 2, 6),),
        ((8, 6), 192, 2): ((32, 32, 4), (16, 16, 2)),
        ((8, 9), 32, 2): ((64, 64, 4, 3, 4), (128, 64, 8)),
        ((8, 9), 32, 4): ((32, 64, 4, 2, 6),),
        ((8, 9), 64, 4): ((128, 32, 8, 2, 6),),
        ((8, 9), 192, 2): ((32, 32, 4), (16, 16, 2)),
        ((8, 9), 48, 1): ((64, 64, 4, 2, 3), (16, 128, 4, 2, 3)),
        ((8, 9), 64, 1): ((64, 32, 4, 2, 3), (16, 128, 4, 2, 3)),
        ((8, 9), 80, 1): ((64, 64, 8), (32, 64, 4)),
        ((8, 9), 96, 1): ((64, 64, 8), (32, 64, 4)),
        ((8, 9), 112, 1): ((64, 64, 8), (32, 64, 4)),
        ((8, 9), 128, 1): ((64, 64, 8), (32, 64, 4)),
        ((9, 0), 72, 2): ((128, 128, 8), (32, 64, 4, 2, 6)),
        ((9, 0), 80, 2): ((128, 128, 8), (32, 64, 4, 2, 6)),
        ((9, 0), 96, 2): ((128, 128, 8), (32, 64, 4, 2, 6)),
        ((9, 0), 128, 2): ((32, 64, 4, 2, 3), (32, 64, 4, 2, 6)),
        ((9, 0), 192, 2): (
            (16, 64, 2), (32, 32, 8, 2, 6), (32, 32, 4, 2, 6), (16, 16, 2, 3, 3),
        ),
        ((9, 0), 256, 2): ((32, 64, 4, 3, 3),),
        ((9, 0), 16, 4): ((16, 32, 2, 2, 4),),
        ((9, 0), 32, 4): ((32, 64, 4),),
        ((9, 0), 64, 4): ((64, 64, 4, 2, 6), (64, 64, 4, 2, 7), (128, 64, 8, 2, 6)),
        ((9, 0), 72, 4): (
            (64, 32, 4, 2, 4), (64, 32, 4, 2, 6), (64, 32, 4, 2, 7), (16, 32, 4, 2, 3),
            (16, 32, 4, 2, 4),
        ),
        ((9, 0), 80, 4): (
            (64, 32, 4, 2, 4), (64, 32, 4, 2, 6), (64, 32, 4, 2, 7), (16, 32, 4, 2, 3),
            (16, 32, 4, 2, 4),
        ),
        ((9, 0), 96, 4): ((64, 32, 4, 2, 3), (16, 32, 4, 2, 4)),
        ((9, 0), 128, 4): ((16, 32, 2, 2, 4),),
        ((10, 0), 192, 2): ((64, 64, 4, 2, 6), (16, 64, 2), (32, 32, 8, 2, 6)),
        ((10, 0), 256, 2): ((64, 32, 8, 2, 3),),
        ((10, 0), 16, 4): ((16, 32, 2, 2, 3),),
        ((10, 0), 32, 4): ((32, 64, 4),),
        ((10, 0), 128, 4): ((16, 32, 2, 2, 6), (16, 32, 2, 2, 7)),
    },
    "row": {
        ((8, 0), 64, 2): ((16, 32, 8),),
        ((8, 0), 64, 4): ((16, 32, 4),),
        ((8, 6), 64, 4): ((16, 16, 2), (16, 32, 4)),
        ((8, 6), 128, 4): ((16, 32, 8),),
        ((8, 9), 64, 4): ((16, 16, 2), (16, 32, 4)),
        ((8, 9), 128, 4): ((16, 32, 8),),
        ((9, 0), 64, 4): ((16, 16, 2), (16, 32, 4)),
        ((9, 0), 128, 4): ((16, 16, 4),),
    },
    "gather": {
        ((8, 0), 64, 2): ((64, 64, 4),),
        ((8, 0), 72, 2): ((16, 64, 2, 3),),
        ((8, 0), 80, 2): ((16, 64, 2, 3),),
        ((8, 0), 96, 2): ((16, 64, 2, 3),),
        ((8, 6), 64, 2): ((64, 64, 4, 3),),
        ((8, 9), 64, 2): ((64, 64, 4, 3),),
        ((10, 0), 128, 2): ((16, 64, 2, 3),),
    },
}  # fmt: skip


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory a program may use on a device; the smallest known one if unknown."""
    if torch.version.hip is not None:
        return _SHARED_BYTES_HIP
    return _SHARED_BYTES.get(capability, min(_SHARED_BYTES.values()))


def shared_memory_bytes(
    block_q: int, block_k: int, block_d: int, block_dv: int, stages: int, itemsize: int
) -> int:
    """Shared memory of a program: the query tile, ``stages`` tiles of k and v and mask words.

    What only Hopper and newer hold also has the scores, which warps beside each other may exchange.
    """
    operands = (block_q * block_d + stages * block_k * (block_d + block_dv)) * itemsize
    parts = itemsize == 4 and block_q >= 64 and torch.version.hip is None
    if parts:  # of fp32 numbers, which are multiplied
        operands += block_k * (block_d + block_dv) * itemsize
    if parts or operands > _SHARED_BYTES[8, 0]:
        operands += block_q * block_k * itemsize
    return operands + stages * (block_q * block_k // 8 + 16)


def multiplies_by_groups(capability: tuple[int, int]) -> bool:
    """Whether a device multiplies tiles of 64 rows by groups of four warps, out of shared memory.

    Others, those of capability 12 among them, hold both operands in registers.
    """
    return torch.version.hip is None and capability[0] in (9, 10)


def product_widths(dim: int, capability: tuple[int, int], itemsize: int = 2) -> tuple[int, int]:
    """Widths of the products that make up a head dim: a power of two, and one for the rest or 0.

    192 as 128 and 64 takes three quarters of what 256 takes. GPUs that hold operands in registers
    have too few of them for two products of half types. Those of fp32 on CUDA are three of TF32
    each (``exact_products``), whose parts take fewer registers in two turns.

    Args:
        itemsize: bytes of an element.
    """
    width = next_power_of_two(dim)
    half = width // 2
    if itemsize == 4 and torch.version.hip is None:
        return (width, 0) if dim <= 64 else (half, max(32, next_power_of_two(dim - half)))
    if dim <= 128 or dim > half + half // 2 or not multiplies_by_groups(capability):
        return width, 0
    return half, max(16, next_power_of_two(dim - half))


def fits_registers(
    block_q: int,
    block_k: int,
    block_d: int,
    block_dv: int,
    num_warps: int,
    itemsize: int,
    capability: tuple[int, int],
) -> bool:
    """Whether what a program keeps between its loads stays in registers."""
    values = block_q * block_dv + 1.5 * block_q * block_k
    group_products = multiplies_by_groups(capability) and block_q >= 64 and num_warps % 4 == 0
    if itemsize == 4:
        limit = _VALUES_PER_THREAD_FP32
    elif group_products:
        limit = _VALUES_PER_THREAD_HOPPER if capability[0] == 9 else _VALUES_PER_THREAD_BLACKWELL
    else:
        limit = _VALUES_PER_THREAD
        values += block_q * block_d / 2
        # one address for 16 bytes; k and v take turns
        values += block_k * max(block_d, block_dv) * itemsize / 16
    return values / (32 * num_warps) <= limit


def without_spills(
    offered: list[_Config],
    kernel: str,
    head_dim: int,
    itemsize: int,
    capability: tuple[int, int],
) -> list[_Config]:
    """What is left of the configs of a kernel ("block", "row", "gather") that do not spill."""
    if torch.version.hip is not None:  # its capabilities are numbered like CUDA's
        return offered
    stored_dim = -(-head_dim // DIM_STEP) * DIM_STEP if itemsize == 1 else head_dim
    known = _SPILLS[kernel].get((capability, stored_dim, itemsize), ())
    return [config for config in offered if not any(config[: len(e)] == e for e in known)]


def exact_products(width: int = 0) -> str:
    """How fp32 numbers are multiplied, for Triton, where TF32 is not allowed.

    Tensor cores take fp32 numbers rounded to TF32, 10 bits behind the first. On CUDA a product is
    three of those, of both numbers' rounded parts and of what rounding left: a result is as near to
    the fp64 one as with the ordinary units (averages over 2,048 keys at head dim 64, rms error on
    an H200: 4.4e-7 and 8.8e-7, SDPA 6.6e-7), at two to six times their speed. SDPA's kernels for
    fp32 multiply so, too. AMD GPUs multiply fp32 numbers.

    Args:
        width: columns of a product that is not split; the parts of more than 128 would spill.
    """
    return "tf32x3" if torch.version.hip is None and width <= 128 else "ieee"


def fp32_precision(dtype: torch.dtype, width: int = 0) -> int:
    """Place in PRECISIONS of how the kernels multiply numbers of a dtype; 0 for all but fp32.

    Args:
        width: as of ``exact_products``.
    """
    if dtype != torch.float32:
        return 0
    return PRECISIONS.index("tf32" if tf32_allowed() else exact_products(width))


def products_of(tf32: int) -> str:
    """How fp32 numbers are multiplied, for Triton, by a config's field ``tf32``.

    Raises:
        ValueError: it has no such value.
    """
    if not 0 <= tf32 < len(PRECISIONS):
        raise ValueError(f"attention config: tf32 must be 0 to {len(PRECISIONS) - 1}, not {tf32}")
    return PRECISIONS[tf32]


def tf32_allowed() -> bool:
    """Whether the user lets fp32 matrix products of torch use TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
