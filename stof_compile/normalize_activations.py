"""GELU and SiLU, however they are written, as one node.

    x * sigmoid(x),  x / (1 + exp(-x))                               F.silu(x)
    0.5 * x * (1 + erf(x / sqrt(2)))                                 F.gelu(x)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))     F.gelu(x, approximate="tanh")

Factors may stand in any order and constants be multiplied out: what is inside of ``tanh`` and
``erf`` is compared as a polynomial in x. ``x * sigmoid(1.702 * x)`` (QuickGELU) is none of these
functions and stays. In half precision the one node rounds once, the formula after every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from stof_compile.between import writer_between
from stof_compile.capture import CaptureFacts
from stof_compile.node_ops import argument, dtype_of, number, operation
from stof_compile.respell import constant_number, only_user, read_inside, respell

Polynomial = Mapping[int, float]  # power -> coefficient
_ROOT = math.sqrt(2.0 / math.pi)
INNER: Mapping[str, Polynomial] = {
    "tanh": {1: _ROOT, 3: 0.044715 * _ROOT},
    "erf": {1: math.sqrt(0.5)},
}
CONSTANT_TOLERANCE = 1e-5  # relative: models write 0.79788456, 1.41421
MAX_DEGREE = 3


@dataclass(frozen=True)
class _Factors:
    """A product: a number and the values it is multiplied with.

    ``nodes``: the multiplications, and divisions by numbers, it consists of.
    """

    number: float
    values: tuple[Node, ...]
    nodes: tuple[Node, ...] = ()


def rewrite_silus(graph: Graph, facts: CaptureFacts) -> int:
    """Write every spelled-out SiLU as ``F.silu``; in inference only."""
    if facts.grad_enabled:
        return 0
    count = 0
    for node in list(graph.nodes):
        found = _sigmoid_product(node) or _exp_quotient(node, facts)
        if found is not None:
            x, nodes = found
            count += _rewrite(graph, x, nodes, node, F.silu)
    return count


def rewrite_gelus(graph: Graph, facts: CaptureFacts) -> int:
    """Write every spelled-out GELU as ``F.gelu``, exact or with tanh; in inference only."""
    if facts.grad_enabled:
        return 0
    count = 0
    for node in list(graph.nodes):
        kind = operation(node)
        if kind not in INNER:
            continue
        plus_one = only_user(node)
        if plus_one is None or not _adds_one(plus_one, node, facts):
            continue
        result = only_user(plus_one)
        while result is not None and operation(result) in ("mul", "div"):
            found = _gelu(result, plus_one, node, facts)
            if found is not None:
                x, nodes = found
                approximate = "tanh" if kind == "tanh" else "none"
                build = lambda t, a=approximate: F.gelu(t, approximate=a)  # noqa: E731
                count += _rewrite(graph, x, nodes, result, build)
                break
            result = only_user(result)
    return count


def _rewrite(graph: Graph, x: Node, nodes: Sequence[Node], result: Node, build: Any) -> int:
    dtype = dtype_of(x)
    nodes = sorted(set(nodes))
    if dtype is None or not dtype.is_floating_point or any(dtype_of(n) != dtype for n in nodes):
        return 0
    if not read_inside(nodes, result) or writer_between((x,), nodes[0], result) is not None:
        return 0
    return int(respell(graph, result, nodes, build, x))


# -- SiLU ------------------------------------------------------------------------------------------


def _sigmoid_product(node: Node) -> tuple[Node, tuple[Node, ...]] | None:
    if operation(node) != "mul" or node.kwargs or len(node.args) != 2:
        return None
    for x, gate in (node.args, node.args[::-1]):
        if not isinstance(x, Node) or not isinstance(gate, Node):
            continue
        if operation(gate) == "sigmoid" and argument(gate, 0, "input") is x:
            return x, (gate, node)
    return None


def _exp_quotient(node: Node, facts: CaptureFacts) -> tuple[Node, tuple[Node, ...]] | None:
    if operation(node) != "div" or node.kwargs or len(node.args) != 2:
        return None
    x, total = node.args
    if not isinstance(x, Node) or not isinstance(total, Node) or operation(total) != "add":
        return None
    for power in total.all_input_nodes:
        if operation(power) == "exp" and _adds_one(total, power, facts):
            inner: list[Node] = []
            if _polynomial(argument(power, 0, "input"), x, inner, facts) == {1: -1.0}:
                return x, (*inner, power, total, node)
    return None


# -- GELU ------------------------------------------------------------------------------------------


def _gelu(
    result: Node, plus_one: Node, function: Node, facts: CaptureFacts
) -> tuple[Node, tuple[Node, ...]] | None:
    """(x, the nodes) when a product is ``0.5 * x * (1 + function(polynomial of x))``."""
    product = _factors(result, plus_one, facts)
    others = [value for value in product.values if value is not plus_one]
    if len(others) != 1 or len(product.values) != 2 or not math.isclose(product.number, 0.5):
        return None
    (x,) = others
    inner: list[Node] = []
    found = _polynomial(argument(function, 0, "input"), x, inner, facts)
    wanted = INNER[operation(function)]
    if found is None or set(found) != set(wanted):
        return None
    if not all(
        math.isclose(found[power], wanted[power], rel_tol=CONSTANT_TOLERANCE) for power in wanted
    ):
        return None
    return x, (*inner, function, plus_one, *product.nodes)


def _adds_one(node: Node, term: Node, facts: CaptureFacts) -> bool:
    if operation(node) != "add" or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    return (a is term and constant_number(b, facts) == 1.0) or (
        b is term and constant_number(a, facts) == 1.0
    )


def _factors(value: Any, whole: Node, facts: CaptureFacts) -> _Factors:
    """Multiply out a product; ``whole`` and values that others read too are not taken apart."""
    constant = constant_number(value, facts)
    if constant is not None:
        return _Factors(constant, ())
    name = operation(value)
    if value is whole or value.kwargs or len(value.args) != 2 or name not in ("mul", "div"):
        return _Factors(1.0, (value,))
    parts = []
    for place, operand in enumerate(value.args):
        part = _Factors(1.0, (operand,)) if _is_shared(operand) else None
        part = part or _factors(operand, whole, facts)
        if name == "div" and place == 1:
            if part.values or part.number == 0.0:
                return _Factors(1.0, (value,))
            part = _Factors(1.0 / part.number, ())
        parts.append(part)
    a, b = parts
    return _Factors(a.number * b.number, a.values + b.values, (*a.nodes, *b.nodes, value))


def _is_shared(operand: Any) -> bool:
    """Whether a tensor has several readers."""
    return (
        isinstance(operand, Node)
        and len(operand.users) > 1
        and isinstance(operand.meta.get("example_value"), torch.Tensor)
        and operand.meta["example_value"].dim() > 0
    )


def _polynomial(
    value: Any, x: Node, nodes: list[Node], facts: CaptureFacts
) -> dict[int, float] | None:
    """The value as a polynomial in x, None when it is none; its nodes are added to ``nodes``."""
    if value is x:
        return {1: 1.0}
    constant = constant_number(value, facts)
    if constant is not None:
        return {0: constant}
    if not isinstance(value, Node) or value.kwargs or len(nodes) > 16:
        return None
    name, operands = operation(value), value.args
    nodes.append(value)
    if name in ("neg", "square") and len(operands) == 1:
        inner = _polynomial(operands[0], x, nodes, facts)
        if inner is None:
            return None
        return _multiply({0: -1.0} if name == "neg" else inner, inner)
    if len(operands) != 2:
        return None
    if name == "pow":
        return _power(_polynomial(operands[0], x, nodes, facts), number(operands[1]))
    if name not in ("add", "sub", "mul", "div"):
        return None
    a, b = (_polynomial(operand, x, nodes, facts) for operand in operands)
    if a is None or b is None:
        return None
    if name in ("add", "sub"):
        sign = 1.0 if name == "add" else -1.0
        return {p: a.get(p, 0.0) + sign * b.get(p, 0.0) for p in {*a, *b}}
    if name == "mul":
        return _multiply(a, b)
    return {p: c / b[0] for p, c in a.items()} if set(b) == {0} and b[0] != 0.0 else None


def _power(base: dict[int, float] | None, exponent: float | None) -> dict[int, float] | None:
    if base is None or exponent not in (1.0, 2.0, 3.0):
        return None
    result: dict[int, float] | None = {0: 1.0}
    for _ in range(int(exponent)):
        result = None if result is None else _multiply(result, base)
    return result


def _multiply(a: Polynomial, b: Polynomial) -> dict[int, float] | None:
    result: dict[int, float] = {}
    for p, c in a.items():
        for q, d in b.items():
            result[p + q] = result.get(p + q, 0.0) + c * d
    return result if max(result) <= MAX_DEGREE else None
