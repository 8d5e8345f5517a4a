"""Expansion of torch's fused attention modules into linear layers and one attention each.

``F.multi_head_attention_forward`` (nn.MultiheadAttention) and
``torch._transformer_encoder_layer_fwd`` (the
inference path of nn.TransformerEncoderLayer) reach the graph as single calls; nothing inside them
can be matched
or fused until they are written out. Both become batch-first: q, k, v are ``[B, H, S, D]``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from stof_compile.capture import CaptureFacts
from stof_compile.emit import emit
from stof_compile.node_ops import argument, operation, permutation, raw_name, shape_of, tensor_meta

MHA_ARGUMENTS = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias",
    "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
    "training", "key_padding_mask", "need_weights", "attn_mask", "use_separate_proj_weight",
    "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip
MHA_DEFAULTS: dict[str, Any] = {
    "training": True,
    "need_weights": True,
    "use_separate_proj_weight": False,
    "average_attn_weights": True,
    "is_causal": False,
}
ENCODER_ARGUMENTS = (
    "src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias",
    "use_gelu", "norm_first", "eps", "norm_weight_1", "norm_bias_1", "norm_weight_2",
    "norm_bias_2", "ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2", "mask", "mask_type",
)  # fmt: skip


def expand_encoder_layers(graph: Graph, facts: CaptureFacts) -> int:
    """Write out every fused nn.TransformerEncoderLayer call."""
    count = 0
    for node in list(graph.nodes):
        if raw_name(node) != "_transformer_encoder_layer_fwd":
            continue
        given = dict(zip(ENCODER_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        if _expand_encoder_layer(graph, node, given):
            count += 1
    return count


def _expand_encoder_layer(graph: Graph, node: Node, given: dict[str, Any]) -> bool:
    source = given["src"]
    if tensor_meta(source) is None or tensor_meta(source).is_nested:  # type: ignore[union-attr]
        return False
    names = [n for n in ENCODER_ARGUMENTS if isinstance(given.get(n), Node)]
    stack = node.meta.get("nn_module_stack") or {}
    heads, embed = given["num_heads"], given["embed_dim"]
    mask_type, unbatched = given.get("mask_type"), tensor_meta(source).dim() == 2  # type: ignore[union-attr]

    def layer(*proxies: Any) -> Any:
        p = dict(zip(names, proxies, strict=True))

        def attention(y: Any) -> Any:
            packed = F.linear(y, p["qkv_weight"], p.get("qkv_bias"))
            q, k, v = (_heads(t, heads) for t in _chunks(packed, 3))
            keep = None
            if "mask" in p:
                # The fused kernel reads the mask as bool: anything but zero masks.
                keep = _four_dims(~p["mask"].to(torch.bool), mask_type)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            return F.linear(_merge(out, embed), p["proj_weight"], p.get("proj_bias"))

        def feed_forward(y: Any) -> Any:
            y = F.linear(y, p["ffn_weight_1"], p.get("ffn_bias_1"))
            y = F.gelu(y) if given["use_gelu"] else F.relu(y)
            return F.linear(y, p["ffn_weight_2"], p.get("ffn_bias_2"))

        def norm(y: Any, which: int) -> Any:
            weight, bias = p.get(f"norm_weight_{which}"), p.get(f"norm_bias_{which}")
            eps = p.get("eps", given["eps"])  # an input of the graph where sizes are dynamic
            return F.layer_norm(y, (embed,), weight, bias, eps)

        x = p["src"].unsqueeze(0) if unbatched else p["src"]
        if given["norm_first"]:
            x = x + attention(norm(x, 1))
            x = x + feed_forward(norm(x, 2))
        else:
            x = norm(x + attention(x), 1)
            x = norm(x + feed_forward(x), 2)
        return x.squeeze(0) if unbatched else x

    (result,) = emit(graph, node, node, layer, *(given[n] for n in names))
    for inner in result.graph.nodes:
        if (
            inner.meta.get("nn_module_stack") is stack
            and operation(inner) == "scaled_dot_product_attention"
        ):
            inner.meta["nn_module_stack"] = _below(stack, "self_attn")
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return True


def _below(stack: dict[str, Any], child: str) -> dict[str, Any]:
    """Module stack of a child module that the fused call has hidden."""
    if not stack:
        return stack
    outer = next(reversed(stack.values()))[0]
    return {**stack, f"{child}_of_fused_layer": (f"{outer}.{child}", torch.nn.MultiheadAttention)}


def _four_dims(keep: Any, mask_type: int | None) -> Any:
    if mask_type == 1:  # padding [B, K]
        return keep[:, None, None, :]
    return keep  # 0: [Q, K]; 2: [B, H, Q, K]


def expand_multihead(graph: Graph, facts: CaptureFacts) -> int:
    """Write out every ``F.multi_head_attention_forward`` whose pieces are plain (no bias_k, zero
    or static keys)."""
    count = 0
    for node in list(graph.nodes):
        if raw_name(node) != "multi_head_attention_forward":
            continue
        given = MHA_DEFAULTS | dict(zip(MHA_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        if _can_expand(node, given):
            _expand_multihead(graph, node, given)
            count += 1
    return count


def _can_expand(node: Node, given: dict[str, Any]) -> bool:
    plain = all(given.get(n) is None for n in ("bias_k", "bias_v", "static_k", "static_v"))
    unpacked = all(raw_name(user) == "getitem" and user.args[1] in (0, 1) for user in node.users)
    metas = [tensor_meta(given[n]) for n in ("query", "key", "value")]
    return (
        plain
        and unpacked
        and not given.get("add_zero_attn")
        and all(meta is not None and meta.dim() in (2, 3) and not meta.is_nested for meta in metas)
    )


def _expand_multihead(graph: Graph, node: Node, given: dict[str, Any]) -> None:
    batched = tensor_meta(given["query"]).dim() == 3  # type: ignore[union-attr]
    inputs = {n: given[n] for n in MHA_ARGUMENTS if isinstance(given.get(n), Node)}
    # [S, B, E] arguments are usually transposes of batch-first tensors: read those instead.
    first = {
        n: _batch_first_source(given[n]) if batched else None for n in ("query", "key", "value")
    }
    inputs |= {n: source for n, source in first.items() if source is not None}
    names = list(inputs)
    weights_used = any(user.args[1] == 1 and user.users for user in node.users)
    need_weights = bool(given["need_weights"]) and weights_used
    heads, embed = given["num_heads"], given["embed_dim_to_check"]
    dropout_p = given["dropout_p"] if given["training"] else 0.0
    # nn.MultiheadAttention drops a causal attn_mask in favour of SDPA's flag unless it has to
    # merge masks.
    causal = (
        bool(given["is_causal"])
        and given.get("key_padding_mask") is None
        and not given["need_weights"]
    )
    sharing = (given["key"] is given["value"], given["query"] is given["key"])

    def attention(*proxies: Any) -> Any:
        p = dict(zip(names, proxies, strict=True))

        def batch_first(name: str) -> Any:
            if not batched:
                return p[name].unsqueeze(0)
            return p[name] if first[name] is not None else p[name].transpose(0, 1)

        q, k, v = (
            _heads(t, heads)
            for t in _project(
                p, batch_first, embed, sharing, bool(given["use_separate_proj_weight"])
            )
        )
        mask = None if causal else _merged_mask(p, inputs, heads)
        weights = None
        if need_weights:
            scores = torch.matmul(q * math.sqrt(heads / embed), k.transpose(-2, -1))
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout_p, True, False) if dropout_p else weights
            out = torch.matmul(weights, v)
            weights = weights.mean(dim=1) if given["average_attn_weights"] else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal
            )
        out = F.linear(_merge(out, embed), p["out_proj_weight"], p.get("out_proj_bias"))
        out = out.transpose(0, 1) if batched else out.squeeze(0)
        return (out,) if weights is None else (out, weights)

    results = emit(graph, node, node, attention, *(inputs[n] for n in names))
    for user in list(node.users):
        if user.args[1] < len(results):  # type: ignore[operator]
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _project(
    p: dict[str, Any], batch_first: Any, embed: int, sharing: tuple[bool, bool], separate: bool
) -> list[Any]:
    """In-projections with as few products as the arguments allow: 1 for self-attention, 2 when k
    is v, else 3."""
    key_is_value, query_is_key = sharing
    bias = p.get("in_proj_bias")
    if separate:
        biases = _chunks(bias, 3) if bias is not None else (None, None, None)
        kinds = ("query", "key", "value")
        return [
            F.linear(batch_first(n), p[f"{n[0]}_proj_weight"], b)
            for n, b in zip(kinds, biases, strict=True)
        ]
    weight = p["in_proj_weight"]
    if key_is_value and query_is_key:
        return _chunks(F.linear(batch_first("query"), weight, bias), 3)
    q_bias = bias[:embed] if bias is not None else None
    q = F.linear(batch_first("query"), weight[:embed], q_bias)
    if key_is_value:
        kv = F.linear(
            batch_first("key"), weight[embed:], bias[embed:] if bias is not None else None
        )
        return [q, *_chunks(kv, 2)]
    k_bias = bias[embed : 2 * embed] if bias is not None else None
    v_bias = bias[2 * embed :] if bias is not None else None
    return [
        q,
        F.linear(batch_first("key"), weight[embed : 2 * embed], k_bias),
        F.linear(batch_first("value"), weight[2 * embed :], v_bias),
    ]


def _merged_mask(p: dict[str, Any], inputs: dict[str, Node], heads: int) -> Any:
    """Additive mask broadcastable to [B, H, Q, K] from attn_mask and key_padding_mask, True =
    masked when bool."""
    dtype = tensor_meta(inputs["query"]).dtype  # type: ignore[union-attr]

    def additive(name: str) -> Any:
        mask, meta = p[name], tensor_meta(inputs[name])
        assert meta is not None, "masks are tensors"
        if meta.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
        if name == "key_padding_mask":
            return mask[:, None, None, :] if meta.dim() == 2 else mask
        return mask.unflatten(0, (-1, heads)) if meta.dim() == 3 else mask  # [B*H, Q, K] or [Q, K]

    found = [additive(n) for n in ("attn_mask", "key_padding_mask") if n in p]
    return None if not found else found[0] if len(found) == 1 else found[0] + found[1]


def _batch_first_source(node: Node) -> Node | None:
    """x when the node is ``x.transpose(0, 1)`` of a 3-D tensor."""
    if permutation(node) == (1, 0, 2) and shape_of(node.args[0]) is not None:
        source = argument(node, 0, "input")
        return source if isinstance(source, Node) else None
    return None


def _chunks(t: Any, count: int) -> list[Any]:
    parts = t.chunk(count, dim=-1)
    return [parts[i] for i in range(count)]  # a proxy can be indexed but not unpacked


def _heads(t: Any, heads: int) -> Any:
    """[B, S, E] -> [B, H, S, E/H]."""
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(t: Tensor, embed: int) -> Tensor:
    """[B, H, S, D] -> [B, S, E]."""
    return t.transpose(1, 2).flatten(-2)
