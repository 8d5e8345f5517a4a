"""Graphs that were tuned before: what later compiles of them may spend."""

import pytest
import torch
from torch import nn

import stof_compile
from stof_compile import masks
from stof_compile.attention import select
from stof_compile.options import StofOptions
from stof_compile.store import Store
from stof_compile.tuned import TunedBefore


def before(store, seconds, captured="graph", **options):
    return TunedBefore(store, captured, StofOptions(tune_budget_s=seconds, **options))


def test_what_was_cut_off_ends_later_compiles_without_more_time(tmp_path):
    store = Store(tmp_path, "here")
    first = before(store, 5.0)
    assert not first.known and not first.ended
    first.note(3, cut_off=True)
    for seconds, ended in ((1.0, True), (5.0, True), (6.0, False)):
        again = before(store, seconds)
        assert again.known and again.ended == ended
    assert not before(store, 5.0, captured="another").known
    assert not before(store, 5.0, attention="gather").known
    assert not before(store, 5.0, mask=masks.causal()).known


def test_a_search_that_ended_by_itself_stops_nobody(tmp_path):
    store = Store(tmp_path, "here")
    before(store, 5.0).note(3, cut_off=True)
    before(store, 60.0).note(9, cut_off=False)
    assert before(store, 5.0).known and not before(store, 5.0).ended


def test_a_compile_that_decides_nothing_leaves_the_note_as_it_is(tmp_path):
    store = Store(tmp_path, "here")
    before(store, 5.0).note(0, cut_off=False)
    assert not before(store, 5.0).known
    before(store, 5.0).note(3, cut_off=True)
    before(store, 1.0).note(0, cut_off=True)
    assert before(store, 5.0).ended and not before(store, 6.0).ended


class Layer(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x) + 1.0


@pytest.mark.parametrize("fusion", ["auto", "off"])
def test_the_second_compile_measures_nothing_without_more_time(tmp_path, monkeypatch, fusion):
    measured = []
    measure = select.measure_candidate
    monkeypatch.setattr(select, "measure_candidate", lambda *a: measured.append(a) or measure(*a))
    x = torch.randn(1, 2, 64, 16)

    def attention(seconds):
        torch._dynamo.reset()
        options = {"tune_budget_s": seconds, "cache_dir": str(tmp_path), "fusion": fusion}
        options["mask"] = masks.sliding_window(4)
        fast = torch.compile(Layer(), backend="stof", options=options)
        with torch.no_grad():
            fast(x)
        (graph,) = stof_compile.explain(fast).graphs
        return graph.sites[0].kernel

    # the seconds end as soon as they begin to be spent
    chosen = attention(1e-9)
    assert not measured
    assert attention(1e-9) == chosen and not measured
    attention(30.0)
    assert measured
    measured.clear()
    attention(30.0)
    assert not measured
