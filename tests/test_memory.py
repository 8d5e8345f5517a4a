"""Writes seen under another name: views of views, inputs that overlap, operators that write.

Everything is compared with eager mode, what it writes to as well.
"""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import stof_compile
from stof_compile.capture import read_capture
from stof_compile.normalize import normalize

B, H, S, D = 2, 4, 64, 32
OPTIONS = {"tune_budget_s": 0}
GATHER = OPTIONS | {"attention": "gather"}


def sdpa(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def eager(q, k, v, bias):
    return torch.softmax(q @ k.mT * D**-0.5 + bias, -1) @ v


def check(call, *given, options=OPTIONS, make=None):
    """``call`` on operands of its own, compiled and not; ``make`` builds operands that overlap."""
    torch._dynamo.reset()
    make = make or (lambda: [t.clone() for t in given])
    theirs, mine = make(), make()
    wanted = call(*theirs)
    found = torch.compile(call, backend="stof", options=options)(*mine)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


# -- in-place operations on private tensors --------------------------------------------------------


def view_of_a_view(x):
    h = x * 2
    seen = h.view(4, 16, 8, 4).transpose(1, 2)
    h *= 3
    return seen + 0


def chunks(x):
    h = x * 2
    gate, up = h.chunk(2, -1)
    h.clamp_(max=0.7)
    return F.silu(gate) * up


def heads(x):
    qkv = x * 1.0
    q, k, v = qkv.view(4, 1, 16, 32).split([8, 8, 16], -1)
    qkv.clamp_(-0.5, 0.5)
    return sdpa(q, k, v[..., :8])


def result_of_a_write(x):
    t = x * 2
    first = t[:, :5].add_(1)
    t.mul_(2)
    return first


def write_through_an_older_view(x):
    t = x * 2
    view = t[0].t()
    t.mul_(2)
    view.add_(1)
    return t + 1


def transposed_in_place(x):
    y = (x + 1).transpose(0, 1)
    y.transpose_(0, 1)
    return y * 2


def out_of_an_addition(x):
    t = x * 2
    r = torch.add(x, x, out=t)
    t.mul_(3)
    return r + 1


def unnamed_view(make):
    """A view made by a function whose name does not tell."""

    def call(x):
        t = x * 2
        seen = make(t)
        t.mul_(3)
        return seen + 1

    return call


UNNAMED = {
    "atleast": torch.atleast_2d,
    "broadcast": lambda t: torch.broadcast_tensors(t, t[:1])[0],
    "einsum": lambda t: torch.einsum("bij->bji", t),
    "dropout2d": lambda t: F.dropout2d(t[None], 0.5, False)[0],
    "sizes": lambda t: t.split_with_sizes([16, 16], -1)[1],
    "aten": lambda t: torch.ops.aten.slice(t, 1, 2, 9),
    "conj": torch.conj,
}
PRIVATE = {
    f.__name__: f
    for f in (view_of_a_view, chunks, heads, result_of_a_write, write_through_an_older_view,
              transposed_in_place, out_of_an_addition)
} | {name: unnamed_view(make) for name, make in UNNAMED.items()}  # fmt: skip


@pytest.mark.parametrize("call", PRIVATE.values(), ids=PRIVATE)
def test_writes_seen_through_views(call):
    check(call, torch.randn(4, 16, 32))


def test_an_activation_behind_idle_dropout():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.drop, self.act = nn.Dropout2d(), nn.ReLU(inplace=True)

        def forward(self, x):
            h = self.conv(x)
            return self.act(self.drop(h)) + h

    with torch.no_grad():
        check(Block().eval(), torch.randn(2, 3, 8, 8))


def test_a_norm_whose_weight_is_written_before_the_cast():
    def call(x, weight):
        wide = x.float()
        scaled = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))
        weight.mul_(3)
        return scaled.to(torch.float64)

    with torch.no_grad():
        check(call, torch.randn(4, 16, 32, dtype=torch.float64), torch.randn(32))


# -- masks and operands ----------------------------------------------------------------------------


@torch._dynamo.allow_in_graph
def foreign_write(b, c):
    b.add_(c)
    return b.sum()


@torch._dynamo.allow_in_graph
def foreign_read(b, c):
    return (b + c).sum()


def written_in_checkpoint(b, c):
    def body(b, c):
        b.add_(c)
        return b.sum()

    return checkpoint(body, b, c, use_reentrant=False)


def written_in_a_branch(b, c):
    def raised(b, c):
        b.add_(c)
        return b.sum()

    return torch.cond(c.sum() > -1e9, raised, raised, (b, c))


WRITERS = {
    "foreign": foreign_write,
    "checkpoint": written_in_checkpoint,
    "cond": written_in_a_branch,
    "broadcast": lambda b, c: torch.broadcast_tensors(b, c)[0].add_(c).sum(),
    "atleast": lambda b, c: torch.atleast_2d(b).add_(3 * c).sum(),
    "out": lambda b, c: torch.add(b, c, out=b).sum(),
    "statistics": lambda b, c: F.batch_norm(
        c[0].reshape(-1, S), b[0, 0, 0], b[1, 0, 0].abs_(), training=True
    ).sum(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_masks_computed_before_a_hidden_write(write):
    if write is written_in_a_branch and TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("Dynamo of torch 2.11 refuses torch.cond with a branch that writes")

    def call(q, k, v, b, c):
        mask = b * 2 + c
        added = write(b, c)
        return sdpa(q, k, v, mask) + added

    with torch.no_grad():
        operands = torch.randn(3, B, H, S, D).unbind()
        check(call, *operands, *torch.randn(2, B, 1, S, S), options=GATHER)


def test_the_result_of_out_is_that_memory():
    def call(q, k, v, b, c):
        into = torch.empty(B, 1, S, S)
        mask = torch.add(b, c, out=into) * 2
        into.zero_()
        return sdpa(q, k, v, mask)

    check(call, *torch.randn(3, B, H, S, D), *torch.randn(2, B, 1, S, S), options=GATHER)


def test_inputs_that_overlap():
    q, k, v = torch.randn(3, B, H, S, D)
    table = torch.randn(B, 1, S, S)

    def make():
        own = table.clone()
        return [q, k, v, own, own[:, :, :8]]

    def call(q, k, v, bias, rows):
        mask = bias + 1.5 * bias.mT
        rows.add_(3 * torch.arange(S))
        return sdpa(q, k, v, mask)

    check(call, make=make, options=GATHER)


def test_buffers_that_overlap():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(S, S, dtype=torch.bool))
            self.register_buffer("rows", self.mask[5:20])

        def forward(self, q, k, v):
            self.rows.logical_not_()
            self.rows[:, 0] = True
            return sdpa(q, k, v, self.mask)

    operands = torch.randn(3, B, H, S, D).unbind()
    torch._dynamo.reset()
    wanted = Attend()(*operands)
    found = torch.compile(Attend(), backend="stof", options=GATHER)(*operands)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@torch._dynamo.allow_in_graph
def foreign_negation(keep):
    return keep.logical_not_().sum()


@pytest.mark.parametrize(
    ("function", "status"),
    [(lambda keep: foreign_read(keep, keep), "rewritten"), (foreign_negation, "kept")],
)
def test_a_foreign_function_writes_or_reads(function, status):
    """A mask that was only read is padding as before."""

    def call(q, k, v, keep):
        read = function(keep)
        return sdpa(q, k, v, keep[:, None, None, :]) + read

    torch._dynamo.reset()
    keep = torch.ones(B, S, dtype=torch.bool)
    keep[:, 50:] = False
    operands = torch.randn(3, B, H, S, D).unbind()
    compiled = torch.compile(call, backend="stof", options=GATHER)
    with torch.no_grad():
        found, wanted = (f(*operands, keep.clone()) for f in (compiled, call))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    (site,) = stof_compile.explain(compiled).graphs[0].sites
    assert site.status == status


# -- what else the reviews found -------------------------------------------------------------------


@torch._dynamo.allow_in_graph
def foreign_nonzero(x):
    return torch.nonzero(x)


def test_a_foreign_function_with_a_size_that_depends_on_data():
    def call(x):
        h = x * 2
        h.clamp_(min=0.0)
        return foreign_nonzero(h), h

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(call, torch.randn(8, 8))


def test_memory_that_is_set():
    def call(x):
        h, g = x * 2, x * 3
        h.set_(g)
        g.add_(1)
        return h + 1

    check(call, torch.randn(4, 8))


def test_a_mask_of_running_statistics():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(S))
            self.register_buffer("variance", torch.ones(S))

        def forward(self, x, q, k, v):
            aten = torch.ops.aten.batch_norm.default
            x = aten(x, None, None, self.mean, self.variance, True, 0.5, 1e-5, False)
            return sdpa(q, k, v, (self.mean > 0.1)[None]) + x.sum()

    torch._dynamo.reset()
    models = Attend(), Attend()
    call = torch.compile(models[0], backend="stof", options=GATHER)
    operands = torch.randn(3, B, H, S, D).unbind()
    for _ in range(3):
        x = torch.randn(B * H, S) + 0.2
        torch.testing.assert_close(call(x, *operands), models[1](x, *operands))


def test_many_writes_to_one_tensor_take_no_time():
    def call(x):
        h = x * 2
        for _ in range(200):
            h += x
        return h

    found = []

    def backend(gm, inputs):
        facts = read_capture(gm, inputs)
        start = time.perf_counter()
        found.append((normalize(gm, facts)["functionalize_fresh"], time.perf_counter() - start))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(call, backend=backend)(torch.randn(4))
    ((count, seconds),) = found
    assert count == 200 and seconds < 1.5  # 0.1 here; 2.6 where every write looked at all others


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_attention_that_torch_func_differentiates(transform):
    q, k, v = torch.randn(3, 1, H, 16, D)

    def call(bias):
        return transform(lambda bias: eager(q, k, v, bias).sum())(bias)

    check(call, torch.randn(16, 16), options=GATHER)


# -- other crashes and masks -----------------------------------------------------------------------


def test_values_computed_after_the_softmax_under_autocast():
    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            weights = torch.softmax(q @ k.mT * 0.2, -1)
            values = v * 2.5 + 1
            return weights @ values

    operands = torch.randn(3, B, H, S, D).unbind()
    torch._dynamo.reset()
    found = torch.compile(call, backend="stof", options=GATHER)(*operands)
    torch.testing.assert_close(found, call(*operands), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_integers_added_to_scores(kind):
    def call(q, k, v):
        near = (torch.arange(S)[:, None] - torch.arange(S)).abs() < 9
        return torch.softmax(q @ k.mT * D**-0.5 + near.to(kind), -1) @ v

    check(call, *torch.randn(3, B, H, S, D), options=GATHER)


def test_rows_emptied_by_two_masks_of_which_one_is_too_large(monkeypatch):
    monkeypatch.setattr("stof_compile.static_values.ELEMENT_CAP", 100)

    def call(q, k, v):
        i = torch.arange(S)
        below = torch.where(i[:, None] >= i, 0.0, -1e9)
        return sdpa(q, k, v, below + torch.where(i > 3, 0.0, -1e9))

    check(call, *torch.randn(3, B, H, S, D), options=GATHER)
