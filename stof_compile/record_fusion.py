"""What became of a graph's operators, written into its record."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from stof_compile.dump import Record
from stof_compile.fusion_result import FusionResult

MAX_TEMPLATES = 3  # whose first calls are told
MAX_REPEATS = 8  # told of a graph
FOLDED = "copies of transposed operands folded into products"
PATCHES = "patch embeddings computed as products"
ROTATED = "rotary embeddings in the epilogue of"
JOINED = "norms and elementwise kernels left to Inductor, which joins them with ops beside them"
MARKED = "checks for infinities done by the kernels of products"

logger = logging.getLogger("stof_compile")


def record_fusion(result: FusionResult, record: Record) -> None:
    """Note schemes and packs; a graph left alone as a whole is a note with its reason."""
    if result.refusal:
        record.notes.append(f"operators are left to Inductor: {result.refusal}")
        logger.info("operators are left to Inductor: %s", result.refusal)
        return
    record.chains = sorted(result.chains.values(), key=lambda chain: -chain.count)
    record.packs = [*result.packs.values(), *result.refused_packs.values()]
    for name, times, within in result.repeats[:MAX_REPEATS]:
        where = f", {within} of them within a longer chain" if within else ""
        record.notes.append(f"the graph repeats {times} times: {name}{where}")
    if result.folded:
        record.notes.append(f"{FOLDED}: {result.folded}")
    if result.patches:
        record.notes.append(f"{PATCHES}: {result.patches}")
    if result.rotated:
        record.notes.append(f"{ROTATED} {result.rotated} products")
    if result.joined:
        record.notes.append(f"{JOINED}: {result.joined}")
    if result.marked:
        record.notes.append(f"{MARKED}: {result.marked}")
    for reason, count in result.apart.items():
        record.notes.append(f"rotary embeddings left to Inductor, {count} times: {reason}")
    record.timings_s["fusion"] = result.seconds
    record.timings_s["measuring"] = result.measuring_s
    if result.trials:
        record.notes.append(
            f"fusion measured {result.trials} candidates in {result.measuring_s:.1f} s: "
            f"{result.compiling_s:.1f} s waiting for compilers, {result.first_calls_s:.1f} s in "
            f"first calls{_longest(result.first_calls)}, {result.timing_s:.1f} s timing"
        )


def notes_without_fusion(notes: Sequence[str]) -> list[str]:
    """The notes where the graph that is kept is not the fused one: what only that one has is not
    among them.
    """
    only_fused = (FOLDED, PATCHES, ROTATED, JOINED, MARKED)
    return [note for note in notes if not note.startswith(only_fused)]


def _longest(calls: Mapping[str, Sequence[float]]) -> str:
    """The templates whose first calls took longest, in brackets; empty where there are none."""
    most = sorted(calls.items(), key=lambda call: -sum(call[1]))[:MAX_TEMPLATES]
    parts = [f"{len(seconds)} of {name} {sum(seconds):.1f}" for name, seconds in most]
    return f" ({', '.join(parts)})" if parts else ""
