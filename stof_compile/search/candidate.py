"""One way to run a segment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stof_compile.templates.space import Config

LIBRARY = "inductor"
"""Template name of a segment that is left as it is."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a segment: a template's name and config, or :data:`LIBRARY` without one."""

    template: str
    config: tuple[tuple[str, int | float | str | bool], ...] = ()

    @property
    def settings(self) -> Config:
        """The config as a dict."""
        return dict(self.config)


def candidate_of(template: str, config: Mapping[str, Any]) -> Candidate:
    """A candidate from a template's name and a config."""
    return Candidate(template, tuple(sorted(config.items())))


def closest_to(candidate: Candidate, space: Sequence[Candidate]) -> list[Candidate]:
    """Candidates of a space that are of the same template, those that differ least first."""
    settings = candidate.settings
    alike = [c for c in space if c.template == candidate.template]
    alike = [c for c in alike if c.settings.keys() == settings.keys()]
    return sorted(alike, key=lambda c: _distance(settings, c.settings))


def _distance(first: Config, second: Config) -> tuple[int, float]:
    """How many settings of two configs differ, and by how many powers of two."""
    apart = [(first[name], second[name]) for name in first if first[name] != second[name]]
    powers = [
        abs(math.log2(a / b))
        for a, b in apart
        if isinstance(a, int | float) and isinstance(b, int | float) and a > 0 and b > 0
    ]
    return len(apart), sum(powers)
