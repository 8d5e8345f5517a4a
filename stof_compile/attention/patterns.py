"""The two forms attention takes in a normalised graph, read off the nodes.

    sdpa      F.scaled_dot_product_attention(q, k, v, mask, ...)
    softmax   matmul(softmax(terms(scale * matmul(q, k^T))), v)

``read_scores`` walks from a softmax to its product and ``read_weights`` from a softmax to its
values. Both return a
``Mismatch`` with the reason when something looks like attention and is not quite; they change
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

from stof_compile.masks.mask_tree import MASKING_LIMIT
from stof_compile.node_ops import (
    argument,
    dtype_of,
    is_cast,
    is_one,
    number,
    operation,
    raw_name,
    same_size,
    shape_of,
    swaps_last_two,
    tensor_meta,
)
from stof_compile.static_values import StaticValues


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


@dataclass(frozen=True)
class Mismatch:
    """Why something that looks like attention is not taken."""

    reason: str


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
class Weights:
    """softmax -> [casts] -> matmul(., v) -> output; ``nodes`` lie between softmax and output (both
    excluded)."""

    output: Node
    v: Node
    nodes: tuple[Node, ...]


@dataclass
class _Walk:
    static: StaticValues
    factor: float = 1.0
    softcap: float = 0.0
    terms: list[Term] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


def read_weights(softmax: Node) -> Weights | Mismatch | None:
    """Follow a softmax to the product with the values; None when there is no such product."""
    node, passed = softmax, []
    while True:
        products = [
            u
            for u in node.users
            if operation(u) in ("matmul", "bmm") and argument(u, 0, "input") is node
        ]
        if products:
            break
        followers = [
            u
            for u in node.users
            if is_cast(u) or operation(u) in ("contiguous", "dropout", *HEAD_RESHAPES)
        ]
        if not followers:
            return None
        if operation(followers[0]) == "dropout":
            rate = argument(followers[0], 1, "p", 0.5)
            return Mismatch(f"dropout with p = {rate} between softmax and values")
        if operation(followers[0]) in HEAD_RESHAPES and not _splits_heads(node, followers[0]):
            return None
        node = followers[0]
        passed.append(node)
    product = products[0]
    v = argument(product, 1, "mat2", product.kwargs.get("other"))
    if not isinstance(v, Node) or (v.op == "placeholder" and len(shape_of(v) or ()) < 3):
        return None
    for inner in (softmax, *passed):
        others = [u for u in inner.users if u is not product and u not in passed]
        if others:
            return Mismatch(f"the attention weights are also used by {_described(others[0])}")
    return Weights(product, v, tuple(passed))


def read_scores(softmax: Node, static: StaticValues) -> Scores | Mismatch | None:
    """Follow the input of a softmax down to ``q @ k^T``; None when it is no attention."""
    start = argument(softmax, 0, "input")
    if not isinstance(start, Node) or not _has_product(start):
        return None
    walk = _Walk(static)
    node: Node | Mismatch = start
    while isinstance(node, Node):
        walk.nodes.append(node)
        name = operation(node)
        if name in ("matmul", "bmm", "baddbmm"):
            return _read_product(node, walk)
        node = _step(node, name, walk)
    return node


def _has_product(node: Node, depth: int = 16) -> bool:
    """Whether a product of two activations is reached through operations on scores only."""
    name = operation(node)
    if name in ("matmul", "bmm"):
        return all(isinstance(arg, Node) and len(shape_of(arg) or ()) > 2 for arg in node.args[:2])
    if name == "baddbmm":
        return True
    if depth == 0 or not (is_cast(node) or name in SCORE_OPERATIONS):
        return False
    operands = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, Node)]
    return any(_has_product(a, depth - 1) for a in operands if shape_of(a) is not None)


HEAD_RESHAPES = ("view", "reshape", "flatten", "unflatten")
SCORE_OPERATIONS = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "masked_fill", "where", "tanh", "contiguous", "view",
        "reshape", "flatten", "unflatten", "clamp", "clone", "unsqueeze", "squeeze",
    }
)  # fmt: skip


def _step(node: Node, name: str, walk: _Walk) -> Node | Mismatch:
    """One operation towards the product; records what it does to the scores."""
    if is_cast(node) or name in ("contiguous", "clone"):
        return _only(node, 0)
    if name in HEAD_RESHAPES:
        inner = _only(node, 0)
        return (
            inner
            if isinstance(inner, Mismatch) or _splits_heads(inner, node)
            else Mismatch(f"the scores are reshaped by {_described(node)}")
        )
    if name in ("mul", "div"):
        return _scaled(node, name, walk)
    if name == "neg":
        walk.factor = -walk.factor
        return _only(node, 0)
    if name == "tanh":
        if walk.softcap:
            return Mismatch("two tanh in the scores")
        walk.softcap, walk.factor = walk.factor, 1.0
        return _only(node, 0)
    if name in ("add", "sub", "masked_fill", "where"):
        if walk.softcap:
            return Mismatch(f"{_described(node)} changes the scores before the softcap")
        return _term(node, name, walk)
    return Mismatch(f"the scores pass through {_described(node)}")


def _scaled(node: Node, name: str, walk: _Walk) -> Node | Mismatch:
    first, second = node.args[0], argument(node, 1, "other")
    value = walk.static.scalar(second)
    if value is None and name == "mul":
        first, value = second, walk.static.scalar(node.args[0])
    if value is None or not isinstance(first, Node) or node.kwargs.get("rounding_mode") is not None:
        return Mismatch(f"the scores are scaled by a tensor in {_described(node)}")
    if name == "div" and value == 0.0:
        return Mismatch(f"division by zero in {_described(node)}")
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
        if isinstance(kept, Node) and _has_product(kept):
            return _masked(node, kept, condition, "keep", walk.static.scalar(other), rank, walk)
        return _masked(node, other, condition, "drop", walk.static.scalar(kept), rank, walk)
    alpha = number(node.kwargs.get("alpha", 1))
    first, second = node.args[0], argument(node, 1, "other")
    sign = -1.0 if name == "sub" else 1.0
    if not (isinstance(first, Node) and _has_product(first)):
        if name == "sub":
            return Mismatch(f"the scores are subtracted in {_described(node)}")
        first, second = second, first
    if alpha is None or not isinstance(first, Node):
        return Mismatch(f"cannot read {_described(node)}")
    if isinstance(second, Node):
        if _has_product(second):
            return Mismatch(f"two products are added in {_described(node)}")
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
        return Mismatch(f"cannot read the mask of {_described(node)}")
    if fill * walk.factor > MASKING_LIMIT:
        return Mismatch(f"{_described(node)} fills scores with {fill}, which does not mask them")
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
            return Mismatch(f"alpha or beta of {_described(node)} is no number")
        if beta != 0.0:
            if walk.softcap:
                return Mismatch("a tensor is added to the scores before the softcap")
            walk.terms.append(Term("add", added, factor=factor * beta, rank=3))
        factor *= alpha
    else:
        q, k = argument(node, 0, "input"), argument(node, 1, "mat2", node.kwargs.get("other"))
    assert isinstance(q, Node) and isinstance(k, Node), "operands of a product are nodes"
    q, narrow_q, q_scale = peel_operand(q, walk.static)
    k, narrow_k, k_scale, transposed = _peel_key(k, walk.static)
    scale = factor * q_scale * k_scale
    if walk.softcap:
        scale *= walk.softcap  # cap * tanh(f * s) = cap * tanh((f * cap) * s / cap)
    terms = tuple(reversed(walk.terms))
    return Scores(
        q, k, narrow_q, narrow_k, not transposed, scale, abs(walk.softcap), terms, tuple(walk.nodes)
    )


def peel_operand(node: Node, static: StaticValues) -> tuple[Node, Node, float]:
    """Strip constant factors and copies from an operand; (operand, the same before widening casts,
    factor)."""
    scale, wide = 1.0, node
    while True:
        name = operation(node)
        if name in ("mul", "div") and len(node.args) == 2:
            first, second = node.args
            value = static.scalar(second)
            if value is None and name == "mul":
                first, value = second, static.scalar(node.args[0])
            if value is None or value == 0.0 or not isinstance(first, Node):
                break
            scale *= value if name == "mul" else 1.0 / value
            wide = first if wide is node else wide
            node = first
        elif name in ("contiguous", "clone"):
            source = _only(node, 0)
            if isinstance(source, Mismatch):
                break
            wide = source if wide is node else wide
            node = source
        elif is_cast(node) and _widens(node):
            source = _only(node, 0)
            if isinstance(source, Mismatch):
                break
            node = source
        else:
            break
    if wide is not node and dtype_of(wide) == dtype_of(node):
        wide = node
    # A factor below a widening cast is only taken along with the cast: both operands must tell the
    # same story.
    return wide, node, scale


def _peel_key(node: Node, static: StaticValues) -> tuple[Node, Node, float, bool]:
    wide, narrow, scale = peel_operand(node, static)
    if not swaps_last_two(narrow):
        return narrow if wide is not narrow and scale != 1.0 else wide, narrow, scale, False
    inner = narrow.args[0]
    assert isinstance(inner, Node), "a transposition has a node to transpose"
    wide, narrow, inner_scale = peel_operand(inner, static)
    return wide, narrow, scale * inner_scale, True


def _widens(node: Node) -> bool:
    before, after = tensor_meta(node.args[0]), tensor_meta(node)
    if before is None or after is None or before.device != after.device:
        return False
    return before.dtype == after.dtype or (
        before.is_floating_point()
        and after.is_floating_point()
        and before.element_size() < after.element_size()
    )


def _splits_heads(inner: Node, outer: Node) -> bool:
    """Whether a reshape only splits or merges the leading batch and head dimensions of scores."""
    a, b = shape_of(inner), shape_of(outer)
    if a is None or b is None or {len(a), len(b)} - {3, 4}:
        return False
    return same_size(a[-1], b[-1]) and same_size(a[-2], b[-2])


def _only(node: Node, index: int) -> Node | Mismatch:
    source = argument(node, index, "input")
    return source if isinstance(source, Node) else Mismatch(f"cannot read {_described(node)}")


def _described(node: Node) -> str:
    if node.op == "output":
        return "the graph's result"
    return f"'{node.name}' ({raw_name(node) or node.op})"


# -- repeated key and value heads ------------------------------------------------------------------


def unrepeated(node: Node) -> tuple[Node, int] | None:
    """Source and count when each head of [B, Hk, S, D] is repeated in place (grouped queries)."""
    name, out = operation(node), shape_of(node)
    if out is None or len(out) != 4:
        return None
    if name == "repeat_interleave":
        source, times = argument(node, 0, "input"), argument(node, 1, "repeats")
        inner = shape_of(source)
        if (
            isinstance(times, int)
            and inner is not None
            and argument(node, 2, "dim") in (1, -3)
            and len(inner) == 4
        ):
            return source, times
        return None
    if name not in ("reshape", "view", "flatten", "contiguous"):
        return None
    expanded = node.args[0]
    if name == "contiguous" and isinstance(expanded, Node):
        return unrepeated(expanded)
    five = shape_of(expanded)
    if (
        not isinstance(expanded, Node)
        or operation(expanded) not in ("expand", "repeat")
        or five is None
    ):
        return None
    opened = expanded.args[0]
    before = shape_of(opened)
    if (
        len(five) != 5
        or before is None
        or len(before) != 5
        or not is_one(before[2])
        or not isinstance(five[2], int)
    ):
        return None
    if not isinstance(opened, Node) or operation(opened) not in ("getitem", "unsqueeze"):
        return None
    source = opened.args[0]
    inner = shape_of(source)
    if not isinstance(source, Node) or inner is None or len(inner) != 4:
        return None
    unchanged = (before[0], before[1], before[3], before[4])
    if (
        not all(map(same_size, inner, unchanged))
        or not same_size(five[1], inner[1])
        or not same_size(out[2], inner[2])
    ):
        return None
    if not isinstance(inner[1], int) or not isinstance(out[1], int) or out[1] != inner[1] * five[2]:
        return None
    return source, five[2]
