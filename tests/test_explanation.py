"""explain() finds the records behind compiled modules and functions, and only theirs."""

import pytest
import torch
from torch import nn

import stof_compile
from stof_compile.dump import Record, SiteRecord

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Compiled:
    """Stands for what the backend returns: a callable with the record of its graph."""

    def __init__(self, gm, record):
        self.gm = gm
        self.stof_record = record

    def __call__(self, *args):
        return self.gm(*args)


def toy_backend(gm, example_inputs, options=None):
    record = Record(options=dict(options or {}))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    record.sites = [SiteRecord(str(node.target), "sdpa", "kept", "sdpa") for node in calls]
    return Compiled(gm, record)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def break_here(x):
    torch._dynamo.graph_break()
    return x * 2


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Inner()
        self.second = Inner()

    def forward(self, x):
        return self.second(break_here(self.first(x)))


def test_module_and_its_recompilations():
    fast = torch.compile(Inner(), backend=toy_backend, dynamic=False)
    assert "call the compiled model once" in str(stof_compile.explain(fast))
    fast(torch.ones(2, 4))
    assert len(stof_compile.explain(fast).graphs) == 1
    fast(torch.ones(3, 4))
    explanation = stof_compile.explain(fast)
    assert len(explanation.graphs) == 2
    assert len(explanation.sites) == 2  # relu is a method call
    assert "2 graph(s)" in str(explanation)


def test_graph_break_follows_resume_functions_in_order():
    fast = torch.compile(Broken(), backend=toy_backend)
    fast(torch.ones(2, 4))
    names = [[site.name for site in record.sites] for record in stof_compile.explain(fast).graphs]
    assert len(names) == 3
    assert "linear" in names[0][0]
    assert "mul" in names[1][0]
    assert "linear" in names[2][0]


def test_function_and_closure():
    inner = Inner()

    def f(x):
        return inner(x) + 1

    fast = torch.compile(f, backend=toy_backend)
    fast(torch.ones(2, 4))
    assert len(stof_compile.explain(fast).graphs) == 1


def test_function_with_graph_breaks():
    def f(x):
        return break_here(x + 1) - 1

    fast = torch.compile(f, backend=toy_backend)
    fast(torch.ones(3))
    assert len(stof_compile.explain(fast).graphs) == 3


def test_torch_module_compiled_directly():
    # torch's own modules get a wrapper frame whose code all of them share
    small = torch.compile(nn.Linear(4, 4), backend=toy_backend)
    other = torch.compile(nn.Linear(4, 8), backend=toy_backend, options={"other": 1})
    small(torch.ones(2, 4))
    other(torch.ones(2, 4))
    assert [r.options for r in stof_compile.explain(small).graphs] == [{}]
    assert [r.options for r in stof_compile.explain(other).graphs] == [{"other": 1}]


def test_submodule_compiled_in_place():
    model = Broken()
    model.first.compile(backend=toy_backend)
    model(torch.ones(2, 4))
    assert len(stof_compile.explain(model).graphs) == 1


def test_bound_method():
    model = Inner()
    fast = torch.compile(model.forward, backend=toy_backend)
    fast(torch.ones(2, 4))
    assert len(stof_compile.explain(fast).graphs) == 1


def test_models_of_one_class_stay_apart():
    first, second = Inner(), Inner()
    fast = torch.compile(first, backend=toy_backend, options={"name": "first"})
    slow = torch.compile(second, backend=toy_backend, options={"name": "second"})
    fast(torch.ones(2, 4))
    slow(torch.ones(2, 4))
    assert [r.options["name"] for r in stof_compile.explain(fast).graphs] == ["first"]
    assert [r.options["name"] for r in stof_compile.explain(slow).graphs] == ["second"]


def test_equal_backends_share_their_entry():
    model = Inner()
    for _ in range(2):  # the second compilation of the same model is a hit of the first one's entry
        fast = torch.compile(model, backend=toy_backend)
        fast(torch.ones(2, 4))
        assert len(stof_compile.explain(fast).graphs) == 1


def test_other_backends_are_not_shown():
    fast = torch.compile(Inner(), backend="eager")
    fast(torch.ones(2, 4))
    assert stof_compile.explain(fast).graphs == ()


def test_unmatched_paths_are_those_no_graph_matched():
    one = Record(mask_paths={"layer.0": ["layer.0.attention"], "layer.9": [], "head": []})
    two = Record(mask_paths={"layer.0": [], "layer.9": [], "head": ["head"]})
    explanation = stof_compile.Explanation((one, two))
    assert explanation.unmatched == ("layer.9",)
    assert "layer.9" in str(explanation)


def test_refuses_what_is_not_compiled():
    with pytest.raises(stof_compile.StofUnsupportedError, match="compile it first"):
        stof_compile.explain(lambda x: x)
