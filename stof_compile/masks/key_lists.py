"""The tile lists of a block mask by column: which query rows reach a tile of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def key_lists(
    row_ptr: Tensor, full_start: Tensor, col_idx: Tensor, bitmap_id: Tensor, rows: int, cols: int
) -> tuple[Tensor, Tensor]:
    """Transpose the tile lists of a block mask, on its device and without waiting for it.

    Args:
        row_ptr, full_start, col_idx, bitmap_id: as in `BlockMask`.
        rows, cols: tiles of one plane.

    Returns:
        key_ptr: int32 [3, planes * cols + 1]. Column c of plane p is number i = p * cols + c; its
            part tiles are ``key_tiles[:, key_ptr[0, i]:key_ptr[1, i]]``, its full tiles
            ``key_tiles[:, key_ptr[1, i]:key_ptr[0, i + 1]]``; ``key_ptr[2]`` has each plane's
            columns with the heaviest first.
        key_tiles: int32 [2, tiles]: tile row (ascending within part and full) and bitmap.
    """
    planes = full_start.numel() // max(1, rows)
    device, tiles = col_idx.device, col_idx.numel()
    number = torch.arange(tiles, device=device, dtype=row_ptr.dtype)
    row = torch.searchsorted(row_ptr[1:], number, right=True)
    full = number >= full_start[row]
    plane, row_in_plane = row // max(1, rows), row % max(1, rows)
    place = ((plane * cols + col_idx) * 2 + full).contiguous()
    ordered, order = torch.sort(place, stable=True)
    bounds = torch.arange(2 * planes * cols + 1, device=device)
    starts = torch.searchsorted(ordered, bounds).int()
    key_ptr = torch.zeros((3, planes * cols + 1), dtype=torch.int32, device=device)
    key_ptr[0] = starts[::2]
    key_ptr[1, :-1] = starts[1::2]
    length = key_ptr[0].diff().view(planes, cols)
    heavy = torch.argsort(length, dim=1, descending=True, stable=True)
    key_ptr[2, :-1] = heavy.flatten().int()
    return key_ptr, torch.stack([row_in_plane[order].int(), bitmap_id[order]])
