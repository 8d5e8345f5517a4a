"""Facts of a block mask as plain data."""

from __future__ import annotations

from typing import Any

from stof_compile.masks.block_mask import BlockMask


def statistics(mask: BlockMask) -> dict[str, Any]:
    """What `BlockMask.statistics` returns; the host waits for counts."""
    return {
        "q_len": mask.q_len,
        "k_len": mask.k_len,
        "block": [mask.block_q, mask.block_k],
        "planes": mask.planes,
        "q_offset": mask.q_offset,
        "density": round(mask.density, 6),
        "full_tiles": mask.full_tiles,
        "part_tiles": mask.part_tiles,
        "empty_tiles": mask.empty_tiles,
        "max_row_tiles": mask.max_row_tiles,
        "has_empty_rows": mask.has_empty_rows,
        "bitmaps": mask.bitmap.shape[0],
        "band": None if mask.band is None else mask.band.as_ints(),
        "is_band": mask.is_band,
        "nbytes": mask.nbytes,
    }
