"""T5 with FlexAttention inside, a peer of the benchmark: its bias is a table made beforehand."""

import operator

import pytest
import torch
from close import assert_close

pytest.importorskip("transformers")

SEQ = 100  # no multiple of a block
CPU = torch.device("cpu")


@pytest.fixture
def subject(bench_path, tmp_path):
    from ways import make_subject

    return make_subject("t5-tiny", f"2x{SEQ}", CPU, tmp_path, 1, answer=True)


def flex_of(subject):
    from models import flex_model
    from peers import split_block_mask

    blocks = {
        role: split_block_mask(subject.setup, 32, causal=role == "causal")
        for role in ("self", "causal")
    }
    return flex_model("t5-tiny", SEQ, 1, blocks, {}, torch.float32, CPU), blocks


def made_from(node):
    """What a node is a view of."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]
    return node


@torch.no_grad()
def test_t5_in_one_graph_with_flexattention_computes_what_the_masked_model_does(
    subject, fresh_dynamo
):
    from models import caller, register_flex

    graphs = []
    model, blocks = flex_of(subject)
    register_flex(blocks, {}, torch.device("cuda"))  # inside the model, as on a GPU

    def kept(gm, _):
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=kept, fullgraph=True, dynamic=False)
    out = caller(compiled, dict.fromkeys(subject.names), {})(*subject.sets[0])
    assert_close(out, subject.expected, scale=10.0)  # four layers
    (gm,) = graphs
    attention = torch.ops.higher_order.flex_attention
    read = [
        node.args[7]
        for node in gm.graph.nodes
        if node.op == "call_function" and node.target is attention
    ]
    assert [len(tables) for tables in read] == [1, 1, 1, 0, 1, 0]  # none for cross-attention
    sources = [made_from(*tables) for tables in read if tables]
    # computed in the graph it would be computed anew for each score, or fail to compile
    assert {node.op for node in sources} == {"placeholder"} and len(set(sources)) == 2
    # no stack makes the bias of all pairs
    made = [node.meta["example_value"] for node in gm.graph.nodes if "example_value" in node.meta]
    sizes = [value.shape for value in made if isinstance(value, torch.Tensor)]
    assert (1, 2, 1, 2 * SEQ - 1) in sizes and (SEQ, SEQ) not in sizes


@torch.no_grad()
def test_t5_apart_from_flexattention_computes_what_the_masked_model_does(subject, monkeypatch):
    from ways import chosen_ways, compile_model

    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    (way,) = chosen_ways(CPU, subject.model, subject.shape, "flex-default")
    call, _ = compile_model(way, subject)
    assert_close(call(*subject.sets[0]), subject.expected, scale=10.0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_table_of_distances(bench_path, side):
    from models import keep_table

    from stof_compile import zoo

    model = zoo.build_model("t5-tiny", SEQ, 1)
    attention = getattr(model, side).block[0].layer[0].SelfAttention
    bias = attention.compute_bias(SEQ, SEQ)
    keep_table(attention, SEQ)
    table = attention.compute_bias(SEQ, SEQ, device=CPU, past_seen_tokens=0)[0, :, 0]
    distance = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
    assert torch.equal(table[:, distance + SEQ - 1], bias[0])
    assert len(table.unique()) > 16 and table.is_contiguous()
    assert not any("bench_table" in name for name in attention.state_dict())
