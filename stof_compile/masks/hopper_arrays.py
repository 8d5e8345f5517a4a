"""A block mask as the Hopper attention kernels take it.

Tiles of 192 or 128 rows have 64 x 64 scores for each of three or two consumers, which share their
keys. What a tile is to consumer i stands in bits 24 + 2 i and 25 + 2 i of its number: 0 part, 1
full, 2 nothing of it. Source: ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks.row_order import pair_order

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask

HOPPER_TILES = ((64, 64), (64, 128), (192, 64), (128, 64))
"""(rows, keys) of a tile."""
KIND_BITS = 24  # below them the row of the bitmap
_FULL, _NONE = 1, 2


def hopper_arrays(mask: BlockMask) -> tuple[Tensor, ...]:
    """The seven tensors with the fragments in place of the bitmap; in tiles of 128 keys with rows
    ordered by pairs, in those of over 64 rows with `numbers_with_kinds`.

    Raises:
        StofMaskError: a tile that is none of `HOPPER_TILES`, or too many different ones.
    """
    numbers, fragments, order = mask.bitmap_id, mask.fragments, mask.row_order
    if mask.block_k > 64:
        order = pair_order(mask.row_ptr, mask.planes, mask.rows)
    if mask.block_q > 64:
        numbers = numbers_with_kinds(numbers, fragments)
    return (*mask.tensors[:4], numbers, fragments, order)


def numbers_with_kinds(bitmap_id: Tensor, fragments: Tensor) -> Tensor:
    """Numbers of part tiles with what each is to the consumers: int32 [tiles]; those of full tiles
    mean nothing.

    Args:
        bitmap_id: int32 [tiles]. fragments: int32 [U, 128 * consumers], up to three consumers.

    Raises:
        StofMaskError: more different part tiles than a number has room for.
    """
    refusal = kinds_refusal(fragments.shape[0])
    if refusal is not None:
        raise StofMaskError(refusal)
    if not fragments.numel():
        return bitmap_id
    words = fragments.unflatten(1, (-1, 128))
    kinds = _NONE * (words == 0).all(2).int() + _FULL * (words == -1).all(2).int()
    places = KIND_BITS + 2 * torch.arange(kinds.shape[1], dtype=torch.int32, device=kinds.device)
    upper = (kinds << places).sum(1, dtype=torch.int32)
    both: Tensor = bitmap_id | upper[bitmap_id.long()]
    return both


def kinds_refusal(different: int) -> str | None:
    """Why numbers of so many different part tiles have no room for kinds, None where they have."""
    if different <= 1 << KIND_BITS:
        return None
    most = f"{1 << KIND_BITS} different part tiles"
    return f"rows that share keys take up to {most}, not {different}; tiles of 64 rows any number"


def numbers_alone(numbers: Tensor) -> Tensor:
    """Inverse of `numbers_with_kinds`: the rows of the bitmap."""
    plain: Tensor = numbers & ((1 << KIND_BITS) - 1)
    return plain
