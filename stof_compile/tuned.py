"""Which graphs were tuned before, and whether the seconds ended before the search did.

Decisions are kept one by one, each for whatever graph asks next. This is kept for a graph as a
whole: a compile that ended with its budget is not followed by others that go on where it stopped,
each a little slower than a compile that has nothing to decide, unless they have more time.
"""

from __future__ import annotations

import hashlib
import json

from stof_compile.fusion.recipe import fp32_products
from stof_compile.options import StofOptions
from stof_compile.store import Store

TUNED_KIND = "tuned"  # of the store
ASKED = ("mask", "inductor", "mode", "attention", "fusion")  # options that decide what is measured


class TunedBefore:
    """What earlier compiles of a graph left.

    Args:
        store: where it is kept. captured: the graph as text. opts: what is asked for now.
    Attributes:
        known: whether it was tuned before. ended: whether the seconds ended in the middle of it,
            and there are not more of them now: what is not decided yet follows rules.
    """

    def __init__(self, store: Store, captured: str, opts: StofOptions) -> None:
        asked = opts.to_json()
        told = [captured, *(asked[name] for name in ASKED), fp32_products()]
        self._store, self._budget_s = store, opts.tune_budget_s
        self._key = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        held = store.get(TUNED_KIND, self._key)
        unfinished_s = 0.0 if held is None else held.get("unfinished_s", 0.0)
        self.known = held is not None
        self.ended = unfinished_s > 0 and not self._budget_s > unfinished_s

    def note(self, trials: int, *, cut_off: bool) -> None:
        """Keep what this compile did, if it was anything.

        Args:
            trials: candidates measured. cut_off: the seconds ended before the search did.
        """
        if trials or (cut_off and not self.ended):
            unfinished_s = self._budget_s if cut_off else 0.0
            value = {"trials": trials, "unfinished_s": unfinished_s}
            self._store.put(TUNED_KIND, self._key, value)
