"""From a rule to its list of tiles: classify the grid, evaluate what is mixed, find equal contents.

Nothing here has the size of the attention matrix: the grid is classified in strips of tile rows,
elements are evaluated for mixed tiles only, in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof_compile.masks import bitmap
from stof_compile.masks.evaluate import TileEvaluator
from stof_compile.masks.spec import EMPTY, FULL, MIXED, MaskSpec, Tiles
from stof_compile.masks.tensor_rules import TensorRule

_STRIP_CPU = 2**16
_STRIP_GPU = 2**23
"""Tiles classified at once: they fit a CPU's cache; few launches and host syncs on a GPU."""

_STRIP_ELEMENTS = 2**24
"""Elements of a dense mask cut into tiles at once."""


@dataclass(frozen=True)
class Grid:
    """The tile grid of one group of planes that share a rule.

    Args:
        b, h: int64 [P], batch and head of each plane.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    q_offset: int
    b: Tensor
    h: Tensor

    @property
    def rows(self) -> int:
        """Tile rows of one plane."""
        return -(-self.q_len // self.block_q)

    @property
    def cols(self) -> int:
        """Tile columns."""
        return -(-self.k_len // self.block_k)

    def tiles(self, row: Tensor, col: Tensor, *, clipped: bool = True) -> Tiles:
        """Bounds of tiles; ``row`` counts through all planes. Clipped = cut at the lengths."""
        plane = torch.div(row, self.rows, rounding_mode="floor")
        q_lo = (row - plane * self.rows) * self.block_q + self.q_offset
        k_lo = col * self.block_k
        q_hi, k_hi = q_lo + (self.block_q - 1), k_lo + (self.block_k - 1)
        if clipped:
            q_hi = q_hi.clamp(max=self.q_len + self.q_offset - 1)
            k_hi = k_hi.clamp(max=self.k_len - 1)
        b, h = (self.b[plane], self.h[plane]) if self.b.shape[0] > 1 else (self.b[0], self.h[0])
        aligned = self.q_offset % self.block_q == 0
        return Tiles(q_lo, q_hi, k_lo, k_hi, b, h, (self.block_q, self.block_k), aligned)

    def is_ragged(self, row: Tensor, col: Tensor) -> Tensor:
        """True for tiles that stick out of the mask."""
        ragged = torch.zeros_like(row * col, dtype=torch.bool)
        if self.q_len % self.block_q:
            ragged = ragged | (row % self.rows == self.rows - 1)
        if self.k_len % self.block_k:
            ragged = ragged | (col == self.cols - 1)
        return ragged

    def area_inside(self, row: Tensor, col: Tensor) -> Tensor:
        """Elements of each tile that belong to the mask, int64."""
        q_first, k_first = (row % self.rows) * self.block_q, col * self.block_k
        inside_q = (self.q_len - q_first).clamp(max=self.block_q)
        return inside_q * (self.k_len - k_first).clamp(max=self.block_k)

    @property
    def has_ragged(self) -> bool:
        """True when some tile sticks out."""
        return self.q_len % self.block_q != 0 or self.k_len % self.block_k != 0


@dataclass(frozen=True)
class TileList:
    """Non-empty tiles of a group of planes, row by row, ascending columns.

    Args:
        row, col: int64 [N]; ``row`` counts through all planes.
        full: bool [N].
        bitmap_id: int64 [N], 0 for full tiles.
        words: int64 [U, W] different part tiles.
        clipped_full: the tiles (row, col) that are full as far as the mask reaches, but stick out.
    """

    row: Tensor
    col: Tensor
    full: Tensor
    bitmap_id: Tensor
    words: Tensor
    clipped_full: tuple[Tensor, Tensor]


def list_tiles(spec: MaskSpec, grid: Grid) -> TileList:
    """Find the non-empty tiles of a bound rule, and the contents of the part tiles."""
    if isinstance(spec, TensorRule):
        return _list_dense(spec, grid)
    row, col, kind = _classify_grid(spec, grid)
    nothing = row[:0]
    clipped_full = (nothing, nothing)
    if grid.has_ragged:
        sticks_out = (kind == FULL) & grid.is_ragged(row, col)
        clipped_full = (row[sticks_out], col[sticks_out])
        kind = kind.masked_fill(sticks_out, MIXED)
    mixed = torch.nonzero(kind == MIXED).squeeze(1)
    width = grid.block_q // 8 * (grid.block_k // 8)
    bitmap_id = torch.zeros_like(row)
    if mixed.shape[0] == 0:
        return TileList(row, col, kind == FULL, bitmap_id, row.new_zeros((0, width)), clipped_full)

    kept, tile_id, words = _evaluate_mixed(spec, grid, row[mixed], col[mixed])
    area = grid.block_q * grid.block_k
    found = (
        torch.full_like(kept, MIXED).masked_fill(kept == 0, EMPTY).masked_fill(kept == area, FULL)
    )
    if grid.has_ragged:
        # a tile the rule could not classify may turn out full as far as the mask reaches
        whole = (kept == grid.area_inside(row[mixed], col[mixed])) & (kept < area)
        missed = mixed[whole & ~sticks_out[mixed]]
        clipped_full = (
            torch.cat([clipped_full[0], row[missed]]),
            torch.cat([clipped_full[1], col[missed]]),
        )
    kind[mixed] = found.to(torch.int8)
    bitmap_id[mixed] = tile_id
    left = torch.nonzero(kind).squeeze(1)
    return TileList(row[left], col[left], kind[left] == FULL, bitmap_id[left], words, clipped_full)


def _classify_grid(spec: MaskSpec, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column (int64) and class (int8) of all tiles that are not certainly empty."""
    device, cols = grid.b.device, grid.cols
    total = grid.b.shape[0] * grid.rows
    strip = max(1, (_STRIP_CPU if device.type == "cpu" else _STRIP_GPU) // max(cols, 1))
    # int32 bounds halve the traffic of the largest tensors here
    col = torch.arange(cols, device=device, dtype=torch.int32)[None, :]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, total, strip):
        row = torch.arange(start, min(start + strip, total), device=device, dtype=torch.int32)[
            :, None
        ]
        kind = spec.classes(grid.tiles(row, col)).expand(row.shape[0], cols)
        here = torch.nonzero(kind)
        local, column = here[:, 0], here[:, 1]
        found.append((local + start, column, kind[local, column]))
    if not found:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return nothing, nothing, nothing.to(torch.int8)
    rows, columns, kinds = zip(*found, strict=True)
    return torch.cat(rows), torch.cat(columns), torch.cat(kinds)


def _evaluate_mixed(
    spec: MaskSpec, grid: Grid, row: Tensor, col: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate tiles (row, col), each distinct signature once.

    Returns:
        kept int64 [N] elements of each tile, bitmap number int64 [N] (0 where empty or full), words
        int64 [U, W].
    """
    inverse: Tensor | None = None
    tiles = grid.tiles(row, col, clipped=False)
    columns = spec.signature(tiles)
    if columns is not None:
        if grid.has_ragged:
            clipped = grid.tiles(row, col)
            columns = (*columns, clipped.q_hi - clipped.q_lo, clipped.k_hi - clipped.k_lo)
        table = [column.to(torch.int64).expand(row.shape) for column in columns]
        signature = torch.stack(table, dim=1) if table else row.new_zeros((row.shape[0], 1))
        first, inverse = bitmap.unique_rows(signature)
        row, col = row[first], col[first]
    kept, partial, words = TileEvaluator(spec, grid).run(row, col)
    different, number = bitmap.unique_rows(words)
    bitmap_id = torch.zeros_like(kept)
    bitmap_id[partial] = number
    if inverse is not None:
        kept, bitmap_id = kept[inverse], bitmap_id[inverse]
    return kept, bitmap_id, words[different]


def _list_dense(spec: TensorRule, grid: Grid) -> TileList:
    """The tiles of a dense mask, read strip by strip of tile rows instead of element by element."""
    area, rows, cols = grid.block_q * grid.block_k, grid.rows, grid.cols
    strip = max(1, _STRIP_ELEMENTS // max(grid.block_q * cols * grid.block_k, 1))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    contents = [torch.zeros((0, area // 64), dtype=torch.int64, device=grid.b.device)]
    for plane, (b, h) in enumerate(zip(grid.b.tolist(), grid.h.tolist(), strict=True)):
        dense = spec.mask[min(b, spec.mask.shape[0] - 1), min(h, spec.mask.shape[1] - 1)]
        for start in range(0, rows, strip):
            stop = min(start + strip, rows)
            part = dense[start * grid.block_q : stop * grid.block_q]
            height, width = (stop - start) * grid.block_q, cols * grid.block_k
            part = torch.nn.functional.pad(
                part, (0, width - part.shape[1], 0, height - part.shape[0])
            )
            tiles = part.reshape(stop - start, grid.block_q, cols, grid.block_k).transpose(1, 2)
            kept = tiles.sum((2, 3))
            here = torch.nonzero(kept)
            local, col = here[:, 0], here[:, 1]
            full = kept[local, col] == area
            mixed = torch.nonzero(~full).squeeze(1)
            contents.append(bitmap.pack(tiles[local[mixed], col[mixed]]))
            found.append((local + (plane * rows + start), col, full))
    if not found:
        nothing = contents[0].new_zeros(0)
        return TileList(nothing, nothing, nothing.bool(), nothing, contents[0], (nothing, nothing))
    row, col, full = (torch.cat(parts) for parts in zip(*found, strict=True))
    words = torch.cat(contents)
    different, number = bitmap.unique_rows(words)
    bitmap_id = torch.zeros_like(row)
    bitmap_id[~full] = number
    return TileList(row, col, full, bitmap_id, words[different], (row[:0], row[:0]))
