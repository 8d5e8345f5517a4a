"""What a GPU holds and what a tile needs: configs are pruned by this before any launch."""

from typing import TypeVar

import torch

from .problem import next_power_of_two

_Config = TypeVar("_Config", bound=tuple[int, ...])

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
# products hold it in registers, beside the addresses of the tile they load. Products of fp32
# operands run on the ordinary units and hold theirs in registers too.
_VALUES_PER_THREAD = 140
_VALUES_PER_THREAD_HOPPER = 165
_VALUES_PER_THREAD_BLACKWELL = 155  # the accumulator lives apart and is copied to be rescaled
_VALUES_PER_THREAD_FP32 = 36

# What fits by the counts above and still spills a few bytes, by CUDA capability, head dim and bytes
# of an element. Made with Triton 3.9 from what test_every_config_anywhere of
# tests/kernels/test_compile_only.py compiles (STOF_FULL_COMPILE=1), of which a part has been run;
# add what it lists. That of one byte (e4m3; head dims in steps of 16) is from Triton 3.6 as well.
# An entry is the beginning of a config: a tile (rows, keys, warps) where the others do without it,
# with stages and loops where the tile is good otherwise or the last.
_SPILLS: dict[str, dict[tuple[tuple[int, int], int, int], tuple[tuple[int, ...], ...]]] = {
    "block": {
        ((8, 0), 32, 2): (
            (64, 64, 4, 2, 3), (64, 64, 4, 2, 4), (64, 64, 4, 3, 3), (128, 64, 8), (64, 64, 8),
            (32, 64, 4),
        ),
        ((8, 0), 96, 4): (
            (32, 32, 8, 2, 3), (32, 32, 8, 3, 3), (32, 32, 8, 3, 4), (32, 32, 8, 3, 5),
            (16, 16, 4, 2, 6), (16, 16, 4, 3, 3),
        ),
        ((8, 0), 192, 2): ((64, 64, 8, 2, 4), (32, 64, 4), (32, 32, 4), (16, 16, 2)),
        ((8, 6), 32, 2): ((64, 64, 4, 3, 4), (128, 64, 8)),
        ((8, 6), 96, 4): (
            (32, 32, 8, 2, 5), (32, 32, 8, 2, 6), (16, 16, 4, 2, 1), (16, 16, 4, 3, 3),
            (16, 16, 4, 3, 6),
        ),
        ((8, 6), 192, 2): ((32, 32, 4), (16, 16, 2)),
        ((8, 6), 192, 4): ((16, 16, 4, 2, 1), (16, 16, 4, 2, 6)),
        ((8, 9), 32, 2): ((64, 64, 4, 3, 4), (128, 64, 8)),
        ((8, 9), 96, 4): (
            (32, 32, 8, 2, 5), (32, 32, 8, 2, 6), (16, 16, 4, 2, 1), (16, 16, 4, 3, 3),
            (16, 16, 4, 3, 6),
        ),
        ((8, 9), 192, 2): ((32, 32, 4), (16, 16, 2)),
        ((8, 9), 192, 4): ((16, 16, 4, 2, 1), (16, 16, 4, 2, 6)),
        ((8, 9), 48, 1): ((64, 64, 4, 2, 3), (16, 128, 4, 2, 3)),
        ((8, 9), 64, 1): ((64, 32, 4, 2, 3), (16, 128, 4, 2, 3)),
        ((8, 9), 80, 1): ((64, 64, 8), (32, 64, 4)),
        ((8, 9), 96, 1): ((64, 64, 8), (32, 64, 4)),
        ((8, 9), 112, 1): ((64, 64, 8), (32, 64, 4)),
        ((8, 9), 128, 1): ((64, 64, 8), (32, 64, 4)),
        ((9, 0), 64, 4): ((64, 32, 8),),
        ((9, 0), 72, 2): ((128, 128, 8), (32, 64, 4, 2, 6)),
        ((9, 0), 80, 2): ((128, 128, 8), (32, 64, 4, 2, 6)),
        ((9, 0), 96, 2): ((128, 128, 8), (32, 64, 4, 2, 6)),
        ((9, 0), 128, 2): ((32, 64, 4, 2, 3), (32, 64, 4, 2, 6)),
        ((9, 0), 192, 2): (
            (16, 64, 2), (32, 32, 8, 2, 6), (32, 32, 4, 2, 6), (16, 16, 2, 3, 3),
        ),
        ((9, 0), 256, 2): ((32, 64, 4, 3, 3),),
        ((10, 0), 192, 2): ((64, 64, 4, 2, 6), (16, 64, 2), (32, 32, 8, 2, 6)),
        ((10, 0), 192, 4): ((16, 16, 4, 3, 6),),
        ((10, 0), 256, 2): ((64, 32, 8, 2, 3),),
        ((10, 0), 256, 4): ((16, 16, 4, 3, 7),),
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
        ((9, 0), 72, 4): ((32, 32, 8), (16, 32, 4)),
        ((9, 0), 80, 4): ((32, 32, 8), (16, 32, 4)),
        ((9, 0), 96, 4): ((32, 32, 8), (16, 32, 4)),
        ((10, 0), 72, 4): ((32, 32, 8), (16, 32, 4)),
        ((10, 0), 80, 4): ((32, 32, 8), (16, 32, 4)),
        ((10, 0), 96, 4): ((32, 32, 8), (16, 32, 4)),
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
    if operands > _SHARED_BYTES[8, 0]:
        operands += block_q * block_k * itemsize
    return operands + stages * (block_q * block_k // 8 + 16)


def multiplies_by_groups(capability: tuple[int, int]) -> bool:
    """Whether a device multiplies tiles of 64 rows by groups of four warps, out of shared memory.

    Others, those of capability 12 among them, hold both operands in registers.
    """
    return torch.version.hip is None and capability[0] in (9, 10)


def product_widths(dim: int, capability: tuple[int, int]) -> tuple[int, int]:
    """Widths of the products that make up a head dim: a power of two, and one for the rest or 0.

    192 as 128 and 64 takes three quarters of what 256 takes. GPUs that hold operands in registers
    have too few of them for two products.
    """
    width = next_power_of_two(dim)
    half = width // 2
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
    known = _SPILLS[kernel].get((capability, head_dim, itemsize), ())
    return [config for config in offered if not any(config[: len(e)] == e for e in known)]


def tf32_allowed() -> bool:
    """Whether the user lets fp32 matrix products of torch use TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
