"""A mask of the options in attention that stays: a tensor of the graph where sizes are known."""

import pytest
import torch
from models import hf_gpt2
from running import NO_TIMING, assert_same, masked, without_inductor
from torch import nn
from torch.nn import functional as F

from stof_compile import masks

WINDOW = masks.sliding_window(4)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


def compile_with(model, **options):
    return torch.compile(model, backend="stof", options={**NO_TIMING, "mask": WINDOW, **options})


@torch.no_grad()
def test_a_mask_of_known_sizes_is_evaluated_once_for_all_layers_and_calls(monkeypatch):
    from stof_compile import ops

    model, inputs = hf_gpt2("sdpa", False, layers=2)
    evaluated = []
    evaluate = ops._dense_rows
    monkeypatch.setattr(ops, "_dense_rows", lambda *a: evaluated.append(a) or evaluate(*a))
    fast = compile_with(model, attention="off")
    with masked(WINDOW):
        expected = model(**inputs)
    for _ in range(2):
        assert_same(fast(**inputs), expected)
    assert len(evaluated) == 1


@pytest.mark.parametrize("attention", ["gather", "off"])
@torch.no_grad()
def test_attention_that_reads_the_output_of_another(attention):
    class Attend(nn.Module):
        def forward(self, x):
            first = F.scaled_dot_product_attention(x, x, x)
            second = F.scaled_dot_product_attention(first, first, first)
            return F.scaled_dot_product_attention(second, second, second)

    x = torch.randn(1, 2, 32, 16)
    with masked(WINDOW):
        expected = Attend()(x)
    fast = compile_with(Attend(), attention=attention)
    assert_same(fast(x), expected)


@torch.no_grad()
def test_more_masks_than_a_graph_keeps_are_evaluated_at_each_call(monkeypatch):
    from stof_compile import ops
    from stof_compile.attention import dense_mask

    class Attend(nn.Module):
        def forward(self, x):
            first = F.scaled_dot_product_attention(x, x, x)
            rest = first[:, :, 8:]
            return F.scaled_dot_product_attention(rest, rest, rest)

    evaluated = []
    evaluate = ops._dense_rows
    monkeypatch.setattr(ops, "_dense_rows", lambda *a: evaluated.append(a) or evaluate(*a))
    x = torch.randn(1, 2, 32, 16)
    with masked(WINDOW):
        expected = Attend()(x)
    for most, calls in ((2**20, 2), (32 * 32, 1 + 3), (0, 2 * 3)):
        torch._dynamo.reset()
        evaluated.clear()
        monkeypatch.setattr(dense_mask, "MOST_KEPT", most)
        fast = compile_with(Attend(), attention="off")
        for _ in range(3):
            assert_same(fast(x), expected)
        assert len(evaluated) == calls, most


@pytest.mark.parametrize(
    ("spec", "operator"),
    [(WINDOW, "stof.dense_mask"), (masks.bigbird(4, 2, 0.1), "stof.dense_mask_of_lengths")],
    ids=["no", "yes"],
)
@torch.no_grad()
def test_a_rule_that_depends_on_the_lengths_has_its_own_operator(spec, operator, monkeypatch):
    from stof_compile.attention import dense_mask

    seen = []

    def compiled(gm, *given, **options):
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return without_inductor(gm, *given, **options)

    class Attend(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", compiled)
    monkeypatch.setattr(dense_mask, "MOST_KEPT", 0)
    x = torch.randn(1, 2, 32, 16)
    with masked(spec):
        expected = Attend()(x)
    assert_same(compile_with(Attend(), attention="off", mask=spec)(x), expected)
    assert f"{operator}.default" in seen


@pytest.mark.parametrize("attention", ["auto", "gather", "off"])
@torch.no_grad()
def test_more_queries_than_keys_end_with_them(attention):
    class Attend(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x[:, :, :24], x[:, :, :24])

    x = torch.randn(1, 2, 32, 16)
    wide = masks.sliding_window(40)
    keep = (torch.arange(-8, 24)[:, None] - torch.arange(24)).abs() <= 40
    expected = F.scaled_dot_product_attention(x, x[:, :, :24], x[:, :, :24], keep)
    fast = compile_with(Attend(), attention=attention, mask=wide, strict=False)
    assert_same(fast(x), expected)


@torch.no_grad()
def test_a_cache_written_from_its_end_has_no_position():
    class Attend(nn.Module):
        def forward(self, x, cache):
            cache[:, :, -32:] = x
            return F.scaled_dot_product_attention(x, cache, cache)

    with pytest.raises(Exception, match="place that cannot be told"):
        compile_with(Attend())(torch.randn(1, 2, 32, 16), torch.zeros(1, 2, 64, 16))
