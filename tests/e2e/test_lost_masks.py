"""A mask of the options that no attention takes: an error under strict, else one warning."""

import logging

import pytest
import torch
from running import NO_TIMING, assert_same, without_inductor
from torch import nn
from torch.nn import functional as F

from stof_compile import explain, masks
from stof_compile.errors import StofMaskError, StofUnsupportedError

WINDOW = masks.sliding_window(3)
S, SCALE = 24, 8**-0.5


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def scores_before_a_break(q, k, v):
    scores = q @ k.mT * SCALE
    torch._dynamo.graph_break()
    return scores.softmax(-1) @ v


def weights_before_a_break(q, k, v):
    weights = (q @ k.mT * SCALE).softmax(-1)
    torch._dynamo.graph_break()
    return weights @ v


def keys_first(q, k, v):
    return (k @ q.mT * SCALE).softmax(-2).mT @ v


def log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT * SCALE, -1).exp() @ v


def softmax_by_hand(q, k, v):
    scores = q @ k.mT * SCALE
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def divided_at_the_end(q, k, v):
    weights = (q @ k.mT * SCALE).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def kernel_by_name(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


@torch._dynamo.allow_in_graph
def opaque(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def in_an_opaque_function(q, k, v):
    return opaque(q, k, v)


@torch._dynamo.disable
def outside(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def outside_of_all_graphs(q, k, v):
    return outside(q * 1, k * 1, v * 1)


SEEN = {
    scores_before_a_break: "scores come from outside",
    keys_first: "first position",
    log_softmax: "written out",
    softmax_by_hand: "written out",
    divided_at_the_end: "written out",
    kernel_by_name: "called by name",
    in_an_opaque_function: "no graph of the compiled function",
}


def operands(*lengths):
    return [torch.randn(1, 2, length, 8) for length in lengths or (S, S, S)]


def in_window(q, k, v):
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(rows - columns).abs() <= 3)


def compile_with(call, mask=WINDOW, **options):
    return torch.compile(call, backend="stof", options={**NO_TIMING, "mask": mask, **options})


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(("call", "words"), SEEN.items(), ids=lambda v: getattr(v, "__name__", ""))
@torch.no_grad()
def test_attention_that_is_not_taken(call, words, caplog):
    fast, given = compile_with(call, strict=False), operands()
    for _ in range(3):
        assert_same(fast(*given), call(*given))
    (message,) = warnings(caplog)
    assert words in message and "the mask of the options is not put into" in message
    shown = explain(fast)
    assert message in shown.notes
    assert "no attention of these graphs takes" in str(shown)
    assert "another function" not in str(shown)


@pytest.mark.parametrize(("call", "words"), SEEN.items(), ids=lambda v: getattr(v, "__name__", ""))
@torch.no_grad()
def test_attention_that_is_not_taken_is_an_error_under_strict(call, words):
    with pytest.raises(StofMaskError, match=words):
        compile_with(call)(*operands())


@torch.no_grad()
def test_without_a_mask_nothing_is_lost(caplog):
    given = operands()
    for call in SEEN:
        assert_same(compile_with(call, mask=None, strict=False)(*given), call(*given))
    assert not warnings(caplog)


@torch.no_grad()
def test_weights_that_leave_the_graph_are_masked():
    given = operands()
    fast = compile_with(weights_before_a_break, strict=False)
    assert_same(fast(*given), in_window(*given))
    assert "another function" in str(explain(fast))
    torch._dynamo.reset()
    with pytest.raises(StofUnsupportedError, match="weights leave this graph"):
        compile_with(weights_before_a_break)(*given)


@torch.no_grad()
def test_attention_outside_of_all_graphs_is_said_at_the_second_call(caplog):
    fast, given = compile_with(outside_of_all_graphs, strict=False), operands()
    fast(*given)
    assert not warnings(caplog)  # the rest of the function may still take it
    for _ in range(3):
        fast(*given)
    (message,) = warnings(caplog)
    assert "no graph of the compiled function" in message


@torch.no_grad()
def test_attention_outside_of_all_graphs_is_no_error_under_strict(caplog):
    """A branch that was not taken yet may have attention."""
    fast, given = compile_with(outside_of_all_graphs), operands()
    for _ in range(3):
        fast(*given)
    assert len(warnings(caplog)) == 1


@torch.no_grad()
def test_after_a_call_that_failed_between_two_graphs_the_next_one_goes_on():
    def call(x, bad):
        x = x + 1
        torch._dynamo.graph_break()
        if bad:
            raise ValueError("the user's")
        return attend(x, x, x)

    fast, (x,) = compile_with(call), operands(S)
    for _ in range(2):
        with pytest.raises(ValueError, match="the user's"):
            fast(x, True)
    for _ in range(2):
        assert_same(fast(x, False), in_window(*[x + 1] * 3))


@torch.no_grad()
def test_a_loop_before_the_attention_is_no_second_call(caplog):
    def call(x):
        y = x
        while y.abs().sum() < 1e6:
            y = y * 2
        return attend(x, y, x)

    fast, (x,) = compile_with(call), operands(S)
    fast(x)
    assert not warnings(caplog)


@torch.no_grad()
def test_weights_that_are_the_result_are_no_attention():
    """A head that compares positions: nothing is multiplied by them."""

    def call(x):
        y = attend(x, x, x)
        return torch.softmax(y @ y.transpose(-1, -2), -1)

    (x,) = operands(S)
    y = in_window(x, x, x)
    assert_same(compile_with(call)(x), torch.softmax(y @ y.transpose(-1, -2), -1))


@torch.no_grad()
def test_each_compiled_function_warns_once(caplog):
    for number, call in enumerate((log_softmax, softmax_by_hand), 1):
        fast = compile_with(call, strict=False)
        for length in (24, 32, 40):
            fast(*operands(length, length, length))
        assert len(explain(fast).graphs) == 2
        assert len(warnings(caplog)) == number


class Parts(nn.Module):
    """Embedding, attention and a head, with graph breaks in and between them."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def embedded(self, x):
        x = self.embed(x)
        torch._dynamo.graph_break()
        return x * 2

    def forward(self, x):
        x = self.embedded(self.embedded(x) + 1)
        x = self.attended(x)
        torch._dynamo.graph_break()
        return self.out(x)

    def attended(self, x):
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(x, x, x)


@torch.no_grad()
def test_parts_without_attention_are_no_error(caplog):
    model, (x,) = Parts(), operands(S)
    fast = compile_with(model)
    model.attended = lambda x: in_window(x, x, x)
    expected = model(x)
    del model.attended
    for _ in range(3):
        assert_same(fast(x), expected)
    assert not warnings(caplog)
    assert len(explain(fast).graphs) > 2
    assert "no attention of these graphs" not in str(explain(fast))


@torch.no_grad()
def test_a_later_graph_without_attention_is_no_error(caplog):
    def call(q, k, v, attends):
        return attend(q, k, v) if attends else q + v

    fast, given = compile_with(call), operands()
    assert_same(fast(*given, True), in_window(*given))
    assert_same(fast(*given, False), given[0] + given[2])
    assert not warnings(caplog)


class Decoder(nn.Module):
    """Self-attention, and behind a graph break cross-attention with its projections."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        x = attend(x, x, x)
        torch._dynamo.graph_break()
        k = self.key(y)
        return attend(self.query(x), k, k)


@torch.no_grad()
def test_a_graph_of_cross_attention_behind_one_that_took_the_mask(caplog):
    model, (x, y) = Decoder(), operands(24, 32)
    k = model.key(y)
    for _ in range(2):
        assert_same(compile_with(model)(x, y), attend(model.query(in_window(x, x, x)), k, k))
    assert not warnings(caplog)
