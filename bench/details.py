"""What STOF did with a compiled model, in the words of the column ``detail``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attention import describe_site

SEARCH_NOTES = ("fusion measured", "whole graph", "launched one by one")
"""How notes begin that say what the search had time for, and which form was kept."""
STEPS = ("form ahead", "attention", "fusion", "verdict")  # of a compile, whose seconds are told


def stof_detail(compiled: Any) -> str:
    """How often each kernel was chosen, the schemes of the chains, and the form that was kept."""
    import stof_compile

    seen = stof_compile.explain(compiled)
    return " | ".join([*_counted(map(describe_site, seen.sites)), *scheme_texts(seen.graphs)])


def scheme_texts(records: Sequence[Any]) -> list[str]:
    """Schemes, packs and verdicts of compiled graphs, in words."""
    texts = []
    for record in records:
        for chain in record.chains:
            names = "+".join(segment.template for segment in chain.segments)
            texts.append(
                f"{chain.count}x scheme {chain.initial}->{chain.code} {names} ({chain.source})"
            )
        for pack in record.packs:
            texts.append(f"{pack.count}x {'packed' if pack.packed else 'apart'} {pack.sizes}")
        notes = [note for note in record.notes if note.startswith(SEARCH_NOTES)]
        spent = [f"{s} {record.timings_s[s]:.1f}" for s in STEPS if s in record.timings_s]
        texts += [*notes, *([f"seconds: {', '.join(spent)}"] if notes and spent else [])]
    return texts


def _counted(texts: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    return [f"{n}x {text}" for text, n in counts.items()] or ["no site"]
