"""A block mask as a bool tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof_compile.masks import bitmap

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask


def dense_tensor(mask: BlockMask) -> Tensor:
    """The whole matrix, bool [Bm, Hm, q_len, k_len]: `BlockMask.to_dense`."""
    rows, cols = mask.rows, mask.cols
    size = (mask.planes * rows, cols, mask.block_q, mask.block_k)
    tiles = torch.zeros(size, dtype=torch.bool, device=mask.device)
    row, col, part = mask.row_of_tile(), mask.col_idx.long(), mask.is_part()
    tiles[row[~part], col[~part]] = True
    if mask.bitmap.shape[0]:
        content = bitmap.unpack(mask.bitmap, mask.block_q, mask.block_k)
        tiles[row[part], col[part]] = content[mask.bitmap_id[part].long()]
    dense = tiles.reshape(mask.planes, rows, cols, mask.block_q, mask.block_k).transpose(2, 3)
    dense = dense.reshape(mask.planes, rows * mask.block_q, cols * mask.block_k)
    return dense[mask.plane_map.long()][..., : mask.q_len, : mask.k_len]
