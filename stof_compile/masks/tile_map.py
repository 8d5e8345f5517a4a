"""A small picture of a block mask as plain data, for dumps and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stof_compile.masks import bitmap

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask

MAX_CELLS = 64  # on each side of a picture
EMPTY, FULL = 0, 9
"""Cells with nothing kept, and with nothing masked; 1 to 8 = eighths of the elements kept."""


def tile_map(mask: BlockMask, limit: int = MAX_CELLS) -> dict[str, Any]:
    """Draw the first plane of a mask, one cell for each tile or for a group of tiles.

    Args:
        mask: any block mask; a few host syncs where it is on a GPU.
        limit: cells on either side at most.
    Returns:
        ``{"tiles": [rows, cols], "block": [queries, keys], "planes": n, "cells": [...]}``; cells
        has a string of digits for each row: 0 = empty, 9 = full, 1 to 8 = part, as many eighths of
        the elements kept (at least 1, at most 8).
    """
    rows, cols = mask.rows, mask.cols
    high, wide = min(rows, limit), min(cols, limit)
    row_ptr = mask.row_ptr[: rows + 1].cpu().long()
    count = int(row_ptr[-1]) if rows and mask.planes else 0
    kept = torch.zeros(high * wide, dtype=torch.int64)
    full = torch.zeros(high * wide, dtype=torch.int64)
    if count:
        row = torch.repeat_interleave(torch.arange(rows), row_ptr.diff())
        col = mask.col_idx[:count].cpu().long()
        part = torch.arange(count) < mask.full_start[:rows].cpu().long()[row]
        elements = torch.full((count,), mask.block_q * mask.block_k)
        if mask.bitmap.shape[0]:
            counts = bitmap.popcount(mask.bitmap).cpu()
            elements[part] = counts[mask.bitmap_id[:count].cpu().long()[part]]
        cell = (row * high // rows) * wide + col * wide // cols
        kept.index_add_(0, cell, elements)
        full.index_add_(0, cell, (~part).long())
    size = _tiles_per_cell(rows, high)[:, None] * _tiles_per_cell(cols, wide)[None, :]
    size = size.reshape(-1).clamp(min=1)
    eighths = (kept * 8 / (size * mask.block_q * mask.block_k)).round().long().clamp(1, 8)
    value = torch.where(kept == 0, EMPTY, torch.where(full == size, FULL, eighths))
    lines = value.reshape(high, wide).tolist()
    return {
        "tiles": [rows, cols],
        "block": [mask.block_q, mask.block_k],
        "planes": mask.planes,
        "cells": ["".join(map(str, line)) for line in lines],
    }


def _tiles_per_cell(tiles: int, cells: int) -> torch.Tensor:
    """How many tiles fall into each cell along one side, int64 [cells]."""
    if not cells:
        return torch.zeros(0, dtype=torch.int64)
    return torch.bincount(torch.arange(tiles) * cells // tiles, minlength=cells)
