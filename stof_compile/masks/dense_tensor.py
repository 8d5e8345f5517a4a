"""A block mask as a bool tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks import bitmap
from stof_compile.masks.derived import derive

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask

MOST_KEPT = 2**24  # bytes of a dense mask that is kept beside its block mask


def dense_bytes(mask: BlockMask) -> int:
    """Of the mask as a bool tensor, in which equal planes stand apart."""
    return mask.plane_map.numel() * mask.q_len * mask.k_len


def dense_mask(mask: BlockMask) -> Tensor:
    """The mask as a bool tensor for a call that reads it now: kept, up to ``MOST_KEPT`` bytes.

    Raises:
        StofMaskError: the current CUDA stream is being captured, and the tensor is not there.
    """
    size = dense_bytes(mask)
    if size <= MOST_KEPT:
        return mask.dense
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StofMaskError(
            f"SDPA needs the mask as a bool tensor here, and one of {size / 2**20:.0f} MiB is made "
            f"at each call (up to {MOST_KEPT / 2**20:.0f} MiB are kept), for which the host waits; "
            "a CUDA stream that is being captured cannot; attention_kernel('block') needs none "
            "(fp16, bf16 and fp32, head dims up to 256)"
        )
    return derive(mask.device, "mask as a bool tensor", mask.to_dense)


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
