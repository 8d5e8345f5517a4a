"""Refused segments, each with its reason."""

import dataclasses

import pytest
import torch

from stof_compile.fusion.legality import segment_refusal


def refusal(graph, chain, start, stop):
    return segment_refusal(chain, start, stop, graph.gm, graph.facts)


def whole(graph, index=-1):
    chain = graph.chains[index]
    return refusal(graph, chain, 0, len(chain))


def test_feed_forward_block_of_bert(bert):
    graph = bert(1)
    chain = graph.chains[1]  # linear gelu linear residual_add layer_norm
    for start in range(5):
        for stop in range(start + 1, 6):
            assert refusal(graph, chain, start, stop) is None


def test_projections_cannot_be_joined(bert):
    graph = bert(1)
    chain = graph.chain_with("attention")
    names = [op.kind.name for op in chain.ops]
    assert "compute-intensive ops" in refusal(graph, chain, 0, len(chain))
    assert "read by" in refusal(graph, chain, 0, 4)  # q and k: two results
    at = names.index("attention")
    assert refusal(graph, chain, at, at + 4) is None  # attention, two views, projection
    assert "3 compute-intensive" in refusal(graph, chain, at - 3, at + 4)


def test_one_op_needs_fixed_sizes_too(capture):
    def fn(x):
        return torch.relu(x.cos())

    graph = capture(fn, torch.randn(4, 6), dynamic=True)
    assert "symbolic size" in refusal(graph, graph.chains[0], 0, 1)
    assert "symbolic size" in whole(graph)
    fixed = capture(fn, torch.randn(4, 6))
    assert refusal(fixed, fixed.chains[0], 0, 1) is None


def test_gated_block_needs_three_products(llama):
    graph = llama(1)
    chain = graph.chains[-1]  # linear silu linear mul linear residual_add
    assert "3 compute-intensive" in refusal(graph, chain, 0, 5)
    assert refusal(graph, chain, 0, 4) is None
    assert refusal(graph, chain, 3, 6) is None
    assert "'silu' inside is also read by" in refusal(graph, chain, 0, 3)


def test_norm_written_out_is_legal(llama):
    graph = llama(1)
    assert whole(graph, 0) is None


def test_write_into_a_source_in_between(capture):
    def fn(x, y):
        z = torch.exp(x + y)
        y.mul_(2)
        return torch.sin(z)

    graph = capture(fn, torch.randn(3, 5), torch.randn(3, 5))
    chain = graph.chain_with("sin")
    assert "'mul_' writes the memory of 'l_y_' in between" in refusal(graph, chain, 0, 3)
    assert refusal(graph, chain, 0, 2) is None
    assert refusal(graph, chain, 1, 3) is None  # reads y no more


def test_write_elsewhere_does_not_matter(capture):
    def fn(x, y):
        z = torch.exp(x)
        y.mul_(2)
        return torch.sin(z)

    graph = capture(fn, torch.randn(3, 5), torch.randn(3, 5))
    assert refusal(graph, graph.chain_with("sin"), 0, 2) is None


def test_results_that_share_memory_with_the_outside(capture):
    def views(x):
        return x.transpose(0, 1).float().unsqueeze(1)  # the cast changes nothing

    def copies(x):
        return x.transpose(0, 1).double().unsqueeze(1)

    assert "may share memory with 'l_x_'" in whole(capture(views, torch.randn(3, 5)))
    torch._dynamo.reset()
    assert whole(capture(copies, torch.randn(3, 5))) is None


def test_autocast_border(capture):
    def fn(x):
        y = torch.exp(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = y @ y
        return torch.sin(z)

    with torch.no_grad():
        graph = capture(fn, torch.randn(3, 3))
    chain = graph.chain_with("sin")
    border = f"region begins or ends from '{chain.ops[0].name}' to '{chain.ops[1].name}'"
    assert border in refusal(graph, chain, 0, 2)


def test_region_around_other_nodes_does_not_matter(capture):
    def fn(x, w):
        y = torch.exp(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = w @ w
        return torch.sin(y), z

    with torch.no_grad():
        graph = capture(fn, torch.randn(3, 3), torch.randn(3, 3))
    assert refusal(graph, graph.chain_with("sin"), 0, 2) is None


def test_grad_mode_border(capture):
    def fn(x):
        with torch.no_grad():
            y = torch.exp(x)
        return torch.sin(y)

    graph = capture(fn, torch.randn(3, 3, requires_grad=True))
    assert "grad-mode" in whole(graph)


@pytest.mark.parametrize("written", ["x", "y"])
def test_mutating_operator_in_between(capture, written):
    """Its schema tells what it writes."""
    with torch.library._scoped_library("stof_test_fusion", "FRAGMENT") as library:
        library.define("write(Tensor(a!) x) -> ()")
        library.impl("write", lambda x: None, "CompositeExplicitAutograd")
        library.impl("write", lambda x: None, "Meta")

        def fn(x, y):
            z = torch.exp(x)
            torch.ops.stof_test_fusion.write({"x": x, "y": y}[written])
            return torch.sin(z)

        reason = whole(capture(fn, torch.randn(3, 5), torch.randn(3, 5)))
        assert reason is None if written == "y" else "writes the memory of" in reason


def test_device_change(capture):
    def fn(x):
        return torch.exp(x).to("meta").cos()

    graph = capture(fn, torch.randn(3, 5))
    assert "several devices" in whole(graph)


def test_tensor_subclass(capture):
    def fn(x):
        return torch.exp(x).cos()

    graph = capture(fn, torch.randn(3, 5))
    graph.facts = dataclasses.replace(graph.facts, subclass_inputs=("l_x_",))
    assert "tensor subclass" in whole(graph)


def test_range(bert):
    graph = bert(1)
    with pytest.raises(ValueError, match="no segment 2:9 in a chain of 5 ops"):
        refusal(graph, graph.chains[1], 2, 9)
