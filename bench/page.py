"""docs/benchmarks.md from the committed rows: tables, conditions, and where STOF loses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tables
from gather import APART, DTYPES, Group, csv_files, groups, is_gpu, kind_of
from losses import all_losses, loss_lines, rows_text
from plot import pictures_of
from results import read_rows, say
from stats import Row

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
PICTURES = PAGE.parent / "img"

OF_RESULTS = """\
Made by `python bench/run.py page` from the CSV files of `bench/results`; do not edit it.
[Benchmarks](../bench/README.md) says how each figure is made and what the peers are,
[Results](../bench/results/README.md) what is to be known about single files."""
OF_A_RUN = """\
Made by `python bench/run.py paper` from the CSV files beside it. In a quick run STOF has seconds
for tuning and the peers have few settings: its times are no results."""
READING = """\
Times on a GPU are medians of CUDA-graph replay if a column does not say otherwise, on a CPU of
plain calls. A peer counts with its best correct setting in each cell. Every time of a
kernel, an operator or a model stands there after its result was compared with fp64; the error of
STOF's row is in the last columns."""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title, about: heading and a sentence or two. command: what measures it.
        takes: whether a group belongs to it. table: its rows in Markdown.
    """

    title: str
    about: str
    command: str
    takes: Callable[[Group], bool]
    table: Callable[[Group], list[str]]


def _is(kind: str, *words: str, without: Sequence[str] = ()) -> Callable[[Group], bool]:
    def takes(group: Group) -> bool:
        named = not words or any(word in group.name for word in words)
        return group.kind == kind and named and not any(word in group.name for word in without)

    return takes


SECTIONS = (
    Section("Masks (Table 2)", "1,024 tokens, window and global tokens 32; STOF's own rules.",
            "density", _is("density"), tables.density_table),
    Section("Attention (Figures 9 and 10)", "The masks of Table 2 with a width of sqrt(S).",
            "attention --grid table2,mha",
            _is("attention", without=("long", "headdims", "single", "scattered", "blocks",
                                      "dense")), tables.attention_table),
    Section("Head dims and dtypes", "Batch 4, 4,096 tokens, 12 heads.",
            "attention --grid headdims", _is("attention", "headdims"), tables.attention_table),
    Section("Single precision", "fp32 without TF32, 12 heads of 64.",
            "attention --grid single", _is("attention", "single"), tables.attention_table),
    Section("Scattered columns", "Fixed attention of Sparse Transformers: segments of 128 tokens.",
            "attention --grid scattered", _is("attention", "scattered"), tables.attention_table),
    Section("Documents and random tiles", "Packed documents of 512 tokens in the mean, which begin "
            "anywhere and see themselves; a tenth of all tiles of 64 x 64.",
            "attention --grid blocks", _is("attention", "blocks"), tables.attention_table),
    Section("No mask", "Each token sees all, and a causal mask where no other grid has it.",
            "attention --grid dense", _is("attention", "dense"), tables.attention_table),
    Section("Gradients of attention", "Both passes together, and the backward pass alone.",
            "backward --grid table2", _is("backward"), tables.backward_table),
    Section("Long sequences: attention", "The oracle answers sampled rows where all are too many.",
            "attention --grid long", _is("attention", "long"), tables.attention_table),
    Section("Long sequences: block masks", "From a rule to a finished block mask.",
            "mask", _is("mask"), tables.mask_table),
    Section("Long sequences: whole models", "BERT-base, batch 1, BigBird; ms.",
            "e2e --model bert-base --cells 1x4096,1x8192,1x16384", _is("e2e", "long"),
            tables.models_table),
    Section("Whole models (Figure 11)", "BigBird, random weights; ms.",
            "e2e --model all", _is("e2e", without=(*APART, *DTYPES)), tables.models_table),
    Section("Whole models in another dtype", "As above; bf16 by `--dtype "
            "bfloat16`, and fp32 without TF32; ms.",
            "e2e --model all --dtype float32", _is("e2e", *DTYPES), tables.models_table),
    Section("Ablation (Figure 12)", "STOF with one half switched off, and with attention left to "
            "operator fusion; all ways of a cell in one process.",
            "e2e --model all --peers compile-default,stof-default,stof-attention,stof-fusion,"
            "stof-broken-mha",
            lambda group: group.kind == "e2e" and tables.has_ablation(group.rows),
            tables.ablation_table),
    Section("Cost of tuning (Table 4, Figure 13)", "From empty caches. *Bookkeeping* is what is "
            "left of fusion's seconds without compiling and timing candidates, the paper's "
            "Figure 13: in per cent of all tuning, and of fusion's seconds. The paper's seconds "
            "are its own on an A100, for its own models.",
            "tuning", _is("tuning"), tables.tuning_table),
    Section("Compiling with stored choices", "Cold processes, medians.",
            "overhead", _is("overhead"), tables.overhead_table),
    Section("Operators, fused and apart (Figures 3 and 4)", "*Before*: the fused kernel with the "
            "settings nearest to the best ones of its heaviest operation alone. The sizes are "
            "ours: the paper's Table 3 is not among our sources.",
            "operators", _is("operators"), tables.operators_table),
    Section("Passes (Graph Surgeon's table)", "No mask, batch 1, 128 tokens; pipelines timed in "
            "turns against torch.compile. A speedup counts (*win*, *loss*) if Welch's test, "
            "corrected by Holm, and a test of the means of rounds agree and it is above 0.5 %.",
            "passes", _is("passes"), tables.passes_table),
)  # fmt: skip


def write_page() -> None:
    """Write docs/benchmarks.md and its pictures from bench/results."""
    from plot import draw_all

    draw_all(RESULTS, PICTURES)
    PAGE.write_text(render(RESULTS))
    say(f"{PAGE}, pictures in {PICTURES}")


def render(folder: Path, pictures: str | None = "img") -> str:
    """The page of a folder of rows.

    Args:
        pictures: the folder of the pictures as the page links to it, None where there are none.
    """
    held = groups(folder)
    origin = OF_RESULTS if folder == RESULTS else OF_A_RUN
    lines = ["# Where STOF stands", "", origin, "", READING, "", "## Where STOF loses", ""]
    told = loss_lines(all_losses(held))
    lines += told or ["Nothing is measured yet."]
    missing = []
    for section in SECTIONS:
        taken = [group for group in held if section.takes(group)]
        if not taken:
            missing.append(f"* {section.title}: `python bench/run.py {section.command}`")
            continue
        lines += ["", f"## {section.title}", "", section.about]
        for group in taken:
            lines += ["", f"### {_heading(section, group)}", "", _conditions(group), ""]
            lines += section.table(group)
            lines += [] if pictures is None else _pictures(section, group, pictures)
    lines += ["", "## Not measured yet", ""]
    if folder == RESULTS:
        lines += _unfinished() or ["Every part of the papers is complete on a GPU."]
    else:
        lines += missing or ["Every kind of table has rows."]
    lines += ["", "## Peers that are missing", "", *_missing_peers(folder)]
    lines += ["", "## Peers that failed", "", *_failed_peers(folder)]
    lines += ["", "## Files", "", *_files(folder)]
    return "\n".join(lines) + "\n"


def _heading(section: Section, group: Group) -> str:
    # headings are anchors: the section's name keeps them apart
    shared = section.table is tables.ablation_table and "ablation" not in group.name
    return f"ablation {group.name}" if shared else group.name


def _conditions(group: Group) -> str:
    versions = [f"torch {_all(group.rows, 'torch')}", f"triton {_all(group.rows, 'triton')}"]
    if "transformers" in group.rows[0]:
        versions.append(f"transformers {_all(group.rows, 'transformers')}")
    files = ", ".join(f"`{path.name}`" for path in group.files)
    when = rows_text(group.rows)
    return f"{group.device}, {', '.join(versions)}; stof {_stof(group.rows)}; {when}; {files}."


def _all(rows: Sequence[Row], column: str) -> str:
    return " and ".join(sorted({row[column] for row in rows}))


def _stof(rows: Sequence[Row]) -> str:
    """Versions of STOF: ``+`` are uncommitted changes, ``-`` an export without a commit."""
    found = sorted({row["stof"] for row in rows})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]} ({len(found)} states)"


def _pictures(section: Section, group: Group, folder: str) -> list[str]:
    wanted = "ablation" if section.table is tables.ablation_table else ""
    lines: list[str] = []
    for picture in pictures_of(group):
        if ("ablation" in picture.name) == bool(wanted):
            lines += ["", f"![{picture.about}, {group.device}]({folder}/{picture.name})"]
    return lines


def _unfinished() -> list[str]:
    """Parts of the papers whose cells lack rows on a GPU, be it of one peer, and what adds them."""
    from driver import pending_units
    from paper import full_parts, part_arguments
    from run import parser

    given = parser().parse_args(["paper", "--resume", "--device", "cuda"])
    given.seed, given.caches = 0, RESULTS  # of no use here
    lines = []
    for part in full_parts(given.device):
        asked = part_arguments(given, part, RESULTS)
        left, name = len(pending_units(asked)), asked.out.name
        if left:
            asked.out = RESULTS / "none.csv"
            shows = part.shows[0].upper() + part.shows[1:]
            every = len(pending_units(asked))
            lines.append(
                f"* {shows} (`{name}`): {left} of {every} cells lack rows of a peer or all"
            )
    if not lines:
        return []
    return ["On a GPU; `python bench/run.py paper --resume` adds them, cell by cell.", "", *lines]


def _missing_peers(folder: Path) -> list[str]:
    """What the logs say was not there, once for each reason."""
    found: dict[tuple[str, str, str], int] = {}
    for path in sorted(folder.glob("*.log.csv")):
        for row in read_rows(path):
            if row["kind"] == "missing":
                reason = (row["reason"].splitlines() or [""])[0]
                key = (path.name.replace(".log.csv", ".csv"), row["peer"], reason)
                found[key] = found.get(key, 0) + 1
    lines = [f"* `{name}`: {peer}, {reason} ({count} lines)"
             for (name, peer, reason), count in found.items()]  # fmt: skip
    return lines or ["No log says that one is."]


def _failed_peers(folder: Path) -> list[str]:
    """What the logs say of wrong results and of errors, by peer."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for path in sorted(folder.glob("*.log.csv")):
        for row in read_rows(path):
            if row["kind"] in ("incorrect", "error", "timeout"):
                key = (path.name.replace(".log.csv", ".csv"), row["peer"], row["kind"])
                first = (row["reason"].splitlines() or [""])[0]
                found.setdefault(key, []).append(f"{row['cell']} {row['variant']}: {first}"[:160])
    lines = [f"* `{name}`: {peer}, {kind}, {len(told)} lines, the first: {told[0]}"
             for (name, peer, kind), told in found.items()]  # fmt: skip
    return lines or ["No log says that one did."]


def _files(folder: Path) -> list[str]:
    rows = []
    for path in csv_files(folder):
        held = read_rows(path)
        if not held or "device" not in held[0]:
            continue
        devices = ", ".join(sorted({r["device"] for r in held}, key=lambda d: (not is_gpu(d), d)))
        size = f"{len(held)}"
        rows.append((f"`{path.name}`", kind_of(held[0]) or "-", size, devices,
                     _all(held, "torch"), _stof(held), rows_text(held)))  # fmt: skip
    return tables.table(("file", "kind", "rows", "device", "torch", "stof", "dates"), rows)
