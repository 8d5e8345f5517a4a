"""The kept columns of every tile row, packed into dense tiles, for kernels that gather keys.

A part tile costs a block-wise kernel the same whether it keeps one column or all of them. Here the
columns that some query of a tile row keeps are put side by side, so that scattered columns (global
tokens, vertical lines, keys picked at run time) cost what they are. Full tiles stay where they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stof_compile.masks import bitmap

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask

_CHUNK = 4096  # tiles packed at once: 16 MB of booleans at 64 x 64


class PackedColumns(NamedTuple):
    """The part tiles of a block mask by column; R tile rows, T packed tiles, U different ones.

    Args:
        pack_ptr: int32 [planes*R + 1]; tile row i, counted through all planes, has the packed tiles
            ``pack_ptr[i]:pack_ptr[i+1]``.
        pack_columns: int32 [T, block_k], keys in ascending order; a row's last packed tile is
            filled up with the row's first key.
        pack_id: int32 [T] row of ``pack_bitmap``.
        pack_bitmap: int64 [U, (block_q/8) * (block_k/8)], as the bitmap of the mask; equal tiles
            are stored once. Columns that fill up are masked.
    """

    pack_ptr: Tensor
    pack_columns: Tensor
    pack_id: Tensor
    pack_bitmap: Tensor


def packed_tiles(mask: BlockMask) -> Tensor:
    """How many packed tiles every tile row of a mask has, int64 [planes*R]."""
    part = mask.is_part()
    row, number = mask.row_of_tile()[part], mask.bitmap_id[part].long()
    kept = kept_columns(mask.bitmap, mask.block_q, mask.block_k).sum(1)[number]
    columns = torch.zeros(mask.planes * mask.rows, dtype=torch.int64, device=mask.device)
    return (columns.scatter_add(0, row, kept) + (mask.block_k - 1)) // mask.block_k


def kept_columns(words: Tensor, block_q: int, block_k: int) -> Tensor:
    """Columns of which some element is kept: int64 [U, W] to bool [U, block_k]."""
    octets = words.contiguous().view(torch.uint8).reshape(-1, block_k // 8, block_q)
    while octets.shape[2] % 2 == 0:  # rows upon rows: no element takes more than a bit
        octets = octets[..., ::2] | octets[..., 1::2]
    bits = octets[..., None] >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (bits & 1).bool().any(2).reshape(-1, block_k)


def pack_columns(mask: BlockMask) -> PackedColumns:
    """Pack the columns of a mask's part tiles; the host waits."""
    block = block_q, block_k = mask.block_q, mask.block_k
    device, words, rows = mask.device, mask.bitmap, mask.planes * mask.rows
    count = packed_tiles(mask)
    pack_ptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    tiles = int(pack_ptr[-1])
    part = mask.is_part()
    row, col, number = mask.row_of_tile()[part], mask.col_idx[part], mask.bitmap_id[part].long()

    # one entry for each kept column of a part tile; entries of a row are beside each other
    tile, in_tile = kept_columns(words, block_q, block_k)[number].nonzero(as_tuple=True)
    row_of = row[tile]
    first = torch.searchsorted(row_of, torch.arange(rows, device=device))
    slot = pack_ptr[row_of] * block_k + torch.arange(row_of.shape[0], device=device) - first[row_of]
    key = (col.long()[tile] * block_k + in_tile).to(torch.int32)
    fill = key.new_zeros(rows)
    some = count > 0
    fill[some] = key[first[some]]
    columns = fill.repeat_interleave(count * block_k, output_size=tiles * block_k)
    columns[slot] = key

    bounds = torch.arange(0, tiles + _CHUNK, _CHUNK, device=device).clamp(max=tiles)
    cuts = torch.searchsorted(slot, bounds * block_k).tolist()
    parts = [words.new_empty((0, block_q // 8 * (block_k // 8)))]
    for chunk, (start, stop) in enumerate(pairwise(cuts)):
        here = min(_CHUNK, tiles - chunk * _CHUNK)
        dense = torch.zeros((here * block_k, block_q), dtype=torch.bool, device=device)
        entry = slice(start, stop)
        dense[slot[entry] - chunk * _CHUNK * block_k] = _column(
            words, number[tile[entry]], in_tile[entry], block
        )
        parts.append(bitmap.pack(dense.reshape(here, block_k, block_q).transpose(1, 2)))
    packed = torch.cat(parts)
    kinds, inverse = bitmap.unique_rows(packed)
    return PackedColumns(
        pack_ptr.to(torch.int32),
        columns.reshape(tiles, block_k),
        inverse.to(torch.int32),
        packed[kinds],
    )


def _column(words: Tensor, number: Tensor, column: Tensor, block: tuple[int, int]) -> Tensor:
    """Columns of tiles, bool [N, block_q]: byte ``column // 8 * block_q + row`` of a tile holds the
    bit ``column % 8`` of every row."""
    block_q, block_k = block
    octets = words.contiguous().view(torch.uint8).reshape(-1, block_k // 8, block_q)
    shift = (column % 8).to(torch.uint8)
    return ((octets[number, column // 8] >> shift[:, None]) & 1).bool()
