"""What kernels for Hopper GPUs are given: TMA descriptors, the order of work."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .bound_launch import Descriptor
from .problem import AttentionProblem, TileMask

WORDS = 128  # 32-bit mask words of a tile, or numbers of its rows


def last_heads_together(p: AttentionProblem, units: int, workers: int) -> int:
    """Heads that are computed together in the end, so that the longest units are begun before the
    last rounds: four units for every worker, where the keys and values stay in the L2 cache.

    Args:
        units: of a head.
    """
    cache = getattr(torch.cuda.get_device_properties(p.k.device), "L2_cache_size", 0)
    of_head = max(1, (p.k[0, 0].numel() + p.v[0, 0].numel()) * p.k.element_size() // p.group)
    heads = min(-(-4 * workers // max(1, units)), cache * 6 // 10 // of_head)
    return max(1, min(p.batch * p.heads, heads))


def no_fragments(mask: TileMask) -> Tensor:
    """What stands for the fragments of a mask without part tiles; nothing reads it."""
    return mask.bitmap.new_empty((1, WORDS))


@cache
def shared_layout(swizzle: int, bits: int, rank: int) -> Any:
    """The shared-memory layout of what TMA copies."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle, bits, rank=rank)


def tiles_of(tensor: Tensor, rows: int, columns: int) -> Descriptor:
    """Tiles of so many rows and columns of a [batch, heads, rows, head_dim] tensor."""
    layout = shared_layout(min(2 * columns, 128), 16, 4)
    return Descriptor(tensor, tensor.shape, _strides(tensor), (1, 1, rows, columns), layout)


def for_tma(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if TMA cannot address it: 16-byte strides and address."""
    step = 16 // tensor.element_size()
    suits = (
        tensor.stride(3) == 1
        and tensor.data_ptr() % 16 == 0
        and all(
            size == 1 or (stride > 0 and stride % step == 0)
            for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        )
    )
    return tensor if suits else tensor.clone(memory_format=torch.contiguous_format)


def _strides(tensor: Tensor) -> list[int]:
    """Strides with a valid number where a size of 1 makes them meaningless."""
    row = tensor.shape[3]
    return [
        row if size == 1 and axis < 3 else stride
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
