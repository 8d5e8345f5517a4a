"""Memory-intensive segments that Inductor computes with the ops beside them."""

import pytest
import torch
import torch.nn.functional as F

from stof_compile.fusion.beside import Neighbours
from stof_compile.fusion.rewrite import Segment

X, W, ROWS = torch.randn(2, 8, 16), torch.randn(16, 16), torch.arange(2)


def clamped(x, w):
    limit = torch.where(torch.isinf(x).any(), 10.0, 20.0)
    return torch.clamp(x, -limit, limit)


def norm(x):
    return F.layer_norm(x, (16,))


CASES = {
    "a norm behind a clamp": (lambda x, w: F.linear(norm(clamped(x, w)), w), True),
    "views in between": (lambda x, w: norm(clamped(x, w).view(16, 16)) @ w, True),
    "a norm in front of where": (
        lambda x, w: torch.where(x > 0, norm(torch.relu(x)).view(2, 8, 16), w[0]), True
    ),
    "behind embeddings": (lambda x, w: norm(F.embedding(torch.arange(3), w)) @ w, True),
    "behind their sum": (
        lambda x, w: norm(F.embedding(torch.arange(3), w) + F.embedding(torch.arange(3), x[0])) @ w,
        True,
    ),
    "behind a sum with rows that repeat": (
        lambda x, w: norm(F.embedding(torch.ones(2, 2).long(), w) + F.embedding(ROWS, w)) @ w, True
    ),
    "in a stream that an embedding began": (
        lambda x, w: norm(F.embedding(ROWS, w) + F.linear(F.embedding(ROWS, w), w) * w[0]), False
    ),
    "behind a product's sum": (
        lambda x, w: norm(F.linear(F.embedding(torch.arange(3), w), w) + w[:3]), False
    ),
    "behind a product": (lambda x, w: norm(F.linear(x, w)), False),
    "with a residual": (lambda x, w: norm(F.linear(x, w) + x), False),
    "behind what a template takes": (lambda x, w: norm(torch.relu(x)) @ w, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_norms(capture, case):
    fn, claimed = CASES[case]
    graph = capture(fn, X, W)
    chain = graph.chain_with("layer_norm")
    at = [op.kind.name for op in chain.ops].index("layer_norm")
    claims = Neighbours(graph.gm, graph.chains).claimed(chain)
    assert (at in claims) == claimed


def test_what_reads_a_product_is_not_claimed(capture):
    graph = capture(lambda x, w: clamped(F.linear(x, w) + x, w), X, W)
    chain = graph.chain_with("linear")
    claimed = Neighbours(graph.gm, graph.chains).claimed(chain)
    names = [op.kind.name for i, op in enumerate(chain.ops) if i in claimed]
    assert not {"linear", "residual_add"} & set(names)


def test_equal_layers_have_equal_claims(bert):
    """Whatever the first of them reads: here the embeddings, with a norm between."""
    graph = bert(3)
    beside = Neighbours(graph.gm, graph.chains)
    layers = [chain for chain in graph.chains if len(chain) > 1]
    assert len(layers) > 3 and not any(map(beside.claimed, layers[1:]))


def add_and_norm(x, w):
    """A residual that the norm behind it and the next residual read."""
    h = x + F.linear(norm(x), w)
    return h + F.linear(norm(h), w)


def segments_of(graph, *kinds):
    """One segment for each op of these kinds, and each product with its residual in one."""
    found = []
    for chain in graph.chains:
        names = [op.kind.name for op in chain.ops]
        for i, name in enumerate(names):
            if (name, names[i + 1 : i + 2]) == ("linear", ["residual_add"]) and "both" in kinds:
                found.append(Segment(chain, i, i + 2))
            elif name in kinds and not (name == "residual_add" and "both" in kinds):
                found.append(Segment(chain, i, i + 1))
    return found


def joined(graph, segments):
    left = Neighbours(graph.gm, graph.chains).joined(segments)
    return [s.ops[0].kind.name for s, gone in zip(segments, left, strict=True) if gone]


def test_a_residual_of_inductors_takes_the_norm_behind_it(capture):
    graph = capture(add_and_norm, X, W)
    assert joined(graph, segments_of(graph, "layer_norm", "linear")) == ["layer_norm"]  # of two
    both = segments_of(graph, "layer_norm", "residual_add")
    assert sorted(joined(graph, both)) == ["layer_norm", "residual_add"]


def test_a_residual_in_a_product_leaves_the_norm_alone(capture):
    graph = capture(add_and_norm, X, W)
    assert joined(graph, segments_of(graph, "layer_norm", "both")) == []


def test_norms_that_a_product_stands_between_are_not_joined(capture):
    """As in BERT, whose residual is the norm before."""

    def post_norm(x, w):
        h = norm(F.linear(x, w))
        return norm(h + F.linear(h, w)) @ w

    graph = capture(post_norm, X, W)
    (last,) = (c for c in graph.chains if "residual_add" in [op.kind.name for op in c.ops])
    names = [op.kind.name for op in last.ops]
    at = names.index("residual_add")
    first = next(s for s in segments_of(graph, "layer_norm") if s.chain is not last)
    assert joined(graph, [first, Segment(last, at, at + 2)]) == []
    assert joined(graph, [first, Segment(last, at + 1, at + 2)]) == ["layer_norm"]  # not the first


def test_a_sum_beside_a_check_is_inductors(capture):
    graph = capture(lambda x, w: norm(clamped(F.linear(x, w) + x, w)) @ w, X, W)
    assert joined(graph, segments_of(graph, "residual_add", "linear")) == ["residual_add"]


def test_what_is_kept_is_kept_without_the_others(capture):
    """A plan has no segments that were left to Inductor everywhere, and decides as they did."""

    def fn(x, w):
        b = norm(x)
        a = F.gelu(b)
        h = a + torch.cumsum(F.linear(b, w), 1)
        return F.linear(torch.sin(norm(h)), w)

    graph = capture(fn, X, W)
    kinds = ("layer_norm", "gelu", "residual_add", "add", "sin", "linear")
    segments = segments_of(graph, *kinds)
    left = Neighbours(graph.gm, graph.chains).joined(segments)
    kept = [s for s, gone in zip(segments, left, strict=True) if not gone]
    assert any(left) and not any(Neighbours(graph.gm, graph.chains).joined(kept))
