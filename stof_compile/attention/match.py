"""Finding the attention of a normalised graph: sites that can be replaced, near misses with their
reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from stof_compile.attention.origin import (
    ENDS_WITH_KEYS,
    UNTOLD,
    QueryOffset,
    query_offset,
    sequence_relation,
)
from stof_compile.attention.patterns import (
    Mismatch,
    Scores,
    Term,
    Weights,
    read_scores,
    read_weights,
    unrepeated,
)
from stof_compile.capture import CaptureFacts, site_path
from stof_compile.emit import autocast_dtype, emit
from stof_compile.node_ops import (
    argument,
    dtype_of,
    mutations,
    operation,
    raw_name,
    same_size,
    shape_of,
    source_line,
    storage_base,
    tensor_meta,
)
from stof_compile.normalize import heads_of

SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Form = Literal["sdpa", "softmax", "flex", "stof"]


@dataclass(frozen=True)
class AttentionSite:
    """One attention that was found.

    Args:
        name: path as text, with "#1", "#2" ... when one module attends several times; unique in
            the graph.
        path: module path, relative to the compiled root where that is known.
        form: how it is written; "flex" and "stof" are already kernels and only listed.
        output: node [B, H, Q, Dv] to replace. q, k, v: [B, Hq, Q, D], [B, Hk, K, D], [B, Hk, K,
            Dv].
        k_transposed: ``k`` is [B, Hk, D, K] instead.
        terms: masks and biases on the scaled scores, in order. is_causal: SDPA's flag (upper-left).
        mask, bias: the single bool keep mask / float additive mask when that is all there is, else
            None.
        scale: factor on the scores, None for D ** -0.5. softcap: cap of ``cap * tanh(s / cap)``, 0
            for none.
        enable_gqa: k and v have fewer heads than q.
        cross: keys come from another sequence; a guess from the lengths unless ``cross_known``.
            offset: position of the query rows, for an added
            mask.
        nodes: interior nodes, in order; they die with the output. softmax: the softmax of that
            form, else None.
        source: the user's source line.
    """

    name: str
    path: tuple[str, ...]
    form: Form
    output: Node
    q: Node
    k: Node
    v: Node
    k_transposed: bool = False
    terms: tuple[Term, ...] = ()
    mask: Node | None = None
    bias: Node | None = None
    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    enable_gqa: bool = False
    cross: bool = False
    cross_known: bool = True
    offset: QueryOffset = ENDS_WITH_KEYS
    nodes: tuple[Node, ...] = ()
    softmax: Node | None = None
    source: str = ""


@dataclass(frozen=True)
class NearMiss:
    """Attention that is left as it is.

    Args:
        name, path, source: as for a site.
        node: the SDPA call, the softmax, or the fused module call. reason: why it is left.
        cross: keys come from another sequence. offset: position of the query rows, for an added
            mask.
    """

    name: str
    node: Node
    reason: str
    path: tuple[str, ...] = ()
    source: str = ""
    cross: bool = False
    offset: QueryOffset = UNTOLD


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
            cross, offset = _miss_facts(gm, node, facts)
            misses.append(
                NearMiss(name, node, found.reason, path, source_line(node), cross, offset)
            )
        else:
            sites.append(AttentionSite(name=name, path=path, source=source_line(node), **found))
    return sites, misses


def _miss_facts(gm: GraphModule, node: Node, facts: CaptureFacts) -> tuple[bool, QueryOffset]:
    """Whether a near miss is cross-attention, and where its queries stand."""
    q: Any = argument(node, 0, "query")
    k: Any = argument(node, 1, "key")
    if operation(node) == "softmax":
        scores = read_scores(node, facts.static)
        if not isinstance(scores, Scores):
            return False, UNTOLD
        q, k = scores.q, scores.k
        if scores.k_transposed:
            offset = query_offset(gm.graph, q, k, node, -1)
            return sequence_relation(gm.graph, q, k, node).cross, offset
    if not (isinstance(q, Node) and isinstance(k, Node)):
        return False, UNTOLD
    return sequence_relation(gm.graph, q, k, node).cross, query_offset(gm.graph, q, k, node)


Found = dict[str, Any]
Writes = list[tuple[Node, Node]]


def _candidates(
    gm: GraphModule, facts: CaptureFacts, writes: Writes
) -> Iterator[tuple[Node, Found | Mismatch]]:
    for node in list(gm.graph.nodes):
        name = operation(node)
        found: Found | Mismatch | None = None
        if name == "scaled_dot_product_attention":
            found = _sdpa_site(gm, node, facts, writes)
        elif name == "softmax":
            found = _softmax_site(gm, node, facts, writes)
        elif name == "flex_attention":
            found = _kernel_site(node, "flex")
        elif raw_name(node).startswith("stof::attention"):
            found = _kernel_site(node, "stof")
        elif name == "multi_head_attention_forward":
            found = Mismatch(
                "nn.MultiheadAttention with bias_k, add_zero_attn or static keys stays one call"
            )
        elif name == "_transformer_encoder_layer_fwd":
            found = Mismatch("a fused nn.TransformerEncoderLayer on nested tensors stays one call")
        if found is not None:
            yield node, found


def _kernel_site(node: Node, form: Form) -> Found | None:
    q, k, v = (argument(node, i, n) for i, n in enumerate(("query", "key", "value")))
    if form == "stof":
        q, k, v = (argument(node, i, n) for i, n in enumerate(("q", "k", "v")))
    if not all(isinstance(n, Node) for n in (q, k, v)):
        return None
    first = next((u for u in node.users if raw_name(u) == "getitem" and u.args[1] == 0), node)
    return {"form": form, "output": first, "q": q, "k": k, "v": v}


# -- SDPA ------------------------------------------------------------------------------------------


def _sdpa_site(
    gm: GraphModule, node: Node, facts: CaptureFacts, writes: Writes
) -> Found | Mismatch:
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
    k_source, v_source, gqa = _ungrouped(k, v, bool(given.get("enable_gqa", False)))
    q, k_source, v_source = _autocast(gm, node, node, q, k_source, v_source)
    problem = _operand_problem(q, k_source, v_source, node, transposed=False)
    if problem is None:
        problem = _written_between(
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
        "offset": query_offset(gm.graph, q, k_source, node),
    }


def _ungrouped(k: Node, v: Node, gqa: bool) -> tuple[Node, Node, bool]:
    """k and v before their heads were repeated, when both were repeated alike."""
    k_repeat, v_repeat = unrepeated(k), unrepeated(v)
    if k_repeat is None or v_repeat is None or k_repeat[1] != v_repeat[1]:
        return k, v, gqa
    return k_repeat[0], v_repeat[0], gqa or k_repeat[1] > 1


# -- softmax ---------------------------------------------------------------------------------------


def _softmax_site(
    gm: GraphModule, node: Node, facts: CaptureFacts, writes: Writes
) -> Found | Mismatch | None:
    weights = read_weights(node)
    if weights is None:
        return None
    scores = read_scores(node, facts.static)
    if scores is None or isinstance(scores, Mismatch) or isinstance(weights, Mismatch):
        return scores if scores is None or isinstance(scores, Mismatch) else weights  # type: ignore[return-value]
    problem = _softmax_problem(node, scores, weights)
    if problem is not None:
        return problem
    output, q, k, v = _four_dimensional(gm, scores, weights)
    if isinstance(output, Mismatch):
        return output
    gqa = False
    if not scores.k_transposed:
        k, v, gqa = _ungrouped(k, v, False)
    heads = [(shape_of(n) or (0, 0))[1] for n in (q, k)]
    q, k, v = _autocast(gm, weights.output, node, q, k, v)
    gqa = gqa or (isinstance(heads[0], int) and isinstance(heads[1], int) and heads[0] != heads[1])
    problem = _operand_problem(q, k, v, output, transposed=scores.k_transposed)
    interior = (*reversed(scores.nodes), node, *weights.nodes)
    if weights.output is not output:
        interior = (*interior, weights.output)
    if problem is None:
        operands = (q, k, v, *(t.node for t in scores.terms), *interior)
        problem = _written_between(interior[0], output, operands, writes)
    if problem is not None:
        return problem
    single = scores.terms[0] if len(scores.terms) == 1 else None
    relation = sequence_relation(gm.graph, q, k, output)
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
        "nodes": interior,
        "softmax": node,
        "offset": query_offset(gm.graph, q, k, output, -1 if scores.k_transposed else -2),
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
    gm: GraphModule, scores: Scores, weights: Weights
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
    q, k, v = (_unfolded(gm, n, heads) for n in (q, k, v))
    return lifted, q, k, v


def _unfolded(gm: GraphModule, node: Node, heads: int | None) -> Node:
    """[B*H, S, D] as [B, H, S, D]: the tensor it was reshaped from, else a new view."""
    if len(shape_of(node) or ()) == 4:
        return node
    if heads is not None and heads_of(node) == heads:
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


def _autocast(gm: GraphModule, product: Node, before: Node, *operands: Node) -> list[Node]:
    """Operands as the autocast region around a product sees them: cast to the dtype of its
    result."""
    wanted = dtype_of(product)
    if (
        wanted is None
        or autocast_dtype(gm.graph, product) != wanted
        or all(dtype_of(n) == wanted for n in operands)
    ):
        return list(operands)
    cast: list[Node] = []
    for node in operands:
        cast += (
            [node]
            if dtype_of(node) == wanted
            else emit(gm.graph, before, product, lambda t: t.to(wanted), node)
        )
    return cast


# -- checks ----------------------------------------------------------------------------------------


def _operand_problem(
    q: Node, k: Node, v: Node, output: Node, *, transposed: bool
) -> Mismatch | None:
    metas = [tensor_meta(n) for n in (q, k, v, output)]
    if any(meta is None for meta in metas):
        return Mismatch("shape and dtype of q, k, v or the result are unknown")
    for name, meta in zip(("q", "k", "v", "the result"), metas, strict=True):
        assert meta is not None, "checked above"
        if type(meta) not in (torch.Tensor, FakeTensor):
            return Mismatch(f"{name} is a {type(meta).__name__}")
        if meta.dim() != 4:
            return Mismatch(
                f"{name} has {meta.dim()} dimensions, not [batch, heads, sequence, head dim]"
            )
        if meta.dtype not in FLOATS:
            return Mismatch(f"{name} is {meta.dtype}")
    dtypes = {str(meta.dtype) for meta in metas if meta is not None}
    if len(dtypes) > 1:
        return Mismatch(
            f"q, k, v and the result have different dtypes: {', '.join(sorted(dtypes))}"
        )
    (qb, qh, _, qd), ks, (vb, vh, v_len, _) = (tuple(m.shape) for m in metas[:3])  # type: ignore[union-attr]
    kb, kh, k_len, kd = (ks[0], ks[1], ks[3], ks[2]) if transposed else ks
    if not (same_size(qb, kb) and same_size(qb, vb)):
        return Mismatch(f"q, k and v have different batch sizes: {qb}, {kb}, {vb}")
    if not (same_size(qd, kd) and same_size(k_len, v_len) and same_size(kh, vh)):
        return Mismatch("shapes of q, k and v do not fit together")
    if not same_size(qh, kh) and not (isinstance(qh, int) and isinstance(kh, int) and qh % kh == 0):
        return Mismatch(f"{qh} query heads do not divide into {kh} key heads")
    return None


def _written_between(
    first: Node, last: Node, read: tuple[Node, ...], writes: Writes
) -> Mismatch | None:
    """A write to an operand's memory between the first matched node and the place where the
    operands are read anew."""
    if not writes:
        return None
    bases = {storage_base(node) for node in read}
    span: set[Node] = set()
    node = first
    while node is not last:
        span.add(node)
        node = node.next
    for writer, base in writes:
        if writer in span and base in bases:
            return Mismatch(f"'{writer.name}' ({raw_name(writer)}) writes to an operand in between")
    return None
