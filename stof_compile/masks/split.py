"""Splitting the mask a model computes into a static part, padding, bias and what only the run
knows.

The mask of a site is a tree of ``&``, ``|``, ``~``, ``where``, ``masked_fill`` and sums between
shape changes. Its
conjuncts are taken apart and sorted by what they depend on:

    static   constants, factories, buffers     evaluated now (or, for symbolic sizes, kept as text)
    padding  the user's inputs, along batch and keys only      -> key_keep [B, K]
    bias     anything added that is no mask     -> additive [B|1, H|1, Q|1, K]
    dynamic  any other bool conjunct     -> keep [B|1, H|1, Q|1, K]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from stof_compile.capture import CaptureFacts
from stof_compile.emit import emit
from stof_compile.masks.mask_tree import (
    BATCH,
    BATCH_HEAD,
    HEAD,
    KEY,
    MASKING_LIMIT,
    QUERY,
    Leaf,
    MaskTree,
    broadcast_axes,
)
from stof_compile.memory import mutations, storage_base
from stof_compile.node_ops import dtype_of, is_one, shape_of, tensor_meta
from stof_compile.static_values import ELEMENT_CAP, StaticGraph

if TYPE_CHECKING:
    from stof_compile.attention.origin import QueryOffset
    from stof_compile.attention.site import AttentionSite


@dataclass(frozen=True)
class MaskParts:
    """The mask of one site, taken apart. A score counts when all of static, causal, padding and
    dynamic say so.

    Args:
        static: bool keep [B|1, H|1, Q, K] on the device of the graph; None when it keeps
            everything.
        static_graph: the same as a function of sizes, when shapes are symbolic (``static`` is None
            then); its value
            is [B|1, H|1, Q|1, K|1], see ``full_planes``.
        is_causal: SDPA's flag: row i sees keys 0..i (upper-left), besides everything else.
        padding: bool node [B, K], True = attend.
        bias: float node [B|1, H|1, Q|1, K], added to the scaled (and soft-capped) scores.
        dynamic: bool node [B|1, H|1, Q|1, K] that could not be sorted; keep the site unless it can
            be honoured.
        empty_rows: what the model computes for a row whose keys are all masked: "zero", "nan",
            "mean" (of all
            values: finfo.min was added) or "unmasked" (a constant was added to all its scores, as
                with -1e4).
        static_empty_rows: ``static`` has such rows.
        buffers: names of the buffer inputs whose present contents went into ``static``.
        offset: position of the query rows, for a mask given from outside.
        reasons: why parts are dynamic, and other remarks.
    """

    static: Tensor | None = None
    static_graph: StaticGraph | None = None
    is_causal: bool = False
    padding: Node | None = None
    bias: Node | None = None
    dynamic: Node | None = None
    empty_rows: Literal["zero", "nan", "mean", "unmasked"] = "zero"
    static_empty_rows: bool = False
    buffers: tuple[str, ...] = ()
    offset: QueryOffset | None = None
    reasons: tuple[str, ...] = ()

    @property
    def finfo_min(self) -> bool:
        """Whether masked entries are finite, so that a row without keys is no row of zeros."""
        return self.empty_rows in ("mean", "unmasked")

    @property
    def trivial(self) -> bool:
        """Whether nothing is masked or added."""
        parts = (self.static, self.static_graph, self.padding, self.bias, self.dynamic)
        return not self.is_causal and all(part is None for part in parts)


def split_mask(gm: GraphModule, facts: CaptureFacts, site: AttentionSite) -> MaskParts:
    """Take the mask of a site apart.

    New nodes (reshapes and conjunctions of parts) are written in front of the site; those that
    stay unused are erased by ``dead_code.erase_dead``.
    """
    walk = MaskTree(facts.static, site.output)
    for term in site.terms:
        axes = broadcast_axes(shape_of(term.node) or (), term.rank)
        if term.kind == "add":
            walk.add(term.node, axes, term.factor, float("-inf"))
        else:
            walk.keep(term.node, axes, term.kind == "drop", term.fill)
    return _Assembly(gm, facts, site, walk).parts()


def full_planes(keep: Tensor, q_len: int, k_len: int) -> Tensor:
    """Expand a keep mask [B|1, H|1, Q|1, K|1] to [b, h, Q, K], storing equal planes once."""
    keep = keep.expand(*keep.shape[:2], q_len, k_len)
    for dim in (0, 1):
        first = keep.narrow(dim, 0, 1)
        if keep.shape[dim] > 1 and bool((keep == first).all()):
            keep = first
    return keep.contiguous()


# -- putting the parts together --------------------------------------------------------------------


@dataclass
class _Assembly:
    """Sorts the leaves of one site and writes the nodes that read them."""

    gm: GraphModule
    facts: CaptureFacts
    site: AttentionSite
    walk: MaskTree
    reasons: list[str] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)

    def parts(self) -> MaskParts:
        """Assemble the parts."""
        sorted_leaves: dict[str, list[Leaf]] = {"static": [], "padding": [], "dynamic": []}
        for leaf in self.walk.keeps:
            sorted_leaves[self._kind(leaf)].append(leaf)
        fixed, padding, dynamic = sorted_leaves.values()
        biases = []
        for leaf in self.walk.sums:
            mask, remains = self._mask_of_static_sum(leaf)
            fixed += [mask] if mask is not None else []
            biases += [leaf] if remains else []
        if self.walk.unread and any(fill != float("-inf") for fill in self.walk.fills):
            # two finite masks: a row may lose its keys to both together, and nobody would know
            dynamic += [Leaf(self._compare(leaf), leaf.axes) for leaf in self.walk.unread]
            self.reasons.append(f"a second mask needs more than {ELEMENT_CAP} elements to evaluate")
        static, static_graph, dynamic_static = self._static(fixed)
        dynamic += dynamic_static
        empty = static is not None and bool((~static.any(dim=-1)).any())
        return MaskParts(
            static=static,
            static_graph=static_graph,
            is_causal=self.site.is_causal,
            padding=self._conjunction(padding, self._as_padding),
            bias=self._bias(biases),
            dynamic=self._conjunction(dynamic, self._as_four),
            empty_rows=self._empty_rows(),
            static_empty_rows=empty,
            buffers=tuple(sorted(self.buffers)),
            offset=self.site.offset,
            reasons=tuple(dict.fromkeys(self.reasons)),
        )

    def _kind(self, leaf: Leaf) -> str:
        if dtype_of(leaf.node) != torch.bool:
            self.reasons.append(f"'{leaf.node.name}' is {dtype_of(leaf.node)}, not bool")
            return "dynamic"
        if self.facts.static.is_static(leaf.node):
            if self.facts.fake_inputs and self.facts.static.buffers_read(leaf.node):
                return "dynamic"
            return "static"
        if storage_base(leaf.node) in {base for _, base in mutations(self.gm.graph)}:
            self.reasons.append(f"'{leaf.node.name}' is written to inside the graph")
            return "dynamic"
        shape = shape_of(leaf.node) or ()
        along = {axis for axis, size in zip(leaf.axes, shape, strict=True) if not is_one(size)}
        if along <= {BATCH, KEY}:
            return "padding"
        names = ", ".join(
            ("batch", "heads", "queries", "keys", "batch x heads")[a]
            for a in sorted(axis for axis in along if axis is not None)
        )
        inputs = any(n.op == "placeholder" for n in self.facts.static.closure(leaf.node))
        why = "depends on the inputs" if inputs else "is made anew at each call"
        self.reasons.append(f"'{leaf.node.name}' {why} and varies along {names}")
        return "dynamic"

    # -- static ------------------------------------------------------------------------------------

    def _static(self, leaves: list[Leaf]) -> tuple[Tensor | None, StaticGraph | None, list[Leaf]]:
        """(dense keep, its text for symbolic sizes, leaves that are too large to evaluate)."""
        small, large = [], []
        for leaf in leaves:
            if not self.facts.static.is_symbolic(leaf.node) and self.facts.static.too_large(
                leaf.node
            ):
                self.reasons.append(
                    f"'{leaf.node.name}' needs more than {ELEMENT_CAP} elements to evaluate"
                )
                large.append(leaf)
            else:
                small.append(leaf)
        node = self._conjunction(small, self._as_four)
        if node is None:
            return None, None, large
        self.buffers.update(self.facts.static.buffers_read(node))
        q_len, k_len = (shape_of(self.site.q) or ())[2], self._key_length()
        fixed = isinstance(q_len, int) and isinstance(k_len, int)
        if not fixed or self.facts.static.is_symbolic(node):
            return None, self.facts.static.as_text(node), large
        keep = full_planes(self.facts.static.evaluate(node), q_len, k_len)
        return (None if bool(keep.all()) else keep), None, large

    def _mask_of_static_sum(self, leaf: Leaf) -> tuple[Leaf | None, bool]:
        """The mask in a static added tensor, and whether it adds something to what is kept."""
        static, node = self.facts.static, leaf.node
        if not static.is_static(node) or static.is_symbolic(node) or static.too_large(node):
            return None, True
        if self.facts.fake_inputs and static.buffers_read(node):
            return None, True
        value = static.evaluate(node)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None, True
        masks = value * leaf.factor <= MASKING_LIMIT
        remains = bool((value.masked_select(~masks) != 0).any())
        if not bool(masks.any()):
            return None, remains
        self.walk.fills.add(float(value.masked_select(masks).max()) * leaf.factor)
        return Leaf(self._compare(leaf), leaf.axes), remains

    def _compare(self, leaf: Leaf) -> Node:
        """The node ``summand > MASKING_LIMIT``."""
        return self._derived(
            ("above", leaf.node, leaf.factor), lambda t: t * leaf.factor > MASKING_LIMIT, leaf.node
        )

    # -- nodes -------------------------------------------------------------------------------------

    def _derived(self, key: tuple[Any, ...], build: Callable[..., Any], *nodes: Node) -> Node:
        """A node made from others, written once and shared between sites.

        Each site has its own where the graph writes to one of the others, maybe between them and
        through an alias, or switches gradients or another mode.
        """
        known = self.facts.static.derived
        if self.facts.static.is_eventful or any(map(self.facts.static.is_written, nodes)):
            key = (*key, self.site.output)
        if key not in known or known[key]._erased:
            anchor = self.site.softmax or self.site.output  # every mask node stands in front of it
            (known[key],) = emit(self.gm.graph, anchor, self.site.output, build, *nodes)
        return known[key]

    def _as_four(self, leaf: Leaf) -> Node:
        """Leaf as [B|1, H|1, Q|1, K|1]."""
        return self._arranged(leaf, (BATCH, HEAD, QUERY, KEY))

    def _as_padding(self, leaf: Leaf) -> Node:
        """Leaf as [B, K]."""
        node = self._arranged(leaf, (BATCH, KEY))
        shape = shape_of(node) or ()
        if not is_one(shape[0]) and not is_one(shape[1]):
            return node
        batch, k_len = (shape_of(self.site.q) or ())[0], self._key_length()
        if isinstance(batch, int) and isinstance(k_len, int):
            return self._derived(
                ("expand", node, batch, k_len), lambda t: t.expand(batch, k_len), node
            )
        axis = -1 if self.site.k_transposed else -2
        return self._derived(
            ("expand", node, self.site.k),
            lambda t, k: t.expand(k.size(0), k.size(axis)),
            node,
            self.site.k,
        )

    def _key_length(self) -> Any:
        shape = shape_of(self.site.k) or ()
        return shape[-1] if self.site.k_transposed else shape[-2]

    def _arranged(self, leaf: Leaf, wanted: tuple[int, ...]) -> Node:
        heads = (shape_of(self.site.q) or ())[1]
        axes: list[int | None] = list(leaf.axes)
        dropped = [
            i for i, a in enumerate(axes) if a is None or (a not in wanted and a != BATCH_HEAD)
        ]
        left = [a for i, a in enumerate(axes) if i not in dropped]
        split = left.index(BATCH_HEAD) if BATCH_HEAD in left else None
        if split is not None:
            left[split : split + 1] = [BATCH, HEAD]
        order = sorted(range(len(left)), key=lambda i: left[i] if left[i] is not None else -1)  # type: ignore[arg-type,return-value]
        missing = [i for i, axis in enumerate(wanted) if axis not in left]

        def build(t: Any) -> Any:
            for i in reversed(dropped):
                t = t.squeeze(i)
            if split is not None:
                t = t.unflatten(split, (-1, heads))
            if order != sorted(order):
                t = t.permute(order)
            for i in missing:
                t = t.unsqueeze(i)
            if leaf.negated:
                t = torch.logical_not(t)
            return t * leaf.factor if leaf.factor != 1.0 else t

        return self._derived(("arranged", leaf, wanted), build, leaf.node)

    def _conjunction(self, leaves: list[Leaf], arrange: Callable[[Leaf], Node]) -> Node | None:
        nodes = list(dict.fromkeys(arrange(leaf) for leaf in leaves))
        if not nodes:
            return None
        return nodes[0] if len(nodes) == 1 else self._derived(("and", *nodes), _all_of, *nodes)

    def _bias(self, leaves: list[Leaf]) -> Node | None:
        nodes = [self._as_float(self._as_four(leaf)) for leaf in leaves]
        if not nodes:
            return None
        total = nodes[0] if len(nodes) == 1 else self._derived(("sum", *nodes), _sum_of, *nodes)
        if total is not self.site.bias and self.facts.static.is_written(total):
            # the model's sum was its own; a later write must not reach what gradients need
            total = self._derived(("copy", total), lambda t: t.clone(), total)
        shape = shape_of(total) or ()
        if not is_one(shape[-1]) or is_one(self._key_length()):
            return self._by_keys(total)
        axis = -1 if self.site.k_transposed else -2
        return self._derived(
            ("wide", total, self.site.k),
            lambda t, k: t.expand(-1, -1, -1, k.size(axis)),
            total,
            self.site.k,
        )

    def _as_float(self, bias: Node) -> Node:
        """An added tensor of integers or bools as the numbers it adds."""
        dtype = dtype_of(bias)
        if dtype is None or dtype.is_floating_point:
            return bias
        return self._derived(("float", bias), lambda t: t.to(torch.float32), bias)

    def _by_keys(self, bias: Node) -> Node:
        """The bias with keys side by side in memory, which kernels read as rows.

        A table looked up by position has its heads there, as in T5: each value of a head then comes
        with those of all others.
        """
        meta = tensor_meta(bias)
        strides = () if meta is None else meta.stride()
        if not strides or not isinstance(strides[-1], int) or strides[-1] in (0, 1):
            return bias
        shared = [dim for dim, n in enumerate(strides) if isinstance(n, int) and n == 0]
        assert meta is not None, "it has strides"
        whole = None
        if all(isinstance(size, int) for size in meta.shape):
            sizes = [1 if dim in shared else size for dim, size in enumerate(meta.shape)]
            whole = torch.empty(sizes, device="meta")

        def build(t: Any) -> Any:
            copied = t
            for dim in shared:
                copied = copied.narrow(dim, 0, 1)
            copied = copied.contiguous()
            if whole is not None:  # Inductor would copy anew for each site, but not for a view
                copied = copied.as_strided(whole.shape, whole.stride())
            return copied.expand_as(t) if shared else copied

        return self._derived(("by keys", bias), build, bias)

    def _empty_rows(self) -> Literal["zero", "nan", "mean", "unmasked"]:
        finite = {fill for fill in self.walk.fills if fill != float("-inf")}
        if not finite:
            return "nan" if self.site.form == "softmax" and self.walk.fills else "zero"
        meta = tensor_meta(self.site.q)
        lowest = torch.finfo(meta.dtype).min if meta is not None else torch.finfo(torch.float32).min
        return "mean" if min(finite) <= 0.5 * lowest else "unmasked"


def _all_of(*masks: Any) -> Any:
    result = masks[0]
    for mask in masks[1:]:
        result = result & mask
    return result


def _sum_of(*biases: Any) -> Any:
    result = biases[0]
    for bias in biases[1:]:
        result = result + bias
    return result
