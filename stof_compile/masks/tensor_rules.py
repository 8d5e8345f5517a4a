"""Rules that hold data: documents, prefixes, a dense mask, a table of blocks, single points."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks.spec import MaskSpec, PlaneShape, Tiles, three_valued


@dataclass(frozen=True, eq=False, repr=False)
class Document(MaskSpec):
    """Query and key belong to the same document.

    Args:
        ids: int64 [S] or [B, S], the document of each position; need not be sorted.
    """

    ids: Tensor
    rule: ClassVar[str] = "document"

    def plane_shape(self) -> PlaneShape:
        """One plane per batch row when the ids have a batch."""
        return (self.ids.shape[0] if self.ids.dim() == 2 else 1), 1

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Check that every position has a document."""
        _check_reach("document ids", self.ids.shape[-1], q_len, k_len, q_offset)
        return self

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Compare documents."""
        return self._at(b, q) == self._at(b, k)

    def _at(self, b: Tensor, place: Tensor) -> Tensor:
        ids = self.ids.to(place.device)
        place = place.clamp(max=ids.shape[-1] - 1)
        return ids[place] if ids.dim() == 1 else ids[b, place]

    def classes(self, tiles: Tiles) -> Tensor:
        """Compare the smallest and largest id on both sides; exact where the ids are sorted."""
        ids = self.ids.to(tiles.q_lo.device)
        low, high = _range_tables(ids.reshape(-1, ids.shape[-1]))
        # without a batch both sides stay one-dimensional, whatever shape the planes have
        plane = tiles.b if ids.dim() == 2 else torch.zeros((), dtype=torch.int64, device=ids.device)
        q_min, q_max = _range_ends(low, high, plane, tiles.q_lo, tiles.q_hi)
        k_min, k_max = _range_ends(low, high, plane, tiles.k_lo, tiles.k_hi)
        full = (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
        return three_valued((q_max < k_min) | (k_max < q_min), full)


def _range_tables(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Minima and maxima over windows of 1, 2, 4, ... positions: two tensors [levels, rows, S]."""
    low, high = [rows], [rows]
    width = 1
    while 2 * width <= rows.shape[-1]:
        for levels, pick in ((low, torch.minimum), (high, torch.maximum)):
            here = levels[-1]
            ahead = torch.cat([here[:, width:], here[:, -1:].expand(-1, width)], dim=1)
            levels.append(pick(here, ahead))
        width *= 2
    return torch.stack(low), torch.stack(high)


def _range_ends(
    low: Tensor, high: Tensor, plane: Tensor, first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over [first, last], from two overlapping windows."""
    length = low.shape[-1]
    first, last = first.clamp(max=length - 1).long(), last.clamp(max=length - 1).long()
    size = last - first + 1
    powers = 2 ** torch.arange(1, low.shape[0], device=first.device)
    level = torch.bucketize(size, powers, right=True)
    second = last + 1 - 2**level
    minimum = torch.minimum(low[level, plane, first], low[level, plane, second])
    return minimum, torch.maximum(high[level, plane, first], high[level, plane, second])


@dataclass(frozen=True, eq=False, repr=False)
class BatchPrefix(MaskSpec):
    """Keys before a length of the batch row's own.

    Args:
        lengths: int64 [B] tokens.
    """

    lengths: Tensor
    rule: ClassVar[str] = "batch_prefix"

    def plane_shape(self) -> PlaneShape:
        """One plane per batch row."""
        return self.lengths.shape[0], 1

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Compare the key with the row's length."""
        return (k < self.lengths.to(k.device)[b]) & torch.ones_like(q, dtype=torch.bool)

    def classes(self, tiles: Tiles) -> Tensor:
        """Compare the tile's keys with the row's length; exact."""
        stop = self.lengths.to(tiles.b.device)[tiles.b]
        return three_valued(tiles.k_lo >= stop, tiles.k_hi < stop)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Where in the tile the row ends."""
        left = self.lengths.to(tiles.b.device)[tiles.b] - tiles.k_lo
        return (left.clamp(0, tiles.block[1]),)


@dataclass(frozen=True, eq=False, repr=False)
class TensorRule(MaskSpec):
    """A dense mask at fixed lengths.

    Args:
        mask: bool [Bm, Hm, Q, K]; a batch or head size of 1 is shared.
        q_start: absolute position of its first row, set by `bind`.
    """

    mask: Tensor
    q_start: int = 0
    rule: ClassVar[str] = "tensor"

    @property
    def depends_on_lengths(self) -> bool:
        """Its first row stands where the first query does."""
        return True

    def plane_shape(self) -> PlaneShape:
        """Batch and head sizes of the tensor."""
        return self.mask.shape[0], self.mask.shape[1]

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Check the lengths and remember where the rows begin."""
        _check_fixed("a mask tensor", (self.mask.shape[2], self.mask.shape[3]), q_len, k_len)
        return self if q_offset == self.q_start else dataclasses.replace(self, q_start=q_offset)

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Look the element up."""
        mask = self.mask.to(q.device)
        planes = [
            index.clamp(max=size - 1) for index, size in zip((b, h), mask.shape[:2], strict=True)
        ]
        row = (q - self.q_start).clamp(0, mask.shape[2] - 1)
        return mask[planes[0], planes[1], row, k.clamp(max=mask.shape[3] - 1)]


@dataclass(frozen=True, eq=False, repr=False)
class BlockTable(MaskSpec):
    """Whole blocks kept or masked by a table, at fixed lengths.

    Args:
        table: bool [Bm, Hm, R, C].
        block_q, block_k: edges of a table block in tokens.
        q_len, k_len: the lengths the table is for.
        q_start: absolute position of the first row, set by `bind`.
    """

    table: Tensor
    block_q: int
    block_k: int
    q_len: int
    k_len: int
    q_start: int = 0
    rule: ClassVar[str] = "block_table"

    @property
    def depends_on_lengths(self) -> bool:
        """Its first row stands where the first query does."""
        return True

    def plane_shape(self) -> PlaneShape:
        """Batch and head sizes of the table."""
        return self.table.shape[0], self.table.shape[1]

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Check the lengths and remember where the rows begin."""
        _check_fixed("a block table", (self.q_len, self.k_len), q_len, k_len)
        return self if q_offset == self.q_start else dataclasses.replace(self, q_start=q_offset)

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Look the element's block up."""
        row = torch.div(q - self.q_start, self.block_q, rounding_mode="floor")
        return self._at(b, h, row, torch.div(k, self.block_k, rounding_mode="floor"))

    def _at(self, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        table = self.table.to(row.device)
        indices = (b, h, row, col)
        places = [
            index.long().clamp(0, size - 1)
            for index, size in zip(indices, table.shape, strict=True)
        ]
        return table[places[0], places[1], places[2], places[3]]

    def classes(self, tiles: Tiles) -> Tensor:
        """Check every block below the tile; exact."""
        some: Tensor | None = None
        every: Tensor | None = None
        first = torch.div(tiles.q_lo - self.q_start, self.block_q, rounding_mode="floor")
        last = torch.div(tiles.q_hi - self.q_start, self.block_q, rounding_mode="floor")
        left = torch.div(tiles.k_lo, self.block_k, rounding_mode="floor")
        right = torch.div(tiles.k_hi, self.block_k, rounding_mode="floor")
        for down in range((tiles.block[0] + self.block_q - 2) // self.block_q + 1):
            for over in range((tiles.block[1] + self.block_k - 2) // self.block_k + 1):
                # past the tile's end the last block is looked at again, which changes nothing
                row, col = torch.minimum(first + down, last), torch.minimum(left + over, right)
                kept = self._at(tiles.b, tiles.h, row, col)
                some = kept if some is None else some | kept
                every = kept if every is None else every & kept
        assert some is not None and every is not None, "a tile covers at least one block"
        return three_valued(~some, every)


@dataclass(frozen=True, eq=False, repr=False)
class Points(MaskSpec):
    """Single positions.

    Args:
        codes: int64 [N] ascending, ``q * 2**31 + k`` of each kept position.
    """

    codes: Tensor
    rule: ClassVar[str] = "points"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Search the position's code."""
        wanted = q * 2**31 + k
        codes = self.codes.to(wanted.device)
        place = torch.searchsorted(codes, wanted).clamp(max=codes.numel() - 1)
        return codes[place] == wanted


def _check_fixed(what: str, made_for: tuple[int, int], q_len: int, k_len: int) -> None:
    if made_for != (q_len, k_len):
        raise StofMaskError(
            f"{what} of shape {list(made_for)} (queries, keys) can't be used at lengths [{q_len}, "
            f"{k_len}]; "
            "give a rule (masks.causal, masks.rule(mask_mod), ...), which holds at any length"
        )


def _check_reach(what: str, made_for: int, q_len: int, k_len: int, q_offset: int) -> None:
    longest = max(q_len + q_offset, k_len)
    if longest > made_for:
        raise StofMaskError(
            f"{what} cover {made_for} positions, but position {longest - 1} is asked for"
        )
