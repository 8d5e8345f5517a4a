"""A bench of segments for tests: a clock that moves by one second a trial, times by formula."""

import random

from stof_compile.budget import Budget
from stof_compile.measure import ErrorReport, Timing
from stof_compile.search.candidate import LIBRARY, candidate_of
from stof_compile.search.context import TuningContext
from stof_compile.search.trial import TrialTable
from stof_compile.search.tuner import ChainTuner


class FakeBench:
    """Times by formula: a template saves a share for each op it fuses; configs differ a little."""

    def __init__(self, table, now, saving=0.3, max_contractions=2, broken=()):
        self.table, self.now, self.saving = table, now, saving
        self.max_contractions, self.broken = max_contractions, broken
        self.asked: list = []
        self.seen_contractions = 0
        self.compared = None

    def candidates(self, recipe):
        working = [step for step in recipe.steps if step.kind != "reshape"]
        if len(working) < 2 or recipe.contractions > self.max_contractions:
            return []
        return [
            candidate_of("fake", {"warps": w, "tile": t}) for w in range(1, 5) for t in (16, 32)
        ]

    def offers(self, recipe, candidate):
        return candidate in self.candidates(recipe)

    def first(self, recipe):
        return next(iter(self.candidates(recipe)), None)

    def prepare(self, recipe, candidates):
        pass

    def known(self, recipe, candidate):
        return self.table.known(recipe.key, candidate.template, candidate.settings)

    def trial(self, recipe, candidate):
        def run():
            self.now[0] += 1.0
            self.asked.append((recipe, candidate))
            self.seen_contractions = max(self.seen_contractions, recipe.contractions)
            return ErrorReport(0.0, 0.0, True), self.time(recipe, candidate)

        return self.table.measure(recipe.key, candidate.template, candidate.settings, run)

    def time(self, recipe, candidate):
        base = sum(20.0 if step.kind == "linear" else 10.0 for step in recipe.steps)
        if candidate.template != LIBRARY:
            if candidate.settings["warps"] in self.broken:
                raise RuntimeError("does not fit")
            fused = sum(step.kind != "reshape" for step in recipe.steps) - 1
            noise = random.Random(f"{recipe.contractions} {candidate}").random()
            base *= (1 - self.saving) ** fused * (1 + 0.05 * noise)
        return Timing(base, base, base, 3, "clock")

    def compare(self, schemes, long_turns=False):
        self.compared = [sum(self.time(r, c).median_us for r, c in scheme) for scheme in schemes]
        return self.compared


def tuned(graph, chain, store=None, seconds=1000.0, legality=None, **bench):
    now = [0.0]
    table = TrialTable(store)
    fake = FakeBench(table, now, **bench)
    fake.budget = Budget(seconds, clock=lambda: now[0])
    ctx = TuningContext(fake, fake.budget, seconds, store)
    tuner = ChainTuner(graph.gm, chain, legality or (lambda a, b: None), ctx)
    tuner.compile_ahead()
    return tuner.choose(), fake, ctx


def bound(plan):
    """(start, stop, template) of each segment."""
    return [(s.start, s.stop, s.template) for s in plan.segments]
