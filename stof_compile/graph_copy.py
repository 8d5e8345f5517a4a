"""Copies of a captured graph that share its tensors."""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

DYNAMO_ATTRIBUTES = (
    "_param_name_to_source",
    "compile_subgraph_reason",
    "_backend_id",
)  # read by AOTAutograd and by us


def copy_graph(gm: GraphModule) -> GraphModule:
    """Copy a graph with its meta; tensors and submodules are shared.

    A copy may live as long as the compiled graph, so it leaves out what Dynamo takes out of its own
    graph at the end: references to the inputs of the call that was captured.
    """
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, twin in copies.items():
        twin.meta.pop("grapharg", None)  # weak ones, with which swap_tensors takes no tensor
        if hasattr(node, "_dynamo_source"):  # AOTAutograd wants to know where each input is from
            twin._dynamo_source = node._dynamo_source
    copied = _LazyGraphModule(gm, graph)  # as Dynamo's: writes its code when that is asked for
    copied.meta = dict(gm.meta)
    for name in DYNAMO_ATTRIBUTES:
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))
    return copied
