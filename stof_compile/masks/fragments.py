"""Tile contents in the order a Hopper warp group holds a 64 x 64 tile of scores.

Thread t of 128 holds rows 16 w + r and 16 w + r + 8 (w = t // 32, r = t // 4 % 8) and of every
octet of columns the pair at 2 (t % 4). Its 32 scores are the bits of one word: bit 16 i + 2 j + c
is row half i, octet j, column c of the pair.
Source: register fragments of ``wgmma``, PTX ISA, section "Register Fragments for wgmma.m64nNk16".
"""

from __future__ import annotations

import torch
from torch import Tensor

from stof_compile.masks import bitmap

_CHUNK = 4096  # tiles unpacked at once: 64 MB


def to_fragments(words: Tensor) -> Tensor:
    """Reorder the bitmaps of 64 x 64 tiles: int64 [N, 64] to int32 [N, 128]."""
    return torch.cat(
        [_reorder(part) for part in words.split(_CHUNK)]
        or [torch.empty((0, 128), dtype=torch.int32, device=words.device)]
    )


def from_fragments(fragments: Tensor) -> Tensor:
    """Inverse of `to_fragments`: int32 [N, 128] to int64 [N, 64]."""
    return torch.cat(
        [_restore(part) for part in fragments.split(_CHUNK)]
        or [torch.empty((0, 64), dtype=torch.int64, device=fragments.device)]
    )


def _restore(fragments: Tensor) -> Tensor:
    octets = fragments.contiguous().view(torch.uint8)[:, :, None]
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=fragments.device)) & 1
    # [N, warp, lane row, lane pair, half, octet, column] to [N, row, column]
    factors = bits.reshape(-1, 4, 8, 4, 2, 8, 2).permute(0, 1, 4, 2, 5, 3, 6)
    return bitmap.pack(factors.reshape(-1, 64, 64).bool())


def _reorder(words: Tensor) -> Tensor:
    tiles = bitmap.unpack(words, 64, 64).reshape(-1, 4, 2, 8, 8, 4, 2)
    bits = tiles.permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, 128, 4, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = (bits.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return octets.contiguous().view(torch.int32).squeeze(-1)
