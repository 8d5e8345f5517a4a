"""Masks taken apart: static, padding, bias, dynamic; symbolic lengths; rows without keys."""

import pytest
import torch
import torch.nn.functional as F
from e2e.models import hand_written, hf_bert, hf_llama
from torch import nn
from torch._inductor.utils import run_and_get_code

from stof_compile.masks.split import full_planes
from stof_compile.static_values import ELEMENT_CAP, run_static_graph

B, H, S, D = 2, 4, 24, 16
LOW = torch.finfo(torch.float32).min


def positions():
    i = torch.arange(S)
    return i[:, None], i[None, :]


def eager(q, k, v, bias):
    return torch.softmax(q @ k.mT + bias, -1) @ v


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.fixture
def parts(recorder):
    """Parts of one attention with a computed mask; also checks that they compute the same."""

    def run(attend, mask, *given):
        q, k, v = torch.randn(3, B, H, S, D, generator=torch.Generator().manual_seed(0))

        def call(q, k, v, *given):
            return attend(q, k, v, mask(*given))

        found = torch.compile(call, backend=recorder)(q, k, v, *given)
        torch.testing.assert_close(found, call(q, k, v, *given), atol=2e-6, rtol=2e-6)
        (part,) = recorder.parts()
        return part

    return run


def padding():
    keep = torch.ones(B, S, dtype=torch.bool)
    keep[1, 18:] = False
    return keep


def test_rule_and_padding_and_dynamic(parts):
    dynamic = torch.rand(1, H, S, S) > 0.2
    dynamic |= torch.eye(S, dtype=torch.bool)

    def mask(pad, free):
        q, k = positions()
        return (q >= k) & ((q - k) < 9) & pad[:, None, None, :] & free

    part = parts(sdpa, mask, padding(), dynamic)
    q, k = positions()
    assert torch.equal(part.static, ((q >= k) & (q - k < 9))[None, None])
    assert part.padding.meta["example_value"].shape == (B, S)
    assert part.dynamic.meta["example_value"].shape == (1, H, S, S)
    assert "varies along heads, queries, keys" in part.reasons[0]
    assert part.empty_rows == "zero"


def test_de_morgan_and_negations(parts):
    def mask(padded):
        q, k = positions()
        outside = (q < k) | padded[:, None, None, :]
        return torch.where(outside, LOW, 0.0)

    part = parts(eager, mask, ~padding())
    assert part.static is not None and part.padding is not None and part.bias is None
    assert part.empty_rows == "mean" and part.finfo_min


def test_masks_compared_with_a_number(parts):
    """torch 2.11 writes the comparison as a method."""

    def mask(keep):
        q, k = positions()
        return torch.where(((q >= k) & keep[:, None, None, :]) == 0, LOW, 0.0)

    part = parts(eager, mask, padding())
    assert part.static is not None and part.padding is not None and part.bias is None


@pytest.mark.parametrize("form", ["times", "one minus"])
def test_float_arithmetic_on_bools(form, parts):
    def mask(pad):
        keep = pad[:, None, None, :]
        return (~keep).float() * -1e9 if form == "times" else (1.0 - keep.float()) * LOW

    part = parts(eager, mask, padding())
    assert part.padding is not None and part.bias is None
    assert part.empty_rows == ("unmasked" if form == "times" else "mean")


def test_numbers_of_the_user_stay_additive(parts):
    def mask(attention_mask):  # 0 and 1 only if the user says so: not provable
        return (1.0 - attention_mask[:, None, None, :].float()) * LOW

    part = parts(eager, mask, padding().long())
    assert part.padding is None and part.bias is not None


def test_static_additive_mask_with_bias(parts):
    def mask(table):
        q, k = positions()
        alibi = -0.1 * (q - k).abs()
        return torch.triu(torch.full((S, S), float("-inf")), 1) + alibi + table[:, None, None]

    part = parts(eager, mask, torch.randn(H))
    assert torch.equal(part.static, torch.ones(S, S, dtype=torch.bool).tril()[None, None])
    assert part.bias.meta["example_value"].shape == (1, H, S, S)
    assert part.empty_rows == "nan"


@pytest.mark.parametrize("width", [S, 5])
def test_a_sum_too_large_to_evaluate_is_taken_apart(parts, monkeypatch, width):
    """T5's cross-attention: zeros where a mask, expanded over the batch, keeps all."""
    monkeypatch.setattr("stof_compile.static_values.ELEMENT_CAP", B * H * S * S - 1)

    def mask():
        q, k = positions()
        keep = ((q - k).abs() < width)[None, None].expand(B, 1, S, S)
        return torch.where(keep, torch.zeros(1, H, S, S), LOW)

    part = parts(sdpa, mask)
    assert part.bias is None and part.trivial == (width == S)
    assert width == S or part.static.shape == (1, 1, S, S)


def test_a_sum_stays_whole_where_its_mask_is_too_large_as_well(parts, monkeypatch):
    """It is added at run time, as it was written."""
    monkeypatch.setattr("stof_compile.static_values.ELEMENT_CAP", S * S - 1)

    def mask():
        q, k = positions()
        return torch.where((q - k).abs() < 5, torch.zeros(1, H, S, S), LOW)

    part = parts(sdpa, mask)
    assert part.bias is not None and part.dynamic is None and part.static is None


@pytest.mark.parametrize("rows", [S, 1])
@pytest.mark.parametrize("batch", [B, 1])
def test_a_bias_with_its_heads_side_by_side_is_copied(parts, batch, rows):
    """What the batch shares is copied once."""
    bias = torch.randn(1, rows, S, H).permute(0, 3, 1, 2).expand(batch, H, rows, S)
    copied = parts(sdpa, lambda bias: bias, bias).bias.meta["example_value"]
    assert copied.shape == bias.shape and copied.stride()[1:] == (rows * S, S, 1)
    assert batch == 1 or copied.stride(0) == 0


def test_a_bias_is_copied_once_for_all_sites():
    """Inductor makes one buffer of it."""

    def fn(q, k, v, table, buckets):
        bias = F.embedding(buckets, table).permute(2, 0, 1)[None]
        for _ in range(3):
            q = sdpa(q, k, v, bias)
        return q

    torch._dynamo.reset()
    operands = *torch.randn(3, B, H, S, D), torch.randn(32, H), torch.randint(0, 32, (S, S))
    options = {"tune_budget_s": 0, "attention": "gather"}
    with torch.no_grad():
        found, (code,) = run_and_get_code(
            torch.compile(fn, backend="stof", options=options), *operands
        )
        torch.testing.assert_close(found, fn(*operands), atol=1e-5, rtol=1e-5)
    assert code.count(f"= empty_strided_cpu((1, {H}, {S}, {S})") == 1


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize(
    "bias", [lambda b, c: b, lambda b, c: b + c, lambda b, c: 2 * b], ids=["b", "sum", "product"]
)
@pytest.mark.parametrize("attend", [sdpa, eager])
def test_a_bias_that_changes_between_two_sites(attend, bias, heads_last):
    """What is made of it for one site is not what the other one reads."""
    shape = (1, S, S, H) if heads_last else (1, H, S, S)
    b, c = torch.randn(2, *shape)
    b, c = (t.permute(0, 3, 1, 2) for t in (b, c)) if heads_last else (b, c)

    def fn(q, k, v, b, c):
        first = attend(q, k, v, bias(b, c))
        b.add_(torch.arange(S))
        return first, attend(q, k, v, bias(b, c))

    torch._dynamo.reset()
    operands = torch.randn(3, B, H, S, D).unbind()
    options = {"tune_budget_s": 0, "attention": "gather"}
    compiled = torch.compile(fn, backend="stof", options=options)
    found, wanted = compiled(*operands, b.clone(), c), fn(*operands, b.clone(), c)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_bias_keeps_its_gradient_behind_a_site_without():
    def fn(q, k, v, bias):
        with torch.no_grad():
            first = sdpa(q, k, v, bias)
        return first, sdpa(q.sin(), k, v, bias)

    table = torch.randn(1, S, S, H, requires_grad=True)
    operands = torch.randn(3, B, H, S, D).requires_grad_().unbind()
    gradients = []
    for call in (fn, torch.compile(fn, backend="stof", options={"tune_budget_s": 0})):
        out = call(*operands, table.permute(0, 3, 1, 2))[1]
        gradients += torch.autograd.grad(out.square().sum(), table)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)


def test_a_bias_that_changes_through_an_alias():
    def fn(q, k, v, bias, row):
        first = sdpa(q, k, v, bias)
        row.mul_(3.0)
        return first, sdpa(q, k, v, bias)

    table, operands = torch.randn(1, S, S, H), torch.randn(3, B, H, S, D).unbind()
    options = {"tune_budget_s": 0, "attention": "gather"}
    found = []
    for call in (fn, torch.compile(fn, backend="stof", options=options)):
        own = table.clone()
        found.append(call(*operands, own.permute(0, 3, 1, 2), own[0]))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_a_bias_of_rows_stays_as_it_is(parts):
    bias = torch.randn(1, H, S, 2 * S)[..., :S]
    part = parts(sdpa, lambda bias: bias, bias)
    assert part.bias.op == "placeholder"


def test_masks_through_every_shape_change(parts):
    def mask(pad):
        q, k = positions()
        static = (q >= k).unsqueeze(0).expand(B, S, S)
        both = (static & pad.view(B, 1, S)).unsqueeze(1).contiguous()
        return both.reshape(B, 1, S, S).expand(B, H, S, S)

    part = parts(sdpa, mask, padding())
    assert part.static is not None and part.padding is not None and part.dynamic is None


def test_planes_that_differ_by_head_are_kept(parts):
    def mask():
        q, k = positions()
        return (q - k).abs() <= torch.arange(1, H + 1)[:, None, None]

    assert parts(sdpa, mask).static.shape == (1, H, S, S)


def test_rows_without_a_key_are_reported(parts):
    def mask():
        q, k = positions()
        return (q >= k) & (q != 5)

    assert parts(sdpa, mask).static_empty_rows


def test_random_and_too_large_masks_are_dynamic(record, monkeypatch):
    def attend(q, noise):
        mask = torch.rand(S, S) > 0.5
        return sdpa(q, q, q, mask)

    recording = record(attend, torch.randn(B, H, S, D), None)
    assert recording.parts()[0].dynamic is not None
    recording.clear()
    monkeypatch.setattr("stof_compile.static_values.ELEMENT_CAP", 10)

    def causal(q):
        a, b = positions()
        return sdpa(q, q, q, a >= b)

    part = record(causal, torch.randn(B, H, S, D)).parts()[-1]
    assert part.static is None and f"more than {ELEMENT_CAP}" in part.reasons[0]


def test_a_buffer_the_graph_writes_is_not_static(record):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keep", torch.ones(S, S, dtype=torch.bool))

        def forward(self, q):
            self.keep.logical_and_(torch.ones(S, S, dtype=torch.bool))
            return sdpa(q, q, q, self.keep)

    recording = record(Counting(), torch.randn(B, H, S, D))
    if recording.misses():
        assert "writes to an operand" in recording.misses()[0].reason
    else:
        assert recording.parts()[0].static is None


@pytest.mark.parametrize("name", ["llama", "buffer"])
def test_symbolic_lengths_become_text(name, record):
    model, inputs = (
        hf_llama("sdpa", True) if name == "llama" else hand_written("masked_fill_buffer")
    )
    with torch.no_grad():
        recording = record(model, dynamic=True, **inputs)
    assert len(recording.sites()) == 2
    for part in recording.parts():
        assert part.static is None and (part.padding is not None) == (name == "llama")
        for length in (1, 5, 33):
            sizes = [length] * len(part.static_graph.symints)
            keep = full_planes(run_static_graph(part.static_graph, sizes), length, length)
            assert torch.equal(keep, torch.ones(1, 1, length, length, dtype=torch.bool).tril())


def test_what_holds_at_every_length_is_dropped(record):
    model, inputs = hf_bert("sdpa", True)
    with torch.no_grad():
        parts = record(model, dynamic=True, **inputs).parts()
    assert all(part.static_graph is None and part.padding is not None for part in parts)
