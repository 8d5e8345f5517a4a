"""Chains of layer stacks: equal layers give equal chains, and each op is in one."""

import torch

from stof_compile.fusion.chain import find_chains
from stof_compile.fusion.op_kind import op_kind
from stof_compile.fusion.segment_key import segment_key

HEAD = ["linear", "reshape", "permute"]
NORM = ["rms_norm"]
ROTATE = ["slice", "neg", "slice", "cat", "mul", "mul", "residual_add"]
BERT = [
    [*HEAD * 3, "attention", "permute", "reshape", "linear", "residual_add", "layer_norm"],
    ["linear", "gelu", "linear", "residual_add", "layer_norm"],
]
LLAMA = [
    NORM,
    [*HEAD * 3, *ROTATE * 2, "attention", "permute", "reshape", "linear", "residual_add"],
    NORM,
    ["linear", "silu", "linear", "mul", "linear", "residual_add"],
]


def kinds(chain):
    return [op.kind.name for op in chain.ops]


def test_bert_layers(bert):
    chains = bert(3).chains
    assert [sorted(kinds(c)) for c in chains] == [sorted(c) for c in BERT] * 3
    assert kinds(chains[1]) == BERT[1]
    assert len({c.signature for c in chains}) == 2


def test_llama_layers(llama):
    chains = llama(3).chains
    assert [sorted(kinds(c)) for c in chains] == [sorted(c) for c in LLAMA] * 3
    assert len({c.signature for c in chains}) == 3  # both norms are alike


def test_twelve_equal_layers_are_one_chain(bert):
    chains = bert(12).chains
    assert len(chains) == 24
    for like in (0, 1):
        assert len({segment_key(c, 0, len(c)) for c in chains[like::2]}) == 1


def test_each_op_is_in_one_chain(llama):
    graph = llama(2)
    listed = [name for chain in graph.chains for op in chain.ops for name in op.nodes]
    wanted = [node.name for node in graph.gm.graph.nodes if op_kind(node) is not None]
    assert sorted(listed) == sorted(wanted) and len(set(listed)) == len(listed)


def test_order_and_positions(llama):
    graph = llama(2)
    place = {node.name: i for i, node in enumerate(graph.gm.graph.nodes)}
    for chain in graph.chains:
        assert [op.name for op in chain.ops] == sorted((op.name for op in chain.ops), key=place.get)
        for i, op in enumerate(chain.ops):
            for operand in op.operands:
                assert operand.position is None or operand.position < i
                if operand.position is not None:
                    assert chain.ops[operand.position].name == operand.name


def test_only_the_last_value_is_read_outside(bert, llama):
    for graph in (bert(2), llama(2)):
        for chain in graph.chains:
            inside = {name for op in chain.ops for name in op.nodes}
            for op in chain.ops[:-1]:
                assert {user.name for user in graph.node(op.name).users} <= inside


def test_shapes_and_layouts(bert):
    chain = bert(1).chains[1]
    assert [op.value.shape for op in chain.ops] == [(2, 33, 128)] * 2 + [(2, 33, 32)] * 3
    assert {(op.value.dtype, op.value.layout) for op in chain.ops} == {
        ("torch.float32", "contiguous")
    }


def test_a_value_the_caller_gets_ends_its_chain(capture):
    def fn(x):
        y = torch.relu(x)
        return y, torch.exp(y)

    assert [kinds(c) for c in capture(fn, torch.randn(3, 5)).chains] == [["relu"], ["exp"]]


def test_ways_meet_before_a_compute_intensive_op_only(capture):
    def meets(x):
        y = torch.relu(x)
        return torch.exp(y) * torch.sin(y)

    def passes(x):
        y = torch.relu(x)
        return (y @ y.mT) * torch.sin(y)

    assert len(capture(meets, torch.randn(3, 3)).chains) == 1
    torch._dynamo.reset()
    assert kinds(capture(passes, torch.randn(3, 3)).chains[0]) == ["relu"]


def test_writes_and_tuples_split_chains(capture):
    def fn(x):
        y = torch.exp(x)
        first, second = y.split(2, dim=1)
        return torch.sin(first) + torch.cos(second)

    assert [kinds(c) for c in capture(fn, torch.randn(3, 4)).chains] == [
        ["exp"],
        ["sin", "cos", "residual_add"],
    ]


def test_constants_are_in_no_chain(capture):
    def fn(x):
        return x + torch.arange(5).float().mul(2.0)

    assert [kinds(c) for c in capture(fn, torch.randn(3, 5)).chains] == [["bias_add"]]


def test_attention_written_out_is_one_op_when_told(capture):
    def fn(q, k, v):
        return torch.relu(torch.softmax((q @ k.mT) * 0.125, -1) @ v)

    graph = capture(fn, *torch.randn(3, 2, 4, 5, 8))
    group = [n for n in graph.gm.graph.nodes if op_kind(n) is not None][:-1]
    (chain,) = find_chains(graph.gm, graph.facts, [group])
    assert kinds(chain) == ["attention", "relu"]
    assert chain.ops[0].nodes == tuple(node.name for node in group)
    assert [operand.position for operand in chain.ops[1].operands] == [0]
    assert "inner 1" in chain.ops[0].constants and (0.125).hex() in chain.ops[0].constants


def test_operator_with_two_results_is_one_op_with_the_item_read(capture):
    from stof_compile import ops  # noqa: F401
    from stof_compile.attention.functional import sparse_attention
    from stof_compile.masks import causal

    def fn(q, k, v):
        return torch.relu(sparse_attention(q, k, v, causal()))

    with torch.no_grad():
        graph = capture(fn, *torch.randn(3, 2, 4, 64, 16))
    chain = graph.chain_with("attention")
    op = next(op for op in chain.ops if op.kind.name == "attention")
    assert op.value.shape == (2, 4, 64, 16) and "relu" in kinds(chain)


def test_finding_chains_changes_nothing(llama):
    graph = llama(1)
    before = str(graph.gm.graph)
    assert find_chains(graph.gm, graph.facts) == graph.chains
    assert str(graph.gm.graph) == before
