"""Exact keys: what they tell apart and what they must not."""

import pytest
import torch
import torch.nn.functional as F

from stof_compile.fusion.chain import find_chains
from stof_compile.fusion.segment_key import segment_key


def key_of(graph, index=-1):
    chain = graph.chains[index]
    return segment_key(chain, 0, len(chain))


def keys(capture, *calls):
    """Key of the last chain of each (function, tensors ...)."""
    found = []
    for fn, *tensors in calls:
        torch._dynamo.reset()
        found.append(key_of(capture(fn, *tensors)))
    return found


X = torch.randn(2, 6, 8, 8)


def test_equal_under_renaming(llama):
    graph = llama(2)
    before = [segment_key(c, 0, len(c)) for c in graph.chains]
    for i, node in enumerate(list(graph.gm.graph.nodes)):
        if node.op in ("call_function", "call_method"):
            node.name = f"renamed_{i}"
    after = find_chains(graph.gm, graph.facts)
    assert [segment_key(c, 0, len(c)) for c in after] == before
    assert after[0].ops[0].name.startswith("renamed_")


def test_every_segment_of_twelve_layers(bert):
    graph = bert(12)
    feed_forward = graph.chains[1::2]
    for start in range(5):
        for stop in range(start + 1, 6):
            assert len({segment_key(c, start, stop) for c in feed_forward}) == 1


def test_segments_of_one_chain_differ(bert):
    chain = bert(1).chains[1]
    ranges = [(a, b) for a in range(5) for b in range(a + 1, 6)]
    assert len({segment_key(chain, a, b) for a, b in ranges}) == len(ranges)


@pytest.mark.parametrize(
    "change",
    [
        {"length": 34},
        {"width": 64},
        {"eps": 1e-5},
        {"approximate": "tanh"},
        {"dtype": torch.bfloat16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_models_that_differ(bert, change):
    same = key_of(bert(1))
    torch._dynamo.reset()
    assert key_of(bert(1)) == same
    torch._dynamo.reset()
    assert key_of(bert(1, **change)) != same


def test_constants_and_kinds(capture):
    found = keys(
        capture,
        (lambda x: torch.exp(x) * 0.5, X),
        (lambda x: torch.exp(x) * 0.25, X),
        (lambda x: torch.exp(x) / 0.5, X),
        (lambda x: torch.sin(x) * 0.5, X),
        (lambda x: F.leaky_relu(torch.exp(x), 0.1), X),
        (lambda x: F.leaky_relu(torch.exp(x), 0.2), X),
        (lambda x: torch.exp(x).sum(-1), X),
        (lambda x: torch.exp(x).sum(-1, keepdim=True), X),
        (lambda x: torch.exp(x).sum(-2), X),
    )
    assert len(set(found)) == len(found)


def test_strides(capture):
    def fn(x):
        return torch.exp(x).cos()

    channels_last = X.to(memory_format=torch.channels_last)
    found = keys(capture, (fn, X), (fn, channels_last), (fn, X.transpose(1, 2).contiguous().mT))
    assert len(set(found)) == 3


def test_edges(capture):
    y = torch.randn_like(X)
    found = keys(
        capture,
        (lambda x, y: torch.exp(x) - y, X, y),
        (lambda x, y: y - torch.exp(x), X, y),
        (lambda x, y: torch.exp(x) - x, X, y),  # one tensor read twice
    )
    assert len(set(found)) == 3


def test_spellings_do_not_matter(capture):
    found = keys(
        capture,
        (lambda x: torch.exp(x).transpose(1, 2), X),
        (lambda x: x.exp().permute(0, 2, 1, 3), X),
        (lambda x: torch.exp(x).swapaxes(2, 1), X),
    )
    assert len(set(found)) == 1
    found = keys(
        capture,
        (lambda x: torch.exp(x).view(2, -1), X),
        (lambda x: torch.exp(x).reshape(2, 384), X),
        (lambda x: torch.exp(x).flatten(1), X),
    )
    assert len(set(found)) == 1


def test_form_and_range(bert):
    chain = bert(1).chains[1]
    assert len(bytes.fromhex(segment_key(chain, 0, 5))) == 32
    for start, stop in ((0, 0), (-1, 2), (3, 6)):
        with pytest.raises(ValueError, match="no segment"):
            segment_key(chain, start, stop)
