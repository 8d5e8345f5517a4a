"""Attention written as a call of ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from stof_compile.attention.autocast_operands import cast_operands
from stof_compile.attention.mismatch import Mismatch
from stof_compile.attention.origin import query_offset, sequence_relation
from stof_compile.attention.repeated_heads import ungrouped
from stof_compile.attention.replaceable import Writes, operand_problem, written_between
from stof_compile.attention.scores import Term
from stof_compile.attention.site import Found
from stof_compile.capture import CaptureFacts
from stof_compile.node_ops import tensor_meta

SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def sdpa_site(gm: GraphModule, node: Node, facts: CaptureFacts, writes: Writes) -> Found | Mismatch:
    """Read a call of SDPA; its operands as its autocast region and grouped queries leave them."""
    given = dict(zip(SDPA_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    q, k, v = (given.get(n) for n in SDPA_ARGUMENTS[:3])
    if not (isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)):
        return Mismatch("q, k or v is no tensor of the graph")
    mask, scale = given.get("attn_mask"), facts.static.scalar(given.get("scale"))
    dropout, causal = (
        facts.static.scalar(given.get("dropout_p", 0.0)),
        given.get("is_causal", False),
    )
    if dropout != 0.0:
        shown = "a value of the graph" if dropout is None else dropout
        return Mismatch(f"dropout_p is {shown}: attention dropout is not supported")
    if not isinstance(causal, bool):
        return Mismatch("is_causal is a value of the graph")
    if scale is None and given.get("scale") is not None:
        return Mismatch("scale is a value of the graph")
    if mask is not None and causal:
        return Mismatch("attn_mask and is_causal together: what that means depends on the device")
    terms: tuple[Term, ...] = ()
    if isinstance(mask, Node):
        meta = tensor_meta(mask)
        if meta is None or type(meta) not in (torch.Tensor, FakeTensor):
            return Mismatch(f"attn_mask is a {type(meta).__name__}, not a plain tensor")
        terms = (Term("keep", mask) if meta.dtype == torch.bool else Term("add", mask),)
    gqa = bool(given.get("enable_gqa", False))
    k_source, v_source, gqa = ungrouped(k, v, gqa, facts.static, node)
    q, k_source, v_source = cast_operands(gm, node, node, q, k_source, v_source)
    problem = operand_problem(q, k_source, v_source, node, transposed=False)
    if problem is None:
        problem = written_between(
            node, node, (q, k_source, v_source, *(t.node for t in terms)), writes
        )
    if problem is not None:
        return problem
    relation = sequence_relation(gm.graph, q, k_source, node)
    return {
        "form": "sdpa",
        "output": node,
        "q": q,
        "k": k_source,
        "v": v_source,
        "terms": terms,
        "mask": mask if terms and terms[0].kind == "keep" else None,
        "bias": mask if terms and terms[0].kind == "add" else None,
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": gqa,
        "cross": relation.cross,
        "cross_known": relation.known,
        "undecided": relation.undecided,
        "offset": query_offset(gm.graph, q, k_source, node),
    }
