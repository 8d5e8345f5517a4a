"""Gate and up projections on a GPU: packed, or left to a template that takes both at once."""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch import nn

from stof_compile.budget import Budget
from stof_compile.capture import read_capture
from stof_compile.fusion.chain import find_chains
from stof_compile.fusion.recipe import run_recipe
from stof_compile.measure import ErrorReport, Timing
from stof_compile.normalize import normalize
from stof_compile.packing import find_packs
from stof_compile.search.candidate import LIBRARY, candidate_of
from stof_compile.search.context import TuningContext
from stof_compile.search.gated_choice import gated_recipes, joining
from stof_compile.search.pack_choice import STORE_KIND, choose_packs, prepare_packs
from stof_compile.search.trial import TrialTable
from stof_compile.store import Store

WIDTH, INNER = 16, 24
GATED, REST = ["activation", "linear", "linear", "mul"], ["activation", "mul"]
TEMPLATE = candidate_of("gated", {"warps": 4})


class Mlp(nn.Module):
    def __init__(self, bias=False, up_first=False, join=lambda gate, up: F.silu(gate) * up):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias) for _ in range(2))
        self.down, self.join, self.up_first = nn.Linear(INNER, WIDTH), join, up_first

    def forward(self, x):
        if self.up_first:
            up = self.up(x)
            return self.down(self.join(self.gate(x), up))
        return self.down(self.join(self.gate(x), self.up(x)))


def found(model):
    """(graph, packs, gated recipes) of a model."""
    kept = []

    def backend(gm, inputs):
        facts = read_capture(gm, inputs)
        normalize(gm, facts)
        packs = find_packs(gm, facts)
        kept.extend((gm, packs, gated_recipes(gm, find_chains(gm, facts), packs)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(2, 5, WIDTH))
    return kept


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("up_first", [False, True], ids=["gate-first", "up-first"])
def test_the_rest_reads_slices_of_the_packed_product(bias, up_first, fresh_dynamo):
    _, (pack,), gated = found(Mlp(bias, up_first))
    recipe = gated[pack.key]
    assert sorted(step.kind for step in recipe.steps) == GATED
    rest = joining(recipe)
    assert [step.kind for step in rest.steps] == REST
    operands = [torch.randn(o.shape, dtype=torch.float64) for o in recipe.operands]
    products = [
        F.linear(*(operands[ref.index] for ref in step.inputs))
        for step in recipe.steps
        if step.kind == "linear"
    ]
    slices = torch.cat(products, -1).split([INNER, INNER], -1)
    assert [part.stride() for part in slices] == [o.stride for o in rest.operands]
    assert [part.shape for part in slices] == [o.shape for o in rest.operands]
    wanted = run_recipe(recipe, operands, torch.float64)
    assert_close(run_recipe(rest, slices, torch.float64), wanted, torch.float32)


def test_what_is_joined_otherwise_is_left_out(fresh_dynamo):
    assert found(Mlp(join=lambda gate, up: F.silu(gate) + up))[2] == {}
    _, packs, gated = found(Mlp(join=lambda gate, up: F.silu(gate + 1.0) * up * 2.0))
    assert packs and all(joining(recipe) is not None for recipe in gated.values())


class FakeBench:
    """Invented times: of the library's products apart and packed, of the template, of the rest."""

    def __init__(self, store=None, ours=10.0, packed=8.0, rest=1.0, takes_gated=True):
        self.budget, self.table = Budget(100.0), TrialTable(store)
        self.ours, self.packed, self.rest, self.takes_gated = ours, packed, rest, takes_gated
        self.prepared, self.compared = [], []

    def candidates(self, recipe):
        return [TEMPLATE] if self.takes_gated and recipe.contractions == 2 else []

    def first(self, recipe):
        return next(iter(self.candidates(recipe)), None)

    def offers(self, recipe, candidate):
        return candidate in self.candidates(recipe)

    def known(self, recipe, candidate):
        return self.table.known(recipe.key, candidate.template, candidate.settings)

    def prepare(self, recipe, candidates):
        self.prepared.append([step.kind for step in recipe.steps])

    def us(self, recipe, candidate):
        kinds = sorted(step.kind for step in recipe.steps)
        if kinds == GATED:
            return self.ours if candidate == TEMPLATE else 20.0
        if kinds == REST:
            return self.rest
        assert kinds == ["linear"] and candidate.template == LIBRARY
        return self.packed if recipe.result.shape[-1] == 2 * INNER else 9.0

    def trial(self, recipe, candidate):
        us = self.us(recipe, candidate)

        def run():
            return ErrorReport(0.0, 0.0, True), Timing(us, us, us, 3, "clock")

        return self.table.measure(recipe.key, candidate.template, candidate.settings, run)

    def compare(self, schemes, long_turns=False):
        self.compared.append(schemes)
        return [sum(self.us(*pair) for pair in scheme) for scheme in schemes]


def chosen(bench, store=None, model=None, **how):
    gm, packs, gated = found(model or Mlp())
    ctx = TuningContext(bench, bench.budget, 100.0, store)
    how = {"on_gpu": True, "gated": gated, **how}
    prepare_packs(gm, packs, ctx, how["gated"])
    (plan,) = choose_packs(gm, packs, ctx, **how).values()
    return plan


@pytest.mark.parametrize(
    ("ours", "packed"), [(8.9, False), (10.0, True)], ids=["template-wins", "packed-wins"]
)
def test_packing_competes_with_the_template_of_both(ours, packed, fresh_dynamo):
    """Of the products alone packing would always win: 8 us against twice 9."""
    bench = FakeBench(ours=ours)
    plan = chosen(bench)
    assert plan.packed == packed and plan.source == "measured"
    assert (plan.separate_us, plan.packed_us) == (ours, 9.0)
    assert "by gated with what joins them" in plan.reason
    ((one, two),) = bench.compared
    assert [candidate for _, candidate in one] == [TEMPLATE] and len(two) == 2
    assert sorted(map(len, bench.prepared))[0] == 1 and REST in map(sorted, bench.prepared)


def test_where_no_template_takes_both_the_products_decide(fresh_dynamo):
    bench = FakeBench(takes_gated=False)
    plan = chosen(bench)
    assert plan.packed and (plan.separate_us, plan.packed_us) == (18.0, 8.0)
    assert bench.compared == [] and all(kinds == ["linear"] for kinds in bench.prepared)


def test_decisions_of_both_kinds_are_kept_apart(fresh_dynamo, tmp_path):
    store = Store(tmp_path, "here")
    assert not chosen(FakeBench(store, ours=8.9), store).packed
    assert chosen(FakeBench(store, takes_gated=False), store).packed
    again = chosen(FakeBench(store, ours=1.0, packed=0.1), store)
    assert (again.packed, again.source) == (False, "store")
    assert len(list(tmp_path.rglob(f"{STORE_KIND}*"))) >= 1
