"""Tile rows of a block mask grouped for the CPU's gather kernel.

A *line* is what gets one call's worth of queries: a tile row, or 16 queries of one where that
saves work (the few global queries of a Longformer mask must not make a whole tile row heavy).
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Lines of one bucket are padded to the longest; a line shorter than this part of it opens a new
# bucket.
BUCKET_FILL = 0.75
# A line with at least this part of all tile columns reads K and V in place, gaps masked: no copy.
WHOLE_LINE_FILL = 0.75
# Queries of a line cut out of a tile row, and the part of the work that must remain to cut: short
# calls cost more per score.
CUT_HEIGHT = 16
CUT_BELOW = 0.6
# Mask elements of one bucket that are remembered between calls (all layers of a model share them).
KEPT_MASK_ELEMENTS = 1 << 20
_FULL, _ABSENT = -1, -2


class Segment(NamedTuple):
    """Consecutive lines of a bucket whose keys are read the same way."""

    begin: int
    end: int
    first_col: int  # line i reads tile columns first_col + (i - begin) * step, ...; -1: any columns
    step: int


class Bucket(NamedTuple):
    """Lines of one plane with about as many kept tiles."""

    height: int  # queries of a line
    rows: Tensor  # int64 [r], ascending: line i starts at query rows[i] * height
    cols: Tensor  # int64 [r, n], padded with columns that are masked
    patterns: Tensor  # int64 [r]: line of ``ids``
    ids: Tensor  # int64 [p, n]: tile number of ``octets``, -1 = full, -2 = absent
    octets: Tensor  # as ``bitmap_octets`` returns them, for tiles of ``height`` queries
    extra: Tensor | None  # 0 or -inf, [p, 1, height, n * block_k], kept where it is small
    plain: bool  # every tile is full: nothing is masked
    first: int  # rows are first, first + 1, ... or -1
    whole: bool  # cols are 0, 1, 2, ... for every line
    segments: tuple[Segment, ...]


def plane_buckets(
    contents: tuple[bytes, ...],
    plane: int,
    rows: int,
    cols: int,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[tuple[Bucket, ...], bool]:
    """Group a plane's tile rows into buckets.

    Args:
        contents: bytes of row_ptr, full_start, col_idx, bitmap_id and bitmap.
        plane: its number. rows, cols: tile rows and tile columns. block: (block_q, block_k).
        dtype: of the additive masks.

    Returns:
        The buckets, and whether they cover every query.
    """
    starts, fulls, columns, numbers = (
        (torch.frombuffer(bytearray(a), dtype=torch.int32) if a else torch.zeros(0)).long()
        for a in contents[:4]
    )
    words = torch.zeros(0, dtype=torch.int64)
    if contents[4]:
        words = torch.frombuffer(bytearray(contents[4]), dtype=torch.int64)
    octets = bitmap_octets(words, block)
    begin, end = int(starts[plane * rows]), int(starts[plane * rows + rows])
    count = starts[plane * rows : plane * rows + rows + 1].diff()
    row = torch.repeat_interleave(torch.arange(rows), count)
    part = torch.arange(begin, end) < fulls[plane * rows : plane * rows + rows][row]
    col, tile = columns[begin:end], torch.where(part, numbers[begin:end], _FULL)
    covered = bool((count > 0).all())
    buckets: list[Bucket] = []
    pieces = block[0] // CUT_HEIGHT
    if pieces > 1 and block[0] % CUT_HEIGHT == 0:
        # [tiles, block_k / 8, pieces, 16] -> a tile of 16 queries each
        cut = octets.view(octets.shape[0], -1, pieces, CUT_HEIGHT).transpose(1, 2).contiguous()
        kept = cut.ne(0).any(-1).any(-1)[tile]  # absent and full are the table's last two
        full = cut.eq(255).all(-1).all(-1)[tile]
        work = torch.zeros(rows).index_add_(0, row, kept.float().mean(1)) / count.clamp(min=1)
        chosen = (work <= CUT_BELOW)[row]
        if bool(chosen.any()):
            lines = row[:, None] * pieces + torch.arange(pieces)
            tiles = torch.where(
                full, _FULL, tile.remainder(octets.shape[0])[:, None] * pieces + lines % pieces
            )
            wanted = kept & chosen[:, None]
            buckets += _buckets(
                lines[wanted], col[:, None].expand_as(kept)[wanted], tiles[wanted],
                torch.cat([cut.flatten(0, 1), cut[-2:, 0]]), rows * pieces, cols,
                (CUT_HEIGHT, block[1]), dtype,
            )  # fmt: skip
            covered = covered and sum(b.rows.shape[0] for b in buckets) == pieces * len(
                row[chosen].unique()
            )
            row, col, tile = row[~chosen], col[~chosen], tile[~chosen]
    buckets += _buckets(row, col, tile, octets, rows, cols, block, dtype)
    return tuple(buckets), covered


def _buckets(
    line: Tensor,
    col: Tensor,
    tile: Tensor,
    octets: Tensor,
    lines: int,
    cols: int,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> list[Bucket]:
    """Group lines by their number of tiles; one entry of ``line``, ``col``, ``tile`` a tile."""
    order = torch.argsort(line * cols + col)
    line, col, tile = line[order], col[order], tile[order]
    count = torch.bincount(line, minlength=lines)
    begin = count.cumsum(0) - count
    by_count = torch.argsort(count, descending=True, stable=True)
    sorted_counts = count[by_count].tolist()
    result, at = [], 0
    while at < lines and sorted_counts[at] > 0:
        longest, end = sorted_counts[at], at + 1
        whole = longest >= WHOLE_LINE_FILL * cols
        least = WHOLE_LINE_FILL * cols if whole else BUCKET_FILL * longest
        while end < lines and sorted_counts[end] >= max(1.0, least):
            end += 1
        members = by_count[at:end].sort().values
        place = torch.arange(longest)
        entry = (begin[members][:, None] + place).clamp(max=col.numel() - 1)
        absent = place >= count[members][:, None]
        ids = torch.where(absent, _ABSENT, tile[entry])
        where = torch.where(absent, 0, col[entry])
        segments: tuple[Segment, ...] = (Segment(0, end - at, -1, 0),)
        first_col, last_col = where[:, 0], where.amax(1)
        if whole:
            where, ids = _spread(torch.zeros_like(members), where, ids, cols)
        elif bool((last_col - first_col + 1 == count[members]).all()):
            start = first_col.clamp(max=cols - longest)
            runs = _segments(start.tolist())
            if len(runs) <= 2 + (end - at) // 8:
                segments = runs
                where, ids = _spread(start, where, ids, longest)
        unique, patterns = torch.unique(ids, dim=0, return_inverse=True)
        plain = bool((unique == _FULL).all())
        extra = None
        if not plain and unique.numel() * block[0] * block[1] <= KEPT_MASK_ELEMENTS:
            extra = additive_mask(unique, octets, block, dtype)
        contiguous = int(members[-1] - members[0]) == end - at - 1
        first = int(members[0]) if contiguous else -1
        result.append(
            Bucket(
                block[0], members, where, patterns, unique, octets, extra, plain, first, whole,
                segments,
            )
        )  # fmt: skip
        at = end
    return result


def _spread(start: Tensor, where: Tensor, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Lay the tiles of a line out over the columns start, start + 1, ..., gaps absent."""
    wide = torch.full((ids.shape[0], width), _ABSENT, dtype=torch.int64)
    # an absent tile lies on some column: amax keeps the tile that is really there
    place = (where - start[:, None]).clamp(min=0)
    return start[:, None] + torch.arange(width), wide.scatter_reduce(1, place, ids, "amax")


def _segments(start: list[int]) -> tuple[Segment, ...]:
    """Cut lines into runs whose first columns advance by equal steps: one view shows a run."""
    result, at = [], 0
    while at < len(start):
        end = at + 1
        step = start[end] - start[at] if end < len(start) else 0
        while step >= 0 and end < len(start) and start[end] - start[end - 1] == step:
            end += 1
        result.append(Segment(at, end, start[at], max(0, step)))
        at = end
    return tuple(result)


def bitmap_octets(bitmap: Tensor, block: tuple[int, int]) -> Tensor:
    """Bitmaps as uint8 [U + 2, block_k / 8, block_q], one bit a column; the last two: absent, full.

    Read as little-endian bytes, a tile's words are column groups of 8, each a byte per row.
    """
    block_q, block_k = block
    stored = bitmap.view(torch.uint8).reshape(-1, block_k // 8, block_q)
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1).expand(2, block_k // 8, block_q)
    return torch.cat([stored, ends])


def additive_mask(
    ids: Tensor, octets: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Expand tiles [r, n] to 0 (keep) and -inf, [r, 1, block_q, n * block_k]."""
    r, n = ids.shape
    # -1 (full) and -2 (absent) count from the end of the table
    tiles = octets.index_select(0, torch.where(ids < 0, ids + octets.shape[0], ids).reshape(-1))
    bits = torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)
    )
    by_row = tiles.view(r, n, block[1] // 8, block[0]).permute(0, 3, 1, 2)
    masked = (by_row.unsqueeze(-1) & bits).eq(0).reshape(r, 1, block[0], n * block[1])
    return torch.zeros(masked.shape, dtype=dtype).masked_fill_(masked, -torch.inf)
