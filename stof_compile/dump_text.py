"""The record of a compiled graph as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stof_compile.plan import AttentionPlan, Candidate, ChainPlan, PackPlan

if TYPE_CHECKING:
    from stof_compile.dump import Record, SiteRecord

STEPS = {
    "form ahead": "compiling a form to compare with",
    "attention": "attention with its trials",
    "measuring": "measuring operators",
    "fusion": "searching besides",
    "stof": "other passes",
    "verdict": "comparing whole graphs",
    "inductor": "Inductor",
}
"""Steps of a record's times, in words."""
WITHIN = {"stof": ("form ahead", "attention", "fusion"), "fusion": ("measuring",)}
"""Steps whose seconds count those of others."""


def summary_of(record: Record) -> str:
    """One line per site, then decisions, misses and fallbacks."""
    lines = [*_head(record), "", *_site_lines(record.sites)]
    for title, part in (
        ("decisions", _decision_lines(record.sites)),
        ("fusion", [*_pack_lines(record.packs), *_chain_lines(record.chains)]),
        ("near misses", [f"{m['name']}: {m['reason']}" for m in record.near_misses]),
        ("left to PyTorch", [f"{f['where']}: {f['reason']}" for f in record.fallbacks]),
        ("notes", record.notes),
    ):
        if part:
            lines += ["", f"{title}:", *(f"  {line}" for line in part)]
    return "\n".join(lines) + "\n"


def spent(timings_s: Mapping[str, float]) -> list[tuple[str, float]]:
    """The seconds of a compile in parts that add up.

    Args:
        timings_s: of a record, where some steps are within others: ``form ahead``, ``attention``
            and ``fusion`` within ``stof``, ``measuring`` within ``fusion``.
    Returns:
        (part in words, seconds), in the order in which they ran; steps of no name as they are.
    """
    left = dict(timings_s)
    for whole, within in WITHIN.items():
        if whole in left:
            left[whole] = max(0.0, left[whole] - sum(timings_s.get(step, 0.0) for step in within))
    named = {step: left.pop(step) for step in STEPS if step in left}
    return [(STEPS[step], seconds) for step, seconds in named.items()] + list(left.items())


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in columns of equal width, left-aligned, two spaces apart."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _head(record: Record) -> list[str]:
    device = record.device.get("name", "unknown device")
    names = " ".join(f"{name} {version}" for name, version in record.versions.items())
    lines = [f"device: {device}", f"versions: {names}"]
    if record.options.get("mask") is not None and not record.changes_function:
        lines.append(
            f"mask of the options: {record.options['mask']} (no attention of this graph takes it)"
        )
    if record.changes_function:
        lines.append(
            f"mask of the options: {record.options['mask']} (and-ed with the model's own: the "
            "compiled model computes another function than the eager one)"
        )
    if record.timings_s:
        parts = spent(record.timings_s)
        steps = ", ".join(f"{step} {seconds:.2f} s" for step, seconds in parts)
        lines.append(f"spent: {sum(s for _, s in parts):.2f} s: {steps}")
    return lines


def _site_lines(sites: Sequence[SiteRecord]) -> list[str]:
    if not sites:
        return ["no attention found"]
    rows: list[tuple[str, ...]] = [
        ("site", "form", "kernel", "problem", "mask", "density", "tiles")
    ]
    for site in sites:
        density = site.statistics.get("density")
        kernel = site.kernel if site.status == "rewritten" else f"{site.kernel} (kept)"
        rows.append(
            (
                site.name,
                site.form,
                kernel,
                _problem(site.shape),
                site.mask if len(site.mask) <= 60 else site.mask[:57] + "...",
                "-" if density is None else f"{density:.3f}",
                _tiles(site.statistics),
            )
        )
    lines = align(rows)
    for site in sites:
        lines += [f"  {site.name}: {note}" for note in site.notes]
    return lines


def _problem(shape: Mapping[str, Any]) -> str:
    if not shape:
        return "-"
    heads = str(shape.get("q_heads", "?"))
    if shape.get("kv_heads", shape.get("q_heads")) != shape.get("q_heads"):
        heads += f"/{shape['kv_heads']}"
    lengths = f"{shape.get('q_len', '?')}x{shape.get('k_len', '?')}"
    dtype = str(shape.get("dtype", "")).replace("torch.", "")
    return f"B{shape.get('batch', '?')} H{heads} {lengths} D{shape.get('head_dim', '?')} {dtype}"


def _tiles(statistics: Mapping[str, Any]) -> str:
    if "part_tiles" not in statistics:
        return "-"
    counts = (statistics.get(f"{kind}_tiles", 0) for kind in ("full", "part", "empty"))
    return "{} full, {} part, {} empty".format(*counts)


def _decision_lines(sites: Sequence[SiteRecord]) -> list[str]:
    # sites of equal problem share their decision: say it once, with the names
    groups: dict[str, tuple[AttentionPlan, list[str]]] = {}
    for site in sites:
        if site.choice is not None:
            key = json.dumps(site.choice.to_dict(), sort_keys=True)
            groups.setdefault(key, (site.choice, []))[1].append(site.name)
    lines: list[str] = []
    for choice, names in groups.values():
        where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        lines.append(f"{where}: {_spell(choice.kernel, choice.config)} ({choice.source})")
        lines.append(f"  {choice.reason}")
        rows = [_candidate_row(candidate) for candidate in choice.candidates]
        lines += [f"    {line}" for line in align(rows)]
    return lines


def _pack_lines(packs: Sequence[PackPlan]) -> list[str]:
    lines = []
    for pack in packs:
        verb = "packed" if pack.packed else "left apart"
        sizes = " + ".join(map(str, pack.sizes))
        memory = f", {pack.nbytes / 1e6:.1f} MB of copies" if pack.nbytes else ""
        lines.append(f"{pack.count}x projections {sizes}: {verb} ({pack.source}){memory}")
        lines.append(f"  {pack.reason}")
    return lines


def _chain_lines(chains: Sequence[ChainPlan]) -> list[str]:
    lines: list[str] = []
    for chain in chains:
        change = f"{chain.initial} -> {chain.code}" if chain.initial != chain.code else chain.code
        lines.append(
            f"{chain.count}x chain of {len(chain.kinds)} ops: scheme {change} ({chain.source})"
        )
        if chain.reason:
            lines.append(f"  {chain.reason}")
        rows = []
        for segment in chain.segments:
            kinds = " ".join(chain.kinds[segment.start : segment.stop])
            config = ",".join(f"{name}={value}" for name, value in segment.config)
            took = "" if segment.median_us is None else f"{segment.median_us:.1f} us"
            library = "" if segment.library_us is None else f"as it was {segment.library_us:.1f} us"
            rows.append((kinds, segment.template, took, library, config))
        lines += [f"    {line}" for line in align(rows)]
    return lines


def _candidate_row(candidate: Candidate) -> tuple[str, ...]:
    time = "" if candidate.median_us is None else f"{candidate.median_us:.1f} us"
    if candidate.p20_us is not None and candidate.p80_us is not None:
        time += f" (p20 {candidate.p20_us:.1f}, p80 {candidate.p80_us:.1f})"
    error = "" if candidate.error is None else f"error {candidate.error:.1e}"
    return (
        _spell(candidate.kernel, candidate.config),
        candidate.status,
        time,
        error,
        candidate.reason,
    )


def _spell(kernel: str, config: Sequence[int]) -> str:
    return f"{kernel}[{','.join(map(str, config))}]" if config else kernel


# -- folders --------------------------------------------------------------------------------------
