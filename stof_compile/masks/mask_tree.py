"""Reading the tree of a mask: which conjuncts and summands it is made of.

A tree consists of ``&``, ``|``, ``~``, ``where``, ``masked_fill``, sums and shape changes.
``MaskTree`` walks it from
the scores down and collects the leaves, each with the logical axes (batch, heads, queries, keys)
of its dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from stof_compile.node_ops import (
    argument,
    dtype_of,
    is_cast,
    is_one,
    operation,
    permutation,
    same_size,
    shape_of,
    tensor_meta,
)
from stof_compile.static_values import StaticValues

# A score moved by this or less gets no weight beside any other: a mask, not a bias.
MASKING_LIMIT = -1e4
BATCH, HEAD, QUERY, KEY, BATCH_HEAD = range(5)
# Logical axis of each dimension of a node; None for a dimension of size 1 to drop.
Axes = tuple[int | None, ...]
ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})


def broadcast_axes(shape: tuple[Any, ...], rank: int) -> Axes:
    """Axes of a tensor that broadcasts to scores of rank 4 ([B, H, Q, K]) or 3 ([B*H, Q, K])."""
    logical = (BATCH, HEAD, QUERY, KEY) if rank == 4 else (BATCH_HEAD, QUERY, KEY)
    aligned = logical[-len(shape) :] if shape else ()
    return tuple(
        None if axis == BATCH_HEAD and is_one(size) else axis
        for axis, size in zip(aligned, shape, strict=True)
    )


@dataclass(frozen=True)
class Leaf:
    """One conjunct (or one summand): a node, the axes of its dimensions, and how it is read."""

    node: Node
    axes: Axes
    negated: bool = False
    factor: float = 1.0


@dataclass
class MaskTree:
    """Collects the leaves of mask terms.

    Args:
        static: the static values of the graph.
        place: node at which the leaves are read. What is written to before that stays in one piece.
    """

    static: StaticValues
    place: Node
    keeps: list[Leaf] = field(default_factory=list)
    sums: list[Leaf] = field(default_factory=list)
    fills: set[float] = field(default_factory=set)
    unread: list[Leaf] = field(default_factory=list)  # sums with a mask too large to evaluate

    # -- bool: keep (or, negated, drop) ------------------------------------------------------------

    def keep(self, node: Node, axes: Axes, negated: bool, fill: float) -> None:
        """Split a bool tensor; ``fill`` is the score of what it masks."""
        self.fills.add(fill)
        self._bool(node, axes, negated)

    def _bool(self, node: Node, axes: Axes, negated: bool) -> None:
        name, static = operation(node), self.static
        if not self._holds(node):
            self.keeps.append(Leaf(node, axes, negated))
            return
        if not negated and self._always_true(node):
            return
        # With symbolic sizes a static tree is split as well: what holds at every length is dropped.
        whole = static.is_static(node) and not static.is_symbolic(node)
        if whole or dtype_of(node) != torch.bool:
            self.keeps.append(Leaf(node, axes, negated))
            return
        first, second = node.args[0] if node.args else None, argument(node, 1, "other")
        joins = ("or",) if negated else ("and", "mul")  # not (a or b) = not a and not b
        if not isinstance(first, Node):
            self.keeps.append(Leaf(node, axes, negated))
            return
        of_bool = dtype_of(first) == torch.bool
        if (
            name in joins
            and of_bool
            and isinstance(second, Node)
            and dtype_of(second) == torch.bool
        ):
            for operand in (first, second):
                self._bool(operand, _aligned(operand, axes), negated)
        elif name == "not" and of_bool:
            self._bool(first, axes, not negated)
        elif name in ("eq", "ne") and of_bool and isinstance(second, bool | int):
            self._bool(first, axes, negated != ((second == 0) == (name == "eq")))
        elif name == "masked_fill" and not negated and argument(node, 2, "value") in (False, 0):
            self._bool(first, _aligned(first, axes), False)
            mask = argument(node, 1, "mask")
            self._bool(mask, _aligned(mask, axes), True)
        elif is_cast(node) and of_bool:
            self._bool(first, axes, negated)
        elif is_cast(node) and (masked := self._nonzero_where(first, axes)) is not None:
            self._bool(*masked, negated)
        elif (inner := _through_shape(node, axes)) is not None:
            self._bool(*inner, negated)
        else:
            self.keeps.append(Leaf(node, axes, negated))

    # -- float: added ------------------------------------------------------------------------------

    def add(self, node: Node, axes: Axes, factor: float, floor: float) -> None:
        """Split an added tensor; values below ``floor`` became -inf in a narrowing cast."""
        name, static = operation(node), self.static
        if not self._holds(node):
            self.sums.append(Leaf(node, axes, factor=factor))
            return
        if name in ZEROS or _changes_nothing(static.scalar(node), factor):
            return
        if static.is_static(node) and not static.is_symbolic(node):
            if static.too_large(node):
                self._large(node, axes, factor, floor)
            else:
                self.sums.append(Leaf(node, axes, factor=factor))
            return
        self._summands(node, axes, factor, floor)

    def _large(self, node: Node, axes: Axes, factor: float, floor: float) -> None:
        """A static sum too large to evaluate: taken apart where the masks in it are not."""
        static = self.static
        inner = MaskTree(static, self.place)
        inner._summands(node, axes, factor, floor)
        if any(static.is_static(leaf.node) and static.too_large(leaf.node) for leaf in inner.keeps):
            self.sums.append(Leaf(node, axes, factor=factor))
            self.unread.append(self.sums[-1])
            return
        self.keeps += inner.keeps
        self.sums += inner.sums
        self.fills |= inner.fills
        self.unread += inner.unread

    def _summands(self, node: Node, axes: Axes, factor: float, floor: float) -> None:
        name, static = operation(node), self.static
        floating = (dtype_of(node) or torch.bool).is_floating_point
        if _stops_gradient(node) or (name in ("add", "mul") and not floating):
            self.sums.append(Leaf(node, axes, factor=factor))  # integers may wrap around
        elif name == "add" and self._is_sum(node, factor):
            for operand in (node.args[0], argument(node, 1, "other")):
                if isinstance(operand, Node):
                    self.add(operand, _aligned(operand, axes), factor, floor)
        elif name == "where" and self._where(node, axes, factor, floor):
            return
        elif (
            name == "masked_fill"
            and self._fill(static.scalar(argument(node, 2, "value")), factor, floor) is not None
        ):
            fill = self._fill(static.scalar(argument(node, 2, "value")), factor, floor)
            mask, kept = argument(node, 1, "mask"), node.args[0]
            self.keep(mask, _aligned(mask, axes), True, fill)  # type: ignore[arg-type]
            self.add(kept, _aligned(kept, axes), factor, floor)  # type: ignore[arg-type]
        elif name == "mul" and self._product(node, axes, factor, floor):
            return
        elif is_cast(node) and floating:
            source = node.args[0]
            if dtype_of(source) is not None and dtype_of(source).is_floating_point:  # type: ignore[union-attr]
                lowest = torch.finfo(dtype_of(node)).min  # type: ignore[arg-type]
                self.add(source, axes, factor, max(floor, lowest))  # type: ignore[arg-type]
            else:
                self.sums.append(Leaf(node, axes, factor=factor))
        elif (inner := _through_shape(node, axes)) is not None:
            self.add(*inner, factor, floor)
        else:
            self.sums.append(Leaf(node, axes, factor=factor))

    def _is_sum(self, node: Node, factor: float) -> bool:
        """Whether a node is the sum of its tensors, up to a number that changes nothing."""
        if node.kwargs.get("alpha", 1) != 1:
            return False
        operands = (node.args[0], argument(node, 1, "other"))
        numbers = [operand for operand in operands if not isinstance(operand, Node)]
        return all(_changes_nothing(self.static.scalar(number), factor) for number in numbers)

    def _fill(self, value: float | None, factor: float, floor: float) -> float | None:
        """Score of a masked entry, or None when the value does not mask."""
        if value is None or value * factor > MASKING_LIMIT:
            return None
        return float("-inf") if value < floor else value * factor

    def _where(self, node: Node, axes: Axes, factor: float, floor: float) -> bool:
        condition, first, second = (
            argument(node, 0, "condition"),
            argument(node, 1, "input"),
            argument(node, 2, "other"),
        )
        scalar = self.static.scalar
        for kept, filled, negated in ((first, second, False), (second, first, True)):
            fill = self._fill(scalar(filled), factor, floor)
            if fill is not None and isinstance(condition, Node):
                self.keep(condition, _aligned(condition, axes), negated, fill)
                if isinstance(kept, Node):
                    self.add(kept, _aligned(kept, axes), factor, floor)
                return True
        return False

    def _product(self, node: Node, axes: Axes, factor: float, floor: float) -> bool:
        """``constant * x``, and the masks ``constant * b`` and ``constant * (1 - b)`` of a bool
        b."""
        scalar = self.static.scalar
        x, other = node.args[0], argument(node, 1, "other")
        value = scalar(other)
        if value is None:
            x, value = other, scalar(node.args[0])
        if value is None or not isinstance(x, Node):
            return False
        fill = self._fill(value, factor, floor)
        masked, negated = x, True  # constant * b: True masks
        if operation(x) in ("sub", "rsub") and self._holds(x):
            one, masked_arg = (x.args[0], argument(x, 1, "other"))
            if operation(x) == "rsub":
                one, masked_arg = masked_arg, one
            if scalar(one) == 1.0 and isinstance(masked_arg, Node):
                masked, negated = masked_arg, False
        cast = is_cast(masked) and self._holds(masked)
        source = masked.args[0] if cast else None
        if fill is not None and isinstance(source, Node) and dtype_of(source) == torch.bool:
            self.keep(source, _aligned(source, axes), negated, fill)
            return True
        self.add(x, _aligned(x, axes), factor * value, float("-inf"))
        return True

    # -- what nodes tell ---------------------------------------------------------------------------

    def _holds(self, node: Node) -> bool:
        return self.static.holds_at(node, self.place)

    def _always_true(self, node: Node) -> bool:
        """Whether a bool tensor is True at every length: ones, or ``positions >= 0``."""
        name = operation(node)
        if name in ("ones", "ones_like", "new_ones"):
            return True
        zero = name == "ge" and argument(node, 1, "other") == 0
        return zero and self._not_negative(node.args[0])

    def _not_negative(self, value: Any) -> bool:
        if not isinstance(value, Node):
            return isinstance(value, int | float) and value >= 0
        if not self._holds(value):
            return False
        name = operation(value)
        if name == "arange":
            bounds = [a for a in value.args if isinstance(a, int | float | Node)]
            return len(bounds) == 1 or (len(bounds) == 2 and self._not_negative(bounds[0]))
        if name in ("add", "mul"):
            plain = not set(value.kwargs) - {"other"}
            return plain and all(self._not_negative(a) for a in value.args[:2])
        if name in ("getitem", "unsqueeze", "expand", "view", "reshape", "contiguous"):
            return self._not_negative(value.args[0])
        return is_cast(value) and self._not_negative(value.args[0])

    def _nonzero_where(self, node: Any, axes: Axes) -> tuple[Node, Axes] | None:
        """The mask m of ``zeros.masked_fill(m, nonzero)``, which is where that tensor is not
        zero."""
        while isinstance(node, Node) and self._holds(node) and operation(node) != "masked_fill":
            inner = _through_shape(node, axes)
            if inner is None:
                return None
            node, axes = inner
        if not isinstance(node, Node) or not self._holds(node):
            return None
        zeros = node.args[0]
        if not isinstance(zeros, Node) or operation(zeros) not in ZEROS or not self._holds(zeros):
            return None
        value, mask = argument(node, 2, "value"), argument(node, 1, "mask")
        return (mask, _aligned(mask, axes)) if isinstance(mask, Node) and value else None


def _changes_nothing(value: float | None, factor: float) -> bool:
    """Whether a number may be added to every score: a finite one that does not mask."""
    return value is not None and abs(value * factor) < -MASKING_LIMIT


def _stops_gradient(node: Node) -> bool:
    """Whether a node has no gradient although its operands have: ``detach``, ``no_grad``."""
    value = tensor_meta(node)
    if value is None or value.requires_grad or not torch.is_grad_enabled():
        return False
    operands = map(tensor_meta, node.all_input_nodes)
    return any(operand is not None and operand.requires_grad for operand in operands)


def _aligned(operand: Any, axes: Axes) -> Axes:
    """Axes of an operand that broadcasts (from the right) into a result with the given axes."""
    rank = len(shape_of(operand) or ())
    return axes[len(axes) - rank :] if rank else ()


def _through_shape(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """Source of a node that only moves, adds, drops or broadcasts dimensions, with the source's
    axes."""
    name, source = operation(node), node.args[0] if node.args else None
    inner, outer = shape_of(source), shape_of(node)
    if (
        not isinstance(source, Node)
        or inner is None
        or outer is None
        or dtype_of(source) != dtype_of(node)
    ):
        return None
    if name in ("expand", "expand_as", "broadcast_to"):
        return source, _aligned(source, axes)
    if name in ("contiguous", "clone", "detach") or is_cast(node):
        return source, axes
    order = permutation(node)
    if order is not None:
        moved: list[int | None] = [None] * len(order)
        for i, axis in enumerate(order):
            moved[axis] = axes[i]
        return source, tuple(moved)
    if name == "unsqueeze":
        dim = argument(node, 1, "dim")
        return (
            (source, tuple(a for i, a in enumerate(axes) if i != dim % len(outer)))
            if isinstance(dim, int)
            else None
        )
    if name == "getitem":
        kept = _indexed_axes(node, inner, outer, axes)
        return None if kept is None else (source, kept)
    if name in ("view", "reshape", "squeeze", "flatten", "unflatten", "view_as", "reshape_as"):
        wide = [axes[i] for i, size in enumerate(outer) if not is_one(size)]
        sizes = [size for size in outer if not is_one(size)]
        inner_sizes = [size for size in inner if not is_one(size)]
        if len(sizes) == len(inner_sizes) and all(map(same_size, sizes, inner_sizes)):
            remaining = iter(wide)
            return source, tuple(None if is_one(size) else next(remaining) for size in inner)
    return None


def _indexed_axes(
    node: Node, inner: tuple[Any, ...], outer: tuple[Any, ...], axes: Axes
) -> Axes | None:
    """Axes of ``x`` in ``x[...]`` with None, full slices and ``...`` only."""
    index = node.args[1] if isinstance(node.args[1], tuple | list) else (node.args[1],)
    if not all(i is None or i is Ellipsis or isinstance(i, slice) for i in index):
        return None
    given = sum(isinstance(i, slice) for i in index)
    entries: list[Any] = []
    for i in index:
        entries.extend([slice(None)] * (len(inner) - given) if i is Ellipsis else [i])
    entries.extend([slice(None)] * (len(inner) - sum(isinstance(i, slice) for i in entries)))
    kept = [position for position, i in enumerate(entries) if i is not None]
    if len(kept) != len(inner) or not all(
        same_size(outer[p], inner[d]) for d, p in enumerate(kept)
    ):
        return None
    return tuple(axes[p] for p in kept)
