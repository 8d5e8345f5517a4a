"""Dead code goes after each pass that changed something; constants are there when a pass asks."""

import operator
from functools import wraps

import pytest
import torch
import torch.nn.functional as F
from normalized_calls import llama, new_gelu, rows, weight
from packed_projections import packed
from rope_graphs import Layer, inputs, plain, rotated
from torch import nn
from true_values import assert_values_are_true

from stof_compile import fold_transpose, normalize, ops_tilelang, short_gelu
from stof_compile.capture import read_capture
from stof_compile.dead_code import erase_dead, has_effect
from stof_compile.fusion.chain import find_chains
from stof_compile.fusion.rewrite import Segment, rewrite_segments
from stof_compile.graph_copy import copy_graph
from stof_compile.improve import improve
from stof_compile.node_ops import argument, operation, raw_name
from stof_compile.options import StofOptions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def unread(graph):
    """Calls nothing reads; in a graph without effects all of them are dead."""
    inside = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return [node.name for node in inside if not node.users]


def captured(fn, *args):
    """The one graph of a call, with its facts, before any pass."""
    found = []

    def record(gm, given):
        found.append((copy_graph(gm), given))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=record, dynamic=False)(*args)
        ((gm, given),) = found
        return gm, read_capture(gm, given)


def compute_in_vain(graph):
    """Give a graph a call that nothing reads, as models have them."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    last_input = first.prev
    with graph.inserting_before(first):
        vain = graph.call_method("cos", (last_input,))
    vain.meta["example_value"] = last_input.meta["example_value"]


def tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.inner(x, x, x)[0].transpose(0, 1)


def batched(q, k, v):
    q, k, v = (t.reshape(8, 7, 8) for t in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v).view(2, 4, 7, 8)


def encoder_layer():
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()


HEADS = [tensor(2, 4, 7, 8) for _ in range(3)]
NORMALISED = {
    "functionalize_fresh": (lambda x: (x + 1).masked_fill_(x > 0, 0.0), [tensor(3, 4)]),
    "expand_encoder_layers": (encoder_layer(), [tensor(2, 7, 32)]),
    "expand_multihead": (SequenceFirst().eval(), [tensor(2, 7, 32)]),
    "remove_idle_dropout": (lambda x: F.dropout(x.sin(), 0.0), [tensor(3, 4)]),
    "einsum_to_matmul": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), HEADS[:2]),
    "cancel_transposes": (lambda x: x.cos().transpose(1, 2).transpose(1, 2) * 2, [tensor(2, 3, 4)]),
    "lift_unbatched_sdpa": (
        lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]), HEADS
    ),
    "lift_batched_products": (batched, HEADS),
    "rewrite_rms_norms": (llama, [rows(), weight()]),
    "rewrite_gelus": (new_gelu, [rows()]),
    "rewrite_silus": (lambda x: x * torch.sigmoid(x), [rows()]),
}  # fmt: skip


def test_the_passes_are_all_here():
    assert list(NORMALISED) == [rewrite.__name__ for rewrite in normalize.PASSES]


@pytest.mark.parametrize("name", NORMALISED)
def test_normalisation_leaves_nothing_dead(name, monkeypatch):
    """Whether it was the pass, a pass before it, or Dynamo."""
    fn, args = NORMALISED[name]
    gm, facts = captured(fn, *args)
    compute_in_vain(gm.graph)

    def checked(rewrite):
        @wraps(rewrite)
        def run(graph, facts):
            assert unread(graph) == []
            return rewrite(graph, facts)

        return run

    monkeypatch.setattr(normalize, "PASSES", tuple(map(checked, normalize.PASSES)))
    assert normalize.normalize(gm, facts)[name] == 1
    assert unread(gm.graph) == []
    assert not any(normalize.normalize(gm, facts).values())
    assert_values_are_true(gm)
    gm.graph.lint()


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q, k, v):
    keep = torch.ones(7, 7, dtype=torch.bool).tril_()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def by_hand(q, k, v):
    mask = torch.full((7, 7), float("-inf")).triu_(1)
    return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5 + mask, -1) @ v


@pytest.mark.parametrize("attention", ["gather", "sdpa", "off"])
@pytest.mark.parametrize("fn", [sdpa, masked, by_hand])
def test_attention_leaves_nothing_dead(fn, attention):
    gm, facts = captured(fn, *HEADS)
    opts = StofOptions(attention=attention, tune_budget_s=0, strict=True)
    outcome = improve(gm, copy_graph(gm), facts, opts)
    assert unread(outcome.gm.graph) == []
    torch.testing.assert_close(outcome.gm(*HEADS)[0], fn(*HEADS))


def test_folded_transposes_leave_nothing_dead():
    def fn(x, y):
        return x @ y.cos().transpose(-2, -1).contiguous().view(2, 4, 5)

    gm, facts = captured(fn, tensor(2, 3, 4), tensor(2, 5, 4))
    compute_in_vain(gm.graph)
    assert fold_transpose.fold_transposes(gm, facts) == 1
    assert unread(gm.graph) == []


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_packs_leave_nothing_dead(layout):
    weights = [nn.Parameter(tensor(16, 16)) for _ in range(3)]

    def fn(x):
        if layout == "kn":
            q, k, v = (x.reshape(-1, 16) @ w.t() for w in weights)
        else:
            q, k, v = (F.linear(x, w) for w in weights)
        return q * k + v

    backend, _ = packed(fn, tensor(2, 5, 16))
    assert len(backend.packs) == 1
    assert unread(backend.gm.graph) == []


def test_rotations_leave_nothing_dead():
    backend = rotated(Layer(plain), *inputs())
    assert backend.sites
    assert unread(backend.gm.graph) == []


def test_segments_leave_nothing_dead_and_keep_what_writes_their_results():
    w = nn.Parameter(tensor(64, 64).half())
    gm, facts = captured(lambda x: F.gelu(F.linear(x, w)), tensor(8, 64).half())
    (chain,) = find_chains(gm, facts)
    compute_in_vain(gm.graph)

    def call(given):
        return ops_tilelang.tile_linear(
            *given, None, None, "gelu", False, [64, 64, 64, 128, 3], (8, 64)
        )

    assert rewrite_segments(gm, [(Segment(chain, 0, len(chain)), call)]) == 1
    write = next(n for n in gm.graph.nodes if n.target is torch.ops.stof.tile_linear_out.default)
    assert unread(gm.graph) == [write.name]


def test_short_gelus_leave_nothing_dead():
    with torch._subclasses.FakeTensorMode():
        value = torch.empty(3, 4, dtype=torch.float16, device="cuda")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    result = graph.call_function(F.gelu, (x,))
    vain = graph.call_method("cos", (result,))
    graph.output(result)
    for node in (x, result, vain):
        node.meta["example_value"] = value
    assert short_gelu.shorten_gelu(torch.fx.GraphModule(nn.Module(), graph)) == 1
    assert unread(graph) == []


# -- what stays -----------------------------------------------------------------------------------


@torch.library.custom_op("stof_test::tell", mutates_args=())
def _tell(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_tell.register_fake
def _(x):
    return torch.empty_like(x)


def checks(x):
    torch._check(x.shape[0] < 9)
    torch._assert_async((x < 9).all())


def in_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        x.cos()


KEPT = {
    "writes to an input": (lambda x: x.add_(1), ["add_"]),
    "writes to a view": (lambda x: x[0].zero_(), ["zero_"]),
    "an operator with out": (lambda x: torch.cos(x, out=x), ["cos"]),
    "writes by a method": (lambda x: x.view(-1).__imul__(3), ["__imul__"]),
    "shifts in place": (lambda x: operator.ilshift(x.int(), 1), ["ilshift"]),
    "scales rows of weights": (
        lambda x: F.embedding_bag(torch.zeros(1, 1, dtype=torch.long), x, max_norm=0.5),
        ["embedding_bag"],
    ),
    "draws of distributions": (lambda x: torch.binomial(x.abs(), x.sigmoid()), ["binomial"]),
    "sets an item": (lambda x: x.__setitem__(0, 1.0), ["setitem"]),
    "random numbers": (lambda x: torch.rand_like(x), ["rand_like"]),
    "dropout": (lambda x: F.dropout(x, 0.5), ["dropout"]),
    "attention with dropout": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        ["scaled_dot_product_attention"],
    ),
    "running statistics": (
        lambda x: F.batch_norm(x, x[0].clone(), x[0].abs(), training=True), ["batch_norm"],
    ),
    "checks": (checks, ["_assert_async"]),
    "modes": (in_autocast, ["_exit_autocast"]),
    "an operator of others": (lambda x: torch.ops.stof_test.tell(x), ["stof_test::tell"]),
    "nothing": (lambda x: x.cos().sin(), []),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), []),
    "memory": (lambda x: torch.empty(3), []),
    "a size": (lambda x: x.numel() + 1, []),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_effects_stay(name):
    fn, kept = KEPT[name]

    def run(x):
        fn(x)
        return x * 2

    gm, _ = captured(run, tensor(4, 5))
    erase_dead(gm.graph)
    nodes = {node.name: node for node in gm.graph.nodes}
    left = [raw_name(nodes[name]) for name in unread(gm.graph)]
    assert [name for name in left if name != "_check"] == kept  # torch 2.13 drops it by itself
    assert all(has_effect(nodes[name]) for name in unread(gm.graph))
    assert erase_dead(gm.graph) == 0


def test_transforms_stay():
    """Private functions of torch switch them on, and mark what is differentiated."""
    gm, _ = captured(lambda x: torch.func.grad(lambda y: y.cos().sum())(x), tensor(3))
    erase_dead(gm.graph)
    names = {raw_name(node) for node in gm.graph.nodes}
    assert {"_grad_increment_nesting", "_set_tensor_requires_grad"} <= names


def test_inputs_stay():
    gm, _ = captured(lambda x, y: x * 2, tensor(2), tensor(3))
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    erase_dead(gm.graph)
    assert names == [node.name for node in gm.graph.find_nodes(op="placeholder")]


# -- constants ------------------------------------------------------------------------------------


def test_a_pass_folds_what_an_earlier_one_made_constant():
    """Written in place the epsilon has two values; made functional it is a number."""

    def fn(x, w):
        eps = torch.full((), 5e-7)
        eps.mul_(2.0)
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    gm, facts = captured(fn, rows(), weight())
    counts = normalize.normalize(gm, facts)
    assert counts["functionalize_fresh"] == counts["rewrite_rms_norms"] == 1
    (norm,) = (node for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
    assert operation(norm) == "rms_norm"
    assert argument(norm, 3, "eps") == pytest.approx(1e-6)


@pytest.mark.parametrize("fn", [masked, by_hand])
def test_attention_folds_the_mask_that_normalisation_made_constant(fn):
    gm, facts = captured(fn, *HEADS)
    opts = StofOptions(attention="gather", tune_budget_s=0, strict=True)
    outcome = improve(gm, copy_graph(gm), facts, opts)
    (site,) = outcome.record.sites
    assert site.kernel == "gather"
    left = {operation(node) for node in outcome.gm.graph.nodes}
    assert left.isdisjoint({"full", "ones", "tril", "triu", "softmax"})
