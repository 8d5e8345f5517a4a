"""What may change between two places of a graph: memory that is written, modes that are switched.

A rewrite that reads a value earlier or later than the graph does has to ask here first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from stof_compile.memory import storage_base, written_arguments
from stof_compile.node_ops import raw_name

REGION_ENTERS = frozenset({"_enter_autocast", "_enter_inference_mode"})
REGION_EXITS = frozenset({"_exit_autocast", "_exit_inference_mode"})
GRAD_MODES = frozenset({"_set_grad_enabled", "set_grad_enabled"})
# Beginnings of other calls with an effect on what follows them; they pair in no common way.
BARRIERS = (
    "_saved_tensors_hooks", "_vmap_", "_grad_increment", "_grad_decrement", "_jvp_",
    "_functionalization", "_set_deterministic", "_set_fwd_grad",
)  # fmt: skip


def written_by(node: Node) -> tuple[Node, ...] | None:
    """Bases of the memory a node writes; empty when it writes none, None when it may write any."""
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    if node.op == "call_function" and not raw_name(node):
        return None  # a function of the user that Dynamo was told not to look into
    return tuple(storage_base(target) for target in written_arguments(node))


def writer_between(values: Iterable[Node], first: Node, last: Node) -> Node | None:
    """The first node after ``first`` and before ``last`` that may write memory of the values.

    Args:
        values: what is read. first, last: nodes of one graph, ``first`` not after ``last``.
    """
    bases = {storage_base(value) for value in values}
    node = first
    while node is not last:
        node = node.next
        assert node.op != "root", f"'{last.name}' stands before '{first.name}'"
        if node is last:
            break
        written = written_by(node)
        if written is None or not bases.isdisjoint(written):
            return node
    return None


def has_effects(graph: Graph) -> bool:
    """Whether running a graph may change anything but its result: what is written is not its own,
    running statistics, or a message to other ranks.
    """
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        written = written_by(node)
        if written is None or any(base.op in ("placeholder", "get_attr") for base in written):
            return True
        if "c10d" in raw_name(node):
            return True
    return False


def no_border(first: Node, last: Node) -> bool:
    """Whether nothing between two nodes of a graph, the later one last, can change what is switched
    on: then their :func:`region_states` are equal.
    """
    node = first.next
    while node is not last and node.op != "root":
        name = raw_name(node)
        if name in REGION_ENTERS or name in REGION_EXITS or name in GRAD_MODES:
            return False
        if name.startswith(BARRIERS):
            return False
        node = node.next
    return True


def region_states(graph: Graph) -> dict[Node, tuple[object, ...]]:
    """Every node with what is switched on around it; nodes of equal states compute alike.

    A region that is left and entered again is another one, and so is what stands behind a barrier.
    """
    states: dict[Node, tuple[object, ...]] = {}
    entered: list[Node] = []
    gradients: object = None  # as at the start of the graph
    barrier: Node | None = None
    for node in graph.nodes:
        name = raw_name(node)
        if name in REGION_ENTERS:
            entered.append(node)
        elif name in REGION_EXITS:
            entered = [region for region in entered if region is not node.args[0]]
        elif name in GRAD_MODES:
            gradients = node.args[0]
        elif name.startswith(BARRIERS):
            barrier = node
        states[node] = (*entered, gradients, barrier)
    return states


def switches_gradients_on(graph: Graph) -> bool:
    """Whether the graph turns gradients on for a part of itself."""
    return any(raw_name(n) in GRAD_MODES and n.args[0] is not False for n in graph.nodes)
