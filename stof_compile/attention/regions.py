"""Attention inside the sub-graphs of higher-order operators: activation checkpointing, branches,
loops.

Such a region gets no buffers and no masks of ours, so its attention stays with PyTorch. It must
still be seen: the option's mask would be lost otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch.fx import GraphModule, Node

from stof_compile.attention.match import match_attention
from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.capture import CaptureFacts
from stof_compile.node_ops import operation
from stof_compile.static_values import StaticValues


def region_near_misses(gm: GraphModule, facts: CaptureFacts) -> list[NearMiss]:
    """List the attention of all sub-graphs as near misses at the operator that runs them."""
    found: list[NearMiss] = []
    for caller, body in _regions(gm):
        inner = replace(facts, static=StaticValues(body.graph, {}))
        sites, misses = match_attention(body, inner)
        reason = f"it is inside a region of '{operation(caller)}', which is not rewritten"
        places: list[AttentionSite | NearMiss] = [*sites, *misses]
        for place in places:
            name = f"{place.name}@{caller.name}"
            found.append(
                NearMiss(
                    f"{name}#{len(found)}" if any(m.name == name for m in found) else name,
                    caller,
                    reason,
                    place.path,
                    place.source,
                    place.cross,
                    place.offset,
                    place.cross_known,
                    place.undecided,
                )
            )
    return found


def _regions(gm: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """(operator of ``gm``, sub-graph it runs), also sub-graphs of sub-graphs; those of
    FlexAttention are its own.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or operation(node) == "flex_attention":
            continue
        for argument in node.all_input_nodes:
            if argument.op != "get_attr":
                continue
            body = getattr(gm, str(argument.target), None)
            if isinstance(body, GraphModule):
                yield node, body
                for _, deeper in _regions(body):
                    yield node, deeper
