"""Random tiles, chosen by an integer hash: every device and every process picks the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stof_compile.errors import StofMaskError
from stof_compile.masks.spec import EMPTY, MaskSpec, PlaneShape, Tiles, shown_as, three_valued

_MAX_TILES = 2**16
"""Tiles per side that fit the rank's tie breaker."""

_STRIP_CPU = 2**16
_STRIP_GPU = 2**24
"""Tiles ranked at once: temporaries that fit a CPU's cache, few launches on a GPU."""

_TILES_ON_HOST = 2**16
"""Tiles that the CPU ranks for any device; a GPU loads the kernels of its first sort for half a
second."""


@dataclass(frozen=True, eq=False, repr=False)
class RandomTiles(MaskSpec):
    """A fraction of the tiles that are empty in another rule, filled.

    The tiles with the lowest ranks are taken; the rank of a tile is a hash of (seed, plane, tile
    row, tile column).

    Args:
        fill: fraction of the candidate tiles, 0..1; their number is rounded to the nearest, halves
            to even.
        block: edge of a random tile in tokens; has nothing to do with the tile size of a kernel.
        seed: any 32-bit integer.
        max_len: length whose grid is drawn, so that a shorter length sees a prefix of the same
            pattern; None = the lengths at hand.
        heads: number of head planes with a pattern of their own; 1 = all heads share one.
        empty_in: only tiles empty in this rule are candidates; None = all tiles.
        grid_len: bound lengths (q_len, k_len) of the drawn grid; None before `bind`.
        limits: bound highest rank taken, one per head plane.
    """

    fill: float
    block: int = 64
    seed: int = 0
    max_len: int | None = None
    heads: int = 1
    empty_in: MaskSpec | None = None
    grid_len: tuple[int, int] | None = None
    limits: tuple[int, ...] = ()
    rule: ClassVar[str] = "random_tiles"

    @property
    def depends_on_lengths(self) -> bool:
        """True until the ranks are counted."""
        return self.grid_len is None

    def plane_shape(self) -> PlaneShape:
        """One plane per head pattern."""
        return 1, self.heads

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Count the candidates of the grid and find the highest rank taken."""
        grid = self._grid(q_len, k_len, q_offset)
        if self.grid_len is not None:
            if self.grid_len != grid:
                raise StofMaskError(
                    f"this rule is bound to lengths {self.grid_len}, not to {grid}; bind the "
                    "original"
                )
            return self
        avoid = None if self.empty_in is None else self.empty_in.bind(*grid, 0, device)
        bound = dataclasses.replace(self, empty_in=avoid, grid_len=grid)
        tiles = bound.heads * -(-grid[0] // self.block) * -(-grid[1] // self.block)
        host = tiles <= _TILES_ON_HOST and bound.is_plain
        place = "cpu" if host else str(torch.device(device))
        return shown_as(dataclasses.replace(bound, limits=_limits(bound, place)), self)

    def _grid(self, q_len: int, k_len: int, q_offset: int) -> tuple[int, int]:
        longest = max(q_offset + q_len, k_len)
        if self.max_len is not None:
            if longest > self.max_len:
                raise StofMaskError(
                    f"random tiles were given max_len={self.max_len}, but position {longest - 1} "
                    "is asked for; "
                    "raise max_len to the longest sequence"
                )
            return self.max_len, self.max_len
        if q_offset:
            raise StofMaskError(
                f"random tiles at query offset {q_offset}: with growing lengths the pattern of a "
                "step must be a prefix "
                "of the next one; give max_len, the longest sequence, to bigbird or random_blocks"
            )
        grid = (q_len, k_len)
        if max(grid) > _MAX_TILES * self.block:
            raise StofMaskError(
                f"random tiles of {self.block} reach {_MAX_TILES * self.block} tokens, not "
                f"{max(grid)}"
            )
        return grid

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Look up the random tile of each element by recomputing its rank."""
        row = torch.div(q, self.block, rounding_mode="floor")
        col = torch.div(k, self.block, rounding_mode="floor")
        return self.taken(b, h, row, col)

    def taken(self, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        """Bool per random tile (row, col), index tensors that broadcast together: is it filled?"""
        if self.grid_len is None:
            raise StofMaskError("random tiles depend on the lengths; call bind(q_len, k_len) first")
        rank, candidate = self._rank(b, h, row, col)
        limit: Tensor | int = self.limits[0]
        if self.heads > 1:
            limit = torch.tensor(self.limits, device=h.device)[h]
        return candidate & (rank <= limit)

    def _rank(self, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        """Return the int64 rank of tiles, without ties, and whether each is a candidate at all."""
        assert self.grid_len is not None, "ranks exist on a bound grid only"
        plane = h if self.heads > 1 else torch.zeros_like(h)
        row, col, plane = row.to(torch.int64), col.to(torch.int64), plane.to(torch.int64)
        mixed = _mix(_mix(_mix(self.seed & 0xFFFFFFFF, plane), row), col)
        rank = ((mixed >> 1) << 32) | (row << 16) | col
        q_len, k_len = self.grid_len
        q_lo, k_lo = row * self.block, col * self.block
        candidate = (row >= 0) & (col >= 0) & (q_lo < q_len) & (k_lo < k_len)
        if self.empty_in is not None:
            q_hi = (q_lo + self.block).clamp(max=q_len) - 1
            k_hi = (k_lo + self.block).clamp(max=k_len) - 1
            tiles = Tiles(q_lo, q_hi, k_lo, k_hi, b, h, (self.block, self.block))
            candidate = candidate & (self.empty_in.classes(tiles) == EMPTY)
        return rank, candidate

    def classes(self, tiles: Tiles) -> Tensor:
        """Check every random tile below the tile; exact."""
        members = self._members(tiles)
        some, every = members[0]
        for inside, taken in members[1:]:
            some, every = some | (inside & taken), every & (taken | ~inside)
        return three_valued(~some, every)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Which of the random tiles below are filled, and where they begin."""
        bits = [inside & taken for inside, taken in self._members(tiles)]
        if len(bits) == 1:
            return (bits[0].to(torch.int64),)
        if len(bits) > 62:
            return None
        packed = bits[0].to(torch.int64)
        for place, bit in enumerate(bits[1:], 1):
            packed = packed | (bit.to(torch.int64) << place)
        return packed, tiles.q_lo % self.block, tiles.k_lo % self.block

    def _members(self, tiles: Tiles) -> list[tuple[Tensor, Tensor]]:
        """For every random tile a tile can touch: (is it below the tile, is it filled and
        below).
        """
        sides = []
        for low, high, edge in (
            (tiles.q_lo, tiles.q_hi, tiles.block[0]),
            (tiles.k_lo, tiles.k_hi, tiles.block[1]),
        ):
            first = torch.div(low, self.block, rounding_mode="floor")
            last = torch.div(high, self.block, rounding_mode="floor")
            fits = tiles.aligned and (self.block % edge == 0 or edge % self.block == 0)
            count = -(-edge // self.block) if fits else (edge + self.block - 2) // self.block + 1
            sides.append([(first + step, first + step <= last) for step in range(count)])
        found = []
        for row, row_inside in sides[0]:
            for col, col_inside in sides[1]:
                inside = row_inside & col_inside
                found.append((inside, self.taken(tiles.b, tiles.h, row, col) & inside))
        return found


@lru_cache(maxsize=256)
def _limits(bound: RandomTiles, device: str) -> tuple[int, ...]:
    """Highest rank taken in each head plane; -1 = none.

    Args:
        bound: rule with its grid set and without limits.
        device: where to count.
    """
    assert bound.grid_len is not None, "limits are counted on a bound grid"
    rows, cols = (-(-length // bound.block) for length in bound.grid_len)
    # the caller may be inside a trace, whose modes would turn these numbers into symbols
    with _disable_current_modes(), torch.no_grad():
        col = torch.arange(cols, device=device)[None, :]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        strip = max(1, (_STRIP_CPU if device == "cpu" else _STRIP_GPU) // max(cols, 1))
        limits = []
        for plane in range(bound.heads):
            found = [zero.new_zeros(0)]
            for start in range(0, rows, strip):
                row = torch.arange(start, min(start + strip, rows), device=device)[:, None]
                rank, candidate = bound._rank(zero, zero + plane, row, col)
                found.append(rank[candidate])
            ranks = torch.cat(found)
            count = round(bound.fill * ranks.numel())
            limits.append(_smallest(ranks, count) if count else -1)
    return tuple(limits)


def _smallest(ranks: Tensor, count: int) -> int:
    """The ``count``-th smallest; a GPU sorts faster than it selects."""
    return int(
        ranks.kthvalue(count).values
        if ranks.device.type == "cpu"
        else ranks.sort().values[count - 1]
    )


def _mix(state: Tensor | int, value: Tensor) -> Tensor:
    """Absorb 32-bit ``value`` into 32-bit ``state``: multiply, fold, multiply, all modulo 2**32 in
    int64.
    """
    word = (value * 0x9E3779B1 + state) & 0xFFFFFFFF
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return word ^ (word >> 16)
