"""Pictures of block masks; matplotlib is imported only when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stof_compile.errors import StofUnsupportedError

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask

_MAX_PIXELS = 1024
"""Masks longer than this are drawn by tile instead of by element."""

_COLOURS = ("#f4f4f4", "#f0a04b", "#2f6690")
"""Masked or empty, part, full."""


def plot_block_mask(mask: BlockMask, path: Path) -> Path:
    """Draw the first plane, elements coloured by the kind of their tile; long masks by tile.

    Args:
        mask: any block mask.
        path: PNG to write; its folder is made.
    Returns:
        The path.
    Raises:
        StofUnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StofUnsupportedError(
            "drawing a mask needs matplotlib: pip install matplotlib"
        ) from error

    tiles = tile_kinds(mask)
    if max(mask.q_len, mask.k_len) <= _MAX_PIXELS:
        wide = tiles.repeat_interleave(mask.block_q, 0).repeat_interleave(mask.block_k, 1)
        picture = wide[: mask.q_len, : mask.k_len] * mask.to_dense()[0, 0].cpu()
    else:
        picture = tiles
    figure = Figure(figsize=(3, 3), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(
        picture.numpy(),
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=2,
        interpolation="nearest",
        extent=(0, mask.k_len, mask.q_len, 0),
    )
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("query", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_title(f"density {100 * mask.density:.1f} %", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def tile_kinds(mask: BlockMask) -> torch.Tensor:
    """Kinds of the first plane's tiles, uint8 [R, C] on the CPU: 0 empty, 1 part, 2 full."""
    kinds = torch.zeros((mask.rows, mask.cols), dtype=torch.uint8)
    plane = int(mask.plane_map[0, 0]) * mask.rows
    pointers, middles = mask.row_ptr.tolist(), mask.full_start.tolist()
    columns = mask.col_idx.long().cpu()
    for row in range(mask.rows):
        start, middle, stop = pointers[plane + row], middles[plane + row], pointers[plane + row + 1]
        kinds[row, columns[start:middle]] = 1
        kinds[row, columns[middle:stop]] = 2
    return kinds
