"""Summary of end-to-end rows: every way of a cell, then STOF against the best peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from results import number
from stats import Row, geometric_mean

PEERS = {"torch.compile": "compile-", "expert flex": "flex-"}
STOF = ("stof-default", "stof-captured", "stof-ro")  # the ablations are rows of their own
Time = Callable[[Row], float]


def replayed(row: Row) -> float:
    """Replay of a CUDA graph; a plain call where the device has no graphs; NaN for ``-ro``."""
    if row["device"].startswith("NVIDIA"):
        return number(row, "graph_us")
    return number(row, "median_us")


def launched(row: Row) -> float:
    """One call, launches included."""
    return number(row, "median_us")


@dataclass(frozen=True)
class Compared:
    """The best times of a cell in microseconds; NaN where there is no row.

    Args:
        peers: of each group of peers. stof: of STOF. floor_us: of the model.
    """

    cell: str
    peers: dict[str, float]
    stof: float
    floor_us: float

    def ratio(self, peer: str) -> float:
        """How much faster STOF is."""
        return self.peers[peer] / self.stof

    @property
    def best_ratio(self) -> float:
        """The same against the best of all peers."""
        return _best(self.ratio(peer) for peer in self.peers)


def e2e_summary(rows: Sequence[Row]) -> str:
    """Every way of every cell, then the comparison of :func:`comparison`."""
    if not rows:
        return "no rows"
    lines = [
        _conditions(rows[0]),
        f"{'cell':24s} {'way':20s} {'graph':>8s} {'launched':>8s} {'p20':>8s} {'p80':>8s} "
        f"{'row':>8s} {'floor %':>7s} {'rms err':>8s} {'compile s':>9s}",
    ]
    columns = ("graph_us", "median_us", "p20_us", "p80_us", "back_to_back_us")
    for cell, group in cells(rows).items():
        for r in sorted(group, key=lambda r: _last(replayed(r))):
            times_ms = " ".join(_ms(number(r, column)) for column in columns)
            share = 100 * number(r, "floor_us") / replayed(r)
            lines.append(
                f"{cell:24s} {r['peer']:20s} {times_ms} {_plain(share, 7, 0)} "
                f"{number(r, 'rms_rel'):8.2g} {number(r, 'compile_s'):9.1f}"
            )
    return "\n".join([*lines, "", comparison(rows)])


def comparison(rows: Sequence[Row]) -> str:
    """STOF against the best of each group of peers per cell; means and the worst cell.

    First by replay of CUDA graphs (on a CPU there is none), then with launches, where every way
    has its best mode.
    """
    lines = []
    on_gpu = any(row["device"].startswith("NVIDIA") for row in rows)
    graphs: list[tuple[str, Time]] = [("graph replay", replayed)] if on_gpu else []
    for title, time in (*graphs, ("launches included", launched)):
        found = compare(rows, time)
        lines += [f"best times, {title}, ms:", *_table(found), *_means(found, title), ""]
    return "\n".join(lines).rstrip()


def compare(rows: Sequence[Row], time: Time) -> list[Compared]:
    """The best times of every cell."""
    found = []
    for cell, group in cells(rows).items():
        peers = {
            name: _best(time(r) for r in group if r["peer"].startswith(prefix))
            for name, prefix in PEERS.items()
        }
        stof = _best(time(r) for r in group if r["peer"] in STOF)
        found.append(Compared(cell, peers, stof, number(group[0], "floor_us")))
    return found


def cells(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each ``model BxS``, models as they come, short cells first."""
    grouped: dict[str, list[Row]] = {}
    order = {model: i for i, model in enumerate(dict.fromkeys(r["model"] for r in rows))}
    for row in sorted(rows, key=lambda r: (order[r["model"]], int(r["seq"]))):
        grouped.setdefault(f"{row['model']} {row['cell']}", []).append(row)
    return grouped


# -- text ------------------------------------------------------------------------------------------


def _table(found: Sequence[Compared]) -> list[str]:
    head = f"{'cell':24s} " + " ".join(f"{name:>13s}" for name in PEERS)
    lines = [f"{head} {'STOF':>8s} {'floor %':>7s}   ratio to each, to the best"]
    for cell in found:
        times = " ".join(_ms(cell.peers[name], 13) for name in PEERS)
        ratios = " ".join(_plain(cell.ratio(name), 6) for name in PEERS)
        share = 100 * cell.floor_us / cell.stof
        lines.append(
            f"{cell.cell:24s} {times} {_ms(cell.stof)} {_plain(share, 7, 0)}   {ratios} "
            f"{_plain(cell.best_ratio, 6)}"
        )
    return lines


def _means(found: Sequence[Compared], title: str) -> list[str]:
    against = {name: {c.cell: c.ratio(name) for c in found} for name in PEERS}
    against["the best peer"] = {c.cell: c.best_ratio for c in found}
    lines = []
    missing = [c.cell for c in found if not math.isfinite(c.stof)]
    if missing:
        lines.append(f"no time of STOF, {title}, in {len(missing)} cells: {', '.join(missing)}")
    for name, ratios in against.items():
        held = {cell: ratio for cell, ratio in ratios.items() if math.isfinite(ratio)}
        if held:
            worst = min(held, key=lambda cell: held[cell])
            lines.append(
                f"STOF against {name}, {title}: geometric mean {geometric_mean(held.values()):.2f}x"
                f" over {len(held)} cells, worst {held[worst]:.2f}x in {worst}"
            )
    return lines


def _conditions(row: Row) -> str:
    return (
        f"{row['device']} · torch {row['torch']} · transformers {row['transformers']} · stof "
        f"{row['stof']} · {row['mask']}, {row['dtype']}, ms of a compiled call"
    )


def _best(times: Iterable[float]) -> float:
    return min((t for t in times if math.isfinite(t)), default=math.nan)


def _last(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _ms(us: float, width: int = 8) -> str:
    return f"{us / 1e3:{width}.3f}" if math.isfinite(us) else f"{'-':>{width}s}"


def _plain(value: float, width: int, digits: int = 2) -> str:
    return f"{value:{width}.{digits}f}" if math.isfinite(value) else f"{'-':>{width}s}"
