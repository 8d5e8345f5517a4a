"""Estimates the time of TileLang kernels, to choose which few of the configs are worth a trial."""

from __future__ import annotations

from math import ceil

from stof_compile.device import DeviceFacts

ITEMSIZE = 2
# Bytes of shared memory left for barriers and alignment.
SLACK_BYTES = 2048
# Multiplications with addition of a multiprocessor in a clock that a loop reaches: products of
# warp groups (Hopper, 64 rows and more), and of warps.
_GROUP_RATE = 1500.0
_WARP_RATE = {(8, 0): 768.0, (8, 6): 384.0, (8, 9): 384.0, (12, 0): 384.0, (12, 1): 384.0}
_WARP_RATE_ELSE = 900.0
_L2_BYTES = 40.0  # a clock and multiprocessor
_BLOCK_CLOCKS = 2000.0  # from the start of a block to its first product, and from its last


def block_clocks(
    blocks: int, products: float, bytes_read: float, resident: int, rows: int, device: DeviceFacts
) -> float:
    """Clocks of a kernel: rounds of blocks, each bound by its products or by its loads.

    Args:
        blocks: of the grid.
        products: multiplications of one block, padding included.
        bytes_read: by one block.
        resident: blocks a multiprocessor runs at once, which hide each other's start.
        rows: of a block's tile.
    """
    rate = _WARP_RATE.get(device.capability or (8, 0), _WARP_RATE_ELSE)
    if device.capability and device.capability[0] == 9 and rows >= 64:
        rate = _GROUP_RATE
    rounds = ceil(blocks / max(1, device.units))
    return rounds * (_BLOCK_CLOCKS / resident + max(products / rate, bytes_read / _L2_BYTES))


def next_power_of_two(n: int, least: int) -> int:
    """Smallest power of two >= n and >= least."""
    return max(least, 1 << (n - 1).bit_length())
