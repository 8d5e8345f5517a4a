"""The part of the HTML report about attention sites and their masks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stof_compile.dump import SiteRecord
from stof_compile.report.graph import in_package
from stof_compile.report.markup import Markup, el, join, table
from stof_compile.report.model import GraphReport, alike_sites, named
from stof_compile.report.pictures import key, mask_picture
from stof_compile.report.terminal import mask_lines


def sites_section(report: GraphReport) -> Markup:
    """Attention sites and the pictures of their masks."""
    record = report.record
    rows = []
    for alike in alike_sites(record.sites):
        site = alike[0]
        shape = ", ".join(f"{name} {value}" for name, value in site.shape.items())
        density = site.statistics.get("density")
        kept = "" if site.status == "rewritten" else f" ({site.status})"
        rows.append(
            el(
                "tr",
                el("td", named(alike), _names(alike)),
                el("td", f"{site.kernel}{kept}"),
                el("td", shape, cls="wide"),
                el("td", site.mask, cls="wide"),
                _density(density),
                el(
                    "td",
                    _breakable(in_package(site.source)),
                    *(el("div", note) for note in site.notes),
                    cls="place",
                ),
            )
        )
    head = ("site", "kernel", "problem", "mask", "density", "source and remarks")
    figures = [_figure(report, name) for name in record.pictures]
    without = [s for s in record.sites if not s.picture and s.mask != "none"]
    remark = None
    if without:
        remark = el(
            "p",
            f"Masks without a picture: {len(without)}. They are known only at run time, or the "
            "dump is of an older STOF.",
            cls="dim",
        )
    listed = (
        table(head, rows, "attention sites", ("density",))
        if rows
        else el("p", "No attention was found.")
    )
    return join(
        (
            el("h3", "Attention sites and masks", id=f"g{report.number}-sites"),
            listed,
            el("div", *figures, cls="masks"),
            remark,
        )
    )


def _breakable(place: str) -> Markup:
    """A path that breaks behind its folders rather than anywhere."""
    return join(re.split(r"(?<=[/_])(?=\w)", place), el("wbr"))


def _density(density: float | None) -> Markup:
    if density is None:
        return el("td", "-", cls="n")
    return el("td", el("span", "density ", cls="narrow"), f"{density:.3f}", cls="n")


def _names(sites: Sequence[SiteRecord]) -> Markup | None:
    if len(sites) == 1:
        return None
    items = (el("li", site.name) for site in sites)
    return el("details", el("summary", "all names"), el("ul", *items))


def _figure(report: GraphReport, name: str) -> Markup | None:
    picture = report.record.pictures[name]
    sites = [site for site in report.record.sites if site.picture == name]
    if not sites:
        return None
    facts = sites[0].statistics
    counts = ", ".join(f"{facts.get(f'{k}_tiles', '?')} {k}" for k in ("full", "part", "empty"))
    kept = f"{facts['density']:.3f}" if "density" in facts else "?"
    rows, cols = picture["tiles"]
    block = " x ".join(map(str, picture["block"]))
    where = named(sites)
    words = f"{rows} x {cols} tiles of {block}: {counts}; density {kept}"
    if picture["planes"] > 1:
        words += f"; the first of {picture['planes']} planes is drawn"
    text = "\n".join(mask_lines(picture, 64, "ascii"))
    return el(
        "figure",
        mask_picture(picture, f"Mask of {where}, queries down, keys across. {words}"),
        el(
            "figcaption",
            el("b", where),
            el("br"),
            words,
            el("br"),
            key("full"),
            key("part", "part (stronger: more kept)"),
            key("empty"),
        ),
        el("details", el("summary", "as text"), el("pre", text, cls="cells")),
    )
