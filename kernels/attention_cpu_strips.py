"""What the CPU's gather kernel does for a mask, call by call: made once per mask, then reused."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from stof_compile.kernels.attention_cpu_buckets import (
    KEPT_MASK_ELEMENTS,
    Bucket,
    additive_mask,
    plane_buckets,
)
from torch import Tensor

# Bytes of K gathered at once, all heads together: a strip's K, V and mask stay in the caches.
STRIP_BYTES = 3 << 19
# Strips that read K and V in place may be this much larger: fewer calls, the same caches.
IN_PLACE = 8


class Strip(NamedTuple):
    """Lines handled by one call of the inner attention."""

    height: int  # queries of a line
    rows: Tensor  # int64 [r]: line i starts at query rows[i] * height
    cols: Tensor  # int64 [r, n]
    gathered: Tensor  # int64 [r * n]
    first: int  # first row if the rows are contiguous, else -1
    whole: bool  # cols are 0, 1, 2, ... for every line
    run: tuple[int, int] | None  # first column of the first line, and the lines' distance
    extra: Tensor | None  # 0 or -inf, [r or 1, 1, height, n * block_k], or None
    bucket: Bucket | None  # where the mask comes from, if there is one and ``extra`` is None
    patterns: Tensor  # int64 [r or 1]: lines of ``bucket.ids``

    def mask(self, block_k: int, dtype: torch.dtype) -> Tensor | None:
        """Return 0 or -inf, [r or 1, 1, height, n * block_k]; None: nothing is masked."""
        if self.bucket is None:
            return self.extra
        if self.bucket.extra is not None:
            return self.bucket.extra.index_select(0, self.patterns)
        ids = self.bucket.ids.index_select(0, self.patterns)
        return additive_mask(ids, self.bucket.octets, (self.height, block_k), dtype)


class Plan(NamedTuple):
    """All strips of a plane, and whether they cover every query."""

    strips: tuple[Strip, ...]
    complete: bool


class MaskArrays:
    """The five arrays a plan depends on, equal where they are the same memory and unchanged.

    A cache that holds this as a key keeps the memory alive, so that it can't be handed out again
    for another mask; writing into an array changes its version.
    """

    def __init__(self, arrays: tuple[Tensor, ...]) -> None:
        self.arrays = arrays
        self._facts = tuple((t.data_ptr(), t.shape, t.stride(), t._version) for t in arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskArrays) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)


def plane_plan(
    arrays: tuple[Tensor, ...],
    plane: int,
    rows: int,
    cols: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    bytes_per_tile: int,
) -> Plan:
    """Plan the calls for one plane.

    Args:
        arrays: row_ptr, full_start, col_idx, bitmap_id and bitmap of the mask.
        plane: its number. rows, cols: tile rows and tile columns. block: (block_q, block_k).
        dtype: of the additive masks. bytes_per_tile: of a tile of K, all heads together.
    """
    if any(t.is_inference() for t in arrays):
        # such tensors carry no version: compare contents at every call
        return _plan_of_contents(_contents(arrays), plane, rows, cols, block, dtype, bytes_per_tile)
    return _plan_of_arrays(MaskArrays(arrays), plane, rows, cols, block, dtype, bytes_per_tile)


def _contents(arrays: tuple[Tensor, ...]) -> tuple[bytes, ...]:
    return tuple(t.numpy().tobytes() for t in arrays)


@lru_cache(maxsize=64)
def _plan_of_arrays(
    key: MaskArrays,
    plane: int,
    rows: int,
    cols: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    bytes_per_tile: int,
) -> Plan:
    return _plan_of_contents(_contents(key.arrays), plane, rows, cols, block, dtype, bytes_per_tile)


@lru_cache(maxsize=32)
def _plan_of_contents(
    contents: tuple[bytes, ...],
    plane: int,
    rows: int,
    cols: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    bytes_per_tile: int,
) -> Plan:
    """Compute the plan; equal masks at other addresses share it."""
    # plans outlive a call made under inference_mode, and are used outside of it
    with torch.inference_mode(False):
        buckets, complete = plane_buckets(contents, plane, rows, cols, block, dtype)
        strips = tuple(s for b in buckets for s in _strips(b, bytes_per_tile))
    return Plan(strips, complete)


def _strips(bucket: Bucket, bytes_per_tile: int) -> Iterator[Strip]:
    """Cut a bucket into strips of bounded size; lines that share a pattern share its mask."""
    tiles = bucket.cols.shape[1]
    small = (
        bucket.extra is not None
        and bucket.extra[0].numel() * bucket.rows.shape[0] <= KEPT_MASK_ELEMENTS
    )
    for segment in bucket.segments:
        in_place = bucket.whole or segment.first_col >= 0
        limit = STRIP_BYTES * (IN_PLACE if in_place else 1)
        step = max(1, limit // max(1, tiles * bytes_per_tile))
        for start in range(segment.begin, segment.end, step):
            end = min(start + step, segment.end)
            run = None
            if segment.first_col >= 0:
                first_col = segment.first_col + (start - segment.begin) * segment.step
                run = (first_col, segment.step)
            patterns = bucket.patterns[start:end]
            if bool((patterns == patterns[0]).all()):
                patterns = patterns[:1]
            extra = None
            if bucket.extra is not None and patterns.shape[0] == 1:
                extra = bucket.extra[int(patterns) : int(patterns) + 1]
            elif bucket.extra is not None and small:
                extra = bucket.extra.index_select(0, patterns)
            cols = bucket.cols[start:end]
            yield Strip(
                height=bucket.height,
                rows=bucket.rows[start:end],
                cols=cols,
                gathered=cols.reshape(-1),
                first=-1 if bucket.first < 0 else bucket.first + start,
                whole=bucket.whole,
                run=run,
                extra=extra,
                bucket=None if bucket.plain or extra is not None else bucket,
                patterns=patterns,
            )
