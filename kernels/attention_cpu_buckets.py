"""Tile rows of a block mask grouped for the CPU's gather kernel, and their masks expanded."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# Tile rows of one bucket are padded to the longest; a row shorter than this part of it opens a new
# bucket.
BUCKET_FILL = 0.75
# A row with at least this part of all tile columns reads K and V in place, gaps masked: no copy.
WHOLE_ROW_FILL = 0.75
# Mask elements of one bucket that are remembered between calls (all layers of a model share them).
KEPT_MASK_ELEMENTS = 1 << 20
_FULL, _ABSENT = -1, -2


class Bucket(NamedTuple):
    """Tile rows of one plane with about as many kept tiles."""

    rows: Tensor  # int64 [r], ascending
    cols: Tensor  # int64 [r, n], padded with column 0
    ids: Tensor  # int64 [r, n]: bitmap number, -1 = full, -2 = absent
    first: int  # rows are first, first + 1, ... or -1
    masked: bool  # some tile is not full
    whole: bool  # cols are 0, 1, 2, ... for every row
    extra: Tensor | None  # 0 or -inf, [r, 1, block_q, n * block_k], kept where it is small


@lru_cache(maxsize=32)
def bucket_rows(
    row_ptr: bytes,
    full_start: bytes,
    col_idx: bytes,
    bitmap_id: bytes,
    bitmap: bytes,
    plane: int,
    rows: int,
    cols: int,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[Bucket, ...]:
    """Group a plane's tile rows by their number of tiles; depends on the arrays' contents only."""
    starts, fulls, columns, numbers = (
        torch.frombuffer(bytearray(a), dtype=torch.int32).long()
        if a
        else torch.zeros(0, dtype=torch.int64)
        for a in (row_ptr, full_start, col_idx, bitmap_id)
    )
    begin = starts[plane * rows : plane * rows + rows]
    count = starts[plane * rows + 1 : plane * rows + rows + 1] - begin
    part = fulls[plane * rows : plane * rows + rows] - begin
    by_count = torch.argsort(count, descending=True, stable=True)
    sorted_counts = count[by_count].tolist()
    result, at = [], 0
    while at < rows and sorted_counts[at] > 0:
        longest, end = sorted_counts[at], at + 1
        whole = longest >= WHOLE_ROW_FILL * cols
        least = WHOLE_ROW_FILL * cols if whole else BUCKET_FILL * longest
        while end < rows and sorted_counts[end] >= max(1.0, least):
            end += 1
        members = by_count[at:end].sort().values
        place = torch.arange(longest)
        entry = (begin[members][:, None] + place).clamp(max=columns.numel() - 1)
        ids = torch.where(place < part[members][:, None], numbers[entry], _FULL)
        ids = torch.where(place < count[members][:, None], ids, _ABSENT)
        col = torch.where(ids == _ABSENT, 0, columns[entry])
        if whole:
            spread = torch.full((end - at, cols), _ABSENT, dtype=torch.int64)
            # an absent tile points at column 0: amax keeps the tile that is really there
            ids = spread.scatter_reduce(1, col, ids, "amax")
            col = torch.arange(cols).expand(end - at, cols)
        contiguous = int(members[-1] - members[0]) == end - at - 1
        first = int(members[0]) if contiguous else -1
        masked, extra = bool((ids != _FULL).any()), None
        if masked and ids.numel() * block[0] * block[1] <= KEPT_MASK_ELEMENTS:
            words = (
                torch.frombuffer(bytearray(bitmap), dtype=torch.int64)
                if bitmap
                else torch.zeros(0).long()
            )
            extra = additive_mask(ids, bitmap_octets(words, block), block, dtype)
        result.append(Bucket(members, col, ids, first, masked, whole, extra))
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
