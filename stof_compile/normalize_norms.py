"""RMSNorm, however it is written, as one ``F.rms_norm`` node.

    wide = x.float()                                            # absent where x is fp32
    normed = wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    LLaMA, Mistral, T5:  weight * normed.to(x.dtype)
    Gemma:               (normed * (1 + weight.float())).to(x.dtype)
    OLMo 2:              (weight * normed).to(x.dtype)

``F.rms_norm`` of a half type computes in fp32 and rounds once, after the weight; the first spelling
rounds before and after it. What is not part of it stays as it is: Gemma's sum is a node of its own,
and so is a product with a weight of another dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from stof_compile.between import writer_between
from stof_compile.capture import CaptureFacts
from stof_compile.node_ops import argument, dtype_of, is_cast, number, operation, shape_of
from stof_compile.respell import constant_number, only_user, read_inside, respell

HALF_TYPES = (torch.float16, torch.bfloat16)
WIDE_TYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Spelling:
    """A norm that was found.

    Args:
        source: what is normalised. wide: the same in the dtype of the computation.
        eps: as a number. result: last node of the norm so far. nodes: all of them, without
            ``wide``.
        weight: vector it is multiplied with, None for none.
    """

    source: Node
    wide: Node
    eps: float
    result: Node
    nodes: tuple[Node, ...]
    weight: Node | None = None

    def then(self, node: Node, weight: Node | None = None) -> _Spelling:
        """The norm with one more node at its end."""
        return replace(self, result=node, nodes=(*self.nodes, node), weight=self.weight or weight)


def rewrite_rms_norms(graph: Graph, facts: CaptureFacts) -> int:
    """Write every spelled-out RMSNorm as ``F.rms_norm``; in inference only.

    A norm is left alone when a value inside is read elsewhere, when its input is written to on the
    way, when it is computed in half precision (there ``x ** 2`` overflows, which ``F.rms_norm``
    would mend), or when the result would get other strides.
    """
    if facts.grad_enabled:
        return 0
    count = 0
    for node in list(graph.nodes):
        spelling = _root_mean_square(node, facts) if _is_root(node) else None
        if spelling is None:
            continue
        for candidate in _longest_first(spelling):
            if _rewrite(graph, candidate):
                count += 1
                break
    return count


def _rewrite(graph: Graph, norm: _Spelling) -> bool:
    target = dtype_of(norm.result)
    x = norm.source if dtype_of(norm.source) == target else norm.wide
    if dtype_of(x) != target or (norm.weight is not None and dtype_of(norm.weight) != target):
        return False
    nodes = sorted(norm.nodes)
    if dtype_of(norm.wide) == target and any(dtype_of(node) != target for node in nodes):
        return False  # rounded on the way: a wide norm would not be
    if not read_inside(nodes, norm.result):
        return False
    first = nodes[0] if norm.wide is norm.source else norm.wide
    read = (norm.source,) if norm.weight is None else (norm.source, norm.weight)
    if writer_between(read, first, norm.result) is not None:
        return False
    (*_, width), eps = shape_of(x) or (None,), norm.eps

    def build(source: Any, weight: Any = None) -> Any:
        return F.rms_norm(source, (width,), weight, eps)

    operands = (x,) if norm.weight is None else (x, norm.weight)
    return respell(graph, norm.result, (norm.wide, *nodes), build, *operands)


def _longest_first(norm: _Spelling) -> list[_Spelling]:
    """The norm with what follows it, as far as it may belong to it; then the parts of that."""
    found = [norm]
    node = norm.result
    while len(found) < 4:
        user = only_user(node)
        if user is None:
            break
        if is_cast(user) and _casts_only(user, node):
            found.append(found[-1].then(user))
        elif found[-1].weight is None and (weight := _weight(user, node)) is not None:
            found.append(found[-1].then(user, weight))
        else:
            break
        node = user
    return found[::-1]


def _weight(node: Node, normed: Node) -> Node | None:
    """The vector of a product of normalised rows with a vector of their width."""
    if operation(node) != "mul" or node.kwargs:
        return None
    width = (shape_of(normed) or ())[-1:]
    for own, other in (node.args[:2], node.args[1::-1]):
        if own is not normed or not isinstance(other, Node) or other is normed:
            continue
        if shape_of(other) == width:
            return other
    return None


def _casts_only(node: Node, source: Node) -> bool:
    """Whether a cast leaves its operand where it is (and may change its dtype)."""
    old, new = source.meta.get("example_value"), node.meta.get("example_value")
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    known = not set(node.kwargs) - {"dtype", "device", "copy", "non_blocking"}
    return node.args[0] is source and old.device == new.device and known


# -- x / sqrt(mean(x ** 2) + eps) ------------------------------------------------------------------


def _is_root(node: Node) -> bool:
    if operation(node) == "pow":
        return number(argument(node, 1, "exponent")) in (-0.5, 0.5)
    return operation(node) in ("rsqrt", "sqrt")


def _root_mean_square(root: Node, facts: CaptureFacts) -> _Spelling | None:
    """Read the norm without its weight, from its square root."""
    total = argument(root, 0, "input")
    if not isinstance(total, Node) or operation(total) != "add" or total.kwargs:
        return None
    for mean, eps in (total.args[:2], total.args[1::-1]):
        source = _mean_of_squares(mean)
        value = None if source is None else constant_number(eps, facts)
        if source is not None and value is not None:
            wide, inner = source
            return _product(root, wide, value, (*inner, total, root))
    return None


def _mean_of_squares(mean: Any) -> tuple[Node, tuple[Node, ...]] | None:
    """(x, the nodes) of the mean of ``x ** 2`` over the last dimension, which it keeps."""
    if not isinstance(mean, Node) or operation(mean) != "mean":
        return None
    square = argument(mean, 0, "input")
    x = _squared(square)
    shape = shape_of(x)
    if x is None or not shape or not isinstance(shape[-1], int) or dtype_of(x) not in WIDE_TYPES:
        return None
    dim = argument(mean, 1, "dim", mean.kwargs.get("axis"))
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    keeps = argument(mean, 2, "keepdim", False) is True
    if dims not in ((-1,), (len(shape) - 1,)) or not keeps or len(mean.args) > 3:
        return None
    if mean.kwargs.get("dtype") is not None:
        return None
    return x, (square, mean)


def _squared(node: Any) -> Node | None:
    """x of ``x ** 2``."""
    if not isinstance(node, Node) or node.kwargs:
        return None
    name, x = operation(node), argument(node, 0, "input")
    squares = (
        name == "square"
        or (name == "pow" and number(argument(node, 1, "exponent")) == 2.0)
        or (name == "mul" and argument(node, 1, "other") is x)
    )
    return x if squares and isinstance(x, Node) else None


def _product(root: Node, wide: Node, eps: float, nodes: tuple[Node, ...]) -> _Spelling | None:
    """The norm that ends with ``x * rsqrt(...)``, ``x * (1 / sqrt(...))`` or ``x / sqrt(...)``."""
    source = wide
    if is_cast(wide) and isinstance(wide.args[0], Node) and _casts_only(wide, wide.args[0]):
        narrow = dtype_of(wide.args[0])
        if narrow == dtype_of(wide) or narrow in HALF_TYPES:  # from fp64 it would lose digits
            source = wide.args[0]
    direct = operation(root) == "rsqrt" or number(argument(root, 1, "exponent")) == -0.5
    user = only_user(root)
    if user is not None and not direct and _is_reciprocal(user, root):
        root, nodes, direct, user = user, (*nodes, user), True, only_user(user)
    if user is None or user.kwargs or operation(user) != ("mul" if direct else "div"):
        return None
    a, b = user.args[:2]
    pairs = ((a, b), (b, a)) if direct else ((a, b),)
    if not any(other is root and x in (wide, source) for x, other in pairs):
        return None
    if dtype_of(user) != dtype_of(wide):
        return None
    return _Spelling(source, wide, eps, user, (*nodes, user))


def _is_reciprocal(node: Node, root: Node) -> bool:
    if operation(node) == "reciprocal":
        return True
    return operation(node) == "div" and number(node.args[0]) == 1.0 and node.args[1] is root
