"""Facts about a captured Dynamo graph: its inputs, what it writes to, and which module it was
compiled from.

Nothing here changes the graph except ``add_buffer``, which gives it a new constant tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from stof_compile.compiled_root import (
    compiled_root,
    ends_in_break,
    module_paths,
    path_of,
    stands_in_root,
)
from stof_compile.emit import fake_mode_of
from stof_compile.memory import mark_shared_inputs, mutations, storage_base
from stof_compile.node_ops import source_text
from stof_compile.static_values import StaticValues

InputKind = Literal["parameter", "buffer", "user", "symint"]


@dataclass(frozen=True)
class InputFact:
    """One placeholder of the graph.

    Args:
        name: node name. source: Dynamo's source expression, e.g.
            ``L['self']._modules['a']._parameters['w']``.
        kind: parameter, buffer, user (an argument of the call, a cache, ...) or symint.
        example: the example input handed to the backend (real, or fake under DDP).
    """

    name: str
    kind: InputKind
    example: Any
    source: str


@dataclass(frozen=True)
class RootPlace:
    """Where a graph stands in the object being compiled: told by Dynamo's frames, later by nothing.

    Args:
        module_paths: id of a module -> its path in the compiled root module; empty when the root
            is unknown.
        path_known: site paths are relative to the compiled root module.
        whole_model: no graph break: this graph is the whole call of the root.
        at_start: this graph starts where the root starts.
        cut: it ends in a graph break.
    """

    module_paths: Mapping[int, tuple[str, ...]]
    path_known: bool
    whole_model: bool
    at_start: bool
    cut: bool


@dataclass(frozen=True)
class CaptureFacts:
    """What the backend needs to know about a captured graph before it changes anything.

    They hold the inputs: what lives as long as the compiled graph must not hold them.

    Args:
        inputs: placeholder name -> its facts, in order.
        fake_inputs: the example inputs are fake (DDP): nothing may read their values.
        subclass_inputs: names of inputs that are tensor subclasses (DTensor, quantised weights).
        mutated_inputs: names of inputs the graph writes to.
        grad_enabled: gradients are recorded in this graph (some input requires them and grad mode
            is on).
        inference_mode: compiled under ``torch.inference_mode``.
        has_symbolic_shapes: some size is symbolic.
        device: device of the computation (of the first floating-point input that is not on the
            CPU, else the CPU).
        place: where the graph stands in the compiled root.
        static: static nodes of the graph and their values.
    """

    inputs: Mapping[str, InputFact]
    fake_inputs: bool
    subclass_inputs: tuple[str, ...]
    mutated_inputs: frozenset[str]
    grad_enabled: bool
    inference_mode: bool
    has_symbolic_shapes: bool
    device: torch.device
    place: RootPlace
    static: StaticValues

    def names(self, kind: InputKind) -> tuple[str, ...]:
        """Names of the inputs of one kind."""
        return tuple(name for name, fact in self.inputs.items() if fact.kind == kind)


def read_capture(gm: GraphModule, example_inputs: Sequence[Any]) -> CaptureFacts:
    """Read the facts of a graph; to be called inside the backend, before any pass.

    Args:
        gm: Dynamo's graph module.
        example_inputs: what Dynamo handed to the backend, one entry per placeholder.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = {
        node.name: _input_fact(node, example)
        for node, example in zip(placeholders, example_inputs, strict=True)
    }
    tensors = {
        name: fact.example for name, fact in inputs.items() if isinstance(fact.example, Tensor)
    }
    fake = any(isinstance(tensor, FakeTensor) for tensor in tensors.values())
    subclasses = tuple(
        name
        for name, tensor in tensors.items()
        if type(tensor) not in (Tensor, nn.Parameter, FakeTensor)
        and not isinstance(tensor, nn.Buffer)
    )
    mark_shared_inputs(gm.graph)
    written = {base for _, base in mutations(gm.graph)}
    mutated = frozenset(node.name for node in placeholders if storage_base(node) in written)
    buffers = {
        name: tensor
        for name, tensor in tensors.items()
        if inputs[name].kind == "buffer" and not fake and name not in subclasses
        if not tensor.requires_grad  # one that is learned
    }
    root = compiled_root()
    paths = module_paths(root.modules)
    known, at_root = stands_in_root(gm, root, paths)
    return CaptureFacts(
        inputs=inputs,
        fake_inputs=fake,
        subclass_inputs=subclasses,
        mutated_inputs=mutated,
        grad_enabled=torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()),
        inference_mode=torch.is_inference_mode_enabled(),
        has_symbolic_shapes=any(_is_symbolic(node) for node in placeholders),
        device=_device(tensors.values()),
        place=RootPlace(paths, known, at_root, root.at_start, ends_in_break(gm)),
        static=StaticValues(gm.graph, buffers),
    )


def _input_fact(node: Node, example: Any) -> InputFact:
    kind: InputKind = "user"
    value = node.meta.get("example_value")
    if isinstance(example, torch.SymInt | int) or isinstance(value, torch.SymInt):
        kind = "symint"
    elif isinstance(example, Tensor):
        # Not by "_dynamo_static_input_type": key-value caches have it too, yet their contents
        # change.
        source = source_text(node)
        if isinstance(example, nn.Parameter) or "._parameters[" in source:
            kind = "parameter"
        elif "._buffers[" in source:
            kind = "buffer"
    return InputFact(node.name, kind, example, source_text(node))


def _is_symbolic(node: Node) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)


def _device(tensors: Any) -> torch.device:
    devices = [t.device for t in tensors]
    return next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))


def site_path(node: Node, facts: CaptureFacts) -> tuple[str, ...]:
    """Path of the innermost module of a node, relative to the compiled root where that is known."""
    return path_of(node, facts.place.module_paths)


# -- adding a tensor -------------------------------------------------------------------------------


def add_buffer(gm: GraphModule, name: str, tensor: Tensor) -> Node:
    """Give the graph a constant tensor as a buffer and return the node that reads it.

    It becomes a static input of the compiled graph: not copied under CUDA graphs and not baked
        into the code, so
    other contents of the same shape reuse a cached compilation.

    Args:
        gm: Dynamo's graph module.
        name: wanted attribute name; a number is appended when it is taken by another tensor.
        tensor: real tensor on the device of the computation.
    """
    from torch._dynamo.source import ConstantSource

    unique, count = name, 0
    while hasattr(gm, unique):
        if getattr(gm, unique) is tensor:
            readers: list[Node] = list(gm.graph.find_nodes(op="get_attr", target=unique))
            if readers:
                return readers[0]
        count += 1
        unique = f"{name}_{count}"
    # a persistent one: torch keeps the names of the others in a set, whose order changes with the
    # process, and with it the key of the compile caches
    gm.register_buffer(unique, tensor)
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        sources[unique] = ConstantSource(unique)
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        node = gm.graph.get_attr(unique)
    node.meta["example_value"] = _fake_like(gm, tensor)
    return node


def _fake_like(gm: GraphModule, tensor: Tensor) -> Tensor:
    values = (n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder")
    mode = fake_mode_of(values)
    return mode.from_tensor(tensor, static_shapes=True) if mode is not None else tensor
