"""What tuning one model teaches about the next.

A segment of another model that looks alike (a shared fingerprint: the same kinds in the same order,
sizes within a factor of about 1.4) most likely wants a config like the one found before, and a
chain that looks alike the same scheme. The search then begins there and draws less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from stof_compile.search.candidate import LIBRARY, Candidate, candidate_of, closest_to
from stof_compile.store import Store

log = logging.getLogger("stof_compile")

STORE_KIND = "learned"


class Learned:
    """Schemes and configs by fingerprints, kept in the store; nothing without one.

    Everything is noted under each fingerprint of a segment, and found under any of them.

    Args:
        what: whose configs; those of products that may be packed are drawn with less care than
            those of segments, which must not begin there.
    """

    def __init__(self, store: Store | None, what: str = "segment") -> None:
        self._store, self._what = store, what

    def scheme(self, fingerprints: Sequence[int], kinds: Sequence[str]) -> str | None:
        """Code of the scheme that an alike chain got, None where there was none.

        Args:
            kinds: the chain's; a fingerprint that two kinds of chains share teaches nothing.
        """
        for value in self._all("chain", fingerprints):
            code = value.get("code")
            if value.get("kinds") == list(kinds) and isinstance(code, str):
                return code
        return None

    def note(self, fingerprints: Sequence[int], code: str, kinds: Sequence[str]) -> None:
        """Keep the scheme of a chain."""
        self._put("chain", fingerprints, {"code": code, "kinds": list(kinds)})

    def config(self, fingerprints: Sequence[int], space: Sequence[Candidate]) -> Candidate | None:
        """The candidate of ``space`` that is closest to what an alike segment got.

        Returns:
            One of the same template, or the library if the alike segment was left to it; None
            where nothing was learned, or the template is not in ``space``.
        """
        for value in self._all(self._what, fingerprints):
            try:
                found = candidate_of(str(value["template"]), value["config"])
            except (KeyError, TypeError, AttributeError) as error:
                log.warning("what was learned of a segment cannot be read: %r", error)
                continue
            if found.template == LIBRARY:
                return Candidate(LIBRARY)
            closest = closest_to(found, space)
            if closest:
                return closest[0]
        return None

    def note_config(self, fingerprints: Sequence[int], candidate: Candidate) -> None:
        """Keep the candidate of a segment."""
        value = {"template": candidate.template, "config": candidate.settings}
        self._put(self._what, fingerprints, value)

    def _all(self, what: str, fingerprints: Sequence[int]) -> list[dict[str, Any]]:
        if self._store is None:
            return []
        held = (self._store.get(STORE_KIND, f"{what} {value:016x}") for value in fingerprints)
        return [value for value in held if value is not None]

    def _put(self, what: str, fingerprints: Sequence[int], value: Mapping[str, Any]) -> None:
        if self._store is not None:
            for fingerprint in fingerprints:
                self._store.put(STORE_KIND, f"{what} {fingerprint:016x}", value)
