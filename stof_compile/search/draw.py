"""A sample of candidates: the templates' own first configs, then random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stof_compile.search.bench import LIBRARY, Candidate


def draw_candidates(
    space: Sequence[Candidate], count: int, seed: str, *, library: bool
) -> list[Candidate]:
    """Draw from a segment's candidates.

    Args:
        space: as ``SegmentBench.candidates`` gives them; the first of each template is its own
            choice. count: most candidates drawn, but the library and every template's first
            config always fit. seed: the same one draws the same. library: whether the segment as
            it is without us leads.
    """
    leading = list({c.template: c for c in reversed(space)}.values())[::-1]
    drawn = [*([Candidate(LIBRARY)] if library else []), *leading]
    rest = [c for c in space if c not in leading]
    more = max(0, count - len(drawn))
    return drawn + random.Random(seed).sample(rest, min(len(rest), more))
