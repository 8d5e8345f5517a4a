"""Rotary embeddings behind a product: which of them one kernel may compute together with it.

    y = F.linear(x, W, b);  q, k = views of y
    q * cos + torch.cat((-q_high, q_low), -1) * sin,  k likewise

What a view of the product shows is told by its strides, which are computed anew, so any spelling
of slices, splits, views and transpositions will do. After the rewrite the same views read the
rotated product. Source: the rotation of Hugging Face's LLaMA; the legality rules are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from stof_compile.between import region_states, writer_between
from stof_compile.capture import CaptureFacts
from stof_compile.emit import in_fake_mode
from stof_compile.example_values import run_on
from stof_compile.fusion.read_recipe import read_product, tensor_spec
from stof_compile.fusion.read_rotation import Rotation, read_rotations, same_memory_of
from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec
from stof_compile.node_ops import VIEWS, is_inplace, operation, tensor_meta
from stof_compile.packing_consumers import consumer_problem, strides_matter

Values = Mapping[Node, Any]
"""Views of a product -> fake tensors that share its memory; items of splits are tuples."""


@dataclass(frozen=True)
class RopeSite:
    """A product and the rotations behind it; by names, which hold in every copy of the graph.

    Args:
        product: node of the product. operands: what it reads: x, weight, bias if there is one.
        cos, sin: nodes whose elements are the tables. period: T, rows of the tables.
        place: the last of product, cos and sin: behind it everything is there.
        results: the rotated values, in the order of their columns. values: the view of the
            product that each of them rotates, of the same shape. copied: whether a result has to
            be memory of its own.
        inside: nodes of the rotations. views: all views of the product, in graph order.
        recipe: what is computed, [..., N].
    """

    product: str
    operands: tuple[str, ...]
    cos: str
    sin: str
    period: int
    place: str
    results: tuple[str, ...]
    values: tuple[str, ...]
    copied: tuple[bool, ...]
    inside: tuple[str, ...]
    views: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True)
class RopeRefusal:
    """Rotations that stay apart from their product, and why."""

    results: tuple[str, ...]
    reason: str


class _Refused(Exception):
    """A rotation cannot be computed with its product; the message is the reason."""


def find_rotations(
    gm: GraphModule, facts: CaptureFacts
) -> tuple[list[RopeSite], list[RopeRefusal]]:
    """Find products whose results are rotated, and rotations that stay as they are.

    Args:
        gm: normalised graph, after packing; not changed. facts: its facts; no gradients are
            recorded (``fusion_refusal``).
    """
    groups: dict[Node, list[Rotation]] = {}
    refusals: list[RopeRefusal] = []
    for node in gm.graph.nodes:
        found = read_rotations(node)
        if isinstance(found, str):
            refusals.append(RopeRefusal((node.name,), found))
        elif found is not None:
            groups.setdefault(found.root, []).append(found)
    regions = region_states(gm.graph) if groups else {}
    sites = []
    for product, rotations in groups.items():
        try:
            sites.append(_site(product, rotations, facts, regions))
        except _Refused as reason:
            names = tuple(rotation.result.name for rotation in rotations)
            refusals.append(RopeRefusal(names, str(reason)))
    return sites, refusals


def _site(
    product: Node,
    rotations: Sequence[Rotation],
    facts: CaptureFacts,
    regions: Mapping[Node, object],
) -> RopeSite:
    read = read_product(product)
    if read is None:
        what = operation(product) or product.op
        raise _Refused(f"what is rotated is the result of '{what}', not of a product")
    operands, kn = read
    values = _views(product)
    columns = values[product].shape[-1]
    held = [(_heads(rotation, values, columns), rotation) for rotation in rotations]
    held.sort(key=lambda pair: pair[0].start)
    heads = [head for head, _ in held]
    rotations = [rotation for _, rotation in held]
    first, turned = heads[0], 0
    for head, rotation in held:
        if head.start != turned:
            raise _Refused(f"'{rotation.result.name}' does not follow the columns before it")
        turned += head.count * head.dim
    if len({head.dim for head in heads}) > 1:
        raise _Refused("heads of different widths are rotated")
    if len({(head.period, head.cos, head.sin) for head in heads}) > 1:
        raise _Refused("the rotated values have different tables")
    place = max(product, first.cos, first.sin)
    inside = {node for rotation in rotations for node in rotation.nodes}
    _check_readers(values, inside, columns, turned)
    _check_order(product, operands, first, place, values, inside, rotations)
    if len({regions[node] for node in (product, *inside)}) > 1:
        raise _Refused("an autocast, grad-mode or hook region begins or ends in between")
    sources = (*operands, first.cos, first.sin)
    foreign = next((n.name for n in sources if n.name in facts.subclass_inputs), None)
    if foreign is not None:
        raise _Refused(f"'{foreign}' is a tensor subclass, whose memory a kernel cannot read")
    return RopeSite(
        product=product.name,
        operands=tuple(node.name for node in operands),
        cos=first.cos.name,
        sin=first.sin.name,
        period=first.period,
        place=place.name,
        results=tuple(rotation.result.name for rotation in rotations),
        values=tuple(rotation.value.name for rotation in rotations),
        copied=tuple(strides_matter(r.result, values[r.value]) for r in rotations),
        inside=tuple(node.name for node in sorted(inside)),
        views=tuple(node.name for node in sorted(values) if node is not product),
        recipe=_recipe(product, operands, kn, heads),
    )


def _views(product: Node) -> dict[Node, Any]:
    """All views of a product that share its memory, with their strides and offsets as they are
    (example values may have the offsets of an earlier form of the graph).
    """
    value = tensor_meta(product)
    assert value is not None, "a product is a tensor"
    if not value.is_contiguous():
        raise _Refused("the result of the product is not contiguous")
    with in_fake_mode(value), torch.no_grad():
        base = value.new_empty(value.shape)
        values: dict[Node, Any] = {product: base}
        waiting = [product]
        while waiting:
            node = waiting.pop()
            for user in node.users:
                source = user.args[0] if user.args else None
                if source is not node or operation(user) not in VIEWS or is_inplace(user):
                    continue
                out = run_on(user, values)
                if same_memory_of(out, StorageWeakRef(base.untyped_storage()).cdata):
                    values[user] = out
                    waiting.append(user)
    return values


@dataclass(frozen=True)
class _Heads:
    """Columns that a rotation turns: ``count`` heads of ``dim`` from ``start`` on; its tables."""

    start: int
    count: int
    dim: int
    period: int
    cos: Node
    sin: Node


def _heads(rotation: Rotation, values: Values, columns: int) -> _Heads:
    """Where in a row of the product the rotated value lies, and which rows its tables are for."""
    name, value = rotation.result.name, values.get(rotation.value)
    low, high = values.get(rotation.low), values.get(rotation.high)
    if not all(isinstance(part, Tensor) for part in (value, low, high)):
        raise _Refused(f"'{name}' rotates a copy of the product's result")
    assert value is not None and low is not None and high is not None
    result = tensor_meta(rotation.result)
    if result is None or result.dtype != value.dtype:
        raise _Refused(f"'{name}' is rotated in another dtype")
    dim, start = value.shape[-1], value.storage_offset()
    halves = (*value.shape[:-1], dim // 2)
    matching = all(
        tuple(part.shape) == halves
        and part.stride() == value.stride()
        and part.storage_offset() == start + offset
        for part, offset in ((low, 0), (high, dim // 2))
    )
    if dim % 2 or value.stride(-1) != 1 or not matching:
        raise _Refused(f"'{name}' does not rotate the two halves of each head")
    rows: list[tuple[int, int]] = []  # (stride in rows, dimension)
    count = 1
    for d, (size, stride) in enumerate(zip(value.shape[:-1], value.stride()[:-1], strict=True)):
        if size == 1:
            continue
        if stride % columns == 0:
            rows.append((stride // columns, d))
            continue
        if stride != dim or count > 1:
            raise _Refused(f"'{name}' rotates {dim} elements of heads that are {stride} apart")
        count = size
    rows.sort(reverse=True)
    if start + count * dim > columns:
        raise _Refused(f"'{name}' does not rotate whole rows of the product")
    periods = {_period(rotation, table, value, rows) for table in (rotation.cos, rotation.sin)}
    if len(periods) > 1:
        raise _Refused(f"cos and sin of '{name}' have different shapes")
    return _Heads(start, count, dim, periods.pop(), *rotation.tables)


def _period(rotation: Rotation, table: Node, value: Tensor, rows: Sequence[tuple[int, int]]) -> int:
    """After how many rows a table begins anew: it covers the inner dimensions of the rows."""
    held = tensor_meta(table)
    name = rotation.result.name
    if held is None or held.dtype != value.dtype or held.device != value.device:
        raise _Refused(f"the tables of '{name}' have another dtype or device")
    rank = value.dim()
    sizes = (1,) * (rank - held.dim()) + tuple(held.shape)
    if held.dim() > rank or sizes[-1] != value.shape[-1]:
        raise _Refused(f"the tables of '{name}' are {list(held.shape)}")
    covered = [d for _, d in rows if sizes[d] > 1]
    period, expected = 1, 1
    for stride, d in reversed(rows):  # from the innermost on
        if stride != expected:
            raise _Refused(f"'{name}' does not rotate whole rows of the product")
        expected *= value.shape[d]
        if sizes[d] > 1:
            if period * value.shape[d] != expected:
                raise _Refused(f"the tables of '{name}' differ along outer rows only")
            period = expected
    if sum(size > 1 for size in sizes[:-1]) != len(covered) or covered != sorted(covered):
        raise _Refused(f"the tables of '{name}' differ from head to head, or are transposed")
    return period


def _check_readers(values: Values, inside: set[Node], columns: int, turned: int) -> None:
    """Refuse readers of columns that would be rotated under them, and writes to any."""
    for view, value in values.items():
        for user in view.users:
            if user in values or user in inside:
                continue
            if is_inplace(user):
                raise _Refused(f"'{user.name}' writes to the result of the product, or beside it")
            first = _first_column(value, columns)
            if first is None or first < turned:
                raise _Refused(f"'{view.name}' is also read by '{user.name}'")
    for node in inside:
        for user in node.users:
            if user not in inside and user.op != "output" and _inner(node, inside):
                raise _Refused(f"'{node.name}' inside is also read by '{user.name}'")


def _inner(node: Node, inside: set[Node]) -> bool:
    """Whether a node of a rotation is read by another one: it is no result."""
    return any(user in inside for user in node.users)


def _first_column(value: Any, columns: int) -> int | None:
    """The first column of the product that a view shows; None where that cannot be told."""
    if not isinstance(value, Tensor):
        return None  # all items of a split
    if value.numel() == 0:
        return columns
    width = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if size > 1 and stride % columns:
            width += (size - 1) * stride
    first = int(value.storage_offset()) % columns
    return first if first + width <= columns else None


def _check_order(
    product: Node,
    operands: Sequence[Node],
    heads: _Heads,
    place: Node,
    values: Values,
    inside: set[Node],
    rotations: Sequence[Rotation],
) -> None:
    """Refuse what reads the product before ``place``, and writes that reading later would see."""
    node = product.next
    while place is not product and node is not place.next:
        early = any(source in values for source in node.all_input_nodes)
        if early and node not in values and node not in inside:
            raise _Refused(f"'{node.name}' reads the product before the tables are there")
        node = node.next
    writers = [writer_between(operands, product, place)]
    if heads.cos is not place or heads.sin is not place:
        writers.append(writer_between((heads.cos, heads.sin), place, max(inside)))
        for table in (heads.cos, heads.sin):
            if table is not place and table.op not in ("placeholder", "get_attr"):
                writers.append(writer_between((table,), table, place))
    for writer in writers:
        if writer is not None:
            raise _Refused(f"'{writer.name}' may write to what the rotation reads in between")
    for rotation in rotations:
        problem = consumer_problem(rotation.result)
        if problem is not None:
            raise _Refused(problem)


def _recipe(product: Node, operands: Sequence[Node], kn: bool, heads: Sequence[_Heads]) -> Recipe:
    value = tensor_meta(product)
    specs = [tensor_spec(node) for node in operands]
    if value is None or any(spec is None for spec in specs) or not value.is_floating_point():
        raise _Refused("an operand of the product has a symbolic size or is no float")
    first, device = heads[0], value.device.type
    table = TensorSpec((first.period, first.dim), (first.dim, 1), value.dtype, device)
    shape, dtype = tuple(value.shape), value.dtype
    refs = tuple(Ref("operand", i) for i in range(len(operands) + 2))
    linear = Step("linear", refs[:-2], shape, dtype, (("weight_kn", True),) if kn else ())
    attrs = (("head_dim", first.dim), ("heads", tuple(head.count for head in heads)))
    rope = Step("rope", (Ref("step", 0), *refs[-2:]), shape, dtype, attrs)
    return Recipe((*(spec for spec in specs if spec is not None), table, table), (linear, rope))
