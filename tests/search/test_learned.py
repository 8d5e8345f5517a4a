"""What one model taught: found under any fingerprint, moved to the closest config of a space."""

import pytest
from fake_segment_bench import bound, tuned

from stof_compile.fusion.fingerprint import fingerprints
from stof_compile.search.candidate import LIBRARY, Candidate, candidate_of, closest_to
from stof_compile.search.draw import CLOSEST, WARM_SAMPLES, around, draw_learned
from stof_compile.search.learned import Learned
from stof_compile.store import Store

SPACE = [candidate_of("a", {"m": m, "n": n}) for m in (16, 32, 64, 128) for n in (32, 64, 128, 256)]
SPACE += [candidate_of("b", {"warps": warps}) for warps in (1, 2, 4, 8)]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, "here")


def test_any_shared_fingerprint_finds_it(store):
    learned = Learned(store)
    learned.note((1, 2), "06", ["linear", "gelu"])
    learned.note_config((1, 2), SPACE[3])
    for seen in ((1, 9), (9, 2), (2, 1)):
        assert learned.scheme(seen, ["linear", "gelu"]) == "06"
        assert learned.config(seen, SPACE) == SPACE[3]
    assert learned.scheme((8, 9), ["linear", "gelu"]) is None
    assert learned.scheme((1, 2), ["linear", "relu"]) is None, "a fingerprint of other kinds"
    assert learned.config((8, 9), SPACE) is None


def test_the_first_shared_fingerprint_counts_most(store):
    learned = Learned(store)
    learned.note_config((1,), SPACE[0])
    learned.note_config((2,), SPACE[5])
    assert learned.config((2, 1), SPACE) == SPACE[5]


def test_a_config_that_is_not_there_becomes_the_closest(store):
    learned = Learned(store)
    wide = candidate_of("a", {"m": 64, "n": 512})
    learned.note_config((1,), wide)
    assert learned.config((1,), SPACE) == candidate_of("a", {"m": 64, "n": 256})
    learned.note_config((1,), candidate_of("a", {"m": 64, "other": 1}))
    assert learned.config((1,), SPACE) is None, "a config of another version of the template"
    learned.note_config((1,), candidate_of("c", {"m": 64}))
    assert learned.config((1,), SPACE) is None, "a template that is not there"


def test_the_library_is_learned_too(store):
    learned = Learned(store)
    learned.note_config((1,), Candidate(LIBRARY))
    assert learned.config((1,), SPACE) == Candidate(LIBRARY)
    drawn = draw_learned(Candidate(LIBRARY), SPACE, "seed", library=True)
    assert drawn == [Candidate(LIBRARY), SPACE[0], SPACE[16]] and len(drawn) == WARM_SAMPLES


def test_projections_and_segments_are_apart(store):
    Learned(store, "projections").note_config((1,), SPACE[0])
    assert Learned(store).config((1,), SPACE) is None


def test_what_cannot_be_read_teaches_nothing(store, caplog):
    store.put("learned", f"segment {1:016x}", {"template": "a", "config": 7})
    learned = Learned(store)
    learned.note_config((2,), SPACE[0])
    assert learned.config((1, 2), SPACE) == SPACE[0] and "cannot be read" in caplog.text


def test_nothing_is_learned_without_a_store():
    learned = Learned(None)
    learned.note((1,), "06", ["linear"])
    learned.note_config((1,), SPACE[0])
    assert learned.scheme((1,), ["linear"]) is None and learned.config((1,), SPACE) is None


def test_closest_differ_in_few_settings_by_little():
    wanted = candidate_of("a", {"m": 64, "n": 64})
    found = closest_to(wanted, SPACE)
    assert found[0] == wanted and len(found) == 16
    assert {c.settings["m"] * c.settings["n"] for c in found[1:5]} == {64 * 32, 64 * 128}
    assert all(64 in c.settings.values() for c in found[:7])
    assert all(64 not in c.settings.values() for c in found[7:])


def test_around_a_learned_config_are_the_closest_and_every_first_one():
    wanted = candidate_of("a", {"m": 128, "n": 256})
    found = around(wanted, SPACE)
    assert wanted in found and SPACE[0] in found and SPACE[16] in found
    assert CLOSEST <= len(found) <= CLOSEST + 2
    assert found == [c for c in SPACE if c in found], "in the order of the space"


@pytest.mark.parametrize(
    ("saving", "asked"), [(0.3, 9), (-0.5, WARM_SAMPLES)], ids=["template_wins", "library_wins"]
)
def test_a_learned_library_has_to_win_once_more(bert, store, saving, asked):
    """Where a template is faster after all, all of its configs are looked at."""
    graph = bert(1)
    chain = graph.chain_with("gelu")  # linear gelu linear residual_add layer_norm
    Learned(store).note_config(fingerprints(chain, 3, 5), Candidate(LIBRARY))

    def legality(start, stop):
        return None if (start, stop) == (3, 5) or stop - start == 1 else "apart"

    plan, bench, _ = tuned(graph, chain, store=store, legality=legality, saving=saving)
    norms = [recipe for recipe, _ in bench.asked if len(recipe.steps) == 2]
    assert len(norms) == asked
    assert ((3, 5, "fake") in bound(plan)) == (saving > 0)
