"""SDPA that is chosen and already there: it no longer reads a mask it can do without."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

B, H, S, D = 2, 4, 64, 16
LOWEST = torch.finfo(torch.float32).min


def kept(q_len, rule):
    """As Hugging Face writes it: zero where a key is kept, the lowest number elsewhere."""
    rows, columns = torch.arange(q_len)[:, None], torch.arange(q_len)
    return torch.where(rule(rows, columns), torch.zeros((), dtype=torch.float32), LOWEST)


def everywhere(bias, padding):
    return kept(S, lambda i, j: i >= 0 * j).expand(B, 1, S, S).contiguous()


def nowhere_added(bias, padding):
    return torch.zeros(B, H, S, S)


def causal(bias, padding):
    return kept(S, lambda i, j: i >= j)[None, None].expand(B, H, S, S)


def bias_for_all(bias, padding):
    return bias + everywhere(bias, padding)


def bias_alone(bias, padding):
    return bias


def bias_and_causal(bias, padding):
    return bias + causal(bias, padding)


def padding_as_numbers(bias, padding):
    return everywhere(bias, padding) + (1.0 - padding[:, None, None, :].float()) * LOWEST


def padding_of_rows(bias, padding):
    return padding[:, None, None, :].expand(B, 1, S, S)


@pytest.fixture
def graphs(monkeypatch, fresh_dynamo):
    seen = []

    def inner(gm, inputs, options):
        seen.append(gm)
        return aot_eager(gm, list(inputs))

    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", inner)
    return seen


def read_by_sdpa(gm):
    """(shape of the mask SDPA reads or None, its causal flag)."""
    (call,) = (n for n in gm.graph.nodes if n.target is F.scaled_dot_product_attention)
    mask = call.kwargs.get("attn_mask")
    shape = None if mask is None else tuple(mask.meta["example_value"].shape)
    return shape, bool(call.kwargs.get("is_causal"))


def compiled(call, **kwargs):
    options = {"attention": "sdpa", "tune_budget_s": 0}
    return torch.compile(call, backend="stof", options=options, **kwargs)


@pytest.mark.parametrize(
    ("mask", "read"),
    [
        (everywhere, (None, False)),
        (nowhere_added, (None, False)),
        (causal, (None, True)),
        (bias_for_all, ((B, H, S, S), False)),
        (bias_alone, ((1, H, S, S), False)),
        (bias_and_causal, ((B, H, S, S), False)),
        (padding_as_numbers, ((B, 1, S, S), False)),
        (padding_of_rows, ((B, 1, 1, S), False)),
    ],
)
def test_sdpa_reads_no_more_than_it_needs(graphs, mask, read):
    def call(q, k, v, bias, padding):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(bias, padding))

    q, k, v = torch.randn(3, B, H, S, D).unbind()
    bias, padding = torch.randn(1, H, S, S), torch.arange(S).expand(B, S) < 50
    found, wanted = compiled(call)(q, k, v, bias, padding), call(q, k, v, bias, padding)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert list(map(read_by_sdpa, graphs)) == [read]


@torch._dynamo.config.patch(error_on_recompile=True)
def test_a_batch_without_a_fixed_size(graphs):
    def call(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, bias + kept(S, lambda i, j: i >= 0 * j))

    fast = compiled(call, dynamic=True)
    for batch in (2, 3, 5):
        operands = [*torch.randn(3, batch, H, S, D).unbind(), torch.randn(batch, 1, S, S)]
        for tensor in operands:
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_static(tensor, (1, 2, 3))
        torch.testing.assert_close(fast(*operands), call(*operands), atol=1e-5, rtol=1e-5)
    assert graphs
