"""What all chains of one compile share while they are tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stof_compile.budget import Budget
from stof_compile.fusion.recipe import Recipe
from stof_compile.plan import Plan
from stof_compile.search.bench import SegmentBench
from stof_compile.search.candidate import Candidate
from stof_compile.search.initial import InitialLimits
from stof_compile.store import Store

Progress = Callable[[str, float, int], None]
"""(what is tuned, best microseconds so far, trials measured)"""


@dataclass
class TuningContext:
    """What all chains of one compile share.

    Args:
        bench: takes the times. budget: seconds and trials left. budget_s: seconds the user gave
            for the whole graph. store: choices kept on disk.
        plan: choices of the user, which win over everything. seed: of every random draw.
        forced: scheme code of the user in hexadecimal, "" where the search decides.
        measure: whether anything may be measured at all.
        progress: told after every trial. limits: of the rules for the initial scheme.
    """

    bench: SegmentBench
    budget: Budget
    budget_s: float = 0.0
    store: Store | None = None
    plan: Plan | None = None
    seed: int = 0
    forced: str = ""
    measure: bool = True
    progress: Progress = lambda what, best_us, trials: None
    limits: InitialLimits | None = None
    trials: int = 0

    def use(self, budget: Budget) -> None:
        """Go on with another budget: a slice of the whole, for one chain."""
        self.budget = self.bench.budget = budget

    def count(self, recipe: Recipe, candidate: Candidate, what: str, best_us: float) -> None:
        """Count a trial that was asked for, unless the time ended before it could be taken.

        Args:
            what, best_us: told to ``progress``.
        """
        if self.bench.known(recipe, candidate) is not None:
            self.trials += 1
            self.progress(what, best_us, self.trials)
