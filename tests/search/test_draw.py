"""Which candidates of a segment are measured."""

import math

from stof_compile.search.candidate import LIBRARY, candidate_of
from stof_compile.search.draw import REACH, draw_candidates, within_reach


def space_of(*templates, count=10):
    return [candidate_of(name, {"tile": i}) for name in templates for i in range(count)]


def named(drawn):
    return [(c.template, c.settings.get("tile")) for c in drawn]


def test_every_template_shows_its_first_config():
    space = space_of("triton_a", "hopper_b", "tilelang_c")
    drawn = draw_candidates(space, 2, "seed", library=True)
    assert named(drawn) == [(LIBRARY, None), ("triton_a", 0), ("hopper_b", 0)]


def test_what_compiles_slowly_is_drawn_where_nothing_else_is():
    space = space_of("tilelang_c", "tilelang_d")
    drawn = draw_candidates(space, 8, "seed", library=False)
    assert named(drawn) == [("tilelang_c", 0), ("tilelang_d", 0)]


def test_half_of_the_rest_is_what_should_be_fastest():
    space = space_of("triton_a", "tilelang_c", count=40)
    drawn = draw_candidates(space, 9, "seed", library=False)
    assert named(drawn)[:5] == [("triton_a", tile) for tile in range(5)]
    assert len({*drawn}) == 9 and {c.template for c in drawn} == {"triton_a"}
    assert drawn == draw_candidates(space, 9, "seed", library=False)
    assert drawn[5:] != draw_candidates(space, 9, "another", library=False)[5:]


def test_a_template_out_of_reach_is_sampled_no_further():
    space = space_of("fast", "close", "slow", "broken", "unknown", count=2)
    times = {"fast": 10.0, "close": 10.0 * REACH, "slow": 10.1 * REACH, "broken": math.inf}

    def cost(candidate):
        return times.get(candidate.template) if candidate.settings["tile"] == 0 else None

    kept = within_reach(space, 10.0, cost)
    assert {c.template for c in kept} == {"fast", "close", "unknown"}
    assert len(kept) == 6
    assert within_reach(space, None, cost) == space


def test_one_good_config_keeps_its_template():
    space = space_of("wide", count=2)
    assert within_reach(space, 10.0, lambda c: (math.inf, 12.0)[c.settings["tile"]]) == space
