"""Stored values in a few words, for ``stof cache show``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from stof_compile.plan import AttentionPlan, ChainPlan, PackPlan
from stof_compile.search.trial import Trial
from stof_compile.verdict import Verdict


def in_words(kind: str, value: Mapping[str, Any]) -> str:
    """What was found best, with its time where one was measured; "" for an unknown kind."""
    describe = DESCRIPTIONS.get(kind)
    if describe is None:
        return ""
    try:
        return describe(dict(value))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"unreadable, and measured anew when it is needed ({error!r})"


def _attention(value: dict[str, Any]) -> str:
    plan = AttentionPlan.from_dict(value)
    times = [
        c.median_us
        for c in plan.candidates
        if (c.kernel, c.config) == (plan.kernel, plan.config) and c.median_us is not None
    ]
    config = f"[{','.join(map(str, plan.config))}]" if plan.config else ""
    return f"{plan.kernel}{config}{_time(min(times, default=None))}"


def _chain(value: dict[str, Any]) -> str:
    plan = ChainPlan.from_dict(value)
    templates = [segment.template for segment in plan.segments]
    before = "" if plan.initial_us is None else f" (rules: {plan.initial_us:.1f} us)"
    ops, parts = " ".join(plan.kinds), " + ".join(templates)
    return f"{ops}: scheme {plan.code}, {parts}{_time(plan.final_us)}{before}"


def _trials(value: dict[str, Any]) -> str:
    found = [Trial.from_dict("", data) for data in value["trials"]]
    best = min(found, key=lambda trial: trial.cost_us, default=None)
    if best is None or best.median_us is None:
        return f"none of {len(found)} ran"
    config = json.dumps(dict(best.config))
    return f"{best.template} {config}{_time(best.median_us)}, best of {len(found)}"


def _pack(value: dict[str, Any]) -> str:
    plan = PackPlan.from_dict(value)
    return f"{'packed' if plan.packed else 'apart'}: {plan.reason}"


def _graph(value: dict[str, Any]) -> str:
    verdict = Verdict(**value)
    times = ", ".join(f"{name} {us:.1f} us" for name, us in verdict.times_us.items())
    return f"{verdict.winner}" + (f" of: {times}" if times else "")


def _tuned(value: dict[str, Any]) -> str:
    return f"a graph tuned before, {value['trials']} candidates measured"


def _learned(value: dict[str, Any]) -> str:
    if "code" in value:
        return f"{' '.join(value['kinds'])}: start at scheme {value['code']}"
    return f"start at {value['template']} {json.dumps(dict(value['config']))}"


def _time(us: float | None) -> str:
    return "" if us is None else f", {us:.1f} us"


DESCRIPTIONS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "attention": _attention,
    "chains": _chain,
    "rotations": _chain,
    "trials": _trials,
    "packs": _pack,
    "graphs": _graph,
    "tuned": _tuned,
    "learned": _learned,
}
