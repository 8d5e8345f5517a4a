"""Element-wise evaluation of tiles in chunks of bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof_compile.masks import bitmap
from stof_compile.masks.spec import MaskSpec

if TYPE_CHECKING:
    from stof_compile.masks.tiles import Grid

_CHUNK_CPU = 2**17
_CHUNK_GPU = 2**26
"""Elements evaluated at once; a few int64 temporaries of this size live at the same time."""


@dataclass(frozen=True)
class TileEvaluator:
    """Evaluates tiles of one rule on one grid."""

    spec: MaskSpec
    grid: Grid

    def run(self, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate tiles (row, col), int64 [N].

        Returns:
            kept int64 [N]: elements of each tile; partial int64 [P]: numbers of those neither empty nor full;
            words int64 [P, W]: their contents.
        """
        area = self.grid.block_q * self.grid.block_k
        limit = _CHUNK_CPU if row.device.type == "cpu" else _CHUNK_GPU
        step = max(1, limit // area)
        counts: list[Tensor] = []
        numbers: list[Tensor] = []
        contents: list[Tensor] = []
        for start in range(0, row.shape[0], step):
            kept, words = self.evaluate(row[start : start + step], col[start : start + step])
            counts.append(kept)
            partial = torch.nonzero((kept > 0) & (kept < area)).squeeze(1)
            numbers.append(partial + start)
            contents.append(words[partial])
        if not counts:
            return row, row, row.new_zeros((0, area // 64))
        return torch.cat(counts), torch.cat(numbers), torch.cat(contents)

    def evaluate(self, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        """Kept elements int64 [n] and words int64 [n, W] of one chunk; elements that stick out are masked."""
        kept = self.elements(row, col)
        return kept.sum((1, 2)), bitmap.pack(kept)

    def elements(self, row: Tensor, col: Tensor) -> Tensor:
        """Bool [n, block_q, block_k] of one chunk."""
        grid = self.grid
        tiles = grid.tiles(row, col, clipped=False)
        q = tiles.q_lo[:, None, None] + torch.arange(grid.block_q, device=row.device)[None, :, None]
        k = tiles.k_lo[:, None, None] + torch.arange(grid.block_k, device=row.device)[None, None, :]
        q_end, k_end = grid.q_len + grid.q_offset, grid.k_len
        # a rule may look its position up in a table: ask only for positions that exist
        q_asked, k_asked = (q.clamp(max=q_end - 1), k.clamp(max=k_end - 1)) if grid.has_ragged else (q, k)
        keep = self.spec.keep(tiles.b[..., None, None], tiles.h[..., None, None], q_asked, k_asked)
        if grid.has_ragged:
            keep = keep & (q < q_end) & (k < k_end)
        return keep.expand(row.shape[0], grid.block_q, grid.block_k)
