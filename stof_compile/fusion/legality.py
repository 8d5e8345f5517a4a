"""Legality: why a run of ops must not become one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from stof_compile.between import no_border, region_states, written_by
from stof_compile.capture import CaptureFacts
from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.op_kind import op_kind
from stof_compile.fusion.scheme import MAX_COMPUTE_INTENSIVE
from stof_compile.fusion.segment_key import check_range
from stof_compile.memory import storage_base
from stof_compile.node_ops import dtype_of, tensor_meta


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
        or _crossed_write(nodes)
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
    if no_border(nodes[0], nodes[-1]):
        return None
    regions, states = region_states(graph), dict[tuple[object, ...], str]()
    for node in nodes:
        states.setdefault(regions[node], node.name)
    if len(states) > 1:
        first, second, *_ = states.values()
        return f"an autocast, grad-mode or hook region begins or ends from '{first}' to '{second}'"
    return None


def _crossed_write(nodes: Sequence[Node]) -> str | None:
    inside = set(nodes)
    read = {storage_base(value): value.name for value in (*_sources(nodes), *nodes)}
    node = nodes[0].next
    while node is not nodes[-1]:
        written = written_by(node)
        if written is None and node not in inside:
            return f"'{node.name}' in between may write any memory"
        for base in written or ():
            if base in read:
                return f"'{node.name}' writes the memory of '{read[base]}' in between"
        node = node.next
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
