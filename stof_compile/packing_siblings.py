"""Linear layers of a graph as packing sees them: which read one x with constant weights.

    F.linear(x, W, b)                               W [n, K]
    addmm(b, x, W),  addmm(b, x, W.t())             W [K, n], [n, K]; x [M, K]
    x @ W,  x @ W.t(),  each with + b               W [K, n], [n, K]

Siblings are those of one parent module with the same value x: a node, or views of one that keep
the order of its elements. Where x or the results are written to, siblings are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from stof_compile.between import region_states
from stof_compile.capture import CaptureFacts
from stof_compile.compiled_root import split_source
from stof_compile.memory import mutations, storage_base
from stof_compile.node_ops import (
    argument,
    dtype_of,
    is_cast,
    is_inplace,
    number,
    operation,
    permutation,
    raw_name,
    shape_of,
    tensor_meta,
)

Layout = Literal["nk", "kn"]
Form = Literal["linear", "addmm", "matmul"]
PLAIN_TYPES = (Tensor, nn.Parameter)  # nn.Buffer makes plain tensors
# Views that keep elements in row-major order: views of one value with one shape are equal.
ORDERED = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "contiguous"}
    | {"ravel", "reshape_as"}
)


@dataclass(frozen=True)
class Sibling:
    """One linear layer.

    Args:
        product: the contraction. result: its value with the bias, where that is a node of its own.
        x: what it multiplies [..., K]. root: the value x is a view of. views: nodes from ``root``
            (left out) to ``x``.
        weight: node of the parameter. bias: node [n] or None.
        layout: "nk": weight [n, K], "kn": [K, n]. form: how it is written and will be.
        size: n.
    """

    product: Node
    result: Node
    x: Node
    root: Node
    views: tuple[Node, ...]
    weight: Node
    bias: Node | None
    layout: Layout
    form: Form
    size: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes it consists of, without x and the parameters."""
        return (self.product,) if self.result is self.product else (self.product, self.result)


class Constants:
    """Real values of the parameters and buffers of a graph that nothing in it writes to."""

    def __init__(self, gm: GraphModule, facts: CaptureFacts) -> None:
        self._gm, self._facts = gm, facts
        self._written = {base for _, base in mutations(gm.graph)}
        # x.data has x's memory, unseen by version counters
        self._written |= {n for n in gm.graph.nodes if any(map(_reads_data, n.users))}
        targets = {base.target for base in self._written if base.op == "get_attr"}
        self._written |= {n for n in gm.graph.find_nodes(op="get_attr") if n.target in targets}

    def value(self, node: Any) -> Tensor | None:
        """The tensor, None for what is no constant or no plain strided tensor of floats."""
        if not isinstance(node, Node):
            return None
        if self._written and not self._written.isdisjoint((node, storage_base(node))):
            return None
        held: Any = None
        if node.op == "placeholder":
            fact = self._facts.inputs.get(node.name)
            if fact is not None and fact.kind in ("parameter", "buffer"):
                held = fact.example
        elif node.op == "get_attr" and "stof_packed" not in node.meta:
            held = self._attribute(str(node.target))
        if not isinstance(held, Tensor) or type(held) not in PLAIN_TYPES:
            return None
        plain = held.layout == torch.strided and held.is_floating_point()
        real = not isinstance(held, FakeTensor) and held.device.type != "meta"
        return held if plain and real else None

    def _attribute(self, path: str) -> Any:
        held: Any = self._gm
        for part in path.split("."):
            held = getattr(held, part, None)
        return held

    def path(self, node: Node) -> tuple[str, ...]:
        """Path of a parameter: modules, then its name; as far as it is known."""
        if node.op == "get_attr":
            return tuple(str(node.target).split("."))
        return split_source(self._facts.inputs[node.name].source)[1]


def sibling_groups(gm: GraphModule, facts: CaptureFacts) -> list[list[Sibling]]:
    """Linear layers grouped by what they have to share, in graph order; lone ones left out.

    Shared are x, its shape and dtype, the parent module, the spelling, dtype and device of weights
    and biases, and the autocast and grad-mode region.
    """
    constants, regions = Constants(gm, facts), region_states(gm.graph)
    groups: dict[tuple[Any, ...], list[Sibling]] = {}
    for node in gm.graph.nodes:
        sibling = read_linear(node, constants)
        if sibling is None or regions[sibling.product] != regions[sibling.result]:
            continue
        weight = constants.value(sibling.weight)
        assert weight is not None, "read_linear takes constant weights only"
        key = (
            sibling.root,
            tuple(str(size) for size in shape_of(sibling.x) or ()),
            dtype_of(sibling.x),
            sibling.form,
            sibling.layout,
            weight.dtype,
            weight.device,
            constants.path(sibling.weight)[:-2],
            regions[sibling.product],
        )
        groups.setdefault(key, []).append(sibling)
    return [group for group in groups.values() if len(group) > 1]


def read_linear(node: Node, constants: Constants) -> Sibling | None:
    """Read a contraction with a constant weight; None for other nodes."""
    if is_inplace(node) or tensor_meta(node) is None:
        return None
    read = _operands(node)
    if read is None:
        return None
    x, weight, bias, form = read
    layout: Layout = "nk" if form == "linear" else "kn"
    if isinstance(weight, Node) and permutation(weight) == (1, 0):  # W.t()
        weight, layout = argument(weight, 0, "input"), "kn" if layout == "nk" else "nk"
    value = constants.value(weight)
    if value is None or value.dim() != 2 or not isinstance(x, Node) or tensor_meta(x) is None:
        return None
    size = value.shape[0 if layout == "nk" else 1]
    result = node
    if bias is not None and not _is_bias(bias, size, value, constants):
        return None
    if form == "matmul":
        result, bias = _with_bias(node, size, value, constants)
    root, views = _root(x)
    return Sibling(node, result, x, root, views, weight, bias, layout, form, size)


def _operands(node: Node) -> tuple[Any, Any, Any, Form] | None:
    """(x, weight, bias, form) of a contraction with default flags."""
    name = operation(node)
    if name == "linear" and not set(node.kwargs) - {"input", "weight", "bias"}:
        x, weight, bias = (argument(node, i, n) for i, n in enumerate(("input", "weight", "bias")))
        return x, weight, bias, "linear"
    if name == "addmm" and _is_plain_addmm(node):
        bias, x, weight = (argument(node, i, n) for i, n in enumerate(("input", "mat1", "mat2")))
        return (x, weight, bias, "addmm") if isinstance(bias, Node) else None
    if name in ("matmul", "mm") and not set(node.kwargs) - {"input", "other", "mat2"}:
        x = argument(node, 0, "input")
        weight = argument(node, 1, "other", node.kwargs.get("mat2"))
        return x, weight, None, "matmul"
    return None


def _is_plain_addmm(node: Node) -> bool:
    flags = {name: value for name, value in node.kwargs.items() if name in ("alpha", "beta")}
    known = not set(node.kwargs) - {"input", "mat1", "mat2", "alpha", "beta"}
    return known and len(node.args) <= 3 and all(number(v) == 1.0 for v in flags.values())


def _is_bias(node: Any, size: int, weight: Tensor, constants: Constants) -> bool:
    """Whether a node is a constant vector [n]; what has more dimensions is a residual."""
    value = constants.value(node)
    return value is not None and value.shape == (size,) and value.device == weight.device


def _with_bias(
    product: Node, size: int, weight: Tensor, constants: Constants
) -> tuple[Node, Node | None]:
    """(result, bias) of a product: with the sum behind it where that adds a bias."""
    user = next(iter(product.users), None)
    if len(product.users) != 1 or user is None or operation(user) != "add" or is_inplace(user):
        return product, None
    if user.kwargs or len(user.args) != 2 or dtype_of(user) != dtype_of(product):
        return product, None
    for own, other in (user.args, user.args[::-1]):
        if own is product and _is_bias(other, size, weight, constants):
            return user, other  # type: ignore[return-value]
    return product, None


def _root(x: Node) -> tuple[Node, tuple[Node, ...]]:
    """The value x is an order-preserving view of, and the views."""
    views: list[Node] = []
    while x.op in ("call_function", "call_method") and not is_inplace(x):
        source = x.args[0] if x.args else None
        if not isinstance(source, Node) or tensor_meta(source) is None:
            break
        idle_cast = is_cast(x) and _same_kind(x, source)
        if operation(x) not in ORDERED and not idle_cast:
            break
        if operation(x) == "view" and dtype_of(x) != dtype_of(source):
            break  # view(dtype)
        views.append(x)
        x = source
    return x, tuple(views)


def _reads_data(node: Node) -> bool:
    return raw_name(node) in ("_get_data_attr", "data")


def _same_kind(a: Node, b: Node) -> bool:
    x, y = tensor_meta(a), tensor_meta(b)
    return x is not None and y is not None and (x.dtype, x.device) == (y.dtype, y.device)


def first_node(siblings: Iterable[Sibling]) -> Node:
    """The earliest node at which a value of the siblings' x was taken."""
    return min(node for s in siblings for node in (s.product, *s.views))
