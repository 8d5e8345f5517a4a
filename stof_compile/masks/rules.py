"""Elementary rules that are arithmetic on positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks.spec import FULL, MaskSpec, Tiles, three_valued


@dataclass(frozen=True, eq=False, repr=False)
class Dense(MaskSpec):
    """Every query sees every key."""

    rule: ClassVar[str] = "dense"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """True everywhere."""
        return torch.ones_like(q == k)

    def classes(self, tiles: Tiles) -> Tensor:
        """Full everywhere."""
        return torch.full_like(tiles.q_lo, FULL, dtype=torch.int8)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """All tiles are alike."""
        return ()


@dataclass(frozen=True, eq=False, repr=False)
class Band(MaskSpec):
    """``lo <= k - q <= hi`` in tokens; None = no limit on that side."""

    lo: int | None = None
    hi: int | None = None
    rule: ClassVar[str] = "band"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Compare the distance with the limits."""
        d = k - q
        if self.lo is None:
            return torch.ones_like(d, dtype=torch.bool) if self.hi is None else d <= self.hi
        return d >= self.lo if self.hi is None else (d >= self.lo) & (d <= self.hi)

    def classes(self, tiles: Tiles) -> Tensor:
        """Compare the tile's range of distances with the limits; exact."""
        shortest, longest = tiles.k_lo - tiles.q_hi, tiles.k_hi - tiles.q_lo
        empty = torch.zeros_like(shortest, dtype=torch.bool)
        full = torch.ones_like(shortest, dtype=torch.bool)
        if self.lo is not None:
            empty, full = longest < self.lo, shortest >= self.lo
        if self.hi is not None:
            empty, full = empty | (shortest > self.hi), full & (longest <= self.hi)
        return three_valued(empty, full)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Distance of the tile's corner, cut where the limits are out of reach."""
        corner = tiles.k_lo - tiles.q_lo
        low = None if self.lo is None else self.lo - tiles.block[1]
        high = None if self.hi is None else self.hi + tiles.block[0]
        if self.lo is None and high is not None:
            low = high - tiles.block[0] - tiles.block[1] - 1
        elif self.hi is None and low is not None:
            high = low + tiles.block[0] + tiles.block[1] + 1
        if low is None or high is None:
            return ()
        return (corner.clamp(low, max(low, high)),)

    def __repr__(self) -> str:
        if self.lo is None and self.hi == 0:
            return "causal()"
        if self.lo is not None and self.hi == 0:
            return f"sliding_window({1 - self.lo}, causal=True)"
        if self.lo is not None and self.hi == -self.lo:
            return f"sliding_window({self.hi})"
        return f"band(lo={self.lo}, hi={self.hi})"


@dataclass(frozen=True, eq=False, repr=False)
class LowerRight(MaskSpec):
    """Causal with the last query aligned with the last key, whatever the query offset is."""

    rule: ClassVar[str] = "lower_right"

    @property
    def depends_on_lengths(self) -> bool:
        """The diagonal's place is a difference of lengths."""
        return True

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Become a plain diagonal."""
        return Band(None, k_len - q_len - q_offset)

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Not defined before `bind`."""
        raise StofMaskError(
            "causal(lower_right=True) depends on the lengths; call bind(q_len, k_len) first"
        )

    def __repr__(self) -> str:
        return "causal(lower_right=True)"


@dataclass(frozen=True, eq=False, repr=False)
class Range(MaskSpec):
    """Queries (axis "q") or keys (axis "k") at positions ``start <= p < stop``."""

    axis: str
    start: int
    stop: int
    rule: ClassVar[str] = "range"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Compare one side's position; broadcast over the other."""
        place, other = (q, k) if self.axis == "q" else (k, q)
        inside = place < self.stop
        if self.start > 0:
            inside = inside & (place >= self.start)
        return inside & torch.ones_like(other, dtype=torch.bool)

    def classes(self, tiles: Tiles) -> Tensor:
        """Compare the tile's interval on that side; exact."""
        low, high = (tiles.q_lo, tiles.q_hi) if self.axis == "q" else (tiles.k_lo, tiles.k_hi)
        empty = (low >= self.stop) | (high < self.start)
        return three_valued(empty, (low >= self.start) & (high < self.stop))

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """First position of the tile, cut where the range is out of reach."""
        low, step = (
            (tiles.q_lo, tiles.block[0]) if self.axis == "q" else (tiles.k_lo, tiles.block[1])
        )
        return (low.clamp(min(self.start - step, self.stop), max(self.stop, self.start - step)),)


@dataclass(frozen=True, eq=False, repr=False)
class BlockDiagonal(MaskSpec):
    """Query and key lie in the same segment of ``size`` tokens."""

    size: int
    rule: ClassVar[str] = "block_diagonal"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Compare segment numbers."""
        return _segment(q, self.size) == _segment(k, self.size)

    def classes(self, tiles: Tiles) -> Tensor:
        """Compare the tile's first and last segment numbers; exact."""
        q_first, q_last = _segment(tiles.q_lo, self.size), _segment(tiles.q_hi, self.size)
        k_first, k_last = _segment(tiles.k_lo, self.size), _segment(tiles.k_hi, self.size)
        full = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        return three_valued((q_last < k_first) | (k_last < q_first), full)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Phases of the tile's corner, and how many segments apart its sides begin."""
        reach = max(tiles.block) // self.size + 2
        apart = _segment(tiles.q_lo, self.size) - _segment(tiles.k_lo, self.size)
        return tiles.q_lo % self.size, tiles.k_lo % self.size, apart.clamp(-reach, reach)


@dataclass(frozen=True, eq=False, repr=False)
class Multiple(MaskSpec):
    """The distance ``k - q`` is a multiple of ``step``."""

    step: int
    rule: ClassVar[str] = "multiple"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Test the remainder."""
        return (k - q) % self.step == 0

    def classes(self, tiles: Tiles) -> Tensor:
        """Look for a multiple in the tile's range of distances; exact."""
        shortest, longest = tiles.k_lo - tiles.q_hi, tiles.k_hi - tiles.q_lo
        last = _segment(longest, self.step) * self.step
        full = (last == longest) & (shortest == longest) if self.step > 1 else last == longest
        return three_valued(last < shortest, full)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Phase of the tile's corner."""
        return ((tiles.k_lo - tiles.q_lo) % self.step,)


@dataclass(frozen=True, eq=False, repr=False)
class Phase(MaskSpec):
    """Keys whose position modulo ``period`` is at least ``start``."""

    period: int
    start: int
    rule: ClassVar[str] = "phase"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Test the remainder; broadcast over the queries."""
        return (k % self.period >= self.start) & torch.ones_like(q, dtype=torch.bool)

    def classes(self, tiles: Tiles) -> Tensor:
        """Compare the tile's range of remainders; exact."""
        first = tiles.k_lo % self.period
        last = first + (tiles.k_hi - tiles.k_lo)
        wraps = (
            last >= self.period
        )  # then it holds the last remainder, kept, and remainder 0, kept only if start is 0
        full = (first >= self.start) & ~wraps if self.start > 0 else first >= 0
        return three_valued((last < self.start) & ~wraps, full)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Phase of the tile's first key."""
        return (tiles.k_lo % self.period,)


def _segment(position: Tensor, size: int) -> Tensor:
    return torch.div(position, size, rounding_mode="floor")
