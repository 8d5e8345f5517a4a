"""A captured graph as bytes, for a process that compiles it ahead of this one.

What such a process leaves in Inductor's caches is found here only where it compiled the very same
graph: names of nodes, layouts of inputs, and what Dynamo says of them travel, the contents of
tensors do not. Nothing of the user's program is imported there: a graph that needs it is refused.
(``torch.fx._graph_pickler`` is private, and pickles what a graph holds whosever code it is.)
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stof_compile.graph_copy import DYNAMO_ATTRIBUTES

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
LEAVES = (
    bool, int, float, complex, str, bytes, type(None), type(...), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
MODULES = ("torch", "_operator", "operator", "builtins", "math")  # that functions may be from
NAMESPACES = ("aten", "prims", "inductor", "stof")  # that operators may be from
STATIC = "_dynamo_static_input_type"  # Dynamo's word for weights, on tensors and in meta
GRAPH_META = ("dynamo_compile_id", "dynamo_flat_name_to_original_fqn")  # that AOTAutograd looks for


class UnfitGraphError(Exception):
    """Why a graph is not for another process."""


@dataclass(frozen=True)
class _Link:
    """A node among the arguments of another."""

    name: str


@dataclass(frozen=True)
class _Operator:
    """An operator, by name: ``namespace``, name and overload, "" for all its overloads."""

    namespace: str
    name: str
    overload: str


@dataclass(frozen=True)
class _Meta:
    """A tensor without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    requires_grad: bool
    parameter: bool
    static: str | None

    @classmethod
    def of(cls, tensor: Tensor, what: str) -> _Meta:
        if type(tensor) not in PLAIN:
            raise UnfitGraphError(f"{what} is a {type(tensor).__qualname__}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UnfitGraphError(f"{what} is not strided")
        if tensor.is_conj() or tensor.is_neg():
            raise UnfitGraphError(f"{what} is a view that negates or conjugates")
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        if not all(type(n) is int for n in (*shape, *stride, offset)):
            raise UnfitGraphError(f"{what} has symbolic sizes")
        return cls(
            shape, tuple(stride), int(offset), tensor.dtype, str(tensor.device),
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter), getattr(tensor, STATIC, None),
        )  # fmt: skip

    def made(self, mode: FakeTensorMode) -> Tensor:
        """A fake tensor like it."""
        with mode:
            if self.offset and 0 not in self.shape:
                last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
                whole = torch.empty(self.offset + last + 1, dtype=self.dtype, device=self.device)
                made = whole.as_strided(self.shape, self.stride, self.offset).detach()
            else:
                made = torch.empty_strided(
                    self.shape, self.stride, dtype=self.dtype, device=self.device
                )
        if self.parameter:
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        elif self.requires_grad:
            made.requires_grad_()
        if self.static is not None:
            setattr(made, STATIC, self.static)
        return made


@dataclass(frozen=True)
class _NodeData:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    type_expr: Any
    source: Any  # of an input, as Dynamo says
    static: Any  # of an input, the same
    example: _Meta | None


@dataclass(frozen=True)
class _GraphData:
    nodes: list[_NodeData]
    buffers: dict[str, _Meta]
    inputs: list[Any]
    meta: dict[str, Any]
    attributes: dict[str, Any]


def to_bytes(gm: GraphModule, inputs: Sequence[Any]) -> bytes:
    """Write a graph and what its inputs are like.

    Raises:
        UnfitGraphError: it has symbolic sizes, parts of the user's program, or something unknown.
    """
    nodes, buffers = [], dict[str, _Meta]()
    for node in gm.graph.nodes:
        if node.op == "call_module":
            raise UnfitGraphError(f"{node.name} calls a module")
        if node.op == "get_attr":
            value: Any = gm
            for part in node.target.split("."):
                value = getattr(value, part)
            if not isinstance(value, Tensor):
                raise UnfitGraphError(f"{node.target} is a {type(value).__qualname__}")
            buffers[node.target] = _Meta.of(value, node.target)
        example = node.meta.get("example_value")
        nodes.append(
            _NodeData(
                node.op, node.name, _packed_target(node), _packed(node.args), _packed(node.kwargs),
                _packed_type(node), getattr(node, "_dynamo_source", None),
                node.meta.get("tensor_dict", {}).get(STATIC),
                _Meta.of(example, node.name) if isinstance(example, Tensor) else None,
            )
        )  # fmt: skip
    values = [
        _Meta.of(x, f"input {i}") if isinstance(x, Tensor) else _packed(x)
        for i, x in enumerate(inputs)
    ]
    meta = {name: gm.meta[name] for name in GRAPH_META if name in gm.meta}
    held = {name: getattr(gm, name) for name in DYNAMO_ATTRIBUTES[:1] if hasattr(gm, name)}
    try:
        data = pickle.dumps(_GraphData(nodes, buffers, values, meta, held))
    except Exception as failure:  # a source may hold anything, the key of a dict for instance
        raise UnfitGraphError(f"it cannot be pickled: {failure!r}") from failure
    try:
        _Reader(io.BytesIO(data)).load()
    except UnfitGraphError:
        raise
    except Exception as failure:
        raise UnfitGraphError(f"it cannot be read again: {failure!r}") from failure
    return data


def from_bytes(data: bytes) -> tuple[GraphModule, list[Any], FakeTensorMode]:
    """Read what :func:`to_bytes` wrote: the graph, fake inputs, and their mode."""
    read: _GraphData = _Reader(io.BytesIO(data)).load()
    # as Dynamo's, which has one for constant sizes as well
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    root = torch.nn.Module()
    for name, buffer in read.buffers.items():
        tensor, holder = buffer.made(mode), root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, torch.nn.Module())
            holder = getattr(holder, part)
        if isinstance(tensor, torch.nn.Parameter):
            holder.register_parameter(last, tensor)
        else:
            holder.register_buffer(last, tensor)
    inputs = [value.made(mode) if isinstance(value, _Meta) else value for value in read.inputs]
    graph, made = Graph(), dict[str, Node]()
    for held in read.nodes:
        args, kwargs = _unpacked(held.args, made), _unpacked(held.kwargs, made)
        node = graph.create_node(
            held.op, _target(held.target), args, kwargs, name=held.name, type_expr=held.type_expr
        )
        if held.static is not None:
            node.meta["tensor_dict"] = {STATIC: held.static}
        if held.source is not None:
            node._dynamo_source = held.source
        if held.example is not None:
            node.meta["example_value"] = held.example.made(mode)
        made[held.name] = node
    gm = GraphModule(root, graph)
    gm.meta.update(read.meta)
    for name, value in read.attributes.items():
        setattr(gm, name, value)
    return gm, inputs, mode


class _Reader(pickle.Unpickler):
    """Reads nothing that would import the user's modules."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in (*MODULES, "stof_compile", "collections"):
            raise UnfitGraphError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def _packed_type(node: Node) -> Any:
    known = node.type
    return known if known in (Tensor, torch.nn.Parameter, torch.nn.Buffer) else None


def _packed_target(node: Node) -> Any:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _known(_Operator(namespace, name, target._overloadname))
    if isinstance(target, OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return _known(_Operator(namespace, name, ""))
    of = getattr(target, "__objclass__", None)
    module = str(getattr(target, "__module__", None) or getattr(of, "__module__", ""))
    if module.split(".")[0] not in MODULES:
        raise UnfitGraphError(f"{node.name} calls a function of {module or 'an unknown module'}")
    return target


def _known(operator: _Operator) -> _Operator:
    if operator.namespace not in NAMESPACES:
        raise UnfitGraphError(f"operator {operator.namespace}::{operator.name} is not PyTorch's")
    return operator


def _target(packed: Any) -> Any:
    if not isinstance(packed, _Operator):
        return packed
    packet = getattr(getattr(torch.ops, packed.namespace), packed.name)
    return getattr(packet, packed.overload) if packed.overload else packet


def _packed(value: Any) -> Any:
    """Arguments with links in place of nodes."""
    if isinstance(value, Node):
        return _Link(value.name)
    if isinstance(value, slice):
        return slice(*map(_packed, (value.start, value.stop, value.step)))
    return _mapped(value, _packed)


def _unpacked(value: Any, made: Mapping[str, Node]) -> Any:
    if isinstance(value, _Link):
        return made[value.name]
    if isinstance(value, slice):
        return slice(*(_unpacked(part, made) for part in (value.start, value.stop, value.step)))
    return _mapped(value, lambda part: _unpacked(part, made))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) is torch.Size:
        return torch.Size(map(change, value))
    if type(value) is tuple:
        return tuple(map(change, value))
    if isinstance(value, list):
        return list(map(change, value))
    if isinstance(value, dict):
        return {key: change(kept) for key, kept in value.items()}
    if type(value) in LEAVES:
        return value
    raise UnfitGraphError(f"an argument is a {type(value).__qualname__}")
