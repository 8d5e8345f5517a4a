"""Tile contents as 64-bit words: packing, unpacking, counting and finding equal ones.

Inside a tile the 8 x 8 inner tiles lie column by column; inside a word the bits go row by row,
least significant bit first. Bytes are written in little-endian order, which every supported device
has.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(tiles: Tensor) -> Tensor:
    """Pack bool [N, block_q, block_k] into int64 words [N, (block_q/8)*(block_k/8)]."""
    return words_of(octets(tiles))


def octets(tiles: Tensor) -> Tensor:
    """Pack bool [N, block_q, block_k] into the bytes of its words, uint8 [N, W, 8]."""
    count, rows, cols = tiles.shape
    bits = tiles.reshape(count, rows // 8, 8, cols // 8, 8).permute(0, 3, 1, 2, 4)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=tiles.device)
    packed = (bits.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return packed.reshape(count, rows // 8 * (cols // 8), 8)


def words_of(packed: Tensor) -> Tensor:
    """Read bytes uint8 [N, W, 8] as int64 words [N, W]."""
    return packed.contiguous().view(torch.int64).squeeze(-1)


def unpack(words: Tensor, block_q: int, block_k: int) -> Tensor:
    """Inverse of `pack`: int64 [N, W] to bool [N, block_q, block_k]."""
    octets = words.contiguous().view(torch.uint8).reshape(-1, block_k // 8, block_q // 8, 8, 1)
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = ((octets >> shifts) & 1).bool()
    return bits.permute(0, 2, 3, 1, 4).reshape(-1, block_q, block_k)


def popcount(words: Tensor) -> Tensor:
    """Number of kept elements of each tile: int64 [N, W] to int64 [N]."""
    octets = words.contiguous().view(torch.uint8)
    pairs = octets - ((octets >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return ((nibbles + (nibbles >> 4)) & 0x0F).sum(1, dtype=torch.int64)


def unique_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find equal rows.

    Args:
        rows: int64 [N, W].
    Returns:
        (first, inverse): first [U] ascending numbers of the first row of each kind, inverse [N] in
        0..U-1 with ``rows[first][inverse] == rows``. Rows are told apart by a 64-bit hash, then
        compared; two host syncs.
    """
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        return rows.new_zeros(min(1, rows.shape[0])), rows.new_zeros(rows.shape[0])
    first, inverse = _first_of(*torch.unique(hash_rows(rows), return_inverse=True))
    if not torch.equal(rows[first[inverse]], rows):
        kinds, inverse = torch.unique(rows, dim=0, return_inverse=True)
        first, inverse = _first_of(kinds, inverse)
    return first, inverse


def _first_of(kinds: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber the kinds by their first appearance, so that the order depends on the rows alone."""
    number = torch.arange(inverse.shape[0], device=inverse.device)
    first = torch.full(
        (kinds.shape[0],), inverse.shape[0], dtype=torch.int64, device=inverse.device
    )
    first = first.scatter_reduce(0, inverse, number, "amin")
    first, order = first.sort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.shape[0], device=order.device)
    return first, rank[inverse]


def hash_rows(rows: Tensor) -> Tensor:
    """64-bit hash of each row of int64 [N, W]: words are mixed, weighted by odd numbers and added,
    modulo 2**64.
    """
    place = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=torch.int64)
    weights = place * 0x5851F42D4C957F2D | 1
    return scramble((scramble(rows) * weights).sum(1))


def scramble(words: Tensor) -> Tensor:
    """Bijection on int64 that spreads every bit; it stays one with arithmetic shifts."""
    words = (words ^ (words >> 31)) * 0x369DEA0F31A53F85
    words = (words ^ (words >> 27)) * 0x27BB2EE687B0B0FD
    return words ^ (words >> 33)
