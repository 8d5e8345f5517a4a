"""What equal layers ask for again is worked out once for a graph."""

import pytest
import torch

from stof_compile import masks
from stof_compile.attention.site_problem import BoundMasks
from stof_compile.masks.patterns import BigBird

BIGBIRD = masks.bigbird(window=4, global_tokens=4, random_fill=0.1, random_block=16)
CPU = torch.device("cpu")


class Layers(torch.nn.Module):
    def __init__(self, count, causal=False):
        super().__init__()
        self.inner = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(count))
        self.causal = causal

    def forward(self, x):
        for layer in self.inner:
            q, k, v = layer(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + y.transpose(1, 2).flatten(-2)
        return x


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@torch.no_grad()
def test_a_mask_is_bound_once_for_equal_layers(causal, monkeypatch, fresh_dynamo):
    bound = []
    bind = BigBird.bind

    def counted(self, *lengths):
        bound.append(lengths)
        return bind(self, *lengths)

    monkeypatch.setattr(BigBird, "bind", counted)
    model, x = Layers(4, causal).eval(), torch.randn(2, 64, 32)
    options = {"mask": BIGBIRD, "attention": "gather", "fusion": "off"}
    compiled = torch.compile(model, backend="stof", options=options)
    out = compiled(x)
    seen = len(bound)
    again = torch.compile(Layers(1, causal).eval(), backend="stof", options=options)
    again(x)
    assert len(bound) - seen == seen  # as many for one layer as for four
    assert out.shape == x.shape


def test_other_lengths_and_other_options_are_bound_apart():
    of_graph = BoundMasks()
    first = of_graph.bind(BIGBIRD, 64, 64, 0, CPU)
    assert of_graph.bind(BIGBIRD, 64, 64, 0, CPU) is first
    assert of_graph.bind(BIGBIRD, 128, 128, 0, CPU) != first
    other = masks.bigbird(window=8, global_tokens=4, random_fill=0.1, random_block=16)
    assert of_graph.bind(other, 64, 64, 0, CPU) == other.bind(64, 64)


def test_the_models_mask_is_joined_with_each():
    of_graph = BoundMasks()
    window, prefix = masks.sliding_window(8), masks.prefix_lm(8)
    joined = of_graph.join(masks.causal(), window)
    assert of_graph.join(masks.causal(), window) is joined
    assert joined == masks.causal() & window
    assert of_graph.join(masks.causal(), prefix) == masks.causal() & prefix
    assert of_graph.join(masks.sliding_window(3), window) == masks.sliding_window(3) & window
