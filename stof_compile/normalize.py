"""Normalisation: one spelling per idea, before anything is matched.

A pass is a function ``(graph, facts) -> int`` that returns how much it rewrote; a second run
returns 0. Passes keep
``example_value`` true and add no alias between inputs and outputs. ``PASSES`` is their order.
Spellings that differ
in the name only (``/``, ``div``, ``true_divide``) are not rewritten: ``node_ops.operation`` reads
them as one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from stof_compile.capture import CaptureFacts
from stof_compile.dead_code import erase_dead
from stof_compile.emit import emit, fake_result
from stof_compile.expand_multihead import expand_encoder_layers, expand_multihead
from stof_compile.memory import source_of_memory, storage_base
from stof_compile.node_ops import (
    DROPOUTS,
    INPLACE_OPERATORS,
    argument,
    is_cast,
    is_inplace,
    operation,
    permutation,
    raw_name,
    same_size,
    shape_of,
    tensor_meta,
)
from stof_compile.normalize_activations import rewrite_gelus, rewrite_silus
from stof_compile.normalize_norms import rewrite_rms_norms

Pass = Callable[[Graph, CaptureFacts], int]
# In-place operations with a functional twin of the same result.
FUNCTIONAL_TWINS = frozenset(
    {
        "add", "sub", "mul", "div", "masked_fill", "clamp", "clamp_min", "clamp_max", "tril",
        "triu", "neg", "exp", "tanh", "logical_and", "logical_or", "logical_not", "bitwise_and",
        "bitwise_or", "bitwise_not", "relu",
    }
)  # fmt: skip
RESHAPES = frozenset({"dropout", "view", "reshape", "flatten", "unflatten", "contiguous"})


def normalize(gm: GraphModule, facts: CaptureFacts) -> dict[str, int]:
    """Run every pass once, in order; no dead code is left, neither theirs nor Dynamo's.

    Returns:
        Pass name -> number of rewrites.
    """
    counts = {}
    erase_dead(gm.graph)
    for rewrite in PASSES:
        counts[rewrite.__name__] = rewrite(gm.graph, facts)
        if counts[rewrite.__name__]:
            erase_dead(gm.graph)
    gm.recompile()
    return counts


def functionalize_fresh(graph: Graph, facts: CaptureFacts) -> int:
    """Turn in-place operations on intermediate tensors nobody else sees into functional ones.

    ``scores.masked_fill_(m, x)`` becomes ``masked_fill`` and later readers of ``scores`` read the
    result. Tensors that
    are inputs, views, or viewed by something that is read later are left alone.
    """
    if any(raw_name(node) == "set_" for node in graph.nodes):
        return 0  # gives one tensor the memory of another, from there on
    place = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in list(graph.nodes):
        target = node.args[0] if node.args else None
        if (
            not is_inplace(node)
            or not isinstance(target, Node)
            or operation(node) not in FUNCTIONAL_TWINS
        ):
            continue
        if not _is_private(target, node, place) or node.kwargs.get("out") is not None:
            continue
        if raw_name(node).startswith("__"):
            continue  # x.__iadd__(y), which hardly anybody writes
        spelled = (node.target, node.kwargs)
        if node.op == "call_method":
            node.target = str(node.target).rstrip("_")
        elif raw_name(node) in INPLACE_OPERATORS:
            node.target = getattr(
                operator,
                operation(node).replace("div", "truediv")
                + ("_" if operation(node) in ("and", "or") else ""),
            )
        elif node.kwargs.get("inplace") is True:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        else:
            continue
        result, before = fake_result(node), tensor_meta(target)
        if not isinstance(result, torch.Tensor) or before is None or not _same_kind(result, before):
            node.target, node.kwargs = spelled  # e.g. an int tensor divided in place
            continue
        node.meta["example_value"] = result
        for user in list(target.users):
            if place[user] > place[node]:
                user.replace_input_with(target, node)
        count += 1
    return count


def _is_private(target: Node, writer: Node, place: dict[Node, int]) -> bool:
    """Whether the written tensor is a fresh intermediate whose memory is read under no other name
    after the write."""
    if target.op not in ("call_function", "call_method") or storage_base(target) is not target:
        return False
    if not raw_name(target) or tensor_meta(target) is None:
        return False
    aliases, stack = {target}, [target]
    while stack:
        for user in stack.pop().users:
            if user in aliases or user is writer or place[user] > place[writer]:
                continue
            if source_of_memory(user) not in aliases:
                continue
            if is_inplace(user) and argument(user, 0, "input") is target:
                return False
            if any(place[reader] > place[writer] for reader in user.users):
                return False
            aliases.add(user)
            stack.append(user)
    return True


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.dim() == b.dim() and all(map(same_size, a.shape, b.shape))


def remove_idle_dropout(graph: Graph, facts: CaptureFacts) -> int:
    """Remove dropout that does nothing: p = 0, or not training."""
    count = 0
    for node in list(graph.nodes):
        if raw_name(node) not in DROPOUTS or node.op == "placeholder":
            continue
        source = argument(node, 0, "input")
        training = argument(node, 2, "training", node.kwargs.get("train", True))
        if isinstance(source, Node) and (
            training is False or facts.static.scalar(argument(node, 1, "p", 0.5)) == 0.0
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            count += 1
    return count


def cancel_transposes(graph: Graph, facts: CaptureFacts) -> int:
    """Remove pairs of transpositions that undo each other."""
    count = 0
    for node in list(graph.nodes):
        outer = permutation(node)
        inner_node = argument(node, 0, "input")
        if outer is None or not isinstance(inner_node, Node):
            continue
        if is_inplace(node) or is_inplace(inner_node):
            continue
        inner, source = permutation(inner_node), argument(inner_node, 0, "input")
        if inner is None or not isinstance(source, Node) or source.op == "placeholder":
            continue
        if all(inner[axis] == i for i, axis in enumerate(outer)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            count += 1
    return count


def einsum_to_matmul(graph: Graph, facts: CaptureFacts) -> int:
    """Rewrite two-operand einsums that are one batched matrix product."""
    count = 0
    for node in list(graph.nodes):
        if operation(node) != "einsum" or not node.args or not isinstance(node.args[0], str):
            continue
        operands = node.args[1:]
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        product = _as_product(node.args[0], operands)
        if product is None:
            continue
        (result,) = emit(graph, node, node, product, *operands)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return count


def _as_product(equation: str, operands: Any) -> Callable[[Any, Any], Any] | None:
    """Function of the two operands that computes the einsum with one matmul, or None."""
    text = equation.replace(" ", "")
    if text.count(",") != 1 or "->" not in text or "." in text or len(operands) != 2:
        return None
    inputs, out = text.split("->")
    a, b = inputs.split(",")
    shapes = [shape_of(operand) for operand in operands]
    if any(len(set(labels)) != len(labels) for labels in (a, b, out)) or None in shapes:
        return None
    batch = [label for label in out if label in a and label in b]
    left, right = [x for x in a if x not in b], [x for x in b if x not in a]
    summed = [x for x in a if x in b and x not in out]
    if (
        len(left) != 1
        or len(right) != 1
        or len(summed) != 1
        or not set(left + right) <= set(out)
        or not batch
    ):
        return None
    for label in (*batch, *summed):
        if not same_size(shapes[0][a.index(label)], shapes[1][b.index(label)]):  # type: ignore[index]
            return None
    swap = out.index(left[0]) > out.index(right[0])
    if swap:
        a, b, left, right = b, a, right, left
    last_summed = (
        b[-1] == summed[0]
    )  # keys come as [..., K, D]: keep the transposition visible as such
    row_order = [a.index(x) for x in (*batch, *left, *summed)]
    b_labels = (*batch, *right, *summed) if last_summed else (*batch, *summed, *right)
    column_order = [b.index(x) for x in b_labels]
    produced = (*batch, *left, *right)
    out_order = [produced.index(x) for x in out]

    def product(first: Any, second: Any) -> Any:
        rows, columns = (second, first) if swap else (first, second)
        columns = _permuted(columns, column_order)
        columns = columns.transpose(-2, -1) if last_summed else columns
        return _permuted(torch.matmul(_permuted(rows, row_order), columns), out_order)

    return product


def _permuted(t: Any, order: list[int]) -> Any:
    return t if order == sorted(order) else t.permute(order)


def lift_unbatched_sdpa(graph: Graph, facts: CaptureFacts) -> int:
    """Give SDPA calls on [N, S, D] or [S, D] tensors their missing leading dimensions."""
    count = 0
    for node in list(graph.nodes):
        if operation(node) != "scaled_dot_product_attention":
            continue
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        ranks = {len(shape_of(given.get(n)) or ()) for n in names[:3]}
        if len(ranks) != 1 or not ranks <= {2, 3}:
            continue
        missing = 4 - ranks.pop()
        tensors = [n for n in names[:4] if isinstance(given.get(n), Node)]
        if any(isinstance(value, Node) for n, value in given.items() if n not in tensors):
            continue

        def call(
            *proxies: Any, given: Any = given, tensors: Any = tensors, missing: int = missing
        ) -> Any:
            lifted = dict(given) | dict(zip(tensors, proxies, strict=True))
            q, k, v = (lifted.pop(n) for n in ("query", "key", "value"))
            for _ in range(missing):  # the mask broadcasts from the right: it needs nothing
                q, k, v = (t.unsqueeze(0) for t in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **lifted)
            for _ in range(missing):
                out = out.squeeze(0)
            return out

        (result,) = emit(graph, node, node, call, *(given[n] for n in tensors))
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return count


def lift_batched_products(graph: Graph, facts: CaptureFacts) -> int:
    """Show the result of a [B*H, Q, K] attention as [B, H, Q, D] in between, so that it can be
    replaced.

    B and H are read from the reshape that made the values, or from scores that are [B, H, Q, K] on
    the way; without one, B*H stands as heads of one batch.
    """
    count = 0
    for node in list(graph.nodes):
        if operation(node) not in ("bmm", "matmul") or len(shape_of(node) or ()) != 3:
            continue
        weights = argument(node, 0, "input")
        values = argument(node, 1, "mat2", node.kwargs.get("other"))
        softmax = _softmax_of(weights)
        if softmax is None or not isinstance(values, Node) or len(shape_of(values) or ()) != 3:
            continue
        if any("stof_lifted" in user.meta for user in node.users):
            continue
        heads = heads_of(values) or _heads_of_scores(softmax)
        after = node.next

        def lift(out: Any, heads: int | None = heads) -> Any:
            four = out.unsqueeze(0) if heads is None else out.unflatten(0, (-1, heads))
            return four, four.squeeze(0) if heads is None else four.flatten(0, 1)

        users = list(node.users)
        four, three = emit(graph, after, node, lift, node)
        four.meta["stof_lifted"] = True
        for user in users:
            user.replace_input_with(node, three)
        count += 1
    return count


def heads_of(node: Node) -> int | None:
    """H when a [B*H, S, D] node is a reshape of a [B, H, S, D] one with a fixed H; else None."""
    if operation(node) not in ("view", "reshape", "flatten", "contiguous"):
        return None
    source = argument(node, 0, "input")
    while isinstance(source, Node) and operation(source) == "contiguous":
        source = source.args[0]
    inner, outer = shape_of(source), shape_of(node)
    if inner is None or outer is None or len(inner) != 4 or len(outer) != 3:
        return None
    same = same_size(inner[2], outer[1]) and same_size(inner[3], outer[2])
    return inner[1] if same and isinstance(inner[1], int) else None


def _softmax_of(node: Any) -> Node | None:
    """The softmax that attention weights come from."""
    while isinstance(node, Node) and (operation(node) in RESHAPES or is_cast(node)):
        node = node.args[0] if node.args else None
    return node if isinstance(node, Node) and operation(node) == "softmax" else None


def _heads_of_scores(softmax: Node) -> int | None:
    """H of the first [B, H, Q, K] scores on the way from a softmax to its product."""
    node: Any = softmax
    for _ in range(16):
        shape = shape_of(node)
        if shape is None or operation(node) in ("bmm", "matmul", "baddbmm"):
            return None
        if len(shape) == 4:
            return shape[1] if isinstance(shape[1], int) else None
        operands = [(a, shape_of(a) or ()) for a in node.args if isinstance(a, Node)]
        alike = (a for a, s in operands if len(s) > 2 and all(map(same_size, s[-2:], shape[-2:])))
        node = next(alike, None)
    return None


PASSES: tuple[Pass, ...] = (
    functionalize_fresh,
    expand_encoder_layers,
    expand_multihead,
    remove_idle_dropout,
    einsum_to_matmul,
    cancel_transposes,
    lift_unbatched_sdpa,
    lift_batched_products,
    rewrite_rms_norms,
    rewrite_gelus,
    rewrite_silus,
)
