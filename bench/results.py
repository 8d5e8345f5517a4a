"""Rows on disk: CSV files that grow row by row, and the log of what did not become a row."""

from __future__ import annotations

import csv
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

PROJECT = Path(__file__).resolve().parent.parent
LOG_FIELDS = ("cell", "peer", "variant", "kind", "reason")


def usual_dtype(on_gpu: bool) -> str:
    """Dtype of whole models where none is asked for."""
    return "float16" if on_gpu else "float32"


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a CSV; empty when there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_header(path: Path, fields: Sequence[str]) -> None:
    """See that rows with just these columns can be added to a file, which need not be there.

    Raises:
        SystemExit: it was written with others; says with which, and what to do.
    """
    if not path.exists():
        return
    with path.open(newline="") as file:
        header = next(csv.reader(file), list(fields))
    if header == list(fields):
        return
    missing = [name for name in fields if name not in header]
    unknown = [name for name in header if name not in fields]
    said = [f"it lacks {', '.join(missing)}"] if missing else []
    said += [f"it has {', '.join(unknown)} too many"] if unknown else []
    raise SystemExit(
        f"no rows can be added to {path}, which was written with other columns: "
        f"{'; '.join(said) or 'they are in another order'}. Move the file away, name another one "
        "with --out, or leave out --resume, which begins it anew"
    )


def append_row(path: Path, fields: Sequence[str], row: dict[str, Any]) -> None:
    """Append one row, with the header first in a new file; floats keep five digits.

    Raises:
        SystemExit: the file was written with other columns.
    """
    unknown = set(row) - set(fields)
    assert not unknown, f"columns without a place in {path.name}: {sorted(unknown)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(_lock_path(path)):  # workers may run side by side
        check_header(path, fields)
        fresh = not path.exists() or path.stat().st_size == 0
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(fields))
            if fresh:
                writer.writeheader()
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            os.fsync(file.fileno())


def _lock_path(path: Path) -> Path:
    """Beside no results: where temporary files go."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"stof-bench-{name}.lock"


def log_path(out: Path) -> Path:
    """The log that belongs to a CSV."""
    return out.with_name(out.stem + ".log.csv")


def log_event(
    out: Path, cell: str, peer: str, variant: str, kind: str, reason: str, *, loud: bool = True
) -> None:
    """Record why there is no row; kind is ``missing`` | ``error`` | ``incorrect`` | ``note``."""
    reason = reason.replace(f"{PROJECT}/", "")  # of a traceback: no path of this machine
    row = {"cell": cell, "peer": peer, "variant": variant, "kind": kind, "reason": reason[:600]}
    append_row(log_path(out), LOG_FIELDS, row)
    if loud:
        say(
            f"  {kind}: {cell} {peer} {variant}: "
            f"{reason.strip().splitlines()[0][:200] if reason.strip() else ''}"
        )


def say(text: str) -> None:
    """Progress goes to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def number(row: dict[str, str], field: str) -> float:
    """A numeric column; NaN when empty."""
    return float(row[field]) if row.get(field) else float("nan")


def settled_lines(out: Path) -> list[dict[str, str]]:
    """Lines of a log that another run would only repeat: peers that are missing, that give wrong
    outputs or that Inductor cannot compile.
    """
    return [
        row
        for row in read_rows(log_path(out))
        if row["kind"] == "missing"
        or (
            not row["peer"].startswith("stof")
            and (row["kind"] == "incorrect" or row["reason"].startswith("InductorError"))
            and "CUDA out of memory" not in row["reason"]
        )
    ]
