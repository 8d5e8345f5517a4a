"""Recipes read from graphs: what they mean, and what has none."""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close

from stof_compile.fusion.read_recipe import read_recipe
from stof_compile.fusion.recipe import Recipe, run_recipe


def recipe_of(capture, fn, *args):
    graph = capture(fn, *args)
    chain = max(graph.chains, key=len)
    return read_recipe(graph.gm, chain, 0, len(chain)), graph


W, B, X = torch.randn(8, 6), torch.randn(8), torch.randn(2, 5, 6)
KN = W.t().contiguous()
SPELLINGS = {
    "linear": lambda x: F.gelu(F.linear(x, W, B)),
    "conv1d": lambda x: torch.addmm(B, x.view(-1, 6), KN).view(2, 5, 8).relu(),
    "matmul": lambda x: (x @ KN + B).sigmoid(),
    "number first": lambda x: 1.5 - F.silu(F.linear(x, W)) * 2.0,
    "norm": lambda x: F.layer_norm(F.linear(x, W, B) + B, (8,), B, None, 1e-3),
    "not in place": lambda x: F.silu(F.linear(x, W, B), inplace=False) * 2.0,
    "module": lambda x: torch.nn.ReLU()(F.linear(x, W, B)) * 2.0,
    "rms": lambda x: F.rms_norm(F.linear(x, W), (8,), B),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_recipe_computes_what_the_graph_does(capture, name):
    fn = SPELLINGS[name]
    recipe, graph = recipe_of(capture, fn, X)
    assert isinstance(recipe, Recipe), recipe
    operands = []
    for node_name in [o for c in [max(graph.chains, key=len)] for o in _outside(c)]:
        node = graph.node(node_name)
        operands.append(_value(graph, node))
    assert_close(run_recipe(recipe, operands, torch.float64), fn(X).double(), torch.float32)


def _outside(chain):
    from stof_compile.fusion.read_recipe import segment_operands

    return segment_operands(chain, 0, len(chain))


def _value(graph, node):
    """Run the graph up to a node."""
    values = {}
    tensors = {id(t): t for t in (W, B, X, KN)}
    for n in graph.gm.graph.nodes:
        if n.op == "placeholder":
            shape = tuple(n.meta["example_value"].shape)
            values[n] = next(t for t in tensors.values() if tuple(t.shape) == shape)
        elif n.op == "call_function":
            args = torch.fx.node.map_arg(n.args, lambda a: values[a])
            values[n] = n.target(*args, **torch.fx.node.map_arg(n.kwargs, lambda a: values[a]))
        elif n.op == "call_method":
            args = torch.fx.node.map_arg(n.args, lambda a: values[a])
            values[n] = getattr(args[0], n.target)(*args[1:])
        if n is node:
            return values[n]
    raise AssertionError(node)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_rms_norm_without_eps_has_that_of_the_dtype_it_is_computed_in(capture, dtype):
    x = (torch.randn(3, 16) * 0.01).to(dtype)
    recipe, _ = recipe_of(capture, lambda t: F.rms_norm(t, (16,)) * 2.0, x)
    assert_close(run_recipe(recipe, [x]), F.rms_norm(x, (16,)).double() * 2.0, dtype)


def test_an_activation_in_place_by_position_is_no_step(capture):
    def fn(x):
        h = x * 2.0
        y = F.relu(h, True)
        return h + y

    graph = capture(fn, X)
    kinds = [op.kind.name for chain in graph.chains for op in chain.ops]
    assert "relu" not in kinds or len(max(graph.chains, key=len)) < 3


def test_a_residual_that_broadcasts_the_product_is_no_line(capture):
    wide = torch.randn(4, 1, 5, 8)
    recipe, _ = recipe_of(capture, lambda x: F.linear(x, W) + wide, X)
    assert isinstance(recipe, str) or recipe.spine() is None


def test_keys_tell_tf32_apart(capture, monkeypatch):
    recipe, _ = recipe_of(capture, SPELLINGS["linear"], X)
    exact = Recipe(recipe.operands, recipe.steps).key
    monkeypatch.setattr("stof_compile.fusion.recipe.fp32_products", lambda: "tf32")
    assert Recipe(recipe.operands, recipe.steps).key != exact
