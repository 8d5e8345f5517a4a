"""Writing new nodes into a Dynamo graph, with true example values.

New code is ordinary torch code called with proxies. Every node it leaves behind gets the fake
result of running
it, under the autocast regions that are open at that place, so that later passes read right shapes
and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from stof_compile.new_tensors import remembered_result
from stof_compile.node_ops import raw_name


def emit(
    graph: Graph,
    before: Node,
    like: Node,
    build: Callable[..., Any],
    *nodes: Node,
    value_of: Callable[[Node], Any] | None = None,
) -> list[Node]:
    """Trace ``build`` in front of a node.

    Args:
        graph: graph to write to.
        before: the new nodes are inserted in front of this one.
        like: node whose module stack and source line the new nodes take over.
        build: function of proxies; returns a proxy or a tuple of proxies.
        nodes: arguments of ``build``.
        value_of: example value of a new node, asked in order; by default ``fake_result``. Every
            tensor needs one: torch's caches of compiled graphs refuse a method called on a node
            without.
    Returns:
        The nodes ``build`` returned.
    """
    tracer = GraphAppendingTracer(graph)
    first = before.prev
    with graph.inserting_before(before):
        result = build(*(Proxy(node, tracer) for node in nodes))
    added = []
    node = first.next
    while node is not before:
        node.meta["stof_emitted"] = True
        for key in ("nn_module_stack", "source_fn_stack", "stack_trace"):
            if key in like.meta:
                node.meta.setdefault(key, like.meta[key])
        added.append(node)
        node = node.next
    with autocast_at(graph, before):
        for node in added:
            value = (value_of or fake_result)(node)
            if value is not None:
                node.meta["example_value"] = value
    outputs = result if isinstance(result, list | tuple) else (result,)
    return [out.node if isinstance(out, Proxy) else out for out in outputs]


def fake_result(node: Node) -> Any:
    """Run a node on the example values of its inputs under their fake mode; None when an input has
    no value."""
    values: list[Any] = [n.meta.get("example_value") for n in node.all_input_nodes]
    if any(value is None for value in values):
        return None
    # a factory has no tensor among its inputs: its result is as fake as the rest of the graph
    mode = fake_mode_of(values) or fake_mode_of(
        n.meta.get("example_value") for n in node.graph.nodes
    )
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda n: n.meta["example_value"]
    )
    with in_fake_mode(*values, mode=mode), torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_function" and callable(node.target):
            call = partial(node.target, *args, **kwargs)
            if mode is None:
                return call()
            return remembered_result(call, node.target, args, kwargs, mode)
    return None


@contextmanager
def in_fake_mode(*values: Any, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Enter the mode of example values, if they have one, as Dynamo does to compute with them.

    Composite operators written in C++ may read a symbolic size as a number, which fixes it for the
    whole graph: matmul of torch 2.11 does. Their Python twins do not, and take longer.

    Args:
        values: example values that are read.
        mode: theirs, where they may not be tensors.
    """
    mode = mode or fake_mode_of(values)
    python = enable_python_dispatcher() if any(map(_is_symbolic, values)) else ExitStack()
    with ExitStack() if mode is None else mode, python:
        yield


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_symbolic, value))
    if isinstance(value, FakeTensor):
        return bool(value._has_symbolic_sizes_strides)
    return isinstance(value, torch.SymInt)


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    """The mode the example values of a graph belong to.

    Dynamo keeps another, newer mode in its tracing context while a backend runs; mixing the two is
    an error.
    """
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def has_autocast(graph: Graph) -> bool:
    """Whether the graph has autocast regions of its own."""
    enter = torch.amp.autocast_mode._enter_autocast
    return bool(graph.find_nodes(op="call_function", target=enter, sort=False))


@contextmanager
def autocast_at(graph: Graph, place: Node) -> Iterator[None]:
    """Enter the autocast regions of the graph that are open at a node."""
    open_regions: list[Node] = []
    for node in graph.nodes if has_autocast(graph) else ():
        if node is place:
            break
        if raw_name(node) == "_enter_autocast":
            open_regions.append(node)
        elif raw_name(node) == "_exit_autocast" and node.args[0] in open_regions:
            open_regions = [region for region in open_regions if region is not node.args[0]]
    with ExitStack() as stack:
        for node in open_regions:
            device, dtype, enabled, cache = (*node.args, *(None,) * 4)[:4]
            stack.enter_context(
                torch.autocast(str(device), dtype=dtype, enabled=bool(enabled), cache_enabled=cache)  # type: ignore[arg-type]
            )
        yield


def autocast_dtype(graph: Graph, place: Node) -> torch.dtype | None:
    """Dtype that products are computed in at a node, or None outside of autocast."""
    value = place.meta.get("example_value")
    device = value.device.type if isinstance(value, torch.Tensor) else "cpu"
    with autocast_at(graph, place):
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
