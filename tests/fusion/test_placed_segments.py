"""What Inductor joins with its own ops is Inductor's in the plan, too."""

import torch
import torch.nn.functional as F

from stof_compile.fusion.rewrite import Segment
from stof_compile.placed_segments import PlacedSegment, without_joined
from stof_compile.plan import ChainPlan, SegmentPlan

PART = SegmentPlan(0, 1, "triton_norm", (("rows", 1),), median_us=2.0, library_us=3.0)


def norm(x):
    return F.layer_norm(x, (16,))


def layers(x, w):
    """The first norm stands alone, the second behind a sum that is Inductor's."""
    h = x + F.linear(norm(x), w)
    return h + F.linear(norm(h), w)


def placed_norms(graph, *keys):
    """The norms of a graph in order, as segments of chains of these keys."""
    order = {node.name: i for i, node in enumerate(graph.gm.graph.nodes)}
    found = [
        Segment(chain, number, number + 1)
        for chain in graph.chains
        for number, op in enumerate(chain.ops)
        if op.kind.name == "layer_norm"
    ]
    found.sort(key=lambda segment: order[segment.nodes[0]])
    return [PlacedSegment(s, list, key, PART) for s, key in zip(found, keys, strict=True)]


def plans_of(*keys):
    return {key: ChainPlan(("layer_norm",), "0", "0", (PART,), "measured") for key in keys}


def test_a_chain_that_is_left_everywhere_is_inductors_in_its_plan(capture):
    graph = capture(layers, torch.randn(2, 8, 16), torch.randn(16, 16))
    placed, plans = placed_norms(graph, "first", "second"), plans_of("first", "second")
    assert without_joined(graph.gm, graph.chains, placed, plans) == placed[:1]
    assert plans["first"] == plans_of("first")["first"]
    (left,) = plans["second"].segments
    assert (left.template, left.config, left.median_us) == ("inductor", (), 3.0)


def test_a_chain_that_is_kept_somewhere_keeps_its_plan(capture):
    graph = capture(layers, torch.randn(2, 8, 16), torch.randn(16, 16))
    placed, plans = placed_norms(graph, "same", "same"), plans_of("same")
    assert without_joined(graph.gm, graph.chains, placed, plans) == placed[:1]
    assert plans == plans_of("same")
