"""Checks that the example values of a rewritten graph are what its nodes give."""

import torch
from torch.fx import GraphModule

from stof_compile.emit import autocast_at, fake_result
from stof_compile.node_ops import operation


def assert_values_are_true(gm: GraphModule, skipped: tuple[str, ...] = ()) -> None:
    """Compare shapes, strides and dtypes; ``skipped`` are operations that cannot be run again."""
    for node in gm.graph.nodes:
        old = node.meta.get("example_value")
        if node.op not in ("call_function", "call_method") or not isinstance(old, torch.Tensor):
            continue
        if operation(node) in skipped:
            continue
        with autocast_at(gm.graph, node):
            new = fake_result(node)
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype), node
