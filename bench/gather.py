"""Result files of a folder, as groups of rows that one table and one picture show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from results import read_rows, usual_dtype
from stats import Row

# columns that only one kind of file has; the first that is there tells
TOLD_BY = {
    "settings": "sweep",
    "backward_us": "backward",
    "max_ratio": "accuracy",
    "graph_us": "e2e",
    "fused_us": "operators",
    "pipeline": "passes",
    "paper_percent": "density",
    "overhead_percent": "overhead",
    "tuning_s": "tuning",
    "tiles_kept": "mask",
    "tile_floor_us": "attention",
}
APART = ("long", "ablation")  # of whole models: rows of other cells, or of processes of their own
DTYPES = ("float16", "bfloat16", "float32")  # as names of groups have them, where not the usual one
# what names a row of a kind: of two files the newer row counts
NAMED_BY = {
    "e2e": ("model", "cell", "peer"),
    "operators": ("cell",),
    "passes": ("model", "cell", "pipeline"),
    "density": ("cell",),
    "overhead": ("model", "cell"),
    "tuning": ("model", "cell"),
    "mask": ("cell",),
}


@dataclass(frozen=True)
class Group:
    """Rows of one kind and one device.

    Args:
        kind: see :func:`kind_of`. name: also of its pictures. files: where the rows come from.
        rows: at least one.
    """

    kind: str
    name: str
    files: tuple[Path, ...]
    rows: tuple[Row, ...]

    @property
    def device(self) -> str:
        """Name of the GPU or CPU."""
        return self.rows[0]["device"]

    @property
    def on_gpu(self) -> bool:
        """Whether the times are of a GPU."""
        return is_gpu(self.device)


def is_gpu(device: str) -> bool:
    """Whether a device column names a GPU."""
    return device.startswith(("NVIDIA", "AMD Instinct", "AMD Radeon"))


def kind_of(row: Row) -> str:
    """What a row was measured by: the command's name, with ``sweep`` for sweeps; "" unknown."""
    return next((kind for column, kind in TOLD_BY.items() if column in row), "")


def groups(folder: Path, only: Sequence[Path] | None = None) -> list[Group]:
    """All rows of a folder, or of some files, by kind, file and device.

    Attention has a group for each file, since a file is a grid. Whole models have one for long
    sequences, one for the ablation (files with one of ``APART`` in their name) and one for the
    others, each once more for a dtype that is not the device's usual one; all else has one a
    device.
    A row that two files have counts once, by its date.
    """
    held: dict[tuple[str, str, str], list[tuple[Path, Row]]] = {}
    for path in csv_files(folder) if only is None else only:
        rows = read_rows(path)
        kind = kind_of(rows[0]) if rows else ""
        for row in rows if kind else ():
            base = kind
            if kind in ("attention", "backward"):
                base = path.stem.rsplit("-", 1)[0]
            elif kind == "e2e":
                base = next((f"e2e-{word}" for word in APART if word in path.stem), base)
                usual = usual_dtype(is_gpu(row["device"]))
                base += "" if row["dtype"] == usual else f"-{row['dtype']}"
            held.setdefault((kind, base, row["device"]), []).append((path, row))
    found: list[Group] = []
    for (kind, base, device), pairs in held.items():
        name = f"{base}-{'cuda' if is_gpu(device) else 'cpu'}"
        names = [group.name for group in found]
        if name in names:
            name += f"_{_short(device)}"
        if name in names:
            name += f"_{1 + sum(other.startswith(name) for other in names)}"
        files = tuple(dict.fromkeys(path for path, _ in pairs))
        rows = newest([row for _, row in pairs], NAMED_BY.get(kind, ()))
        found.append(Group(kind, name, files, tuple(rows)))
    return sorted(found, key=lambda group: (not group.on_gpu, group.name))


def _short(device: str) -> str:
    """What tells a device from others: its model ("h100"), else the first word of its name."""
    model = re.search(r"\b[A-Z]+\d\w*", device) or re.search(r"\w+", device)
    return model.group().lower() if model else "other"


def csv_files(folder: Path) -> list[Path]:
    """Files of rows in a folder, without logs."""
    return [p for p in sorted(folder.glob("*.csv")) if not p.name.endswith(".log.csv")]


def newest(rows: Sequence[Row], fields: Sequence[str]) -> list[Row]:
    """Of rows with equal fields the newest, in the order of the first; all where none are given."""
    if not fields:
        return list(rows)
    kept: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(row[field] for field in fields)
        if key not in kept or row["date"] > kept[key]["date"]:
            kept[key] = row
    return list(kept.values())


def of_kind(found: Iterable[Group], *kinds: str) -> list[Group]:
    """The groups of some kinds."""
    return [group for group in found if group.kind in kinds]
