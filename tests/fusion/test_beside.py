"""Memory-intensive segments that Inductor computes with the ops beside them."""

import pytest
import torch
import torch.nn.functional as F

from stof_compile.fusion.beside import Neighbours

X, W = torch.randn(2, 8, 16), torch.randn(16, 16)


def clamped(x, w):
    limit = torch.where(torch.isinf(x).any(), 10.0, 20.0)
    return torch.clamp(x, -limit, limit)


def norm(x):
    return F.layer_norm(x, (16,))


CASES = {
    "a norm behind a clamp": (lambda x, w: F.linear(norm(clamped(x, w)), w), "clamp"),
    "views in between": (lambda x, w: norm(clamped(x, w).view(16, 16)) @ w, "clamp"),
    "a norm in front of where": (
        lambda x, w: torch.where(x > 0, norm(F.linear(x, w)).view(2, 8, 16), w[0]), "where"
    ),
    "behind embeddings": (lambda x, w: norm(F.embedding(torch.arange(3), w)) @ w, "embedding"),
    "behind a product": (lambda x, w: norm(F.linear(x, w)), None),
    "with a residual": (lambda x, w: norm(F.linear(x, w) + x), None),
    "behind what a template takes": (lambda x, w: norm(torch.relu(x)) @ w, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_norms(capture, case):
    fn, beside = CASES[case]
    graph = capture(fn, X, W)
    chain = graph.chain_with("layer_norm")
    at = [op.kind.name for op in chain.ops].index("layer_norm")
    reason = Neighbours(graph.gm, graph.chains).claim(chain, at, at + 1)
    assert reason is None if beside is None else f"({beside})" in reason


def test_products_are_ours_wherever_they_stand(capture):
    graph = capture(lambda x, w: clamped(F.linear(x, w) + x, w), X, W)
    chain = graph.chain_with("linear")
    beside = Neighbours(graph.gm, graph.chains)
    assert beside.claim(chain, 0, 2) is None
    assert "together with" in beside.claim(chain, 1, 2)
