"""Facts about a captured Dynamo graph: its inputs, what it writes to, and which module it was
compiled from.

Nothing here changes the graph except ``add_buffer``, which gives it a new constant tensor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from stof_compile.emit import fake_mode_of
from stof_compile.node_ops import mutations, source_text
from stof_compile.static_values import StaticValues

InputKind = Literal["parameter", "buffer", "user", "symint"]
RESUME_PREFIX = "torch_dynamo_resume_in"


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
class CaptureFacts:
    """What the backend needs to know about a captured graph before it changes anything.

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
        module_paths: id of a module -> its path in the compiled root module; empty when the root
            is unknown.
        path_known: site paths are relative to the compiled root module.
        whole_model: no graph break: this graph is the whole call of the root.
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
    module_paths: Mapping[int, tuple[str, ...]]
    path_known: bool
    whole_model: bool
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
    mutated = frozenset(base.name for _, base in mutations(gm.graph) if base.op == "placeholder")
    buffers = {
        name: tensor
        for name, tensor in tensors.items()
        if inputs[name].kind == "buffer" and not fake and name not in subclasses
    }
    roots = compiled_roots()
    paths = module_paths(roots)
    known, at_root = _root_facts(gm, roots, paths)
    return CaptureFacts(
        inputs=inputs,
        fake_inputs=fake,
        subclass_inputs=subclasses,
        mutated_inputs=mutated,
        grad_enabled=torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()),
        inference_mode=torch.is_inference_mode_enabled(),
        has_symbolic_shapes=any(_is_symbolic(node) for node in placeholders),
        device=_device(tensors.values()),
        module_paths=paths,
        path_known=known,
        whole_model=at_root and not _graph_break(gm),
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


# -- where the graph stands in the model -----------------------------------------------------------


def compiled_roots() -> tuple[nn.Module, ...]:
    """The module being compiled, or the modules a compiled function reaches; empty when they can't
    be told.

    Dynamo does not hand the compiled object to a backend. It is in the frame of the wrapper that
    ``torch.compile``
    returned, which is on the Python stack while a backend runs, also for graphs behind a graph
    break.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame" and "fn" in frame.f_locals:
            given = (*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values())
            return _modules_of(frame.f_locals["fn"]) or tuple(
                m for m in given if isinstance(m, nn.Module)
            )
        frame = frame.f_back
    return ()


def _modules_of(fn: Any, depth: int = 0) -> tuple[nn.Module, ...]:
    if isinstance(fn, nn.Module):
        return (getattr(fn, "_orig_mod", fn),)
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return (getattr(owner, "_orig_mod", owner),)
    if depth > 4:
        return ()
    found: list[nn.Module] = []
    code = getattr(fn, "__code__", None)
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that has not been assigned yet
            continue
        if isinstance(content, nn.Module) or (callable(content) and depth < 4):
            found.extend(_modules_of(content, depth + 1))
    if isinstance(code, CodeType):
        scope = getattr(fn, "__globals__", {})
        found.extend(m for name in code.co_names if isinstance(m := scope.get(name), nn.Module))
    return tuple(dict.fromkeys(found))


def module_paths(roots: Sequence[nn.Module]) -> dict[int, tuple[str, ...]]:
    """Path of every module below the roots by identity; modules reached twice are left out as
    ambiguous."""
    paths: dict[int, tuple[str, ...]] = {}
    twice: set[int] = set()
    for root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            if id(module) in paths:
                twice.add(id(module))
            else:
                paths[id(module)] = tuple(name.split(".")) if name else ()
    return {key: path for key, path in paths.items() if key not in twice}


def split_source(source: str) -> tuple[str, tuple[str, ...]]:
    """Split a source expression into its variable and the path of components below it.

    ``L['self']._modules['layer'][0].attention`` and ``L['self'].layer.0.attention`` both give
    ``("L['self']", ("layer", "0", "attention"))``; wrappers such as ``_orig_mod`` and ``__self__``
    drop out.
    """
    match = re.match(r"[LG]\[(['\"])[^'\"]*\1\]", source)
    base = match.group(0) if match else source.split(".")[0]
    rest = source[len(base) :]
    parts = [a or b for a, b in re.findall(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.?([^.\[\]()]+)", rest)]
    wrappers = {
        "_modules",
        "_parameters",
        "_buffers",
        "_orig_mod",
        "__self__",
        "__wrapped__",
        "_fn",
    }
    return base, tuple(part for part in parts if part not in wrappers)


def module_stack(node: Node) -> list[tuple[int | None, str]]:
    """Modules a node was traced in, outermost first: identity where torch records it, and source
    expression."""
    stack = []
    for key, value in (node.meta.get("nn_module_stack") or {}).items():
        digits = str(key).split("@")[0]  # "@n" counts repeated calls of one module
        stack.append((int(digits) if digits.isdigit() else None, str(value[0])))
    return stack


def site_path(node: Node, facts: CaptureFacts) -> tuple[str, ...]:
    """Path of the innermost module of a node, relative to the compiled root where that is known."""
    stack = module_stack(node)
    if not stack:
        return ()
    for depth in range(len(stack) - 1, -1, -1):
        identity, source = stack[depth]
        if identity is not None and identity in facts.module_paths:
            inner = split_source(stack[-1][1])[1]
            return facts.module_paths[identity] + inner[len(split_source(source)[1]) :]
    return split_source(stack[-1][1])[1]


def _root_facts(
    gm: GraphModule, roots: Sequence[nn.Module], paths: Mapping[int, tuple[str, ...]]
) -> tuple[bool, bool]:
    """(paths are relative to the root, the graph starts at the root)."""
    known, at_root = True, not _is_resumed()
    for node in gm.graph.nodes:
        for identity, source in module_stack(node):
            text = split_source(source)[1]
            if identity is not None and identity in paths:
                at_root = at_root and paths[identity] == text
            elif identity is not None and roots:
                known = known and _is_wrapper(text, paths)
            elif not roots or identity is None:
                known = known and not _is_resumed() and bool(roots)
    return known, at_root


def _is_wrapper(text: tuple[str, ...], paths: Mapping[int, tuple[str, ...]]) -> bool:
    """A module that is not below the root by identity (made in forward, shared) but whose text
    names a place there."""
    return any(path[: len(text)] == text for path in paths.values())


def _is_resumed() -> bool:
    """Whether Dynamo is compiling the rest of a function behind a graph break."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            code = frame.f_locals.get("code")
            if isinstance(code, CodeType):
                return code.co_name.startswith(RESUME_PREFIX)
        frame = frame.f_back
    return False


def _graph_break(gm: GraphModule) -> bool:
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


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
            for existing in gm.graph.find_nodes(op="get_attr", target=unique):
                return existing
        count += 1
        unique = f"{name}_{count}"
    gm.register_buffer(unique, tensor, persistent=False)
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
