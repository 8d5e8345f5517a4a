"""Capture facts, added buffers and single normalisation passes."""

import pytest
import torch
import torch.nn.functional as F
from e2e.models import hf_bert, nn_mha
from torch import nn

from stof_compile.capture import add_buffer, read_capture
from stof_compile.compiled_root import split_source
from stof_compile.normalize import normalize


def capture(fn, *args, change=None):
    """Facts of the only graph of a call; ``change(gm, facts)`` may edit the graph."""
    found = []

    def backend(gm, inputs):
        found.append((gm, read_capture(gm, inputs)))
        if change is not None:
            change(*found[-1])
            gm.recompile()
        return gm.forward

    result = torch.compile(fn, backend=backend)(*args)
    return found[0][0], found[0][1], result


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, cache):
        self.calls.add_(1)
        cache[:, :1] = x
        return self.linear(x) + self.calls


def test_input_kinds_and_mutations(fresh_dynamo):
    _, facts, _ = capture(Counter(), torch.randn(2, 4, 4)[:, :1], torch.zeros(2, 3, 4))
    assert [len(facts.names(kind)) for kind in ("parameter", "buffer", "user")] == [2, 1, 2]
    written = {facts.inputs[name].source for name in facts.mutated_inputs}
    assert written == {"L['self']._buffers['calls']", "L['cache']"}
    assert facts.grad_enabled and not facts.fake_inputs and not facts.has_symbolic_shapes
    assert facts.device == torch.device("cpu")


def test_fake_inputs_are_noticed(fresh_dynamo):
    model, inputs = hf_bert("sdpa", False)
    seen = []

    def backend(gm, real):
        mode = torch._subclasses.FakeTensorMode()
        fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in real]
        seen.append(read_capture(gm, fakes))
        return gm.forward

    torch.compile(model, backend=backend)(**inputs)
    assert seen[0].fake_inputs and not seen[0].static.buffers


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self']._modules['layer']._modules['0'].attention", ("layer", "0", "attention")),
        ("L['self'].layer.0.attention", ("layer", "0", "attention")),
        ("G['orig'].__self__._orig_mod.layer[0]", ("layer", "0")),
        ("L['fn']", ()),
    ],
)
def test_source_expressions(source, path):
    assert split_source(source)[1] == path


def test_added_buffer_is_read_once_and_named_apart(fresh_dynamo):
    table = torch.randn(3)
    nodes = []

    def change(gm, facts):
        output = next(n for n in gm.graph.nodes if n.op == "output")
        nodes.extend(add_buffer(gm, "table", t) for t in (table, table, table + 1))
        with gm.graph.inserting_before(output):
            total = gm.graph.call_function(torch.add, (output.args[0][0], nodes[0]))
            total = gm.graph.call_function(torch.add, (total, nodes[2]))
        output.args = ((total,),)

    x = torch.randn(2, 3)
    _, _, result = capture(torch.neg, x, change=change)
    assert nodes[0] is nodes[1] and nodes[2].target == "table_1"
    torch.testing.assert_close(result, -x + table + table + 1)


def normalized(fn, *args):
    """(rewrites by pass, result, expected result)."""
    counts = []
    _, _, result = capture(fn, *args, change=lambda gm, facts: counts.append(normalize(gm, facts)))
    return counts[0], result, fn(*args)


EINSUMS = {
    "bhid,bhjd->bhij": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bqhd,bkhd->bhqk": ((2, 4, 3, 5), (2, 6, 3, 5)),
    "bkhd,bqhd->bhqk": ((2, 4, 3, 5), (2, 6, 3, 5)),
    "bhqk,bkhd->bqhd": ((2, 3, 4, 6), (2, 6, 3, 5)),
    "b i d, b j d -> b i j": ((2, 4, 5), (2, 6, 5)),
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation, fresh_dynamo):
    a, b = (torch.randn(s) for s in EINSUMS[equation])
    counts, found, wanted = normalized(lambda a, b: torch.einsum(equation, a, b), a, b)
    assert counts["einsum_to_matmul"] == 1
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("equation", ["bi,bj->ij", "bij,bij->bi", "...ij,...jk->...ik"])
def test_einsum_that_is_no_product_stays(equation, fresh_dynamo):
    a = torch.randn(3, 3) if equation == "bi,bj->ij" else torch.randn(2, 3, 3)
    counts, found, wanted = normalized(lambda a: torch.einsum(equation, a, a), a)
    assert counts["einsum_to_matmul"] == 0
    torch.testing.assert_close(found, wanted)


def test_in_place_on_private_tensors_only(fresh_dynamo):
    def run(x):
        a = x * 2
        a.add_(1)
        a.mul_(3)
        b = x + 1
        view = b[0]
        b.add_(5)  # read through the view below: must stay
        return a, b, view * 1

    counts, found, wanted = normalized(run, torch.randn(3, 4))
    assert counts["functionalize_fresh"] == 2
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_in_place_on_an_input_stays(fresh_dynamo):
    x = torch.randn(3)
    before = x.clone()
    _, _, _ = capture(lambda x: x.add_(1), x, change=lambda gm, facts: normalize(gm, facts))
    torch.testing.assert_close(x, before + 1)


def test_dropout_in_training_stays(fresh_dynamo):
    counts, _, _ = normalized(
        lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.0, True), torch.ones(4)
    )
    assert counts["remove_idle_dropout"] == 1


def test_gradients_through_an_expanded_module(fresh_dynamo):
    def grads(compiled):
        model, inputs = nn_mha(False, True)
        fn = torch.compile(model, backend=backend) if compiled else model
        fn(**inputs).square().sum().backward()
        return [p.grad for p in model.parameters()]

    def backend(gm, inputs):
        normalize(gm, read_capture(gm, inputs))
        return gm.forward

    for found, wanted in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
