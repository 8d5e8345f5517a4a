"""Finding the attention of a normalised graph.

It takes two forms there, read by a module each:

    match_sdpa      F.scaled_dot_product_attention(q, k, v, mask, ...)
    match_softmax   matmul(softmax(terms(scale * matmul(q, k^T))), v)

What a form's module returns is a site, a ``Mismatch`` with the reason when something looks like
attention and is not quite, or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from stof_compile.attention.match_sdpa import sdpa_site
from stof_compile.attention.match_softmax import softmax_site
from stof_compile.attention.mismatch import Mismatch
from stof_compile.attention.origin import (
    UNTOLD,
    QueryOffset,
    Relation,
    query_offset,
    sequence_relation,
)
from stof_compile.attention.replaceable import Writes
from stof_compile.attention.scores import Scores, read_scores
from stof_compile.attention.site import AttentionSite, Form, Found, NearMiss
from stof_compile.attention.unmatched import unmatched_attention
from stof_compile.capture import CaptureFacts, site_path
from stof_compile.memory import mutations
from stof_compile.node_ops import argument, operation, raw_name, source_line

# where torch.func.grad, forward-mode derivatives (jvp among them) and torch.vmap begin
TRANSFORMS = {
    "_grad_increment_nesting": "torch.func differentiates",
    "_enter_dual_level": "forward-mode derivatives are computed",
    "_vmap_increment_nesting": "torch.vmap batches functions",
}


def match_attention(
    gm: GraphModule, facts: CaptureFacts
) -> tuple[list[AttentionSite], list[NearMiss]]:
    """Find every attention of a graph, in graph order.

    The graph keeps its meaning; views of operands may be added (unused unless a site is replaced).
    """
    sites: list[AttentionSite] = []
    misses: list[NearMiss] = []
    taken: dict[str, int] = {}
    writes = list(mutations(gm.graph))
    for node, found in _candidates(gm, facts, writes):
        path = site_path(node, facts)
        name = ".".join(path) or "attention"
        count = taken.get(name, 0)
        taken[name] = count + 1
        name = f"{name}#{count}" if count else name
        if isinstance(found, Mismatch):
            relation, offset = _miss_facts(gm, node, facts)
            undecided = (*relation.undecided, *found.undecided)
            misses.append(
                NearMiss(
                    name, node, found.reason, path, source_line(node), relation.cross, offset,
                    relation.known, undecided, found.maskable,
                )
            )  # fmt: skip
        else:
            sites.append(AttentionSite(name=name, path=path, source=source_line(node), **found))
    return sites, misses


def _miss_facts(gm: GraphModule, node: Node, facts: CaptureFacts) -> tuple[Relation, QueryOffset]:
    """Whether a near miss is cross-attention, and where its queries stand."""
    q: Any = argument(node, 0, "query")
    k: Any = argument(node, 1, "key")
    axis = -2
    if operation(node) == "softmax":
        scores = read_scores(node, facts.static, node)
        if not isinstance(scores, Scores):
            return Relation(cross=False), UNTOLD
        q, k, axis = scores.q, scores.k, -1 if scores.k_transposed else -2
    if not (isinstance(q, Node) and isinstance(k, Node)):
        return Relation(cross=False), UNTOLD
    offset = query_offset(gm.graph, q, k, node, axis)
    return sequence_relation(gm.graph, q, k, node, axis), offset


def _candidates(
    gm: GraphModule, facts: CaptureFacts, writes: Writes
) -> Iterator[tuple[Node, Found | Mismatch]]:
    transforms = [t for n in gm.graph.nodes if (t := TRANSFORMS.get(raw_name(n)))]
    for node in list(gm.graph.nodes):
        name = operation(node)
        found: Found | Mismatch | None = None
        if name == "scaled_dot_product_attention":
            found = sdpa_site(gm, node, facts, writes)
        elif name == "softmax":
            found = softmax_site(gm, node, facts, writes)
        elif name == "flex_attention":
            found = _kernel_site(gm, node, "flex")
        elif raw_name(node).startswith("stof::attention"):
            found = _kernel_site(gm, node, "stof")
        elif name == "multi_head_attention_forward":
            found = Mismatch(
                "nn.MultiheadAttention with bias_k, add_zero_attn or static keys stays one call"
            )
        elif name == "_transformer_encoder_layer_fwd":
            found = Mismatch("a fused nn.TransformerEncoderLayer on nested tensors stays one call")
        if found is None:
            found = unmatched_attention(node, facts.place.cut)
        if transforms and isinstance(found, dict) and found["form"] in ("sdpa", "softmax"):
            found = Mismatch(
                f"{transforms[0]} in this graph, which STOF's operators have no rule for"
            )
        if found is not None:
            yield node, found


def _kernel_site(gm: GraphModule, node: Node, form: Form) -> Found | None:
    q, k, v = (argument(node, i, n) for i, n in enumerate(("query", "key", "value")))
    if form == "stof":
        q, k, v = (argument(node, i, n) for i, n in enumerate(("q", "k", "v")))
    if not all(isinstance(n, Node) for n in (q, k, v)):
        return None
    first = next((u for u in node.users if raw_name(u) == "getitem" and u.args[1] == 0), node)
    relation = sequence_relation(gm.graph, q, k, node)
    return {
        "form": form,
        "output": first,
        "q": q,
        "k": k,
        "v": v,
        "cross": relation.cross,
        "cross_known": relation.known,
        "undecided": relation.undecided,
    }
