"""Tile contents in the order a Hopper warp group holds 64 x 64 scores: a tile or a part of one.

Thread t of 128 holds rows 16 w + r and 16 w + r + 8 (w = t // 32, r = t // 4 % 8) and of every
octet of columns the pair at 2 (t % 4). Its 32 scores are the bits of one word: bit 16 i + 2 j + c
is row half i, octet j, column c of the pair.
Source: register fragments of ``wgmma``, PTX ISA, section "Register Fragments for wgmma.m64nNk16".
"""

from __future__ import annotations

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks import bitmap

_CHUNK = 4096  # tiles unpacked at once: 64 MB


def to_fragments(words: Tensor, rows: int = 64) -> Tensor:
    """Reorder the bitmaps of 64 x 64 tiles: int64 [N, 64] to int32 [N, 128]. Larger tiles have as
    many of both as they have parts of 64 x 64: by rows, and those by columns.

    Args:
        rows: of a tile, a multiple of 64.
    """
    # a bitmap goes by columns: [tile, 64 columns, octet of these, 64 rows, octet of these]
    shape = (words.shape[0], words.shape[1] // rows, 8, rows // 64, 8)
    parts = words.reshape(shape).permute(0, 3, 1, 2, 4)
    if words.numel():
        made = torch.cat([_reorder(part) for part in parts.reshape(-1, 64).split(_CHUNK)])
    else:
        made = torch.empty(0, dtype=torch.int32, device=words.device)
    return made.view(words.shape[0], 2 * words.shape[1])


def both_ways(words: Tensor) -> Tensor:
    """Fragments of 64 x 64 tiles, and of the same tiles transposed: int64 [N, 64] to int32
    [2, N, 128].

    Raises:
        StofMaskError: other tiles.
    """
    if words.shape[1] != 64:
        raise StofMaskError(
            f"gradients take fragments of 64 x 64 tiles, not of {64 * words.shape[1]} elements each"
        )
    made = [to_fragments(words)]
    turned = [bitmap.pack(_unpacked(part).mT) for part in words.split(_CHUNK)]
    made.append(to_fragments(torch.cat(turned) if turned else words))
    return torch.stack(made)


def from_fragments(fragments: Tensor, rows: int) -> Tensor:
    """Inverse of `to_fragments`: int32 [N, 128] to int64 [N, 64], or a multiple of both.

    Args:
        rows: of a tile, which the fragments do not tell.
    """
    parts = fragments.reshape(-1, 128).split(_CHUNK)
    if fragments.numel():
        made = torch.cat([_restore(part) for part in parts])
    else:
        made = torch.empty(0, dtype=torch.int64, device=fragments.device)
    shape = (fragments.shape[0], rows // 64, fragments.shape[1] // (2 * rows), 8, 8)
    parts = made.view(shape).permute(0, 2, 3, 1, 4)
    return parts.reshape(fragments.shape[0], fragments.shape[1] // 2)


def _restore(fragments: Tensor) -> Tensor:
    octets = fragments.contiguous().view(torch.uint8)[:, :, None]
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=fragments.device)) & 1
    # [N, warp, lane row, lane pair, half, octet, column] to [N, row, column]
    factors = bits.reshape(-1, 4, 8, 4, 2, 8, 2).permute(0, 1, 4, 2, 5, 3, 6)
    return bitmap.pack(factors.reshape(-1, 64, 64).bool())


def _reorder(words: Tensor) -> Tensor:
    tiles = _unpacked(words).reshape(-1, 4, 2, 8, 8, 4, 2)
    bits = tiles.permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, 128, 4, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = (bits.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return octets.contiguous().view(torch.int32).squeeze(-1)


def _unpacked(words: Tensor) -> Tensor:
    return bitmap.unpack(words, 64, 64)
