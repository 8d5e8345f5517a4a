"""The report of a dump as one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from stof_compile.report.graph_part import graph_section
from stof_compile.report.markup import Markup, el, join
from stof_compile.report.model import GraphReport
from stof_compile.report.search_part import search_section
from stof_compile.report.sites_part import sites_section
from stof_compile.report.terminal import longest, microseconds
from stof_compile.report.time_part import rest_section, time_section
from stof_compile.store import write_named

SECTIONS = (
    ("graph", "graph"),
    ("sites", "attention and masks"),
    ("time", "time"),
    ("search", "search"),
    ("verdict", "whole graph"),
)
TORCH = "as torch.compile runs it"  # a form in the verdict (verdict.py)


def write_html(reports: Sequence[GraphReport], where: str, path: Path) -> Path:
    """Write the page; an older one at this place stays until the new one is complete.

    Args:
        where: the dump, as the user named it. path: of the page; its folder is made.
    Raises:
        OSError: the page cannot be written.
    """
    write_named(path, html_page(reports, where))
    return path


def html_page(reports: Sequence[GraphReport], where: str) -> str:
    """The page as text; its policy allows only the style and the script it carries itself."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    )
    title = f"STOF report of {where}"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", title),
        el("link", rel="icon", href="data:,"),
        el("style", Markup(style)),
    )
    navigation = [
        el("li", el("a", f"{words}{_of(report, reports)}", href=f"#g{report.number}-{name}"))
        for report in reports
        for name, words in SECTIONS
    ]
    body = el(
        "body",
        el("a", "Skip to the report", href="#report", cls="skip"),
        el(
            "header",
            el("h1", "STOF report"),
            el("p", where, cls="dim"),
            el("nav", el("ul", *navigation), aria_label="sections"),
        ),
        el("main", *(_graph(report) for report in reports), id="report"),
        el("footer", "Made by stof inspect from the dump alone; nothing was measured for it."),
        el("script", Markup(script)),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _of(report: GraphReport, reports: Sequence[GraphReport]) -> str:
    return f" (graph {report.number})" if len(reports) > 1 else ""


def _graph(report: GraphReport) -> Markup:
    record = report.record
    warning = None
    if record.changes_function:
        warning = el(
            "p",
            f"The mask of the options, {record.options.get('mask')}, is and-ed with the model's "
            "own: the compiled model computes another function than the eager one.",
            cls="warn",
        )
    versions = ", ".join(f"{name} {value}" for name, value in record.versions.items())
    rewritten = sum(site.status == "rewritten" for site in record.sites)
    verdict = report.verdict
    facts = [
        ("device", str(record.device.get("name", "unknown")), versions),
        (
            "attention sites",
            f"{rewritten} of {len(record.sites)} rewritten",
            f"{len(record.fallbacks)} left to PyTorch, {len(record.near_misses)} near misses",
        ),
        (
            "fused operators",
            str(len(report.fused)),
            ", ".join(f"{stage} {count} operations" for stage, count in report.stages.items()),
        ),
    ]
    if verdict and verdict.winner in verdict.times_us:
        took = verdict.times_us[verdict.winner]
        against = verdict.times_us.get(TORCH)
        most = longest((took, against))
        gain = f"{against / took:.2f}x" if against and took else microseconds(took)
        words = f"{verdict.winner}: {microseconds(took, most)}"
        words += f", torch.compile: {microseconds(against, most)}" if against else ""
        facts.append(("whole graph", gain, words))
    items = [
        el("li", el("span", name, cls="dim"), el("b", value), words) for name, value, words in facts
    ]
    return el(
        "section",
        el("h2", f"Graph {report.number}"),
        warning,
        el("ul", *items, cls="facts"),
        join(
            section(report)
            for section in (
                graph_section,
                sites_section,
                time_section,
                search_section,
                rest_section,
            )
        ),
    )


def _asset(name: str) -> str:
    text = (resources.files("stof_compile.report") / name).read_text(encoding="utf-8")
    assert "</s" not in text, "the asset would end its own element"
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
