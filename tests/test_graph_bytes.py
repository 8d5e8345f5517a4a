"""A captured graph as bytes: the same graph again, or a reason."""

import enum
import operator

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from stof_compile.graph_bytes import UnfitGraphError, from_bytes, to_bytes
from stof_compile.graph_copy import copy_graph


class Layer(nn.Module):
    """Weights, a buffer, a slice, keywords and a graph whose result is no tensor alone."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 12), nn.LayerNorm(12)
        self.register_buffer("keep", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, x, scale):
        y = self.norm(self.first(x[:, 1:]).view(2, 6, 3, 4).transpose(1, 2).reshape(2, 6, 12))
        q = y.view(2, 6, 3, 4).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.keep, scale=0.3)
        return out * scale, y.to(torch.float16)


def captured(model, *inputs, **options):
    """Graph and inputs as a back end gets them."""
    seen = []

    def backend(gm, given):
        seen.append((copy_graph(gm), list(given)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, **options)(*inputs)
    return seen[0]


def test_the_same_graph_comes_back(fresh_dynamo):
    gm, inputs = captured(Layer().eval(), torch.randn(2, 7, 8), 2.0)
    data = to_bytes(gm, inputs)
    again, fakes, mode = from_bytes(data)
    assert again.code == gm.code
    for before, after in zip(gm.graph.nodes, again.graph.nodes, strict=True):
        assert (before.op, before.name, before.target) == (after.op, after.name, after.target)
        assert getattr(before, "_dynamo_source", None) == getattr(after, "_dynamo_source", None)
    for before, after in zip(inputs, fakes, strict=True):
        if isinstance(before, torch.Tensor):
            assert after.fake_mode is mode
            assert (before.shape, before.stride()) == (after.shape, after.stride())
            assert (before.dtype, before.requires_grad) == (after.dtype, after.requires_grad)
            assert isinstance(before, nn.Parameter) == isinstance(after, nn.Parameter)
    weight = torch.randn(300, 300)
    assert len(data) < 100_000 and weight.numpy().tobytes() not in data


def test_layouts_and_offsets_come_back(fresh_dynamo):
    whole = torch.randn(9, 40)
    gm, inputs = captured(lambda x, y: x + y, whole[1:, 4:12].t(), torch.zeros(1).expand(8, 8))
    _, fakes, _ = from_bytes(to_bytes(gm, inputs))
    layouts = [(x.stride(), x.storage_offset()) for x in inputs]
    assert [(x.stride(), x.storage_offset()) for x in fakes] == layouts
    assert layouts[0] == ((1, 40), 44)


def test_operators_and_buffers_of_ours_come_back():
    graph = Graph()
    x = graph.placeholder("x")
    mask = graph.get_attr("mask_array")
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, mask), {"alpha": 2})
    z = graph.call_function(torch.ops.aten.mul, (y, y))
    graph.output((graph.call_function(operator.getitem, (z, slice(0, None, 2))),))
    root = nn.Module()
    root.register_buffer("mask_array", torch.ones(4))
    again, (fake,), _ = from_bytes(to_bytes(GraphModule(root, graph), [torch.ones(4)]))
    targets = [node.target for node in again.graph.nodes]
    assert torch.ops.aten.add.Tensor in targets and torch.ops.aten.mul in targets
    again.mask_array = torch.ones(4)
    (out,) = again(torch.ones(4))
    assert out.tolist() == [9.0, 9.0] and fake.shape == (4,)


class Own(torch.Tensor):
    """A subclass that no other process knows."""


def own_function(x):
    return x


def with_call(target, *arguments):
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(target, (x, *arguments)),))
    return GraphModule(nn.Module(), graph)


@torch.library.custom_op("graph_bytes::own", mutates_args=())
def own_operator(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("gm", "inputs", "reason"),
    [
        (with_call(own_function), [torch.ones(2)], r"calls a function of .*test_graph_bytes"),
        (with_call(torch.ops.graph_bytes.own.default), [torch.ones(2)], "graph_bytes::own"),
        (with_call(torch.add, Kind.ONE), [torch.ones(2)], "an argument is a Kind"),
        (with_call(torch.neg), [torch.ones(2).as_subclass(Own)], "input 0 is a Own"),
        (with_call(torch.neg), [torch.ones(2).to_sparse()], "input 0 is not strided"),
        (with_call(torch.neg), [torch.ones(2, dtype=torch.complex64).conj()], "conjugates"),
    ],
    ids=["function", "operator", "argument", "subclass", "sparse", "conj"],
)
def test_what_needs_the_users_program_is_refused(gm, inputs, reason):
    with pytest.raises(UnfitGraphError, match=reason):
        to_bytes(gm, inputs)


def test_sources_that_name_the_users_classes_are_refused():
    """As the key of a dict can: reading it would import a module of the user's, maybe a script."""
    gm = with_call(torch.neg)
    next(iter(gm.graph.nodes))._dynamo_source = Kind.ONE
    with pytest.raises(UnfitGraphError, match=r"it refers to .*Kind"):
        to_bytes(gm, [torch.ones(2)])


def test_symbolic_sizes_are_refused(fresh_dynamo):
    gm, inputs = captured(lambda x: x * x.shape[0], torch.randn(5, 4), dynamic=True)
    with pytest.raises(UnfitGraphError, match=r"SymInt|symbolic"):
        to_bytes(gm, inputs)


def test_submodules_and_other_attributes_are_refused():
    called = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UnfitGraphError, match="calls a module"):
        to_bytes(called, [torch.ones(2)])
    graph = Graph()
    graph.output((graph.get_attr("body"),))
    root = nn.Module()
    root.body = nn.Linear(2, 2)
    with pytest.raises(UnfitGraphError, match="body is a Linear"):
        to_bytes(GraphModule(root, graph), [])
