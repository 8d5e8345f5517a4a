"""Attention written out as two products with a softmax in between."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from stof_compile.attention.autocast_operands import cast_operands
from stof_compile.attention.mismatch import Mismatch
from stof_compile.attention.origin import query_offset, sequence_relation
from stof_compile.attention.repeated_heads import ungrouped
from stof_compile.attention.replaceable import Writes, operand_problem, written_between
from stof_compile.attention.scores import Scores, read_scores
from stof_compile.attention.site import Found
from stof_compile.attention.weights import Weights, read_weights
from stof_compile.capture import CaptureFacts
from stof_compile.emit import emit
from stof_compile.node_ops import argument, dtype_of, operation, shape_of
from stof_compile.normalize import heads_of
from stof_compile.static_values import StaticValues


def softmax_site(
    gm: GraphModule, node: Node, facts: CaptureFacts, writes: Writes
) -> Found | Mismatch | None:
    """Read the attention around a softmax; None when it is a softmax of something else."""
    weights = read_weights(node)
    if weights is None:
        return None
    place = node if isinstance(weights, Mismatch) else weights.output
    scores = read_scores(node, facts.static, place)
    if scores is None or isinstance(scores, Mismatch) or isinstance(weights, Mismatch):
        return scores if scores is None or isinstance(scores, Mismatch) else weights  # type: ignore[return-value]
    problem = _softmax_problem(node, scores, weights)
    if problem is not None:
        return problem
    output, q, k, v = _four_dimensional(gm, facts.static, scores, weights)
    if isinstance(output, Mismatch):
        return output
    gqa = False
    if not scores.k_transposed:
        k, v, gqa = ungrouped(k, v, False, facts.static, output)
    heads = [(shape_of(n) or (0, 0))[1] for n in (q, k)]
    q, k = cast_operands(gm, weights.output, node, q, k)
    (v,) = cast_operands(gm, weights.output, weights.output, v)  # may be computed after the softmax
    gqa = gqa or (isinstance(heads[0], int) and isinstance(heads[1], int) and heads[0] != heads[1])
    problem = operand_problem(q, k, v, output, transposed=scores.k_transposed)
    interior = (*reversed(scores.nodes), node, *weights.nodes)
    if weights.output is not output:
        interior = (*interior, weights.output)
    if problem is None:
        operands = (q, k, v, *(t.node for t in scores.terms), *interior)
        problem = written_between(interior[0], output, operands, writes)
    if problem is not None:
        return problem
    single = scores.terms[0] if len(scores.terms) == 1 else None
    k_axis = -1 if scores.k_transposed else -2
    relation = sequence_relation(gm.graph, q, k, output, k_axis)
    return {
        "form": "softmax",
        "output": output,
        "q": q,
        "k": k,
        "v": v,
        "k_transposed": scores.k_transposed,
        "terms": scores.terms,
        "mask": single.node if single and single.kind == "keep" else None,
        "bias": single.node if single and single.kind == "add" and single.factor == 1.0 else None,
        "scale": scores.scale,
        "softcap": scores.softcap,
        "enable_gqa": gqa,
        "cross": relation.cross,
        "cross_known": relation.known,
        "undecided": relation.undecided,
        "nodes": interior,
        "softmax": node,
        "offset": query_offset(gm.graph, q, k, output, k_axis),
    }


def _softmax_problem(node: Node, scores: Scores, weights: Weights) -> Mismatch | None:
    shape = shape_of(node)
    if shape is None:
        return Mismatch("the shape of the softmax is unknown")
    dim = argument(node, 1, "dim")
    if not isinstance(dim, int) or dim % len(shape) != len(shape) - 1:
        return Mismatch(f"softmax over dim {dim}, not over the keys")
    if len(shape) not in (3, 4):
        return Mismatch(f"the scores have {len(shape)} dimensions")
    chain = {*scores.nodes, node, *weights.nodes, weights.output}
    for inner in scores.nodes:
        for user in inner.users:
            if user not in chain:
                return Mismatch(f"the scores '{inner.name}' are also used by '{user.name}'")
    if not scores.scale or scores.scale != scores.scale:
        return Mismatch(f"the scores are scaled by {scores.scale}")
    return None


def _four_dimensional(
    gm: GraphModule, static: StaticValues, scores: Scores, weights: Weights
) -> tuple[Any, Node, Node, Node]:
    """Output, q, k, v as [B, H, S, D]; products on [B*H, S, D] are read through the reshape
    normalisation added."""
    output, v = weights.output, weights.v
    v_dtype = dtype_of(v)
    # Scores computed in fp32 from 16-bit q and k: the kernel accumulates in fp32 anyway, so take
    # the 16-bit ones.
    narrow = all(dtype_of(n) == v_dtype for n in (scores.narrow_q, scores.narrow_k))
    q, k = (scores.narrow_q, scores.narrow_k) if narrow else (scores.q, scores.k)
    if len(shape_of(output) or ()) == 4:
        return output, q, k, v
    lifted = next((u for u in output.users if "stof_lifted" in u.meta), None)
    shape = shape_of(lifted)
    if lifted is None or shape is None:
        return Mismatch("the values product has an unexpected layout"), q, k, v
    single = operation(lifted) == "unsqueeze"
    if single and any(term.rank == 4 for term in scores.terms):
        return Mismatch("batch and heads of the scores cannot be told apart"), q, k, v
    heads = None if single else shape[1]
    q, k, v = (_unfolded(gm, n, heads, static.holds_at(n, lifted)) for n in (q, k, v))
    return lifted, q, k, v


def _unfolded(gm: GraphModule, node: Node, heads: int | None, holds: bool) -> Node:
    """[B*H, S, D] as [B, H, S, D]: the tensor it was reshaped from where that still ``holds`` the
    same, else a new view."""
    if len(shape_of(node) or ()) == 4:
        return node
    if holds and heads is not None and heads_of(node) == heads:
        source = argument(node, 0, "input")
        if isinstance(source, Node) and len(shape_of(source) or ()) == 4:
            return source
    build = (lambda t: t.unsqueeze(0)) if heads is None else (lambda t: t.unflatten(0, (-1, heads)))
    (view,) = emit(gm.graph, _first_call_after(node), node, build, node)
    return view


def _first_call_after(node: Node) -> Node:
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place
