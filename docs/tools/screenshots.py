"""Photographs the HTML report of a dump for docs/report.md.

    python docs/tools/screenshots.py DUMP                    into docs/img/report, and the page
    python docs/tools/screenshots.py DUMP --out FOLDER       pictures only, to look at

A headless Chromium has to be on PATH (apt-get install chromium), and Pillow, which comes with
matplotlib. What the page says about the run is read from the dump; a dump knows no date, so that of
its record's file is taken, and no name of the model, so that of its source file is.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from find_browser import MISSING, find_browser
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from stof_compile.report.html import write_html
from stof_compile.report.load import load_ceilings, load_dump
from stof_compile.report.markup import el
from stof_compile.report.model import GraphReport, read_report

DOCS = Path(__file__).resolve().parent.parent
SECTION = re.compile(r"(<!-- screenshots: [^>]*-->\n).*?(<!-- /screenshots -->)", re.DOTALL)
MODEL_FILE = re.compile(r"modeling_(\w+)\.py|(\w+)\.py")
COLOURS = 128  # of a picture: the page has few, and a file is a quarter as large
GAP = 24  # px between phones


@dataclass(frozen=True)
class Shot:
    """One picture.

    Args:
        name: of its file. words: what it shows; the text alternative.
        width, height: of a screen, px. dark: colours. anchors: of the page, one screen for each.
    """

    name: str
    words: str
    width: int
    height: int
    dark: bool
    anchors: tuple[str, ...]


def shots(report: GraphReport) -> list[Shot]:
    """The pictures of a report: 1280 px light and dark, and a phone (three screens of it)."""
    record = report.record
    rewritten = sum(site.status == "rewritten" for site in record.sites)
    facts = f"{rewritten} of {len(record.sites)} attention sites rewritten"
    if report.fused:
        facts += f", {len(report.fused)} fused operators"
    timed = [step for step in report.steps if step.timed]
    chains = ", chains with their schemes, moves accepted and rejected" if record.chains else ""
    return [
        Shot(
            "graph",
            f"Top of the report, light: the device, {facts}; below, the graph before and after "
            "side by side, a fused group in the same colour and with the same number in both",
            1280, 1480, False, ("",),
        ),
        Shot(
            "time",
            "The report, dark: a table of the attention sites, the mask as a picture of full, part "
            f"and empty tiles, and a waterfall of time ({len(timed)} timed), torch.compile "
            "in grey above STOF in green",
            1280, 1480, True, ("g0-sites",),
        ),
        Shot(
            "search",
            f"What the search tried, light: kernels of the attention with times and bars{chains}",
            1280, 1480, False, ("g0-search",),
        ),
        Shot(
            "phone",
            "The report on a phone, three screens: the facts at the top, the attention sites, and "
            "the time of each part",
            390, 844, False, ("", "g0-sites", "g0-time"),
        ),
    ]  # fmt: skip


def where_from(report: GraphReport, model: str, date: str) -> str:
    """The run in one sentence."""
    record = report.record
    versions = ", ".join(
        f"{name} {record.versions[name]}"
        for name in ("torch", "triton", "stof-compile")
        if name in record.versions
    )
    parts = [model]
    if record.sites:
        shape = record.sites[0].shape
        parts.append(f"batch {shape['batch']}" if "batch" in shape else "")
        parts.append(f"{shape['q_len']} tokens" if "q_len" in shape else "")
        parts.append(str(shape.get("dtype", "")))
    mask = record.options.get("mask")
    if mask not in (None, "None"):
        parts.append(f"mask `{mask}`")
    told = ", ".join(part for part in parts if part)
    return f"{told}, on {record.device.get('name', 'an unknown device')} ({date}; {versions})."


def model_of(report: GraphReport) -> str:
    """The model, from the file that most operations come from."""
    graph = report.before
    files = [op.source.file for op in graph.ops if op.source] if graph else []
    if not files:
        return "a model"
    name = Path(max(set(files), key=files.count)).name
    found = MODEL_FILE.fullmatch(name)
    return f"`{(found[1] or found[2]) if found else name}`"


def photograph(browser: str, page: Path, shot: Shot, path: Path, about: str) -> None:
    """Take one picture.

    Args:
        page: the report. path: of the picture. about: stands in the file as its description.
    Raises:
        RuntimeError: the browser gave none.
    """
    # in frames: a window is not made narrower than 500, and a frame begins at its anchor
    frames = [
        el("iframe", src=f"{page.name}#{anchor}", width=shot.width, height=shot.height)
        for anchor in shot.anchors
    ]
    style = f"body{{margin:0;display:flex;gap:{GAP}px;background:#888}}iframe{{border:0}}"
    frame = page.with_name(f"{shot.name}.html")
    frame.write_text(f"<!DOCTYPE html><style>{style}</style>{''.join(frames)}", encoding="utf-8")
    width = len(frames) * (shot.width + GAP) - GAP
    raw = page.with_name("raw.png")
    raw.unlink(missing_ok=True)
    call = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    call += [f"--user-data-dir={page.parent / 'profile'}", "--no-first-run", "--hide-scrollbars"]
    call += [f"--window-size={width},{shot.height}", "--virtual-time-budget=3000"]
    call += [f"--blink-settings=preferredColorScheme={0 if shot.dark else 1}"]
    call += [f"--screenshot={raw}", frame.as_uri()]
    home = {**os.environ, "HOME": str(page.parent)}
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, env=home)
    if done.returncode or not raw.is_file():
        raise RuntimeError(f"{browser} took no picture: {done.stderr[-1000:]}")
    with Image.open(raw) as image:
        cut = _without_empty_end(image.convert("RGB"))
    text = PngInfo()
    text.add_text("Description", about)
    # not by how often colours occur: those of a few small marks would be lost
    few = cut.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=text)


def _without_empty_end(image: Image.Image) -> Image.Image:
    """Cut off what is below the end of the page."""
    ground = image.getpixel((0, image.height - 1))
    rows = [row.getextrema() for row in _rows(image)]
    empty = tuple((channel, channel) for channel in ground)
    last = max((y for y, extrema in enumerate(rows) if extrema != empty), default=image.height)
    return image.crop((0, 0, image.width, min(image.height, last + 20)))


def _rows(image: Image.Image) -> list[Image.Image]:
    return [image.crop((0, y, image.width, y + 1)) for y in range(image.height)]


def section_text(taken: Sequence[Shot], about: str, folder: str) -> str:
    """The part of docs/report.md."""
    lines = ["", "### How it looks", "", f"The pictures are of one run: {about}", ""]
    for shot in taken:
        lines += [f"![{shot.words}]({folder}/{shot.name}.png)", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Take the pictures; returns the exit code."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("dump", type=Path)
    words.add_argument("--out", type=Path, help="folder for the pictures; the page stays as it is")
    words.add_argument("--graph", type=int, help="number; default: the one with most attention")
    words.add_argument("--model", help="what was compiled; default: the name of its source file")
    words.add_argument("--date", help="of the run; default: of the record's file")
    words.add_argument("--ceilings", type=Path, help="as for stof inspect")
    given = words.parse_args(argv)
    browser = find_browser()
    if browser is None:
        sys.exit(MISSING)
    records = load_dump(given.dump, graphs=True)
    sites = [len(record.sites) for record in records]
    number = sites.index(max(sites)) if given.graph is None else given.graph
    record = records[number]
    most = load_ceilings(given.ceilings, records) if given.ceilings else None
    report = read_report(0, record, most)
    file = next(given.dump.rglob("record.json"))
    date = given.date or datetime.fromtimestamp(file.stat().st_mtime).date().isoformat()
    about = where_from(report, given.model or model_of(report), date)
    out = given.out or DOCS / "img" / "report"
    out.mkdir(parents=True, exist_ok=True)
    taken = shots(report)
    with tempfile.TemporaryDirectory() as folder:
        page = write_html([report], about.replace("`", ""), Path(folder) / "report.html")
        for shot in taken:
            photograph(browser, page, shot, out / f"{shot.name}.png", about)
    size = sum((out / f"{shot.name}.png").stat().st_size for shot in taken)
    section = section_text(taken, about, "img/report")
    if given.out is None:
        text = (DOCS / "report.md").read_text(encoding="utf-8")
        text = SECTION.sub(lambda found: f"{found[1]}{section}{found[2]}", text)
        (DOCS / "report.md").write_text(text, encoding="utf-8")
    sys.stdout.write(f"{section}\n{len(taken)} pictures, {size / 1e3:.0f} kB, in {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
