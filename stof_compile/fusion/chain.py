"""Op chains: the runs of a normalised graph that are cut into segments.

A chain is a maximal run of ops in which every value but the last is read inside only, so that it
can end in one kernel. A value with one reader belongs to the chain of its reader. A value with
several readers does so when its ways meet again without passing a compute-intensive op, as inside
a norm or a rotary embedding that is written out; otherwise (a residual stream, the input of
several projections) the chain ends there. Attention is one indivisible op.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from stof_compile.capture import CaptureFacts
from stof_compile.fusion.constants import call_constants, size_text
from stof_compile.fusion.op_kind import OpKind, is_attention, op_kind
from stof_compile.node_ops import raw_name, tensor_meta

Layout = Literal["contiguous", "channels_last", "other", "symbolic", "none"]


@dataclass(frozen=True)
class Value:
    """What a tensor of the graph looks like.

    Args:
        shape: sizes; a symbolic one is its expression. dtype: as ``str(torch.dtype)``.
        layout: class of its strides; "symbolic" when a size is; "none" for what is no tensor.
        device: type of its device.
    """

    shape: tuple[int | str, ...]
    dtype: str
    layout: Layout
    device: str


@dataclass(frozen=True)
class Operand:
    """One value an op reads.

    Args:
        name: node that holds it. position: the op of the chain that made it, None from outside.
        value: what it looks like.
    """

    name: str
    position: int | None
    value: Value


@dataclass(frozen=True)
class ChainOp:
    """One op of a chain.

    Args:
        name: node that holds its result; the last of ``nodes``.
        nodes: nodes it consists of, in graph order: one, but for attention.
        kind: what it does. value: what its result looks like.
        operands: what it reads, each once, in order of first use.
        constants: canonical text of its other arguments (``call_constants``), in which operands
            are numbers.
    """

    name: str
    nodes: tuple[str, ...]
    kind: OpKind
    value: Value
    operands: tuple[Operand, ...]
    constants: str


@dataclass(frozen=True)
class OpChain:
    """A vertical op list: ops in topological order, of which only the last is read outside."""

    ops: tuple[ChainOp, ...]

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def signature(self) -> tuple[tuple[str, tuple[int | str, ...], str], ...]:
        """(kind, shape, dtype) of each op: equal for equal layers. For display; keys tell more."""
        return tuple((op.kind.name, op.value.shape, op.value.dtype) for op in self.ops)


def find_chains(
    gm: GraphModule, facts: CaptureFacts, indivisible: Sequence[Sequence[Node]] = ()
) -> list[OpChain]:
    """Split the ops of a graph into chains.

    Args:
        gm: normalised graph. facts: its facts; what it computes from constants alone (masks,
            positions) is in no chain.
        indivisible: groups of nodes that are one attention op each, e.g. the nodes of a site
            written with softmax; the last node of a group is its result and the only one read
            outside.
    Returns:
        Chains in the order of their first op. Every op is in exactly one; many have one op only.
        An op that returns a tuple is in none, unless it is an attention of which one item is read.
    """
    units = _units(gm, facts, indivisible)
    unit_of = {node: unit for unit in units for node in unit.nodes}
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    last: dict[_Unit, _Unit] = {}  # unit -> the unit its chain ends with
    for unit in sorted(units, key=lambda u: -place[u.result]):
        meeting = _meeting(unit, unit_of, place)
        last[unit] = unit if meeting is None else last[meeting]
    members: dict[_Unit, list[_Unit]] = {}
    for unit in sorted(units, key=lambda u: place[u.result]):
        members.setdefault(last[unit], []).append(unit)
    told = cache(value_of)  # most values are told as a result and as operands
    return [_chain(chain, told) for chain in members.values()]


@dataclass(frozen=True, eq=False)
class _Unit:
    """An op while chains are being found: its nodes and its kind."""

    nodes: tuple[Node, ...]
    kind: OpKind

    @property
    def result(self) -> Node:
        return self.nodes[-1]


def _units(
    gm: GraphModule, facts: CaptureFacts, indivisible: Sequence[Sequence[Node]]
) -> list[_Unit]:
    attention = OpKind("attention", "attention", "contraction")
    units = [_Unit(tuple(group), attention) for group in indivisible]
    taken = {node for unit in units for node in unit.nodes}
    for node in gm.graph.nodes:
        kind = None if node in taken else op_kind(node)
        if kind is None or facts.static.is_static(node):
            continue
        if tensor_meta(node) is not None:
            units.append(_Unit((node,), kind))
        elif is_attention(node) and len(node.users) == 1:
            (item,) = node.users
            if raw_name(item) == "getitem" and tensor_meta(item) is not None:
                units.append(_Unit((node, item), kind))
    return units


def _meeting(unit: _Unit, unit_of: Mapping[Node, _Unit], place: Mapping[Node, int]) -> _Unit | None:
    """The first op that all ways from a value lead to, when nothing compute-intensive is before
    it.
    """
    waiting: list[tuple[int, Node]] = []
    seen: set[_Unit] = set()

    def follow(node: Node) -> bool:
        for user in node.users:
            reader = unit_of.get(user)
            if reader is None:  # the output of the graph, or no op
                return False
            if reader not in seen:
                seen.add(reader)
                heappush(waiting, (place[reader.result], reader.result))
        return True

    if not follow(unit.result):
        return None
    while len(waiting) > 1:
        reader = unit_of[heappop(waiting)[1]]
        if reader.kind.compute_intensive or not follow(reader.result):
            return None
    return unit_of[waiting[0][1]] if waiting else None


def _chain(units: Sequence[_Unit], told: Callable[[Node], Value]) -> OpChain:
    position = {unit.result: i for i, unit in enumerate(units)}
    return OpChain(tuple(_op(unit, position, told) for unit in units))


def _op(unit: _Unit, position: Mapping[Node, int], told: Callable[[Node], Value]) -> ChainOp:
    inner = {node: i for i, node in enumerate(unit.nodes)}
    operands: dict[Node, int] = {}
    for node in unit.nodes:
        for source in node.all_input_nodes:
            if source not in inner:
                operands.setdefault(source, len(operands))

    def slot(source: Node) -> str:
        return f"inner {inner[source]}" if source in inner else str(operands[source])

    single = len(unit.nodes) == 1
    texts = [call_constants(node, unit.kind if single else None, slot) for node in unit.nodes]
    return ChainOp(
        name=unit.result.name,
        nodes=tuple(node.name for node in unit.nodes),
        kind=unit.kind,
        value=told(unit.result),
        operands=tuple(Operand(n.name, position.get(n), told(n)) for n in operands),
        constants=texts[0] if single else json.dumps(texts),
    )


def value_of(node: Node) -> Value:
    """What the value of a node looks like; a symbolic int is its expression, and what is neither
    tensor nor int (a sub-graph) its target.
    """
    tensor = tensor_meta(node)
    if tensor is None:
        held: Any = node.meta.get("example_value")
        text = str(held) if isinstance(held, int | torch.SymInt) else str(node.target)
        return Value((), f"{type(held).__name__} {text}", "none", "")
    shape = tuple(size_text(size) for size in tensor.shape)
    return Value(shape, str(tensor.dtype), layout_of(tensor), tensor.device.type)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The class of a tensor's strides; adds no guard for symbolic sizes."""
    if tensor.layout != torch.strided:
        return "other"
    if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride())):
        return "symbolic"
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    return "other"
