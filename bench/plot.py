"""Pictures of result files: one bar chart of attention times per cell, relative to the best peer.

python bench/plot.py bench/results/attention-cuda.csv attention.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from results import read_rows
from stats import OPPONENTS, best_of, by_cell

SHOWN = {
    "SDPA + mask": ("sdpa_mask",),
    "FlexAttention, default": ("flex_default",),
    "FlexAttention, expert": OPPONENTS["best flex"],
    "cuDNN / flash (causal)": ("cudnn", "sdpa_causal"),
    "STOF": ("stof",),
}


def plot_attention(source: Path, target: Path) -> None:
    """Draw time over the tile floor of each cell; lower is better, 1 is the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_rows(source)
    cells = by_cell(rows)
    figure, axes = pyplot.subplots(figsize=(max(8.0, 0.9 * len(cells)), 4.5))
    width = 0.8 / len(SHOWN)
    for index, (label, peers) in enumerate(SHOWN.items()):
        positions, heights = [], []
        for place, group in enumerate(cells.values()):
            best = best_of(group, peers)
            if best is not None:
                positions.append(place + index * width)
                heights.append(best.median_us / float(group[0]["tile_floor_us"]))
        axes.bar(positions, heights, width, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("time over the tile floor")
    axes.set_xticks([i + 0.4 for i in range(len(cells))], list(cells), rotation=60, ha="right")
    axes.axhline(1.0, color="black", linewidth=0.8)
    first = rows[0]
    axes.set_title(f"{first['device']}, torch {first['torch']}, {first['dtype']}, {first['date']}")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python bench/plot.py ROWS.csv PICTURE.png")
    plot_attention(Path(sys.argv[1]), Path(sys.argv[2]))
