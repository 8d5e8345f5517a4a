"""In which order kernels take the tile rows of a block mask."""

from __future__ import annotations

import torch
from torch import Tensor

UNEVEN = 1.25  # times the mean: rows that differ so much are worth an order of their own


def slot_lengths(row_ptr: Tensor, row_order: Tensor, planes: int, rows: int) -> Tensor:
    """Mean number of tiles of the rows in each place of the order, fp64 [rows]."""
    tiles = row_ptr.diff().reshape(planes, rows)
    return tiles.gather(1, row_order.reshape(planes, rows).long()).double().mean(0)


def pair_order(row_ptr: Tensor, planes: int, rows: int) -> Tensor:
    """Rows by pairs of neighbours (0 and 1, 2 and 3, ...), the heaviest pairs of a plane first.

    A last row without a neighbour comes first, so that pairs keep even places, or odd ones.

    Args:
        row_ptr: int32 [planes * rows + 1].

    Returns:
        int32 [planes * rows].
    """
    pairs = -(-rows // 2)
    tiles = row_ptr.new_zeros((planes, 2 * pairs))
    tiles[:, :rows] = row_ptr.diff().reshape(planes, rows)
    weight = tiles.reshape(planes, pairs, 2).sum(2)
    alone = rows % 2
    if alone:
        weight[:, -1] = torch.iinfo(weight.dtype).max
    first = 2 * weight.argsort(dim=1, descending=True, stable=True)
    ordered = torch.stack([first, first + 1], 2).reshape(planes, 2 * pairs)
    if alone:
        ordered = torch.cat([ordered[:, :1], ordered[:, 2:]], 1)
    return ordered.int().flatten()
