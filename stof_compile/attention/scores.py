"""The scores of an attention, read off the nodes from a softmax back to ``q @ k^T``.

Returns a ``Mismatch`` with the reason when something looks like attention and is not quite; changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

from stof_compile.attention.head_reshape import HEAD_RESHAPES, splits_heads
from stof_compile.attention.mismatch import Mismatch, described, tensor_input
from stof_compile.attention.score_operand import peel_key, peel_operand
from stof_compile.masks.mask_tree import MASKING_LIMIT
from stof_compile.node_ops import argument, is_cast, number, operation, shape_of
from stof_compile.static_values import StaticValues

SCORE_OPERATIONS = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "masked_fill", "where", "tanh", "contiguous", "view",
        "reshape", "flatten", "unflatten", "clamp", "clone", "unsqueeze", "squeeze", "cat",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Term:
    """One thing done to the scores besides scaling.

    Args:
        kind: "keep" (bool, False masks), "drop" (bool, True masks) or "add" (float, added).
        node: the tensor, broadcastable to the scores.
        fill: score of a masked entry (keep and drop); -inf or a large negative number.
        factor: what an added tensor is multiplied by.
        rank: dimensions of the scores where it applies: 4 = [B, H, Q, K], 3 = [B*H, Q, K].
    """

    kind: Literal["keep", "drop", "add"]
    node: Node
    fill: float = float("-inf")
    factor: float = 1.0
    rank: int = 4


@dataclass
class Scores:
    """scores = terms(softcap(scale * q @ k^T)).

    Args:
        q, k: operands of the product; ``k`` as [..., K, D], or [..., D, K] when ``k_transposed``.
        narrow_q, narrow_k: the same before a widening cast, or the same nodes.
        nodes: everything from the product to the softmax (excluded).
    """

    q: Node
    k: Node
    narrow_q: Node
    narrow_k: Node
    k_transposed: bool
    scale: float
    softcap: float
    terms: tuple[Term, ...]
    nodes: tuple[Node, ...]


@dataclass
class _Walk:
    static: StaticValues
    place: Node
    factor: float = 1.0
    softcap: float = 0.0
    terms: list[Term] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


def read_scores(softmax: Node, static: StaticValues, place: Node) -> Scores | Mismatch | None:
    """Follow the input of a softmax down to ``q @ k^T``; None when it is no attention.

    ``place``: node at which q and k are read anew.
    """
    start = argument(softmax, 0, "input")
    if not isinstance(start, Node) or not has_product(start):
        return None
    walk = _Walk(static, place)
    node: Node | Mismatch = start
    while isinstance(node, Node):
        walk.nodes.append(node)
        name = operation(node)
        if name in ("matmul", "bmm", "baddbmm"):
            return _read_product(node, walk)
        node = _step(node, name, walk)
    return node


def has_product(node: Node, depth: int = 16) -> bool:
    """Whether a product of two activations is reached through operations on scores only."""
    name = operation(node)
    if name in ("matmul", "bmm"):
        return all(isinstance(arg, Node) and len(shape_of(arg) or ()) > 2 for arg in node.args[:2])
    if name == "baddbmm":
        return True
    if depth == 0 or not (is_cast(node) or name in SCORE_OPERATIONS):
        return False
    operands = [a for a in node.all_input_nodes if shape_of(a) is not None]
    return any(has_product(a, depth - 1) for a in operands)


def _step(node: Node, name: str, walk: _Walk) -> Node | Mismatch:
    """One operation towards the product; records what it does to the scores."""
    if is_cast(node) or name in ("contiguous", "clone"):
        return tensor_input(node, 0)
    if name in HEAD_RESHAPES:
        inner = tensor_input(node, 0)
        return (
            inner
            if isinstance(inner, Mismatch) or splits_heads(inner, node)
            else Mismatch(f"the scores are reshaped by {described(node)}")
        )
    if name in ("mul", "div"):
        return _scaled(node, name, walk)
    if name == "neg":
        walk.factor = -walk.factor
        return tensor_input(node, 0)
    if name == "tanh":
        if walk.softcap:
            return Mismatch("two tanh in the scores")
        walk.softcap, walk.factor = walk.factor, 1.0
        return tensor_input(node, 0)
    if name in ("add", "sub", "masked_fill", "where"):
        if walk.softcap:
            return Mismatch(f"{described(node)} changes the scores before the softcap")
        return _term(node, name, walk)
    return Mismatch(f"the scores pass through {described(node)}")


def _scaled(node: Node, name: str, walk: _Walk) -> Node | Mismatch:
    first, second = node.args[0], argument(node, 1, "other")
    value = walk.static.scalar(second)
    if value is None and name == "mul":
        first, value = second, walk.static.scalar(node.args[0])
    if value is None or not isinstance(first, Node) or node.kwargs.get("rounding_mode") is not None:
        return Mismatch(f"the scores are scaled by a tensor in {described(node)}")
    if name == "div" and value == 0.0:
        return Mismatch(f"division by zero in {described(node)}")
    walk.factor *= value if name == "mul" else 1.0 / value
    return first


def _term(node: Node, name: str, walk: _Walk) -> Node | Mismatch:
    rank = len(shape_of(node) or ())
    if name == "masked_fill":
        mask, fill = argument(node, 1, "mask"), walk.static.scalar(argument(node, 2, "value"))
        return _masked(node, node.args[0], mask, "drop", fill, rank, walk)
    if name == "where":
        condition, kept, other = (
            argument(node, 0, "condition"),
            argument(node, 1, "input"),
            argument(node, 2, "other"),
        )
        if isinstance(kept, Node) and has_product(kept):
            return _masked(node, kept, condition, "keep", walk.static.scalar(other), rank, walk)
        return _masked(node, other, condition, "drop", walk.static.scalar(kept), rank, walk)
    alpha = number(node.kwargs.get("alpha", 1))
    first, second = node.args[0], argument(node, 1, "other")
    sign = -1.0 if name == "sub" else 1.0
    if not (isinstance(first, Node) and has_product(first)):
        if name == "sub":
            return Mismatch(f"the scores are subtracted in {described(node)}")
        first, second = second, first
    if alpha is None or not isinstance(first, Node):
        return Mismatch(f"cannot read {described(node)}")
    if isinstance(second, Node):
        if has_product(second):
            return Mismatch(f"two products are added in {described(node)}")
        walk.terms.append(Term("add", second, factor=walk.factor * sign * alpha, rank=rank))
    return first  # a number added to every score changes nothing


def _masked(
    node: Node,
    scores: object,
    mask: object,
    kind: Literal["keep", "drop"],
    fill: float | None,
    rank: int,
    walk: _Walk,
) -> Node | Mismatch:
    if not isinstance(scores, Node) or not isinstance(mask, Node) or fill is None:
        return Mismatch(f"cannot read the mask of {described(node)}")
    if fill * walk.factor > MASKING_LIMIT:
        return Mismatch(f"{described(node)} fills scores with {fill}, which does not mask them")
    walk.terms.append(Term(kind, mask, fill * walk.factor, rank=rank))
    return scores


def _read_product(node: Node, walk: _Walk) -> Scores | Mismatch:
    factor = walk.factor
    if operation(node) == "baddbmm":
        alpha, beta = (number(node.kwargs.get(n, 1)) for n in ("alpha", "beta"))
        added, q, k = (
            argument(node, 0, "input"),
            argument(node, 1, "batch1"),
            argument(node, 2, "batch2"),
        )
        if alpha is None or beta is None:
            return Mismatch(f"alpha or beta of {described(node)} is no number")
        if beta != 0.0:
            if walk.softcap:
                return Mismatch("a tensor is added to the scores before the softcap")
            walk.terms.append(Term("add", added, factor=factor * beta, rank=3))
        factor *= alpha
    else:
        q, k = argument(node, 0, "input"), argument(node, 1, "mat2", node.kwargs.get("other"))
    assert isinstance(q, Node) and isinstance(k, Node), "operands of a product are nodes"
    q, narrow_q, q_scale = peel_operand(q, walk.static, walk.place)
    k, narrow_k, k_scale, transposed = peel_key(k, walk.static, walk.place)
    scale = factor * q_scale * k_scale
    if walk.softcap:
        scale *= walk.softcap  # cap * tanh(f * s) = cap * tanh((f * cap) * s / cap)
    terms = tuple(reversed(walk.terms))
    return Scores(
        q, k, narrow_q, narrow_k, not transposed, scale, abs(walk.softcap), terms, tuple(walk.nodes)
    )
