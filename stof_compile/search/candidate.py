"""One way to run a segment."""

from __future__ import annotations

from collections.abc import Mapping
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
