"""Fused groups that look alike as one entry, and the template behind each."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stof_compile.dump import versions
from stof_compile.report.groups import Group
from stof_compile.report.model import GraphReport, spell_config


@dataclass(frozen=True)
class Alike:
    """Groups with the same operator, operations, template and config.

    Args:
        number: from 1. groups: in graph order. replaced: operations in words -> how often.
    """

    number: int
    groups: tuple[Group, ...]
    replaced: dict[str, int]

    @property
    def operator(self) -> str:
        """Name of the operator, with the number of places."""
        return f"{self.groups[0].op.kind} ({len(self.groups)}x)"

    @property
    def runs_as(self) -> str:
        """Template and config in words; empty where the dump does not tell."""
        segment = self.groups[0].segment
        return f"{segment.template} {spell_config(segment.config)}".strip() if segment else ""


def alike_groups(report: GraphReport) -> list[Alike]:
    """The groups of a graph, equal ones together, in the order of their first place."""
    kinds = {op.name: op for op in report.before.ops} if report.before else {}
    found: dict[tuple[object, ...], list[Group]] = {}
    words: dict[tuple[object, ...], Counter[str]] = {}
    for group in report.groups:
        named = [kinds[name].kind for name in group.members if not kinds[name].is_view]
        segment = group.segment
        key = (
            group.op.kind,
            # what computed its mask goes with the first attention only
            tuple(named[-1:] if group.site else named),
            segment.template if segment else "",
            segment.config if segment else (),
        )
        found.setdefault(key, []).append(group)
        text = " + ".join(named) or "not told by the dump"
        words.setdefault(key, Counter())[text] += 1
    return [
        Alike(number, tuple(groups), dict(words[key]))
        for number, (key, groups) in enumerate(found.items(), 1)
    ]


def numbers_of(kinds: Sequence[Alike]) -> dict[str, int]:
    """Name of an operation, before or after -> number of the entry it belongs to."""
    names: dict[str, int] = {}
    for entry in kinds:
        for group in entry.groups:
            names[group.op.name] = entry.number
            names.update(dict.fromkeys(group.members, entry.number))
    return names


def template_source(name: str, made_with: str) -> tuple[str, str]:
    """The source of a template as it is installed here.

    Args:
        name: of the template. made_with: version of STOF that wrote the dump.
    Returns:
        (source, where or why there is none).
    """
    here = versions().get("stof-compile", "none")
    if made_with != here:
        return "", f"not shown: the dump was written by stof-compile {made_with}, here is {here}"
    from stof_compile.templates import TEMPLATES

    for template in TEMPLATES:
        if template.name == name:
            module = sys.modules[type(template).__module__]
            try:
                return inspect.getsource(module), module.__name__
            except OSError:
                return "", f"{module.__name__}: its source is not installed"
    return "", f"this STOF has no template {name}"
