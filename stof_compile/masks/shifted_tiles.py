"""Tiles that begin where the keys of their rows do, for the Hopper kernel of block-wise attention.

Tiles of a grid hold more keys than a row of tiles has: 64 queries under a window of 45 to either
side keep 154 keys, which lie in three tiles of 64 and fill two and a half. Where that saves
something the part tiles of a row are laid anew, from its first key on, in steps of eight keys; one
of them may be *short*, of 32 keys. Full tiles stay. Source: ours.

    keys of a row      ....xxxx xxxxxxxx xxxxxxx.  ........      a letter is eight keys
    tiles of the grid  |  part | part   | part   |               three tiles of 64
    shifted                |  part  |  part  |sh.|               two and a short one

No shifted tile holds keys of a tile that the mask drops altogether, whose numbers may be anything.
Heavy rows have no short tile: in a piece of its own it would be computed as a whole one, which may
reach into such a tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks.fragments import to_fragments

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask

_TILE = 8  # octets of a tile
_SHORT = 4  # octets of a short one
_MOST_PARTS = 32  # rows with more part tiles stay as they are: they would take long
_CHUNK = 2**20  # places of octets laid at once
_NEVER = 2**40
SHIFTED_SHARE = 0.97
"""Shifted tiles are worth it where they are at most this share of those of the grid."""


class _Laid(NamedTuple):
    """Part tiles of some rows, [row, tile], in the order of their columns."""

    begin: Tensor  # int64, octet of its first key; `_NEVER` or more where there is none
    width: Tensor  # int64, octets to its last key

    def exists(self) -> Tensor:
        return self.begin < _NEVER

    def halves(self, fulls: Tensor, heavy: Tensor) -> tuple[Tensor, Tensor]:
        """(cost of each row in half tiles, place of its short tile or -1).

        Args:
            fulls: full tiles of each. heavy: bool, whether it may be cut into pieces.
        """
        there = self.exists()
        width = torch.where(there, self.width, _TILE + 1)
        best, place = width.min(1)
        count = there.sum(1)
        # a row begins with a whole tile
        short = (best <= _SHORT) & (count + fulls > 1) & ~heavy
        return 2 * count - short.long(), torch.where(short, place, -1)


class _Rows(NamedTuple):
    """Rows that could gain."""

    number: Tensor  # int64 [n], of the row
    laid: _Laid
    short: Tensor  # int64 [n], place of the short tile or -1


def tile_share(mask: BlockMask) -> float:
    """Tiles of a mask in tiles of 64 x 64 as they would be shifted, over those of the grid."""
    total = mask.col_idx.numel()
    rows = _rows(mask)
    if rows is None:
        return 1.0
    saved = 2 * (_parts(mask)[rows.number] - rows.laid.exists().sum(1)) + (rows.short >= 0)
    return 1.0 - float(saved.sum()) / (2 * total)


def shifted_arrays(mask: BlockMask) -> tuple[Tensor, ...]:
    """The seven tensors of a mask in tiles of 64 x 64 with part tiles shifted.

    Columns are counted in octets. The start of a row's full tiles is -1 - start where its first
    tile is short; bits of keys behind the 32nd are 0 there.

    Raises:
        StofMaskError: another tile size.
    """
    tile = mask.block_q, mask.block_k
    if tile != (64, 64):
        raise StofMaskError(f"shifted tiles are 64 x 64, not {tile[0]} x {tile[1]}")
    plain = mask.plane_map, mask.row_ptr, mask.full_start, mask.col_idx, mask.bitmap_id
    rows = _rows(mask)
    if rows is None:
        columns = plain[3] * _TILE
        return (*plain[:3], columns, plain[4], to_fragments(mask.bitmap), mask.row_order)
    device = mask.device
    row_of = mask.row_of_tile()
    is_part = mask.is_part()
    moved = torch.zeros(mask.row_ptr.numel() - 1, dtype=torch.bool, device=device)
    moved[rows.number] = True

    # -- what stays ----
    stays = ~(is_part & moved[row_of])
    row = row_of[stays]
    begin = mask.col_idx[stays].long() * _TILE
    part = is_part[stays]
    left = torch.where(part, mask.bitmap_id[stays].long(), -1)
    none = torch.full_like(left, -1)
    kept = torch.stack([row, torch.where(part, 1, 2), begin, left, none, 0 * row, 0 * row])

    # -- what moves ----
    at, place = rows.laid.exists().nonzero(as_tuple=True)
    row = rows.number[at]
    begin = rows.laid.begin[at, place]
    short = rows.short[at] == place
    column, shift = begin // _TILE, begin % _TILE
    find = _Tiles(mask, row_of, is_part)
    _, left = find(row, column)
    beside, right = find(row, column + 1)
    # never beyond the tiles that a row has
    last = torch.where(short, _TILE - _SHORT, 0)
    back = torch.where(beside, shift, torch.minimum(shift, last))
    drop = shift - back
    new = torch.stack([row, torch.where(short, 0, 1), begin - drop, left, right, back, drop])

    # -- in the order of the kernel: the short one, part tiles, full ones ----
    entries = torch.cat([kept, new], 1)
    order = ((entries[0] * 4 + entries[1]) * (_TILE * (mask.cols + 1)) + entries[2]).argsort()
    row, kind, begin, left, right, shift, drop = entries[:, order].unbind(0)
    size = mask.bitmap.shape[0] + 1
    of_part = kind < 2
    contents = ((left + 1) * size + right + 1) * (_TILE * _TILE) + shift * _TILE + drop
    different, number = contents[of_part].unique(return_inverse=True)
    bitmap_id = torch.zeros_like(row, dtype=torch.int32)
    bitmap_id[of_part] = number.int()
    pieces = different.split(_CHUNK // (_TILE * _TILE))
    words = torch.cat([_contents(mask.bitmap, some, size) for some in pieces])

    count = moved.numel()
    row_ptr = torch.zeros(count + 1, dtype=torch.int64, device=device)
    row_ptr[1:] = row.bincount(minlength=count).cumsum(0)
    middle = row_ptr[:-1] + row[of_part].bincount(minlength=count)
    has_short = row[kind == 0].bincount(minlength=count) > 0
    middle = torch.where(has_short, -1 - middle, middle)
    lists = row_ptr.int(), middle.int(), begin.int(), bitmap_id
    return (mask.plane_map, *lists, to_fragments(words), mask.row_order)


def _parts(mask: BlockMask) -> Tensor:
    """Part tiles of each row, int64."""
    return (mask.full_start - mask.row_ptr[:-1]).long()


def _fulls(mask: BlockMask) -> Tensor:
    return (mask.row_ptr[1:] - mask.full_start).long()


def _heavy(mask: BlockMask) -> Tensor:
    """Which rows are heavy, bool."""
    heavy = torch.zeros((mask.planes, mask.rows), dtype=torch.bool, device=mask.device)
    order = mask.row_order.view(mask.planes, mask.rows).long()
    return heavy.scatter_(1, order[:, : mask.heavy_rows], True).flatten()


def _rows(mask: BlockMask) -> _Rows | None:
    """The rows that gain, and how their tiles are laid."""
    if not mask.bitmap.shape[0]:
        return None
    octets = (mask.bitmap.view(-1, _TILE, _TILE) != 0).any(2)
    parts, fulls, heavy = _parts(mask), _fulls(mask), _heavy(mask)
    # a bound that needs no laying: as if all octets lay side by side
    is_part = mask.is_part()
    filled = octets.sum(1)[mask.bitmap_id.long().clamp(max=octets.shape[0] - 1)]
    per_row = torch.zeros_like(parts).index_add_(
        0, mask.row_of_tile(), torch.where(is_part, filled, 0)
    )
    least = -(-per_row // _SHORT)
    number = ((least < 2 * parts) & (parts <= _MOST_PARTS)).nonzero()[:, 0]
    if not number.numel():
        return None
    most = int(parts[number].max())
    found = [
        _gaining(mask, octets, some, parts[some], (fulls[some], heavy[some]), most)
        for some in number.split(max(1, _CHUNK // (most * _TILE)))
    ]
    numbers, begins, widths, shorts = (torch.cat(some) for some in zip(*found, strict=True))
    return _Rows(numbers, _Laid(begins, widths), shorts) if numbers.numel() else None


def _gaining(
    mask: BlockMask,
    octets: Tensor,
    number: Tensor,
    parts: Tensor,
    facts: tuple[Tensor, Tensor],
    most: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(number, begin and width of its tiles, place of its short one) of the rows that gain.

    Args:
        octets: bool [U, 8], which of a bitmap have keys. number: of the rows to look at.
        parts: tiles of each. facts: for `_Laid.halves`. most: of `parts`, of all rows.
    """
    nth = torch.arange(most, device=mask.device)
    there = nth < parts[:, None]
    entry = torch.where(there, mask.row_ptr[:-1].long()[number, None] + nth, 0)
    column = torch.where(there, mask.col_idx.long()[entry], _NEVER // _TILE)
    within = torch.arange(_TILE, device=mask.device)
    place = (column[:, :, None] * _TILE + within).flatten(1)
    has = (octets[mask.bitmap_id.long()[entry] * there] & there[:, :, None]).flatten(1)
    laid = _lay(place, has, most)
    cost, short = laid.halves(*facts)
    gains = cost < 2 * parts
    return number[gains], laid.begin[gains], laid.width[gains], short[gains]


def _lay(place: Tensor, has: Tensor, most: int) -> _Laid:
    """Tiles from each first octet that is not in one yet.

    Args:
        place: int64 [rows, n], octets of each row, ascending. has: which of them have keys.
        most: tiles of a row; as many always suffice.
    """
    begins, widths = [], []
    free = torch.where(has, place, _NEVER)
    for _ in range(most):
        begin = free.min(1, keepdim=True)[0]
        inside = has & (place >= begin) & (place < begin + _TILE)
        last = torch.where(inside, place, -1).max(1, keepdim=True)[0]
        begins.append(begin)
        widths.append(last - begin + 1)
        free = torch.where(place < begin + _TILE, _NEVER, free)
    return _Laid(torch.cat(begins, 1), torch.cat(widths, 1))


class _Tiles:
    """Finds tiles of the grid by row and column."""

    def __init__(self, mask: BlockMask, row_of: Tensor, is_part: Tensor) -> None:
        self.step = mask.cols + 2
        keys = row_of * self.step + mask.col_idx
        self.keys, order = keys.sort()
        self.number = torch.where(is_part, mask.bitmap_id.long(), -1)[order]

    def __call__(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """(whether a row has a tile there, number of its bitmap or -1)."""
        key = row * self.step + column
        at = torch.searchsorted(self.keys, key).clamp(max=self.keys.numel() - 1)
        there = self.keys[at] == key
        return there, torch.where(there, self.number[at], -1)


def _contents(bitmap: Tensor, different: Tensor, size: int) -> Tensor:
    """Bitmaps of shifted tiles, int64 [n, 64]: octets of the tile to the left from its `shift`-th
    on, then those of the tile to the right; none before the `drop`-th."""
    drop = different % _TILE
    shift = different // _TILE % _TILE
    pair = different // (_TILE * _TILE)
    tiles = torch.stack([pair // size, pair % size], 1)  # 0: none
    octets = torch.cat([bitmap.new_zeros((1, _TILE, _TILE)), bitmap.view(-1, _TILE, _TILE)])
    nth = torch.arange(_TILE, device=bitmap.device)
    source = shift[:, None] + nth
    words = octets[tiles.gather(1, source // _TILE), source % _TILE]
    words[nth < drop[:, None]] = 0
    return words.flatten(1)
