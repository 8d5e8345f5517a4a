"""Summary of a sweep: what wins per cell."""

from __future__ import annotations

from collections.abc import Sequence


def sweep_summary(rows: Sequence[dict[str, str]]) -> str:
    """The three fastest trials of each cell, and the trials best over all cells."""
    cells: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        cells.setdefault(row["cell"], []).append(row)
    lines = []
    for cell, group in cells.items():
        group.sort(key=lambda r: float(r["median_us"]))
        for rank, row in enumerate(group[:3]):
            lines.append(
                f"{cell if rank == 0 else '':22s} {float(row['median_us']):9.1f} us "
                f"{100 * float(row['tile_floor_share']):3.0f} %  {row['kernel']} {row['form']:6s} "
                f"{row['config']}  ({len(group)} trials)"
            )
    return "\n".join(lines) or "no rows"
