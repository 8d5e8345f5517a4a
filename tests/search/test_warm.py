"""Both stages over one trial table: a repeated search runs nothing and ends alike."""

import random
from typing import NamedTuple

from stof_compile.budget import Budget
from stof_compile.fusion.scheme import Scheme
from stof_compile.measure import ErrorReport, Timing
from stof_compile.search.stage1 import search_scheme
from stof_compile.search.stage2 import sample_configs
from stof_compile.search.trial import TrialTable
from stof_compile.store import Store


class Op(NamedTuple):
    name: str
    compute_intensive: bool


KINDS = [Op("linear", True), Op("bias", False), Op("gelu", False), Op("linear", True)]
SPACE = [("fake", warps) for warps in range(20)]


def tune(store, seconds=60.0):
    """Search as a tuner would, with a clock that each measurement moves by a second."""
    table, now = TrialTable(store), [0.0]
    budget = Budget(seconds, clock=lambda: now[0])
    generator = random.Random(0)

    def measure(segment, candidate):
        def run():
            now[0] += 1.0
            fused = segment[1] - segment[0] - 1
            us = 50.0 - 9.0 * fused + random.Random(f"{segment} {candidate}").random()
            if candidate[1] == 3:
                raise RuntimeError("does not fit")
            return ErrorReport(0.0, 0.0, True), Timing(us, us, us, 3, "clock")

        template, warps = candidate
        return table.measure(str(segment), template, {"warps": warps}, run, budget).cost_us

    first = search_scheme(
        Scheme.singletons(4),
        KINDS,
        lambda start, stop: None,
        lambda segment: measure(segment, generator.choice(SPACE)),
        budget=budget,
        samples=3,
    )
    segments = first.scheme.segments

    def known(index, candidate):
        trial = table.known(str(segments[index]), candidate[0], {"warps": candidate[1]})
        return None if trial is None else trial.cost_us

    second = sample_configs(
        [SPACE] * len(segments),
        known,
        lambda index, candidate: measure(segments[index], candidate),
        generator=generator,
        budget=budget,
        per_iteration=4,
    )
    return table, first, second


def test_second_search_runs_nothing(tmp_path):
    store = Store(tmp_path, "here")
    cold, first, second = tune(store)
    assert cold.measured > 0
    assert (first.scheme, first.stopped) == (Scheme((4,)), "no gain")
    assert cold.best("(0, 4)").cost_us == second.cost_us[0]
    warm, first_again, second_again = tune(Store(tmp_path, "here"))
    assert warm.measured == 0
    assert warm.reused > 0
    assert (first_again, second_again.best) == (first, second.best)
    assert second_again.cost_us == second.cost_us


def test_search_cut_by_its_budget_goes_on_the_next_time(tmp_path):
    store = Store(tmp_path, "here")
    cut, first, _ = tune(store, seconds=5.0)
    assert (cut.measured, first.stopped) == (5, "budget")
    cold, whole, _ = tune(Store(tmp_path / "another", "here"))
    rest, again, _ = tune(store)
    assert again == whole
    assert cut.measured + rest.measured == cold.measured


def test_no_budget_keeps_the_initial_scheme(tmp_path):
    table, first, second = tune(Store(tmp_path, "here"), seconds=0.0)
    assert (table.measured, first.scheme) == (0, Scheme.singletons(4))
    assert second.best == (None,) * 4
