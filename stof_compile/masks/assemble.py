"""From the tile lists of all planes to the tensors of a block mask; equal planes stored once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks import bitmap
from stof_compile.masks.bands import BandRule
from stof_compile.masks.opaque import Opaque
from stof_compile.masks.spec import FULL, MaskSpec, PlaneShape
from stof_compile.masks.tiles import Grid, TileList, list_tiles


@dataclass(frozen=True)
class Storage:
    """The tensors of a block mask by name, the number of planes and the arithmetic form."""

    class Shape(NamedTuple):
        """Lengths, tile edges and query offset in tokens."""

        q_len: int
        k_len: int
        block_q: int
        block_k: int
        q_offset: int

    planes: int
    tensors: dict[str, Tensor]
    band: BandRule | None


@dataclass(frozen=True)
class _Group:
    """Planes that share a rule, and their grid."""

    spec: MaskSpec
    grid: Grid


def assemble(
    spec: MaskSpec, shape: Storage.Shape, batch: int, heads: int, device: torch.device
) -> Storage:
    """Build the storage of a bound rule.

    Args:
        spec: bound rule with its tensors on ``device``.
        shape: lengths and tile edges.
        batch, heads: planes to build, Bm x Hm.
    """
    groups, slots = _groups(spec, shape, batch, heads, device)
    lists = [list_tiles(group.spec, group.grid) for group in groups]
    rows = -(-shape.q_len // shape.block_q)
    joined = _join(lists, [group.grid.b.shape[0] for group in groups], rows)
    total = sum(group.grid.b.shape[0] for group in groups)
    joined, plane_of, planes = _share_planes(joined, total, rows)
    plane_map = torch.tensor([plane_of[number] for number in slots], dtype=torch.int32).reshape(
        batch, heads
    )

    order = (joined.row * 2 + joined.full).sort(stable=True).indices
    row, full = joined.row[order], joined.full[order]
    number = torch.arange(planes * rows + 1, device=device)
    row_ptr = torch.searchsorted(row, number)
    full_start = torch.searchsorted(row * 2 + full, number[:-1] * 2 + 1)
    weight = row_ptr.diff().reshape(planes, rows)
    tensors = {
        "plane_map": plane_map.to(device),
        "row_ptr": row_ptr.to(torch.int32),
        "full_start": full_start.to(torch.int32),
        "col_idx": joined.col[order].to(torch.int32),
        "bitmap_id": joined.bitmap_id[order].to(torch.int32),
        "bitmap": joined.words,
        "row_order": weight.argsort(dim=1, descending=True, stable=True)
        .reshape(-1)
        .to(torch.int32),
    }
    return Storage(planes, tensors, _common_band(groups, lists))


def planes_of(spec: MaskSpec, batch: int, heads: int) -> tuple[int, int]:
    """Number of (batch, head) planes of a rule in a problem of these sizes.

    Raises:
        StofMaskError: the rule was made for other sizes, or is none.
    """
    if not isinstance(spec, MaskSpec):
        raise StofMaskError(
            f"a block mask is built of a mask rule, got {type(spec).__name__}; masks.as_mask_spec "
            "makes a rule of a mask_mod, a bool tensor or a block mask"
        )
    shape, reach = _planes_and_reach(spec)
    for what, most, size in zip(("batch row", "head"), reach, (batch, heads), strict=True):
        if most is not None and size > most:
            raise StofMaskError(
                f"the mask looks the {what} up in a table of {most}, the problem has {size}: "
                f"{spec!r}; give the function a table of {size} or more"
            )
    found = []
    for what, planes, size in zip(("batch", "head"), shape, (batch, heads), strict=True):
        if planes not in (1, None, size):
            raise StofMaskError(
                f"the mask has {planes} {what} planes, the problem has {what} size {size}: {spec!r}"
            )
        found.append(max(size, 1) if planes is None else planes)
    return found[0], found[1]


@lru_cache(maxsize=64)  # asked for at every call of sparse attention
def _planes_and_reach(spec: MaskSpec) -> tuple[PlaneShape, list[int | None]]:
    """Planes of a rule, and the smallest tables its functions index by batch row and by head."""
    reaches = [one.reach for one in spec.walk() if isinstance(one, Opaque)]
    sizes = ([size for one in reaches if (size := one[axis]) is not None] for axis in (0, 1))
    return spec.plane_shape(), [min(one, default=None) for one in sizes]


def _groups(
    spec: MaskSpec, shape: Storage.Shape, batch: int, heads: int, device: torch.device
) -> tuple[list[_Group], list[int]]:
    """Group the planes by the rule their head sees; also the plane of each (b, h), row by row."""
    members: dict[MaskSpec, list[tuple[int, int]]] = {}
    place: dict[tuple[int, int], tuple[MaskSpec, int]] = {}
    for head in range(heads):
        seen = spec.at_head(head) if heads > 1 else spec
        batch_planes, head_planes = seen.plane_shape()
        for row in range(batch):
            plane = (0 if batch_planes == 1 else row, 0 if head_planes == 1 else head)
            of_rule = members.setdefault(seen, [])
            if plane not in of_rule:
                of_rule.append(plane)
            place[row, head] = (seen, of_rule.index(plane))
    groups, start = [], {}
    count = 0
    for seen, planes in members.items():
        b, h = torch.tensor(planes, dtype=torch.int64, device=device).unbind(1)
        groups.append(_Group(seen, Grid(*shape, b, h)))
        start[seen] = count
        count += len(planes)
    slots = [
        start[seen] + number
        for seen, number in (place[b, h] for b in range(batch) for h in range(heads))
    ]
    return groups, slots


def _join(lists: list[TileList], counts: list[int], rows: int) -> TileList:
    """One list over the planes of all groups, with one table of bitmaps."""
    if len(lists) == 1:
        return lists[0]
    words = torch.cat([one.words for one in lists])
    first, inverse = bitmap.unique_rows(words)
    row, ids = [], []
    plane_start = word_start = 0
    for one, count in zip(lists, counts, strict=True):
        row.append(one.row + plane_start * rows)
        here = inverse[word_start : word_start + one.words.shape[0]]
        ids.append(
            torch.where(one.full, 0, here[one.bitmap_id]) if here.shape[0] else one.bitmap_id
        )
        plane_start += count
        word_start += one.words.shape[0]
    col, full = torch.cat([one.col for one in lists]), torch.cat([one.full for one in lists])
    return TileList(torch.cat(row), col, full, torch.cat(ids), words[first], lists[0].clipped_full)


def _share_planes(tiles: TileList, planes: int, rows: int) -> tuple[TileList, list[int], int]:
    """Drop planes equal to an earlier one.

    Returns:
        The tiles of the others, the new number of every old plane, and the count of new ones.
    """
    if planes == 1:
        return tiles, [0], 1
    plane = torch.div(tiles.row, max(rows, 1), rounding_mode="floor")
    local = tiles.row - plane * rows
    kind = tiles.bitmap_id * 2 + tiles.full
    entries = torch.stack([local, tiles.col, kind], dim=1)
    sums = torch.zeros(planes, dtype=torch.int64, device=plane.device)
    sums = sums.scatter_add(0, plane, bitmap.hash_rows(entries))
    bounds = torch.searchsorted(plane, torch.arange(planes + 1, device=plane.device)).tolist()

    kept: dict[int, list[int]] = {}
    number_of: list[int] = []
    order: list[int] = []
    for old, code in enumerate(sums.tolist()):
        mine = entries[bounds[old] : bounds[old + 1]]
        alike = (
            p for p in kept.get(code, ()) if torch.equal(entries[bounds[p] : bounds[p + 1]], mine)
        )
        same = next(alike, None)
        if same is not None:
            number_of.append(order.index(same))
            continue
        kept.setdefault(code, []).append(old)
        number_of.append(len(order))
        order.append(old)
    if len(order) == planes:
        return tiles, number_of, planes
    new_number = torch.full((planes,), -1, dtype=torch.int64)
    new_number[order] = torch.arange(len(order))
    new_plane = new_number.to(plane.device)[plane]
    left = torch.nonzero(new_plane >= 0).squeeze(1)
    return (
        TileList(
            (new_plane * rows + local)[left],
            tiles.col[left],
            tiles.full[left],
            tiles.bitmap_id[left],
            tiles.words,
            tiles.clipped_full,
        ),
        number_of,
        len(order),
    )


def _common_band(groups: list[_Group], lists: list[TileList]) -> BandRule | None:
    """The arithmetic form all planes share.

    The form speaks of unclipped tiles. A tile that sticks out is stored as part even if its rule
    keeps all of it, so the form must keep all of it as well.
    """
    common: BandRule | None = None
    for group, tiles in zip(groups, lists, strict=True):
        grid = group.grid
        band = group.spec.band_rule(grid.block_q, grid.block_k, grid.q_offset)
        if band is None or (common is not None and band != common):
            return None
        common = band
        row, col = tiles.clipped_full
        if row.shape[0] and not bool((band.as_spec().classes(grid.tiles(row, col)) == FULL).all()):
            return None
    return common
