"""Other spellings of a value: reading the one there is, putting a new one in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from stof_compile.capture import CaptureFacts
from stof_compile.emit import emit
from stof_compile.node_ops import is_inplace, same_size, tensor_meta


def respell(
    graph: Graph, old: Node, spelled: Sequence[Node], build: Callable[..., Any], *nodes: Node
) -> bool:
    """Compute a value in another way, unless dtype, device, sizes or strides would change.

    Args:
        graph: graph to write to.
        old: node whose readers are to read the new value.
        spelled: nodes of the old spelling; those nothing else reads are erased.
        build: function of proxies for ``nodes``; returns one proxy.
    Returns:
        Whether it was done; if not, the graph is as it was.
    """
    before = old.prev
    (new,) = emit(graph, old, old, build, *nodes)
    if not same_layout(new, old):
        while old.prev is not before:
            graph.erase_node(old.prev)
        return False
    old.replace_all_uses_with(new)
    for node in sorted({*spelled, old}, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return True


def same_layout(a: Node, b: Node) -> bool:
    """Whether two nodes are known to be tensors of one dtype, device, shape and stride."""
    x, y = tensor_meta(a), tensor_meta(b)
    if x is None or y is None or x.dtype != y.dtype or x.device != y.device or x.dim() != y.dim():
        return False
    return all(map(same_size, (*x.shape, *x.stride()), (*y.shape, *y.stride())))


def only_user(node: Node) -> Node | None:
    """The one node that reads a value, None when there are more, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def read_inside(nodes: Sequence[Node], result: Node) -> bool:
    """Whether nothing but ``nodes`` reads any of them, ``result`` apart, and none writes memory."""
    inside = set(nodes)
    return all(
        not is_inplace(node) and (node is result or set(node.users) <= inside) for node in nodes
    )


def constant_number(value: Any, facts: CaptureFacts) -> float | None:
    """A number, a static float of the graph or a static tensor without dimensions, as float.

    Never asks for the number of elements of a tensor: with symbolic sizes that would be a guard.
    """
    meta = value.meta.get("example_value") if isinstance(value, Node) else None
    if isinstance(meta, torch.Tensor) and meta.dim() > 0:
        return None
    return facts.static.scalar(value)
