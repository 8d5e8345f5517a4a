"""Pictures of result files, drawn by matplotlib without a display.

    python bench/plot.py ROWS.csv PICTURE.png [FIGURE]

A file may have several figures: FIGURE is one of ``bars`` and ``roofline`` of attention, ``models``
and ``ablation`` of whole models, ``tuning`` and ``overhead`` of tuning; default the first.
``python bench/run.py page`` draws all of them into docs/img.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
from gather import Group, groups
from tables import has_ablation

Draw = Callable[[Any, Group], None]
FIGURES: dict[str, tuple[tuple[str, str, Draw], ...]] = {
    "attention": (
        ("bars", "Attention: time over the tile floor", figures.attention_bars),
        ("roofline", "Attention: operations per second over intensity", figures.roofline),
    ),
    "e2e": (
        ("models", "Whole models: gain over torch.compile", figures.models),
        ("ablation", "Ablation: gain over torch.compile", figures.ablation),
    ),
    "tuning": (
        ("tuning", "Seconds of tuning", figures.tuning),
        ("overhead", "Bookkeeping of fusion", figures.bookkeeping),
    ),
    "operators": (("operators", "Operators fused and apart, and settings", figures.operators),),
    "passes": (("passes", "Passes: gain over torch.compile", figures.passes),),
    "overhead": (("compiling", "Seconds of compiling", figures.compiling),),
    "mask": (("masks", "Milliseconds to build a block mask", figures.masks),),
    "density": (("density", "Sparsity of the masks", figures.density),),
}


@dataclass(frozen=True)
class Picture:
    """A picture of a group: file name, what it shows, how it is drawn."""

    name: str
    about: str
    draw: Draw


def pictures_of(group: Group) -> list[Picture]:
    """All pictures of a group; of an ablation its own only, and that only where there are rows."""
    return [
        Picture(f"bench-{group.name}-{figure}.png", about, draw)
        for figure, about, draw in FIGURES.get(group.kind, ())
        if (has_ablation(group.rows) if figure == "ablation" else "ablation" not in group.name)
    ]


def draw_all(folder: Path, target: Path) -> list[Path]:
    """Draw the pictures of all rows of a folder; returns the files."""
    target.mkdir(parents=True, exist_ok=True)
    drawn = []
    for group in groups(folder):
        for picture in pictures_of(group):
            drawn.append(target / picture.name)
            draw(group, picture.draw, drawn[-1])
    return drawn


def draw(group: Group, how: Draw, target: Path) -> None:
    """Draw one picture into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure()
    how(figure, group)
    first = group.rows[0]
    days = sorted({row["date"][:10] for row in group.rows})
    figure.suptitle(f"{group.device}, torch {first['torch']}, {days[-1]}", fontsize="medium")
    figure.tight_layout()
    # no software version inside: equal rows give equal files
    figure.savefig(target, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> None:
    """Draw one figure of one file.

    Raises:
        SystemExit: wrong arguments, no rows, or no such figure.
    """
    if len(arguments) not in (2, 3):
        raise SystemExit("usage: python bench/plot.py ROWS.csv PICTURE.png [FIGURE]")
    source, target = Path(arguments[0]), Path(arguments[1])
    found = groups(source.parent, [source])
    if not found:
        raise SystemExit(f"{source} has no rows of a known kind")
    figures_of = {name: draw for name, _, draw in FIGURES.get(found[0].kind, ())}
    wanted = arguments[2] if len(arguments) == 3 else next(iter(figures_of), "")
    if wanted not in figures_of:
        raise SystemExit(f"no figure {wanted!r} of {found[0].kind}: {', '.join(figures_of)}")
    draw(found[0], figures_of[wanted], target)


if __name__ == "__main__":
    main(sys.argv[1:])
