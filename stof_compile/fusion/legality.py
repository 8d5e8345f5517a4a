"""Legality: why a run of ops must not become one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from stof_compile.capture import CaptureFacts
from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.op_kind import op_kind
from stof_compile.fusion.scheme import MAX_COMPUTE_INTENSIVE
from stof_compile.fusion.segment_key import check_range
from stof_compile.node_ops import (
    dtype_of,
    is_inplace,
    mutations,
    raw_name,
    storage_base,
    tensor_meta,
)

ENTERS = frozenset({"_enter_autocast", "_enter_inference_mode"})
EXITS = frozenset({"_exit_autocast", "_exit_inference_mode"})
MODES = frozenset({"_set_grad_enabled", "set_grad_enabled"})
# Other calls with an effect on what stands between them; they pair in no common way.
BARRIERS = (
    "_saved_tensors_hooks", "_vmap_", "_grad_increment", "_grad_decrement", "_jvp_",
    "_functionalization", "_set_deterministic", "_set_fwd_grad",
)  # fmt: skip


def segment_refusal(
    chain: OpChain, start: int, stop: int, gm: GraphModule, facts: CaptureFacts
) -> str | None:
    """Say why a segment cannot be one kernel.

    A fused segment is computed at the place of its last op, reads then all it reads from outside,
    and writes its last value only.

    Args:
        chain: a chain of ``gm``. start, stop: its ops ``start <= i < stop``.
        gm: the normalised graph, unchanged since the chain was found. facts: its facts.
    Returns:
        The reason, or None when it is legal. One op alone may be replaced by a kernel as well,
        where all its values are plain tensors of fixed sizes on one device.
    Raises:
        ValueError: the chain has no such ops.
    """
    check_range(chain, start, stop)
    heavy = [op.name for op in chain.ops[start:stop] if op.kind.compute_intensive]
    if len(heavy) > MAX_COMPUTE_INTENSIVE:
        return (
            f"{len(heavy)} compute-intensive ops ({', '.join(heavy)}); "
            f"at most {MAX_COMPUTE_INTENSIVE} fit"
        )
    names = {name for op in chain.ops[start:stop] for name in op.nodes}
    nodes = [node for node in gm.graph.nodes if node.name in names]
    assert len(nodes) == len(names), "the graph was changed after its chains were found"
    if stop - start == 1:
        return _symbolic(nodes) or _device_change(nodes) or _foreign_input(nodes, facts)
    return (
        _escape(nodes)
        or _symbolic(nodes)
        or _device_change(nodes)
        or _foreign_input(nodes, facts)
        or _region_border(gm.graph, nodes)
        or _crossed_write(gm.graph, nodes)
        or _shared_result(nodes)
    )


def _sources(nodes: Sequence[Node]) -> list[Node]:
    """Values read from outside, each once."""
    inside = set(nodes)
    return list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))


def _escape(nodes: Sequence[Node]) -> str | None:
    inside = set(nodes)
    for node in nodes[:-1]:
        for user in node.users:
            if user not in inside:
                return f"'{node.name}' inside is also read by '{user.name}' outside"
        if not node.users:
            return f"'{node.name}' inside is read by nothing"
    return None


def _symbolic(nodes: Sequence[Node]) -> str | None:
    for node in (*_sources(nodes), *nodes):
        value, tensor = node.meta.get("example_value"), tensor_meta(node)
        sizes = () if tensor is None else (*tensor.shape, *tensor.stride())
        symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
        if isinstance(value, symbolic) or any(isinstance(size, symbolic) for size in sizes):
            return f"'{node.name}' has a symbolic size, and templates need fixed ones for now"
    return None


def _device_change(nodes: Sequence[Node]) -> str | None:
    found: dict[torch.device, str] = {}
    for node in (*_sources(nodes), *nodes):
        tensor = tensor_meta(node)
        if tensor is not None:
            found.setdefault(tensor.device, node.name)
    if len(found) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in found.items())
        return f"values on several devices: {places}"
    return None


def _foreign_input(nodes: Sequence[Node], facts: CaptureFacts) -> str | None:
    for source in _sources(nodes):
        if source.name in facts.subclass_inputs:
            return f"'{source.name}' is a tensor subclass, whose memory a kernel cannot read"
    return None


def _region_border(graph: Graph, nodes: Sequence[Node]) -> str | None:
    inside, states = set(nodes), dict[tuple[object, ...], str]()
    for node, state in _region_states(graph):
        if node in inside:
            states.setdefault(state, node.name)
    if len(states) > 1:
        first, second, *_ = states.values()
        return f"an autocast, grad-mode or hook region begins or ends from '{first}' to '{second}'"
    return None


def _region_states(graph: Graph) -> Iterator[tuple[Node, tuple[object, ...]]]:
    """Every node with what is switched on around it."""
    entered: list[Node] = []
    gradients: object = None  # as at the start of the graph
    barrier: Node | None = None
    for node in graph.nodes:
        name = raw_name(node)
        if name in ENTERS:
            entered.append(node)
        elif name in EXITS:
            entered = [region for region in entered if region is not node.args[0]]
        elif name in MODES:
            gradients = node.args[0]
        elif name.startswith(BARRIERS):
            barrier = node
        yield node, (*entered, gradients, barrier)


def _crossed_write(graph: Graph, nodes: Sequence[Node]) -> str | None:
    inside, sources = set(nodes), _sources(nodes)
    read = {storage_base(source): source.name for source in sources}
    read |= {storage_base(node): node.name for node in nodes}
    place = {node: i for i, node in enumerate(graph.nodes)}
    first, last = place[nodes[0]], place[nodes[-1]]
    for write, base in mutations(graph):
        if first < place[write] < last and base in read:
            return f"'{write.name}' writes the memory of '{read[base]}' in between"
    for node in list(graph.nodes)[first + 1 : last]:
        if node not in inside and not is_inplace(node) and _may_write(node):
            return f"'{node.name}' in between may write any memory"
    return None


def _shared_result(nodes: Sequence[Node]) -> str | None:
    """Refuse a result that may be memory from outside: a kernel would return a copy, and a later
    write to one, by the graph or by its caller, would no longer be seen in the other.
    """
    inside, node = set(nodes), nodes[-1]
    while node in inside:
        kind, source = op_kind(node), node.all_input_nodes[0]
        stays = kind is not None and kind.family == "cast" and dtype_of(node) == dtype_of(source)
        if not stays and (kind is None or kind.family != "view"):
            return None
        node = source
    return f"only views: its result may share memory with '{node.name}'"


def _may_write(node: Node) -> bool:
    """Whether a call declares that it writes, or tells nothing about it."""
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        schemas = (getattr(node.target, name)._schema for name in node.target.overloads())
        return any(schema.is_mutable for schema in schemas)
    # a function of the user that Dynamo was told not to look into
    return node.op == "call_function" and not raw_name(node)
