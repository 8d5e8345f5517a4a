"""Replacing matched attention by kernel calls, and and-ing a mask into attention that is kept.

Both write through ``torch.fx.Proxy``, so the function that is timed is the function that enters
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from stof_compile.attention.call import KernelCall
from stof_compile.attention.site import AttentionSite
from stof_compile.capture import add_buffer
from stof_compile.dead_code import erase_with_inputs
from stof_compile.emit import emit, in_fake_mode
from stof_compile.node_ops import tensor_meta
from stof_compile.packing_consumers import memory_order, order_matters

REPLACED = "stof_replaced_by"  # of a node's meta
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def replace_site(
    gm: GraphModule, site: AttentionSite, call: KernelCall, key_keep: Node | None, bias: Node | None
) -> None:
    """Replace a site's output by a kernel call; its interior nodes die when nothing else uses
    them. Readers that count on heads first in memory get them so from the kernel, if it can."""
    if call.heads_first is not None and _wants_heads_first(site.output):
        call = replace(call, attend=call.heads_first)

    def build(proxy: Callable[[Node], Any]) -> Any:
        q, k, v = proxy(site.q), proxy(site.k), proxy(site.v)
        if site.k_transposed:
            k = k.transpose(-2, -1)
        held = {name: proxy(add_buffer(gm, name, tensor)) for name, tensor in call.buffers.items()}
        out: Any = call.run(
            q,
            k,
            v,
            proxy(key_keep) if key_keep is not None else None,
            proxy(bias) if bias is not None else None,
            held,
        )
        return out

    replace_output(gm, site.output, build)


def and_mask_into_sdpa(
    gm: GraphModule, node: Node, keep: Callable[[Callable[[Node], Any]], Any]
) -> None:
    """And a mask into one SDPA call that stays.

    Args:
        gm, node: the graph and its ``scaled_dot_product_attention`` call.
        keep: builds the bool mask ``[B|1, H|1, Q, K]`` (True = attend) in front of the call; it
            must contain the
            causal rule when the call has ``is_causal`` (SDPA takes a mask or the flag, not both).
    """
    arguments = dict(zip(SDPA_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    mask = arguments.get("attn_mask")

    def build(proxy: Callable[[Node], Any]) -> Any:
        wanted = keep(proxy)
        if isinstance(mask, Node):
            given = proxy(mask)
            example = mask.meta.get("example_value")
            boolean = example is not None and example.dtype == torch.bool
            wanted = (given & wanted) if boolean else torch.where(wanted, given, float("-inf"))
        rest = {
            n: _as_proxy(a, proxy)
            for n, a in arguments.items()
            if n not in ("query", "key", "value", "attn_mask", "is_causal")
        }
        operands: list[Any] = [proxy(arguments[n]) for n in SDPA_ARGUMENTS[:3]]  # type: ignore[arg-type]
        attend: Callable[..., Any] = F.scaled_dot_product_attention
        return attend(*operands, attn_mask=wanted, is_causal=False, **rest)

    replace_output(gm, node, build)


def and_mask_into_softmax(
    gm: GraphModule, node: Node, keep: Callable[[Callable[[Node], Any]], Any]
) -> None:
    """And a mask into the scores of one softmax that stays.

    Rows that lose every key become zero rows, as everywhere in STOF.

    Args:
        gm, node: the graph and its softmax over the last axis.
        keep: builds a bool mask that broadcasts with the scores (True = attend).
    """
    scores = node.args[0] if node.args else node.kwargs["input"]
    assert isinstance(scores, Node), "a softmax of the graph has scores"

    def build(proxy: Callable[[Node], Any]) -> Any:
        wanted = keep(proxy)
        masked = proxy(scores).masked_fill(~wanted, float("-inf"))
        args = (masked, *(_as_proxy(a, proxy) for a in node.args[1:]))
        kwargs = {n: _as_proxy(a, proxy) for n, a in node.kwargs.items() if n != "input"}
        if node.op == "call_method":
            out = getattr(masked, str(node.target))(*args[1:], **kwargs)
        else:
            out = node.target(*args, **kwargs)  # type: ignore[operator]
        # also removes the NaN of rows that have no key left
        result: Any = out.masked_fill(masked == float("-inf"), 0.0)
        return result

    replace_output(gm, node, build)


def _as_proxy(value: Any, proxy: Callable[[Node], Any]) -> Any:
    return proxy(value) if isinstance(value, Node) else value


def replace_output(
    gm: GraphModule, old: Node, build: Callable[[Callable[[Node], Any]], Any]
) -> None:
    """Replace a node by what ``build`` writes in front of it; ``build`` gets a function from nodes
    to proxies, of what stands in their place where they were replaced before."""
    tracer = GraphAppendingTracer(gm.graph)

    def proxy(node: Node) -> Proxy:
        while REPLACED in node.meta:  # attention may read the output of another
            node = node.meta[REPLACED]
        return Proxy(node, tracer)

    (new,) = emit(gm.graph, old, old, lambda: build(proxy))
    new = _in_memory_order(gm, old, new)
    old.replace_all_uses_with(new)
    old.meta[REPLACED] = new
    erase_with_inputs(old)


def _wants_heads_first(old: Node) -> bool:
    """Whether readers of an attention's result count on [batch, heads, queries, dim] memory, where
    a kernel would give them [batch, queries, heads, dim]."""
    before = tensor_meta(old)
    if before is None:
        return False
    with in_fake_mode(before):
        after = before.transpose(1, 2).contiguous().transpose(1, 2)
    return _order_counted_on(old, after) == [0, 1, 2, 3]


def _in_memory_order(gm: GraphModule, old: Node, new: Node) -> Node:
    """``new``, copied into the order of dimensions that ``old`` has in memory where a reader of
    ``old`` depends on that: ``view``, ``as_strided``, the caller, who was told its strides."""
    after = tensor_meta(new)
    order = None if after is None else _order_counted_on(old, after)
    if order is None:
        return new
    back = [order.index(d) for d in range(len(order))]
    (copied,) = emit(gm.graph, old, old, lambda t: t.permute(order).contiguous().permute(back), new)
    return copied


def _order_counted_on(old: Node, after: torch.Tensor) -> list[int] | None:
    """The order of dimensions that readers of ``old`` count on, where ``after``, a fake tensor, has
    another one; else None."""
    before = tensor_meta(old)
    order = None if before is None else memory_order(before)
    if order is None or order == memory_order(after) or not order_matters(old, after):
        return None
    return order
