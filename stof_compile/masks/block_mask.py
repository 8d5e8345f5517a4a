"""Block-sparse storage of a mask: which tiles are kept, and the bitmaps of the part tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stof_compile.errors import StofMaskError
from stof_compile.masks import bitmap
from stof_compile.masks.assemble import Storage, assemble, planes_of
from stof_compile.masks.bands import BandRule
from stof_compile.masks.dense_tensor import dense_tensor
from stof_compile.masks.derived import Made, derive
from stof_compile.masks.fragments import both_ways, to_fragments
from stof_compile.masks.hopper_arrays import HOPPER_TILES, hopper_arrays
from stof_compile.masks.key_lists import key_lists
from stof_compile.masks.on_host import HOST, bound_for_host, of_contents
from stof_compile.masks.packed_columns import PackedColumns, pack_columns, packed_tiles
from stof_compile.masks.row_order import UNEVEN, slot_lengths
from stof_compile.masks.shifted_tiles import shifted_arrays, tile_share
from stof_compile.masks.spec import MaskSpec, digest


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask on a grid of tiles; empty tiles are absent. All tensors are on one device.

    Args:
        q_len, k_len: lengths in tokens; R = ceil(q_len / block_q) tile rows.
        block_q, block_k: tile edges in tokens.
        planes: number of different planes stored.
        q_offset: absolute position of the first query.
        plane_map: int32 [Bm, Hm]; plane of (b, h) is ``plane_map[min(b, Bm-1), min(h, Hm-1)]``.
        row_ptr: int32 [planes*R + 1]; row r of plane p is number p*R + r.
        full_start: int32 [planes*R]; a row's part tiles are ``col_idx[row_ptr[i]:full_start[i]]``,
            its full tiles ``col_idx[full_start[i]:row_ptr[i+1]]``, each ascending.
        col_idx: int32 [nnz] tile columns.
        bitmap_id: int32 [nnz] row of ``bitmap``; 0 for full tiles.
        bitmap: int64 [U, (block_q/8) * (block_k/8)], one word per 8 x 8 elements: words column by
            column, bits row by row, least significant first; equal tiles are stored once.
        row_order: int32 [planes*R]; per plane, the rows 0..R-1 with the heaviest first.
        band: arithmetic form valid on every part tile, or None.
    Source: block-sparse storage of masks, STOF paper, section 4.2.1; one list per row instead of
        three.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    planes: int
    q_offset: int
    plane_map: Tensor
    row_ptr: Tensor
    full_start: Tensor
    col_idx: Tensor
    bitmap_id: Tensor
    bitmap: Tensor
    row_order: Tensor
    band: BandRule | None

    # -- shape -------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Tile rows of one plane."""
        return -(-self.q_len // self.block_q)

    @property
    def cols(self) -> int:
        """Tile columns."""
        return -(-self.k_len // self.block_k)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.row_ptr.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The seven tensors in the order the attention ops take them."""
        return (
            self.plane_map, self.row_ptr, self.full_start, self.col_idx,
            self.bitmap_id, self.bitmap, self.row_order,
        )  # fmt: skip

    @cached_property
    def hopper_tensors(self) -> tuple[Tensor, ...]:
        """The same as the Hopper kernels take them, see `masks.hopper_arrays`; tiles of
        `HOPPER_TILES`. Not to be made while a CUDA stream is capturing: the host waits."""
        return self._derive("arrays for Hopper", lambda: hopper_arrays(self))

    @cached_property
    def shifted_tensors(self) -> tuple[Tensor, ...]:
        """`hopper_tensors` of 64 x 64 tiles with part tiles laid from the first key of a row on,
        see `masks.shifted_tiles`. Not to be made while a CUDA stream is capturing: the host waits.

        Raises:
            StofMaskError: another tile size.
        """
        return self._of_host("shifted tiles", shifted_arrays)

    @of_contents
    def shifted_share(self) -> float:
        """Tiles that the Hopper kernel computes where they are shifted, a short one as half a tile,
        over those of the grid; 1.0 where no row gains, and for tiles other than 64 x 64."""
        return tile_share(self) if (self.block_q, self.block_k) == (64, 64) else 1.0

    @cached_property
    def fragments(self) -> Tensor:
        """The bitmap in the order the Hopper kernels read it, int32 [U, block_q * block_k / 32];
        tiles of `HOPPER_TILES`. Not to be made while a CUDA stream is capturing: the host waits.

        Raises:
            StofMaskError: another tile size.
        """
        tile = (self.block_q, self.block_k)
        if tile not in HOPPER_TILES:
            known = ", ".join(f"{rows} x {keys}" for rows, keys in HOPPER_TILES)
            raise StofMaskError(f"fragments exist for tiles of {known}, not {tile}")
        return self._of_host(
            "bitmap in fragments", lambda mask: (to_fragments(mask.bitmap, mask.block_q),)
        )[0]

    @cached_property
    def gradient_fragments(self) -> Tensor:
        """The fragments of 64 x 64 tiles and of these transposed, int32 [2, U, 128], for gradients
        from the Hopper kernels."""
        return self._derive("bitmap in fragments both ways", lambda: both_ways(self.bitmap))

    @cached_property
    def key_lists(self) -> tuple[Tensor, Tensor]:
        """The tile lists by column, (key_ptr, key_tiles), for the gradients of k and v; see
        `masks.key_lists`. Not to be made while a CUDA stream is capturing: the host waits."""
        lists = (self.row_ptr, self.full_start, self.col_idx, self.bitmap_id)
        return self._derive("lists by column", lambda: key_lists(*lists, self.rows, self.cols))

    @cached_property
    def packed(self) -> PackedColumns:
        """The part tiles by column, for kernels that gather keys; see `masks.packed_columns`. Not
        to be made while a CUDA stream is capturing: the host waits."""
        return PackedColumns(*self._of_host("packed columns", pack_columns))

    @of_contents
    def packed_tiles(self) -> int:
        """Tiles that are left where the columns of part tiles are packed, full ones included."""
        return int(packed_tiles(self).sum()) + self.full_tiles

    def _derive(self, name: str, make: Callable[[], Made]) -> Made:
        what = f"the {name} of a block mask of {self.q_len} queries and {self.k_len} keys"
        return derive(self.device, what, make)

    def _of_host(
        self, name: str, make: Callable[[BlockMask], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """What is made of the CPU's mask where there is one, on this mask's device."""
        mask = vars(self).get(HOST, self)
        return self._derive(name, lambda: tuple(t.to(self.device) for t in make(mask)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    # -- statistics --------------------------------------------------------------------------------

    @of_contents
    def _counts(self) -> tuple[int, int, int, int]:
        """Kept elements, part tiles, largest and smallest row of all planes; one host sync."""
        if self.row_ptr.numel() <= 1:
            return 0, 0, 0, 0
        part = self.is_part()
        per_bitmap = bitmap.popcount(self.bitmap)
        part_kept = (
            torch.where(part, per_bitmap[self.bitmap_id.long()], 0).sum()
            if self.bitmap.shape[0]
            else part.sum()
        )
        lengths = self.row_ptr.diff()
        packed = torch.stack([part_kept, part.sum(), lengths.max().long(), lengths.min().long()])
        kept, parts, longest, shortest = packed.tolist()
        full = self.col_idx.numel() - parts
        return kept + full * self.block_q * self.block_k, parts, longest, shortest

    def is_part(self) -> Tensor:
        """Which of the stored tiles have a bitmap, bool [nnz]."""
        row = self.row_of_tile()
        return torch.arange(self.col_idx.numel(), device=self.device) < self.full_start[row]

    def row_of_tile(self) -> Tensor:
        """Tile row of every stored tile, int64 [nnz], counted through all planes."""
        number = torch.arange(self.row_ptr.numel() - 1, device=self.device)
        return torch.repeat_interleave(
            number, self.row_ptr.diff().long(), output_size=self.col_idx.numel()
        )

    @property
    def density(self) -> float:
        """Kept elements / all elements, averaged over the stored planes."""
        total = self.planes * self.q_len * self.k_len
        return self._counts[0] / total if total else 0.0

    @property
    def part_tiles(self) -> int:
        """Stored tiles with a bitmap, over all stored planes."""
        return self._counts[1]

    @property
    def full_tiles(self) -> int:
        """Stored tiles without a masked element, over all stored planes."""
        return self.col_idx.numel() - self.part_tiles

    @property
    def empty_tiles(self) -> int:
        """Absent tiles, over all stored planes."""
        return self.planes * self.rows * self.cols - self.col_idx.numel()

    @property
    def max_row_tiles(self) -> int:
        """Tiles of the longest row."""
        return self._counts[2]

    @property
    def has_part(self) -> bool:
        """True when some tile needs a mask."""
        return self.part_tiles > 0

    @property
    def has_full(self) -> bool:
        """True when some tile needs none."""
        return self.full_tiles > 0

    @property
    def has_empty_rows(self) -> bool:
        """True when some tile row has no tile at all."""
        return self.rows > 0 and self._counts[3] == 0

    @of_contents
    def heavy_rows(self) -> int:
        """Leading entries of ``row_order`` whose rows have over twice the mean number of tiles."""
        slots = self._slots
        return int((slots > 2 * slots.mean()).sum())

    @of_contents
    def uneven(self) -> bool:
        """True when rows that are not heavy have unequal numbers of tiles."""
        slots = self._slots[self.heavy_rows :]
        return bool((slots > UNEVEN * slots.mean()).any())

    @of_contents
    def _slots(self) -> Tensor:
        empty = self.planes == 0 or self.rows == 0
        order = (self.row_ptr, self.row_order, self.planes, self.rows)
        return torch.zeros(0) if empty else slot_lengths(*order)

    def statistics(self) -> dict[str, Any]:
        """Facts of the mask as plain data, for choosing a kernel and for reports."""
        return dict(self._statistics)

    @of_contents
    def _statistics(self) -> dict[str, Any]:  # each layer asks, and the host waits for counts
        from stof_compile.masks.statistics import statistics

        return statistics(self)

    @of_contents
    def tile_map(self) -> dict[str, Any]:
        """A small picture of the first plane as plain data."""
        from stof_compile.masks.tile_map import tile_map

        return tile_map(self)

    @of_contents
    def is_band(self) -> bool:
        """True when the mask is its ``band`` and no more: a kernel may compute the tiles."""
        if self.band is None or self.planes != 1:
            return False
        tile = (self.block_q, self.block_k)
        rule, lengths = self.band.as_spec(), (self.q_len, self.k_len)
        same = build_block_mask(rule, *lengths, tile, q_offset=self.q_offset, device=self.device)
        pairs = ((getattr(self, n), getattr(same, n)) for n in ("row_ptr", "full_start", "col_idx"))
        return all(torch.equal(mine, other) for mine, other in pairs)

    # -- identity ----------------------------------------------------------------------------------

    @of_contents
    def key(self) -> str:
        """Identity as 32 hex digits, from the contents; the same on every device."""
        parts = [
            str(getattr(self, field.name))
            for field in fields(self)
            if field.type in ("int", "BandRule | None")
        ]
        parts += [digest(tensor) for tensor in self.tensors]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BlockMask) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        blocks = f"blocks {self.block_q} x {self.block_k}, {self.planes} plane(s)"
        tiles = f"{self.col_idx.numel()} tiles kept"
        return f"BlockMask({self.q_len} x {self.k_len}, {blocks}, {tiles}, {self.device})"

    # -- conversion --------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the mask with its tensors on ``device``."""
        if torch.device(device) == self.device:
            return self
        names = [field.name for field in fields(self) if field.type == "Tensor"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @cached_property
    def dense(self) -> Tensor:
        """`to_dense`, kept as long as this mask. Not to be made while a CUDA stream is capturing:
        the host waits."""
        return self._derive("mask as a bool tensor", self.to_dense)

    def to_dense(self) -> Tensor:
        """Expand to bool [Bm, Hm, q_len, k_len], the whole matrix."""
        return dense_tensor(self)

    def plot(self, path: str | Path) -> Path:
        """Draw the mask to a PNG; needs matplotlib."""
        from stof_compile.masks.plot import plot_block_mask

        return plot_block_mask(self, Path(path))


def build_block_mask(
    spec: MaskSpec,
    q_len: int,
    k_len: int,
    block: int | tuple[int, int] = 64,
    *,
    q_offset: int = 0,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Evaluate a mask rule on a grid of tiles.

    A tile is empty, part or full; only the last two are stored. The part beyond the lengths counts
    as masked, so such a tile is never full.

    Args:
        spec: the rule; evaluated by tile where it can be, by element in mixed tiles only.
        q_len, k_len: lengths in tokens; need not be multiples of the tile.
        block: tile edge, or (query edge, key edge), in tokens; multiples of 8.
        q_offset: absolute position of the first query.
        batch, heads: the problem's sizes, for rules that differ by batch or head.
        device: of the tensors. The CPU evaluates small rules for any device (`masks.on_host`).
    Returns:
        BlockMask with equal planes and equal tiles stored once.
    Raises:
        StofMaskError: impossible tile size, or a rule that doesn't exist at these lengths or plane
            counts.
    """
    block_q, block_k = (block, block) if isinstance(block, int) else block
    for edge in (block_q, block_k):
        if edge < 8 or edge % 8:
            raise StofMaskError(f"tile edges are multiples of 8 tokens, got {block_q} x {block_k}")
    if min(q_len, k_len, q_offset) < 0:
        raise StofMaskError(
            f"lengths and offset can't be negative: q_len={q_len}, k_len={k_len}, "
            f"q_offset={q_offset}" + (" (more queries than keys)" if q_offset < 0 else "")
        )
    batch_planes, head_planes = planes_of(spec, batch, heads)
    tiles = batch_planes * head_planes * -(-q_len // block_q) * -(-k_len // block_k)
    # the caller may be tracing: a mask is made of real numbers
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        few = None
        if torch.device(device).type != "cpu":
            few = bound_for_host(spec, q_len, k_len, q_offset, tiles, (block_q, block_k))
        if few is not None:
            made = build_block_mask(
                few, q_len, k_len, block, q_offset=q_offset, batch=batch, heads=heads
            )
            moved = made.to(device)
            vars(moved)[HOST] = made
            return moved
        bound = spec.bind(q_len, k_len, q_offset, device).to(device)
        shape = Storage.Shape(q_len, k_len, block_q, block_k, q_offset)
        storage = assemble(bound, shape, batch_planes, head_planes, torch.device(device))
    return BlockMask(
        q_len, k_len, block_q, block_k, storage.planes, q_offset,
        **storage.tensors, band=storage.band,
    )  # fmt: skip
