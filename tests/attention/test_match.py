"""Matching: spellings beside those of the zoo, near misses with their reasons, names and
positions."""

import math

import pytest
import torch
import torch.nn.functional as F
from e2e.models import hf_bert, hf_llama, hf_llama_decode
from torch import nn

B, H, S, D = 2, 4, 24, 16


def qkv(heads=H, dtype=torch.float32, length=S):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, S, D), (B, heads, length, D), (B, heads, length, D))
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


def causal(n=S):
    return torch.ones(n, n, dtype=torch.bool).tril()


def test_scale_folds_to_one_factor(record):
    def attend(q, k, v):
        scores = (q / 2.0) @ (k * 3.0).transpose(2, 3) / torch.tensor(math.sqrt(D))
        return torch.softmax(scores * 0.5, -1) @ v

    (site,) = record(attend, *qkv()).sites()
    assert site.scale == pytest.approx(0.5 * 3.0 / 2.0 / math.sqrt(D))


def test_keys_that_come_transposed(record):
    def attend(q, k, v):
        return torch.softmax(q @ k.view(B, S, H, D).permute(0, 2, 3, 1), -1) @ v

    q, k, v = qkv()
    (site,) = record(attend, q, k.reshape(B, S, H, D), v).sites()
    assert site.k_transposed and site.k.meta["example_value"].shape == (B, H, D, S)


def test_upcast_scores_keep_the_narrow_operands(record):
    def attend(q, k, v):
        scores = q.float() @ k.float().mT
        return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v

    (site,) = record(attend, *qkv(dtype=torch.bfloat16)).sites()
    assert site.q.op == site.k.op == "placeholder"


def test_fully_upcast_attention_runs_in_fp32(record):
    def attend(q, k, v):
        return (torch.softmax(q.float() @ k.float().mT, -1) @ v.float()).to(q.dtype)

    (site,) = record(attend, *qkv(dtype=torch.bfloat16)).sites()
    dtypes = {n.meta["example_value"].dtype for n in (site.q, site.k, site.v, site.output)}
    assert dtypes == {torch.float32}


def test_bias_inside_the_scale_is_scaled(record):
    def attend(q, k, v, bias):
        return torch.softmax((q @ k.mT + bias) * 0.25, -1) @ v

    recording = record(attend, *qkv(), torch.randn(H, S, S))
    (site,), (parts,) = recording.sites(), recording.parts()
    assert site.terms[0].factor == 0.25 and site.bias is None
    assert parts.bias is not None and not parts.reasons


def test_numbers_match_the_model(record, recorder):
    """The recorder computes sites by the reference: the result must not change."""

    def attend(q, k, v, bias, keep):
        scores = torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=0.25).view(B, H, S, S)
        scores = scores.masked_fill(~keep, torch.finfo(q.dtype).min)
        weights = torch.softmax(scores.view(B * H, S, S), -1)
        return torch.bmm(weights, v)

    q, k, v = (t.reshape(B * H, S, D) for t in qkv())
    bias, keep = torch.randn(B * H, S, S), torch.rand(B, 1, S, S) > 0.3
    found = torch.compile(attend, backend=recorder)(q, k, v, bias, keep)
    torch.testing.assert_close(found, attend(q, k, v, bias, keep), atol=2e-6, rtol=2e-6)
    assert len(recorder.sites()) == 1 and recorder.parts()[0].dynamic is not None


def test_multi_query_broadcast_is_grouped(record):
    def attend(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    (site,) = record(attend, *qkv(heads=1)).sites()
    assert site.enable_gqa and site.k.meta["example_value"].shape[1] == 1


def test_unbatched_sdpa(recorder):
    q, k, v = (t[0] for t in qkv())
    compiled = torch.compile(F.scaled_dot_product_attention, backend=recorder)
    found = compiled(q, k, v, attn_mask=causal())
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, attn_mask=causal()))
    assert recorder.sites()[0].q.meta["example_value"].shape == (1, H, S, D)


MISSES = {
    "dropout": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.2),
        "dropout_p is 0.2",
    ),
    "mask and flag": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=causal(), is_causal=True),
        "together",
    ),
    "softmax over queries": (lambda q, k, v: torch.softmax(q @ k.mT, 2) @ v, "not over the keys"),
    "weights used twice": (
        lambda q, k, v: (lambda w: (w @ v, w.sum()))(torch.softmax(q @ k.mT, -1)),
        "weights are also used",
    ),
    "scores used twice": (
        lambda q, k, v: (lambda s: (torch.softmax(s, -1) @ v, s.amax()))(q @ k.mT),
        "scores 'matmul' are also used",
    ),
    "unknown operation": (lambda q, k, v: torch.softmax((q @ k.mT).clamp(max=5), -1) @ v, "clamp"),
    "scaled by a tensor": (
        lambda q, k, v: torch.softmax((q @ k.mT) * q.amax(), -1) @ v,
        "scaled by a tensor",
    ),
    "mask before softcap": (
        lambda q, k, v: torch.softmax(torch.tanh((q @ k.mT).masked_fill(~causal(), -1e9)), -1) @ v,
        "before the softcap",
    ),
    "small fill": (
        lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(~causal(), -10.0), -1) @ v,
        "does not mask",
    ),
    "five dimensions": (
        lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None]),
        "5 dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSES, ids=lambda name: name.replace(" ", "-"))
def test_near_miss(case, record):
    attend, reason = MISSES[case]
    recording = record(attend, *qkv())
    assert not recording.sites()
    (miss,) = recording.misses()
    assert reason in miss.reason
    assert "test_match.py" in miss.source


def test_write_to_an_operand_in_between(record):
    def attend(q, k, v):
        scores = q @ k.mT
        v.add_(1.0)
        k.mul_(2.0)
        return torch.softmax(scores, -1) @ v

    recording = record(attend, *qkv())
    assert "writes to an operand" in recording.misses()[0].reason


def test_a_classifier_is_no_attention(record):
    def classify(x, w):
        return torch.softmax(x @ w, -1)

    recording = record(classify, torch.randn(4, 8), torch.randn(8, 3))
    assert not recording.sites() and not recording.misses()


def test_one_module_attending_twice_has_two_names(record):
    class Twice(nn.Module):
        def forward(self, q, k, v):
            out = F.scaled_dot_product_attention(q, k, v)
            return F.scaled_dot_product_attention(out, k, v)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Twice()

        def forward(self, q, k, v):
            return self.inner(q, k, v)

    names = [site.name for site in record(Outer(), *qkv()).sites()]
    assert names == ["inner", "inner#1"]


def test_names_behind_a_graph_break(record):
    model, inputs = hf_bert("sdpa", True)
    output = model.encoder.layer[1].attention.output
    forward = output.forward

    def broken(*args):
        torch._dynamo.graph_break()
        return forward(*args)

    output.forward = broken
    with torch.no_grad():
        recording = record(model, **inputs)
    assert len(recording) > 1
    assert [s.name for s in recording.sites()] == [
        f"encoder.layer.{i}.attention.self" for i in (0, 1)
    ]
    assert all(g.facts.place.path_known and not g.facts.place.whole_model for g in recording)


def test_a_block_compiled_alone_is_its_own_root(recorder):
    model, inputs = hf_bert("sdpa", False)
    model.encoder.layer[1].compile(backend=recorder)
    with torch.inference_mode():
        model(**inputs)
    (site,) = recorder.sites()
    assert site.path == ("attention", "self")
    assert recorder[0].facts.place.path_known


def test_a_function_around_a_model(record):
    model, inputs = hf_bert("sdpa", False)

    def run(ids):
        return model(ids).last_hidden_state

    with torch.no_grad():
        recording = record(run, inputs["input_ids"])
    assert recording.sites()[0].name == "encoder.layer.0.attention.self"
    assert recording[0].facts.place.path_known and recording[0].facts.place.whole_model


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_autocast_operands(inside, record):
    model, inputs = hf_llama("eager", False)

    def run(**kwargs):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return model(**kwargs).last_hidden_state

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        recording = record(run if inside else model, **inputs)
    assert len(recording.sites()) == 2
    for site in recording.sites():
        nodes = (site.q, site.k, site.v, site.output)
        assert {n.meta["example_value"].dtype for n in nodes} == {torch.bfloat16}


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_position_of_a_decoded_token(static, record):
    model, inputs = hf_llama_decode("sdpa", static)
    with torch.no_grad():
        recording = record(model, **inputs)
    offsets = [site.offset for site in recording.sites()]
    if static:
        assert [o.kind for o in offsets] == ["position"] * 2
        assert all(o.node.meta["example_value"].shape == (1,) for o in offsets)
    else:
        assert [(o.kind, o.value) for o in offsets] == [("length", 10)] * 2


CACHE_WRITES = {
    "slice": (lambda cache, k: cache.__setitem__((slice(None), slice(None), slice(7, 8)), k), 7),
    "copy": (lambda cache, k: cache[:, :, 7:8].copy_(k), 7),
    "unknown": (lambda cache, k: cache.add_(k), None),
}


@pytest.mark.parametrize("write", CACHE_WRITES)
def test_position_in_a_handmade_cache(write, record):
    store, position = CACHE_WRITES[write]

    def decode(q, new, cache):
        store(cache, new)
        return F.scaled_dot_product_attention(q, cache, cache)

    q, k, _ = qkv()
    (site,) = record(decode, q[:, :, :1], k[:, :, :1], torch.zeros(B, H, 32, D)).sites()
    expected = ("unknown", None) if position is None else ("position", position)
    assert (site.offset.kind, site.offset.value) == expected


def test_flex_attention_is_listed(record):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu")
    (site,) = record(lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask), *qkv()).sites()
    assert site.form == "flex"


def test_attention_sinks_are_a_near_miss(record):
    def attend(q, k, v, sinks):
        scores = (q @ k.mT * 0.25).masked_fill(~causal(), -1e30)
        column = sinks.reshape(1, -1, 1, 1).expand(B, -1, S, 1)
        scores = torch.cat([scores, column], -1)
        scores = scores - scores.amax(-1, keepdim=True)
        return torch.softmax(scores, -1)[..., :-1] @ v

    (miss,) = record(attend, *qkv(), torch.randn(H)).misses()
    assert "the scores pass through" in miss.reason and "(cat)" in miss.reason
