"""What matching finds: an attention that can be replaced, or a near miss with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import Node

from stof_compile.attention.origin import ENDS_WITH_KEYS, UNTOLD, QueryOffset, Sizes
from stof_compile.attention.scores import Term

Form = Literal["sdpa", "softmax", "flex", "stof"]
Found = dict[str, Any]  # fields of a site, all but name, path and source


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
        undecided: pairs of sizes that decide about that, and are not known to be equal.
        offset: position of the query rows, for an added mask.
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
    undecided: Sizes = field(default=(), compare=False)  # symbols cannot be hashed
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
        cross, cross_known, undecided, offset: as for a site; ``undecided`` also sizes that would
            have to be equal for a match.
        maskable: as for a mismatch.
    """

    name: str
    node: Node
    reason: str
    path: tuple[str, ...] = ()
    source: str = ""
    cross: bool = False
    offset: QueryOffset = UNTOLD
    cross_known: bool = True
    undecided: Sizes = field(default=(), compare=False)  # symbols cannot be hashed
    maskable: bool = True
