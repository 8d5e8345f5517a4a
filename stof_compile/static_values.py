"""Nodes whose value is fixed when a graph is compiled: which they are, their real values, their
text.

A node is static when it depends only on constants, factory functions and buffers (never on user
inputs, parameters, random numbers, operators of others or memory the graph writes to). With
symbolic shapes it may depend on sizes too; then it has no single value, but a text that computes it
from the sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import _get_qualified_name, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from stof_compile.between import has_effects, region_states
from stof_compile.memory import mutations, storage_base, storages, written_arguments
from stof_compile.node_ops import is_inplace, raw_name, tensor_meta
from stof_compile.repeatable import is_repeatable

ELEMENT_CAP = (
    1 << 28
)  # largest tensor evaluated at compile time, in elements (2 GiB of int64 indices)


@dataclass(frozen=True)
class StaticGraph:
    """A static value as a function of sizes.

    Args:
        text: Python source of ``value(s0, s1, ..., t0, t1, ...)``.
        tensors: copies of the buffers it reads, bound to ``t0`` ...
        symints: nodes of the sizes it reads, bound to ``s0`` ...
    """

    text: str
    tensors: tuple[Tensor, ...]
    symints: tuple[Node, ...]


@dataclass
class StaticValues:
    """Static nodes of one graph.

    Args:
        graph: Dynamo graph.
        buffers: placeholder name -> real buffer; other placeholders are not static.
    """

    graph: Graph
    buffers: Mapping[str, Tensor]
    folded: set[str] = field(default_factory=set)  # buffers whose contents were read
    derived: dict[tuple[Any, ...], Node] = field(
        default_factory=dict
    )  # nodes made from others, shared by sites
    _values: dict[Node, Any] = field(default_factory=dict)
    _static: dict[Node, bool] = field(default_factory=dict)
    _written: set[Node] | None = None

    def is_static(self, node: Node) -> bool:
        """Whether the node's value depends only on constants, factories, unwritten buffers and
        sizes."""
        stack = [node]
        while stack:
            current = stack[-1]
            if current in self._static:
                stack.pop()
                continue
            verdict = self._leaf_verdict(current)
            if verdict is None:
                waiting = [n for n in current.all_input_nodes if n not in self._static]
                if waiting:
                    stack.extend(waiting)
                    continue
                known = all(self._static[n] for n in current.all_input_nodes)
                verdict = known and is_repeatable(current)
            self._static[current] = verdict
            stack.pop()
        return self._static[node]

    def _leaf_verdict(self, node: Node) -> bool | None:
        if is_size(node):
            return True
        if node.op == "placeholder":
            return node.name in self.buffers and not self.is_written(node)
        if node.op not in ("call_function", "call_method"):
            return False
        name = raw_name(node)
        if not name or is_inplace(node) or self.is_written(node):
            return False
        return False if name.startswith(("_enter", "_exit")) else None

    @cached_property
    def is_eventful(self) -> bool:
        """Whether the graph writes to memory that is not its own, or switches modes on the way."""
        return has_effects(self.graph) or len(set(region_states(self.graph).values())) > 1

    def is_written(self, node: Node) -> bool:
        """Whether the graph writes to the memory of a value, which then has several contents."""
        written = self._written_bases()
        return bool(written) and storage_base(node) in written

    def holds_at(self, node: Node, place: Node) -> bool:
        """Whether a node's operation on its inputs as they are at a later place gives its value
        there.

        It does not where the graph writes to its memory or to that of an input in between.
        """
        bases = {storage_base(value) for value in (node, *node.all_input_nodes)}
        if bases.isdisjoint(self._written_bases()):
            return True
        later = node
        while later is not place and later.op != "root":
            if any(storage_base(t) in bases for t in written_arguments(later)):
                return False
            later = later.next
        return True

    def _written_bases(self) -> set[Node]:
        if self._written is None:
            self._written = {base for _, base in mutations(self.graph)}
        return self._written

    def closure(self, node: Node) -> list[Node]:
        """The static nodes a static node is computed from (itself included), in graph order; sizes
        are leaves."""
        wanted, stack = set(), [node]
        while stack:
            current = stack.pop()
            if current not in wanted:
                wanted.add(current)
                if not is_size(current):
                    stack.extend(current.all_input_nodes)
        return [n for n in self.graph.nodes if n in wanted]

    def is_symbolic(self, node: Node) -> bool:
        """Whether a static node depends on a symbolic size."""
        for current in self.closure(node):
            meta = tensor_meta(current)
            if is_size(current) or (
                meta is not None and any(not isinstance(n, int) for n in meta.shape)
            ):
                return True
        return False

    def buffers_read(self, node: Node) -> tuple[str, ...]:
        """Names of the buffer placeholders a static node reads."""
        return tuple(n.name for n in self.closure(node) if n.op == "placeholder" and not is_size(n))

    def too_large(self, node: Node) -> bool:
        """Whether evaluating the node would need a tensor above ``ELEMENT_CAP``."""
        for current in self.closure(node):
            meta = tensor_meta(current)
            # A broadcast view costs nothing: only elements that are really stored count.
            if meta is not None and current.op != "placeholder":
                stored = 1
                for size, stride in zip(meta.shape, meta.stride(), strict=True):
                    stored *= int(size) if stride != 0 else 1
                if stored > ELEMENT_CAP:
                    return True
        return False

    def evaluate(self, node: Node) -> Any:
        """Real value of a static node without symbolic sizes; on the device the graph computes it
        on.

        Runs outside of every fake, functional and inference mode; the result must not be written
        to. It never is a buffer itself or a view of one: masks made from it outlive the model.
        """
        self.folded.update(self.buffers_read(node))
        return self._evaluated(node)

    def _evaluated(self, node: Node) -> Any:
        if node in self._values:
            return self._values[node]
        order = self.closure(node)
        last_use = {n: i for i, user in enumerate(order) for n in user.all_input_nodes}
        environment: dict[Node, Any] = {}
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            for i, current in enumerate(order):
                environment[current] = self._run(current, environment)
                for used in current.all_input_nodes:
                    if last_use.get(used) == i:
                        environment.pop(used, None)
            value = environment[node]
            held = storages([self.buffers[name] for name in self.buffers_read(node)])
            if isinstance(value, Tensor) and held & storages(value):
                value = value.clone()
        self._values[node] = value
        return value

    def _run(self, node: Node, environment: dict[Node, Any]) -> Any:
        if node.op == "placeholder":
            return self.buffers[node.name]
        args, kwargs = map_arg((node.args, node.kwargs), environment.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target), "call_function nodes have a callable target"
        return node.target(*args, **kwargs)

    def scalar(self, value: Any) -> float | None:
        """A number, or the single element of a static tensor; None for anything else.

        A float attribute of a module may reach the graph as a symbolic float; reading it here pins
        its value with a
        guard, as torch's own kernels do.
        """
        if isinstance(value, Node) and isinstance(value.meta.get("example_value"), torch.SymFloat):
            symbolic = value.meta["example_value"]
            return float(symbolic) if symbolic.node.has_hint() else None
        if isinstance(value, Node):
            meta = tensor_meta(value)
            if (
                meta is None
                or meta.numel() != 1
                or not self.is_static(value)
                or self.is_symbolic(value)
            ):
                return None
            value = self.evaluate(value)
            value = value.item() if isinstance(value, Tensor) else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value)

    def as_text(self, node: Node) -> StaticGraph:
        """The computation of a static node as Python source, see ``StaticGraph``."""
        order = self.closure(node)
        sizes = [n for n in order if is_size(n)]
        held = [n for n in order if n.op == "placeholder" and not is_size(n)]
        names = {n: f"s{i}" for i, n in enumerate(sizes)} | {n: f"t{i}" for i, n in enumerate(held)}
        lines = [f"def value({', '.join(names.values())}):"]
        for current in order:
            if current in names:
                continue
            names[current] = f"v{len(lines) - 1}"
            lines.append(f"    {names[current]} = {_call_text(current, names)}")
        lines.append(f"    return {names[node]}")
        return StaticGraph(
            "\n".join(lines) + "\n", tuple(self._evaluated(n) for n in held), tuple(sizes)
        )


def is_size(node: Node) -> bool:
    """Whether the node is an integer of the graph (a symbolic size or arithmetic on one)."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) or (
        isinstance(value, int) and not isinstance(value, bool)
    )


def run_static_graph(graph: StaticGraph, sizes: list[int]) -> Tensor:
    """Evaluate a static graph for given sizes (in the order of ``symints``)."""
    scope: dict[str, Any] = {"torch": torch, "operator": operator, "math": math}
    exec(graph.text, scope)  # text written by StaticValues.as_text, never by a user
    with _disable_current_modes(), torch.no_grad():
        value: Tensor = scope["value"](*sizes, *graph.tensors)
    return value


def _call_text(node: Node, names: dict[Node, str]) -> str:
    args = [_literal(arg, names) for arg in node.args]
    keywords = [f"{key}={_literal(value, names)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:] + keywords)})"
    name = _get_qualified_name(node.target) if callable(node.target) else str(node.target)
    name = name.replace("_operator.", "operator.").removeprefix("builtins.")
    return f"{name}({', '.join(args + keywords)})"


def _literal(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, tuple | list):
        inner = [_literal(item, names) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(inner)}]"
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if isinstance(value, slice):
        return (
            f"slice({', '.join(_literal(v, names) for v in (value.start, value.stop, value.step))})"
        )
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)
