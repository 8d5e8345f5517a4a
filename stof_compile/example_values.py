"""Example values after a rewrite that changes strides: computed anew as far as they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from stof_compile.emit import autocast_at, fake_result, in_fake_mode
from stof_compile.fusion.op_kind import op_kind
from stof_compile.node_ops import VIEWS, is_inplace, operation, raw_name

FACTS = frozenset({"size", "shape", "dim", "ndim", "numel", "dtype", "device", "len"})


def update_values(graph: Graph, *starts: Node) -> None:
    """Compute the example values of what reads nodes, and of what reads that, where they change.

    Stops at nodes that cannot be run once more for nothing: writes, and operations that are not
    known here.
    """
    waiting = {user for start in starts for user in start.users}
    node = min(starts).next  # the graph is in order: they all follow
    while waiting:
        if node in waiting:
            waiting.remove(node)
            if _can_run(node):
                with autocast_at(graph, node):
                    value = fake_result(node)
                if value is not None and not _alike(value, node.meta.get("example_value")):
                    node.meta["example_value"] = value
                    waiting.update(node.users)
        node = node.next


def values_behind(start: Node, value: Tensor) -> dict[Node, Any] | None:
    """Example values of the nodes that see it when a node has other strides, with its own.

    Args:
        start: a tensor's node. value: the same tensor in fake mode with other strides.
    Returns:
        None where it may matter: where strides of what the graph returns change, a view cannot be
        taken any more, what was a copy would be a view, or an operation sees them that may read
        strides or is not known here.
    """
    values: dict[Node, Any] = {start: value}
    node = start
    while (node := node.next).op != "root":
        if values.keys().isdisjoint(node.all_input_nodes) or operation(node) in FACTS:
            continue
        if _may_read_strides(node):
            return None
        if is_inplace(node):
            written = node.args[0] if node.args else None
            if isinstance(written, Node) and written in values and "example_value" in node.meta:
                values[node] = values[written]  # the same tensor; setitem returns none
            continue
        if not _can_run(node):
            return None
        try:
            with in_fake_mode(value), torch.no_grad(), autocast_at(node.graph, node):
                found = run_on(node, values)
        except (RuntimeError, ValueError):
            return None
        before = {n: n.meta.get("example_value") for n in node.all_input_nodes}
        now = {n: values.get(n, value) for n, value in before.items()}
        if _is_view(found, now) != _is_view(node.meta.get("example_value"), before):
            return None
        if not _alike(found, node.meta.get("example_value")):
            values[node] = found
    return values


def _is_view(result: Any, values: Mapping[Node, Any]) -> bool:
    """Whether a result, or a part of it, is in the memory of one of some values."""
    parts = result if isinstance(result, list | tuple) else (result,)
    held = {v.untyped_storage()._cdata for v in values.values() if isinstance(v, Tensor)}
    return any(isinstance(p, Tensor) and p.untyped_storage()._cdata in held for p in parts)


def run_on(node: Node, values: Mapping[Node, Any]) -> Any:
    """Run a node on other values; nodes that are not among them have their example values.

    Has to be called in the fake mode of the values.
    """
    args, kwargs = map_arg(
        (node.args, node.kwargs), lambda n: values[n] if n in values else n.meta["example_value"]
    )
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target), "call_function nodes have a callable target"
    return node.target(*args, **kwargs)


def _can_run(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or is_inplace(node):
        return False
    return op_kind(node) is not None or operation(node) in VIEWS


def _may_read_strides(node: Node) -> bool:
    """Whether a result may depend on more than elements; so it is for what cannot be run here."""
    foreign = isinstance(node.target, torch._ops.HigherOrderOperator) or "::" in raw_name(node)
    known = all("example_value" in source.meta for source in node.all_input_nodes)
    if is_inplace(node) and ("out" in node.kwargs or operation(node) in VIEWS | {"resize_as"}):
        return True  # changes shapes or strides
    return foreign or not known or operation(node) in ("as_strided", "set", "resize")


def _alike(a: Any, b: Any) -> bool:
    """Whether two example values have the same shapes, strides and dtypes."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        sizes = zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=False)
        same = (a.dtype, a.device, a.dim()) == (b.dtype, b.device, b.dim())
        return same and all(str(m) == str(n) for m, n in sizes)
    return type(a) is type(b)


def is_static(tensor: Tensor) -> bool:
    """Whether sizes and strides are numbers."""
    sizes = (*tensor.shape, *tensor.stride())
    return not any(isinstance(size, torch.SymInt) for size in sizes)
