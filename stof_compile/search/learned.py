"""What tuning one model teaches about the next.

A segment of another model that looks alike (equal fingerprint: the same kinds in the same order,
sizes within a factor of about 1.4) most likely wants a config like the one found before, and a
chain that looks alike the same scheme. The search then begins there and draws less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from stof_compile.search.bench import Candidate, candidate_of
from stof_compile.store import Store

log = logging.getLogger("stof_compile")

STORE_KIND = "learned"


class Learned:
    """Schemes and configs by fingerprint, kept in the store; nothing without one."""

    def __init__(self, store: Store | None) -> None:
        self._store = store

    def scheme(self, fingerprint: int, kinds: Sequence[str]) -> str | None:
        """Code of the scheme that an alike chain got, None where there was none.

        Args:
            kinds: the chain's; a fingerprint that two kinds of chains share teaches nothing.
        """
        value = self._get(f"chain {fingerprint:016x}")
        if value is None or value.get("kinds") != list(kinds):
            return None
        code = value.get("code")
        return code if isinstance(code, str) else None

    def note(self, fingerprint: int, code: str, kinds: Sequence[str]) -> None:
        """Keep the scheme of a chain."""
        self._put(f"chain {fingerprint:016x}", {"code": code, "kinds": list(kinds)})

    def config(self, fingerprint: int, space: Sequence[Candidate]) -> Candidate | None:
        """The candidate an alike segment got, None where there was none or it is not in
        ``space``.
        """
        value = self._get(f"segment {fingerprint:016x}")
        if value is None:
            return None
        try:
            found = candidate_of(str(value["template"]), value["config"])
        except (KeyError, TypeError, AttributeError) as error:
            log.warning("what was learned of a segment cannot be read: %r", error)
            return None
        return found if found in space else None

    def note_config(self, fingerprint: int, candidate: Candidate) -> None:
        """Keep the candidate of a segment."""
        value = {"template": candidate.template, "config": candidate.settings}
        self._put(f"segment {fingerprint:016x}", value)

    def _get(self, key: str) -> dict[str, Any] | None:
        return None if self._store is None else self._store.get(STORE_KIND, key)

    def _put(self, key: str, value: Mapping[str, Any]) -> None:
        if self._store is not None:
            self._store.put(STORE_KIND, key, value)
