"""Kinds of nodes, in every spelling that reaches a graph."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from stof_compile.fusion.op_kind import op_kind

X = torch.empty(2, 5, 8)
W = torch.empty(8, 8)
V = torch.empty(8)
Q = torch.empty(2, 4, 5, 8)


def node_of(target, *args, **kwargs):
    """A node with its example value; tensors among the arguments become placeholders."""
    graph = Graph()

    def lift(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["example_value"] = value
        return node

    call = torch.utils._pytree.tree_map(lift, (args, kwargs))
    if isinstance(target, str):
        node = graph.call_method(target, *call)
        node.meta["example_value"] = getattr(args[0].clone(), target)(*args[1:], **kwargs)
    else:
        node = graph.call_function(target, *call)
        node.meta["example_value"] = target(*args, **kwargs)
    return node


@pytest.mark.parametrize(
    ("call", "name", "family", "rule"),
    [
        ((F.linear, X, W, V), "linear", "contraction", "contraction"),
        ((torch.matmul, X, W), "matmul", "contraction", "contraction"),
        ((operator.matmul, X, W), "matmul", "contraction", "contraction"),
        (("matmul", X, W), "matmul", "contraction", "contraction"),
        ((torch.mm, W, W), "matmul", "contraction", "contraction"),
        ((torch.bmm, X, X.mT), "bmm", "contraction", "contraction"),
        ((torch.addmm, V, W, W), "addmm", "contraction", "contraction"),
        ((torch.baddbmm, X @ X.mT, X, X.mT), "baddbmm", "contraction", "contraction"),
        ((F.conv1d, X, torch.empty(3, 5, 1)), "conv1d", "convolution", "contraction"),
        ((F.scaled_dot_product_attention, Q, Q, Q), "attention", "attention", "contraction"),
        ((operator.add, X, V), "bias_add", "bias", "elementwise"),
        ((operator.add, V, X), "bias_add", "bias", "elementwise"),
        (("add", X, X), "residual_add", "residual", "elementwise"),
        ((operator.add, X, 1e-6), "add", "elementwise", "elementwise"),
        ((operator.add, X, torch.empty(2, 1, 8)), "add", "elementwise", "elementwise"),
        ((operator.mul, X, 2.0), "mul", "scale", "elementwise"),
        ((operator.mul, 2.0, X), "mul", "scale", "elementwise"),
        ((torch.div, X, 8), "div", "scale", "elementwise"),
        ((operator.truediv, 1.0, X), "div", "elementwise", "elementwise"),
        ((operator.mul, X, X), "mul", "elementwise", "elementwise"),
        ((F.gelu, X), "gelu", "activation", "elementwise"),
        ((F.silu, X), "silu", "activation", "elementwise"),
        (("relu", X), "relu", "activation", "elementwise"),
        ((torch.sigmoid, X), "sigmoid", "activation", "elementwise"),
        ((F.glu, X), "glu", "activation", "other"),
        ((torch.rsqrt, X), "rsqrt", "elementwise", "elementwise"),
        ((operator.neg, X), "neg", "elementwise", "elementwise"),
        ((torch.where, X > 0, X, X), "where", "elementwise", "elementwise"),
        (("float", X), "cast", "cast", "elementwise"),
        (("to", X, torch.bfloat16), "cast", "cast", "elementwise"),
        ((F.layer_norm, X, (8,)), "layer_norm", "norm", "row_reduction"),
        ((F.rms_norm, X, (8,)), "rms_norm", "norm", "row_reduction"),
        ((F.group_norm, X, 5), "group_norm", "norm", "other"),
        ((F.softmax, X, -1), "softmax", "softmax", "row_reduction"),
        ((torch.softmax, X, 1), "softmax", "softmax", "other"),
        (("mean", X, -1, True), "mean", "reduction", "row_reduction"),
        ((torch.sum, X, (1, 2)), "sum", "reduction", "row_reduction"),
        ((torch.sum, X, 0), "sum", "reduction", "other"),
        ((torch.sum, X), "sum", "reduction", "other"),
        (("view", X, 10, 8), "reshape", "view", "view"),
        (("unsqueeze", X, 0), "reshape", "view", "view"),
        (("transpose", X, 1, 2), "permute", "view", "view"),
        (("permute", X, 0, 2, 1), "permute", "view", "view"),
        ((getattr, X, "mT"), "permute", "view", "view"),
        (("expand", V, 2, 8), "expand", "view", "view"),
        (("contiguous", X), "contiguous", "view", "view"),
        ((operator.getitem, X, (..., slice(4, None))), "slice", "view", "view"),
        ((operator.getitem, X, torch.tensor([1])), "index", "movement", "other"),
        ((torch.cat, (X, X), -1), "cat", "movement", "other"),
        ((F.embedding, torch.tensor([1]), W), "embedding", "embedding", "other"),
    ],
)
def test_kinds(call, name, family, rule):
    kind = op_kind(node_of(*call))
    assert kind is not None
    assert (kind.name, kind.family, kind.shape_rule) == (name, family, rule)
    assert kind.compute_intensive == (family in ("attention", "contraction", "convolution"))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(("add_", X, X), id="write in place"),
        pytest.param((operator.iadd, X, X), id="in-place operator"),
        pytest.param((operator.getitem, (X, X), 0), id="item of a tuple"),
        pytest.param(("split", X, 2, 1), id="tuple"),
        pytest.param((getattr, X, "shape"), id="shape"),
        pytest.param(("size", X, 0), id="size"),
        pytest.param((torch._assert, True, "text"), id="assert"),
        pytest.param((F.dropout, X, 0.1), id="dropout"),
        pytest.param((torch.rand_like, X), id="random"),
        pytest.param(("detach", X), id="detach"),
        pytest.param((torch.cumsum, X, 0), id="unknown"),
        pytest.param((F.batch_norm, X, X[0, :, 0], X[0, :, 0], None, None, True), id="training"),
    ],
)
def test_no_op_of_a_chain(call):
    assert op_kind(node_of(*call)) is None


def test_limited_embedding_writes_its_weight():
    node = node_of(F.embedding, torch.tensor([1]), W)
    node.kwargs = {"max_norm": 1.0}
    assert op_kind(node) is None


def test_in_place_activation_is_a_write():
    assert op_kind(node_of(F.relu, X.clone(), inplace=True)) is None


def test_markers_and_placeholders_have_no_kind():
    graph = Graph()
    marker = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu",))
    assert op_kind(marker) is None and op_kind(graph.placeholder("x")) is None


def test_operators_of_ours_are_attention():
    from stof_compile import ops  # noqa: F401

    graph = Graph()
    for name in ("attention_rule", "attention_block", "attention_row", "attention_gather"):
        kind = op_kind(graph.call_function(getattr(torch.ops.stof, name).default))
        assert kind is not None and kind.name == "attention" and kind.compute_intensive
    assert op_kind(graph.call_function(torch.ops.stof.attention_backward.default)) is None
    assert op_kind(graph.call_function(torch.ops.stof.dense_mask.default)) is None
