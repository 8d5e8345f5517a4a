"""Stage 1: order of the moves, what is kept, and what the search never does."""

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stof_compile.budget import Budget
from stof_compile.fusion.scheme import Scheme
from stof_compile.search.kinds import compute_intensive_ops
from stof_compile.search.stage1 import neighbours, search_scheme


class Op(NamedTuple):
    name: str
    compute_intensive: bool


def chain(text):
    """C is a compute-intensive op, m a memory-intensive one."""
    return [Op({"C": "linear", "m": "gelu"}[letter], letter == "C") for letter in text]


def moves(text, lengths, gain=None):
    found = neighbours(Scheme(lengths), chain(text), gain)
    return [(move.name, move.scheme.lengths) for move in found]


def always_legal(start, stop):
    return None


def endless():
    return Budget(1.0, clock=lambda: 0.0)


def search(text, costs, lengths=None, legality=always_legal, budget=None, **settings):
    """Search with the costs of a table; a segment that it does not have is slow."""
    initial = Scheme(lengths) if lengths else Scheme.singletons(len(text))
    settings = {"samples": 1, **settings}
    return search_scheme(
        initial,
        chain(text),
        legality,
        lambda segment: costs.get(segment, 1000.0),
        budget=budget or endless(),
        **settings,
    )


def outcomes(result):
    return [(record.name, record.outcome) for record in result.moves]


# -- moves ----------------------------------------------------------------------------------------


def test_expand_is_centred_on_compute_intensive_ops():
    assert moves("mmCm", (1, 1, 1, 1)) == [
        ("expand", (1, 2, 1)),
        ("expand", (1, 1, 2)),
        ("expand", (2, 1, 1)),
    ]


def test_expand_stops_at_two_compute_intensive_ops():
    assert moves("CCC", (2, 1)) == []
    assert moves("CCC", (1, 1, 1)) == [("expand", (2, 1)), ("expand", (1, 2))]


def test_seize_takes_boundary_ops_after_expand():
    assert moves("mmCmm", (2, 1, 2)) == [
        ("expand", (3, 2)),
        ("expand", (2, 3)),
        ("seize", (1, 2, 2)),
        ("seize", (2, 2, 1)),
    ]


def test_seize_leaves_segments_with_compute_intensive_ops_alone():
    assert moves("mCmC", (2, 2)) == [("expand", (4,))]
    assert moves("CmmCC", (3, 2)) == []


@pytest.mark.parametrize(
    ("text", "lengths", "order"),
    [
        ("CmCC", (1, 1, 2), [(2, 2), (1, 3)]),
        ("CCmC", (2, 1, 1), [(2, 2), (3, 1)]),
        ("CmC", (1, 1, 1), [(2, 1), (1, 2)]),
        ("CCmCC", (2, 1, 2), [(3, 2), (2, 3)]),
    ],
    ids=["one on the left", "one on the right", "tie of one", "tie of two"],
)
def test_compete_prefers_exactly_one_compute_intensive_op(text, lengths, order):
    assert moves(text, lengths) == [("compete", lengths) for lengths in order]


def test_compete_gives_a_tie_to_the_larger_gain():
    gains = {(2, 1): 1.0, (1, 2): 3.0}
    assert moves("CmC", (1, 1, 1), lambda scheme: gains[scheme.lengths]) == [
        ("compete", (1, 2)),
        ("compete", (2, 1)),
    ]
    gains[2, 1] = 3.0
    assert moves("CmC", (1, 1, 1), lambda scheme: gains[scheme.lengths])[0][1] == (2, 1)


def test_gain_is_asked_for_ties_only():
    def gain(scheme):
        raise AssertionError("no tie here")

    assert len(moves("CmCC", (1, 1, 2), gain)) == 2


def test_wrong_number_of_kinds_is_refused():
    with pytest.raises(ValueError, match="3 ops with 2 kinds"):
        next(neighbours(Scheme((1, 2)), chain("Cm")))


# -- search ---------------------------------------------------------------------------------------


def test_expand_wins():
    costs = {(0, 1): 10.0, (1, 2): 5.0, (0, 2): 11.0}
    result = search("Cm", costs)
    assert result.scheme == Scheme((2,))
    assert result.stopped == "no gain"
    (record,) = result.moves
    assert (record.before_us, record.after_us, record.outcome) == (15.0, 11.0, "kept")
    assert (record.before, record.after) == (Scheme((1, 1)).hex, Scheme((2,)).hex)


def test_seize_wins():
    costs = {(0, 1): 10.0, (1, 3): 8.0, (0, 2): 10.5, (2, 3): 4.0}
    result = search("Cmm", costs, (1, 2))
    assert result.scheme == Scheme((2, 1))
    assert outcomes(result)[:2] == [("expand", "rolled back"), ("seize", "kept")]


def test_compete_wins_where_more_is_gained():
    costs = {(0, 1): 10.0, (1, 2): 4.0, (2, 3): 10.0, (0, 2): 12.0, (1, 3): 9.0}
    result = search("CmC", costs)
    assert result.scheme == Scheme((1, 2))
    assert outcomes(result)[0] == ("compete", "kept")


def test_compete_goes_first_to_one_compute_intensive_op_though_the_other_gains_more():
    costs = {(0, 1): 10.0, (1, 2): 4.0, (2, 4): 20.0, (0, 2): 13.0, (1, 4): 15.0}
    result = search("CmCC", costs, (1, 1, 2))
    assert result.scheme == Scheme((2, 2))
    assert outcomes(result) == [("compete", "kept")]


def test_rollback_tries_the_next_move_and_no_scheme_twice():
    costs = {(0, 1): 5.0, (1, 2): 5.0, (2, 3): 5.0, (0, 2): 20.0, (1, 3): 6.0, (0, 3): 30.0}
    result = search("mCm", costs)
    assert result.scheme == Scheme((1, 2))
    assert outcomes(result) == [
        ("expand", "rolled back"),
        ("expand", "kept"),
        ("expand", "rolled back"),
    ]
    codes = [record.after for record in result.moves]
    assert len(codes) == len(set(codes))


def test_scheme_rolled_back_once_is_not_looked_at_again():
    costs = {(0, 1): 5.0, (1, 2): 5.0, (2, 3): 5.0, (0, 2): 20.0, (1, 3): 8.0, (0, 3): 50.0}
    result = search("Cmm", costs)
    assert result.scheme == Scheme((1, 2))
    # from the scheme kept, seize leads to the one that the first expand led to
    assert ("seize", (2, 1)) in moves("Cmm", (1, 2))
    assert [Scheme.from_hex(record.after, 3).lengths for record in result.moves] == [
        (2, 1),
        (1, 2),
        (3,),
    ]


def test_gain_below_eps_is_rolled_back():
    costs = {(0, 1): 10.0, (1, 2): 10.0, (0, 2): 19.9}
    assert search("Cm", costs, eps=0.01).scheme == Scheme((1, 1))
    assert search("Cm", costs, eps=0.001).scheme == Scheme((2,))


def test_segment_counts_with_the_best_of_its_samples():
    drawn = {(0, 1): [9.0, 5.0, 7.0], (1, 2): [5.0, 5.0, 5.0], (0, 2): [30.0, math.nan, 8.0]}
    left = {segment: list(samples) for segment, samples in drawn.items()}
    result = search_scheme(
        Scheme((1, 1)),
        chain("Cm"),
        always_legal,
        lambda segment: left[segment].pop(0),
        budget=endless(),
        samples=3,
    )
    assert result.scheme == Scheme((2,))
    assert (result.moves[0].before_us, result.moves[0].after_us) == (10.0, 8.0)
    assert left == {segment: [] for segment in drawn}  # three samples each, drawn once


def test_illegal_segment_is_not_measured():
    asked = []

    def cost(segment):
        asked.append(segment)
        return 10.0

    result = search_scheme(
        Scheme((1, 1, 1)),
        chain("mCm"),
        lambda start, stop: "a value is used outside" if (start, stop) == (0, 2) else None,
        cost,
        budget=endless(),
    )
    assert (0, 2) not in asked
    assert result.moves[0].outcome == "illegal"
    assert result.moves[0].reason == "a value is used outside"
    assert result.scheme == Scheme((3,))


def test_initial_scheme_without_a_kernel_is_left():
    costs = {(0, 2): math.inf, (0, 3): 7.0, (2, 3): 1.0}
    result = search("Cmm", costs, (2, 1))
    assert result.scheme == Scheme((3,))
    assert result.moves[0].before_us == math.inf


def test_initial_segment_that_is_illegal_is_not_measured():
    asked = []

    def cost(segment):
        asked.append(segment)
        return 7.0

    result = search_scheme(
        Scheme((2, 1)),
        chain("Cmm"),
        lambda start, stop: "a value is used outside" if (start, stop) == (0, 2) else None,
        cost,
        budget=endless(),
    )
    assert result.scheme == Scheme((3,))
    assert (0, 2) not in asked


def test_budget_ends_in_mid_search():
    now = [0.0]
    costs = {(0, 1): 5.0, (1, 2): 5.0, (0, 2): 6.0, (2, 3): 5.0, (0, 3): 7.0}
    asked = []

    def cost(segment):
        now[0] += 1.0
        asked.append(segment)
        return costs.get(segment, 100.0)

    def run(seconds):
        asked.clear()
        now[0] = 0.0
        budget = Budget(seconds, clock=lambda: now[0])
        initial = Scheme.singletons(3)
        return search_scheme(initial, chain("Cmm"), always_legal, cost, budget=budget, samples=1)

    assert (run(60.0).scheme, run(60.0).stopped) == (Scheme((3,)), "no gain")
    result = run(4.0)  # three samples for the first move, one for the second, which needs two
    assert (result.scheme, result.stopped) == (Scheme((2, 1)), "budget")
    assert len(asked) == 4
    assert outcomes(result) == [("expand", "kept")]
    result = run(0.0)
    assert (result.scheme, result.moves, result.stopped) == (Scheme((1, 1, 1)), (), "budget")
    assert asked == []


def test_cap_on_schemes():
    result = search("mmmmCmmmm", {}, max_schemes=2)
    assert result.stopped == "schemes"
    assert len(result.moves) == 2


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="3 compute-intensive ops"):
        search("CCC", {}, (3,))
    with pytest.raises(ValueError, match="samples=0"):
        search("Cm", {}, samples=0)
    with pytest.raises(ValueError, match="2 ops with 3 kinds"):
        search("Cmm", {}, (2,))


@st.composite
def problems(draw):
    text = "".join(draw(st.lists(st.sampled_from("Cm"), min_size=1, max_size=10)))
    lengths: list[int] = []
    while sum(lengths) < len(text):
        rest = text[sum(lengths) :]
        most = max(i for i in range(1, len(rest) + 1) if rest[:i].count("C") <= 2)
        lengths.append(draw(st.integers(1, most)))
    return text, tuple(lengths), draw(st.integers(0, 2**32 - 1)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(problems())
def test_any_chain(problem):
    text, lengths, seed, illegal_too = problem
    kinds = chain(text)
    asked = set()

    def random_of(segment):
        return random.Random(f"{seed} {segment}")

    def legality(start, stop):
        return "drawn" if illegal_too and random_of((start, stop)).random() < 0.2 else None

    def cost(segment):
        asked.add(segment)
        value = random_of(segment).random()
        return math.inf if value < 0.1 else value * (segment[1] - segment[0])

    def total(scheme):
        legal = [s for s in scheme.segments if s[1] - s[0] == 1 or legality(*s) is None]
        if len(legal) < len(scheme.segments):
            return math.inf
        return sum(cost(segment) for segment in scheme.segments)

    initial = Scheme(lengths)
    result = search_scheme(initial, kinds, legality, cost, budget=endless(), samples=2)
    seen = set(result.scheme.segments) | asked
    for record in result.moves:
        seen |= set(Scheme.from_hex(record.after, len(text)).segments)
    assert all(compute_intensive_ops(kinds, segment) <= 2 for segment in seen)
    assert total(result.scheme) <= total(initial) * (1 + 1e-9)
    assert result.scheme.ops == len(text)
    again = search_scheme(initial, kinds, legality, cost, budget=endless(), samples=2)
    assert again == result
    if result.stopped == "no gain" and math.isfinite(total(result.scheme)):
        tried = {record.after for record in result.moves} | {initial.hex}
        assert {m.scheme.hex for m in neighbours(result.scheme, kinds)} <= tried
