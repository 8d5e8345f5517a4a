"""Attention that stays with PyTorch: the option's mask is put into it, or it is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from stof_compile.attention.dense_mask import Place, dense_keep
from stof_compile.attention.origin import QueryOffset
from stof_compile.attention.rewrite import and_mask_into_sdpa, and_mask_into_softmax
from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.attention.site_report import SiteReport
from stof_compile.errors import StofMaskError
from stof_compile.masks.spec import MaskSpec
from stof_compile.node_ops import argument, operation, shape_of, tensor_meta

Nodes = Callable[[Node], Any]


def keep_site(
    gm: GraphModule,
    site: AttentionSite,
    option: MaskSpec | None,
    report: SiteReport,
    reason: str,
) -> None:
    """Leave a site to PyTorch with the option's mask and-ed in.

    Raises:
        StofMaskError: the mask has no place, or the position of the queries cannot be told.
    """
    report.reason = reason
    if option is None:
        return
    where = f"{site.name} ({reason})"
    if site.form == "sdpa":
        keep = _keep_of(
            gm,
            option,
            (site.q, site.k, -1 if site.k_transposed else -2),
            site,
            site.is_causal,
            where,
        )
        and_mask_into_sdpa(gm, site.output, keep)
    elif site.form == "softmax" and site.softmax is not None:
        _mask_softmax(gm, site.softmax, option, site, where)
    else:
        raise StofMaskError(
            f"{where}: the mask of the options cannot be put into an attention of form "
            f"{site.form!r}; name the layers that should have a mask by path"
        )
    report.status = "masked"


def mask_near_misses(
    gm: GraphModule, near_misses: Sequence[NearMiss], by_name: Mapping[str, MaskSpec]
) -> None:
    """And the option's masks into attention that was recognised but cannot be rewritten.

    Args:
        gm: graph. near_misses: attention to be left alone. by_name: mask of each that gets one.
    Raises:
        StofMaskError: there is no place to put a mask, or the position of the queries cannot be
            told.
    """
    for miss in near_misses:
        option = by_name.get(miss.name)
        if option is None:
            continue
        where, node = f"{miss.name} ({miss.reason})", miss.node
        query, key = argument(node, 0, "query"), argument(node, 1, "key")
        if operation(node) == "softmax":
            _mask_softmax(gm, node, option, miss, where)
        elif (
            node.target is F.scaled_dot_product_attention
            and isinstance(query, Node)
            and isinstance(key, Node)
        ):
            causal = argument(node, 5, "is_causal", False)
            if not isinstance(causal, bool):
                raise _no_place(where, node)
            keep = _keep_of(gm, option, (query, key, -2), miss, causal, where)
            and_mask_into_sdpa(gm, node, keep)
        else:
            raise _no_place(where, node)


def _no_place(where: str, node: Node) -> StofMaskError:
    return StofMaskError(
        f"{where}: the mask of the options cannot be put into {node.name!r}; name the layers to "
        "mask by path"
    )


def _mask_softmax(
    gm: GraphModule, softmax: Node, option: MaskSpec, place: AttentionSite | NearMiss, where: str
) -> None:
    scores = argument(softmax, 0, "input")
    dim, rank = argument(softmax, 1, "dim"), len(shape_of(scores) or ())
    if not isinstance(scores, Node) or not isinstance(dim, int) or dim % max(rank, 1) != rank - 1:
        raise _no_place(where, softmax)
    if rank != 4 and not (rank == 3 and option.plane_shape() == (1, 1)):
        raise StofMaskError(
            f"{where}: the mask of the options differs between batch rows or heads and the scores "
            f"{list(shape_of(scores) or ())} do not show which is which; give one mask for all"
        )
    keep = _keep_of(gm, option, (scores, scores, -1), place, False, where)
    and_mask_into_softmax(gm, softmax, keep if rank == 4 else lambda proxy: keep(proxy)[0])


def _keep_of(
    gm: GraphModule,
    option: MaskSpec,
    operands: tuple[Node, Node, int],
    place: AttentionSite | NearMiss,
    causal: bool,
    where: str,
) -> Callable[[Nodes], Any]:
    """Return a builder of the option's mask (and SDPA's causal flag) as ``[B|1, H|1, Q, K]``.

    Args:
        operands: node ``[B, H, Q, ...]``, node with the keys, and the axis of the keys in it.
    Raises:
        StofMaskError: the position of the queries cannot be told.
    """
    queries, keys, axis = operands
    offset: QueryOffset = place.offset
    if not place.cross and offset.kind == "unknown":
        raise StofMaskError(
            f"{where}: the mask of the options needs the position of the queries and it cannot be "
            f"told ({offset.reason}); give the mask inside the model, or name other layers by path"
        )

    def positions(proxy: Nodes, rows: Any) -> Any:
        if place.cross:
            return rows
        if offset.node is None:
            return rows + offset.value
        start = proxy(offset.node)
        example = tensor_meta(offset.node)
        return rows + start if example is None or example.dim() == 0 else start.reshape(-1)

    def sizes(proxy: Nodes) -> tuple[Any, Any]:
        return proxy(queries).size(-2), proxy(keys).size(axis)

    known = place.cross or offset.node is not None or offset.value is not None
    preallocated = offset.kind == "position" and not place.cross
    lengths = (shape_of(queries) or (None,) * 2)[-2], (shape_of(keys) or (None,) * 2)[axis]
    fixed = None
    if offset.node is None or place.cross:
        q_len, k_len = lengths
        if isinstance(q_len, int) and isinstance(k_len, int):
            first = 0 if place.cross else offset.value
            fixed = Place(k_len - q_len if first is None else first, q_len, k_len)
    return dense_keep(
        gm,
        option,
        queries,
        sizes,
        causal=causal,
        positions=positions if known else None,
        newest_only=preallocated,
        place=fixed,
    )
