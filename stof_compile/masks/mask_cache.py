"""Block masks remembered: equal rules at equal sizes are built once."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from stof_compile.masks.assemble import planes_of
from stof_compile.masks.block_mask import BlockMask, build_block_mask
from stof_compile.masks.derived import refuse_in_capture
from stof_compile.masks.spec import MaskSpec


def cached_block_mask(
    spec: MaskSpec,
    q_len: int,
    k_len: int,
    block: int | tuple[int, int] = 64,
    q_offset: int = 0,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Same as `build_block_mask`, remembering the 64 masks used last.

    A mask asked for while a CUDA stream is capturing is kept for good: the captured graph reads its
    memory.

    Raises:
        StofMaskError: such a mask was not asked for before, and cannot be made then.
    """
    block = (block, block) if isinstance(block, int) else (block[0], block[1])
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    # the number of planes a rule has does not depend on sizes it ignores, so they must not split
    # the cache
    batch, heads = planes_of(spec, batch, heads)
    arguments = (spec, q_len, k_len, block, q_offset, batch, heads, str(place))
    capturing = place.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _pinned(*arguments) if capturing else _recent(*arguments)


@lru_cache(maxsize=64)
def _recent(
    spec: MaskSpec,
    q_len: int,
    k_len: int,
    block: tuple[int, int],
    q_offset: int,
    batch: int,
    heads: int,
    device: str,
) -> BlockMask:
    what = f"the block mask of {spec} for {q_len} queries and {k_len} keys"
    refuse_in_capture(torch.device(device), what)
    return build_block_mask(
        spec, q_len, k_len, block, q_offset=q_offset, batch=batch, heads=heads, device=device
    )


@cache
def _pinned(
    spec: MaskSpec,
    q_len: int,
    k_len: int,
    block: tuple[int, int],
    q_offset: int,
    batch: int,
    heads: int,
    device: str,
) -> BlockMask:
    return _recent(spec, q_len, k_len, block, q_offset, batch, heads, device)
