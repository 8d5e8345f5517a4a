"""Hugging Face models: ``model.set_attn_implementation("stof")`` and `set_mask`.

Importing this module registers "stof" with transformers; ``import stof_compile`` does so by itself
where transformers' models are loaded already. transformers says which rule holds and which keys are
padding, and every layer hands both to `sparse_attention`: a Q x K mask is avoided.

BERT, GPT2, LLaMA, Mistral, Gemma2, T5 and ViT of transformers 5.23 dispatch through its
AttentionInterface, as most models do. Where one does not, ``set_attn_implementation`` only warns.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import masking_utils, modeling_utils

from stof_compile import masks
from stof_compile.attention.functional import MaskLike, sparse_attention
from stof_compile.attention.resolve import path_matches, resolve_masks
from stof_compile.errors import StofMaskError, StofUnsupportedError
from stof_compile.masks import MaskSpec
from stof_compile.masks.rules import Band, Dense

logger = logging.getLogger("stof_compile")

# Keywords that models hand through and that do not change attention; others are refused if set.
HARMLESS = (
    *("cache_position", "layer_idx", "num_items_in_batch", "output_hidden_states"),
    *("output_router_logits", "past_key_values", "position_embeddings", "position_ids"),
    *("return_dict", "seq_idx", "token_type_ids", "use_cache"),
)
NEXT_STEP = {
    "dropout": "set the attention dropout in the config to 0, or call model.eval()",
    "is_causal": "the model's mask says otherwise; set model.config.is_causal instead",
    "output_attentions": "weights are never stored: set_attn_implementation('eager') has them",
    "set_mask over keys of another sequence": (
        "cross-attention has positions of its own; name the self-attention that is meant by a dict "
        "from module paths"
    ),
    "s_aux": "attention sinks change the softmax; take another attn_implementation",
}
# in names of attention over another sequence: BERT and GPT2, T5, BART, Pix2Struct, Kosmos2, SAM
CROSS = ("cross", "encdec", "encoder_attn", "encoder_decoder", "x_attn", "token_to_image")
WEIGHTS = frozenset({"softmax", "scaled_dot_product_attention"})  # functions that attention calls
SHOWN = 4  # names in a message


@dataclass(frozen=True, eq=False)
class LayerMask:
    """What a model masks in layers of one kind; travels as their ``attention_mask``.

    Args:
        q_len, k_len: lengths in tokens.
        rule: on positions counted from the first query and key of this call; None = all keys.
        key_keep: bool [batch, k_len], False on padding; None = no padding.
        rows: bool [batch, 1, q_len, k_len] where a compiled graph cannot tell the rule.
        first: position of the first query, a tensor in a preallocated cache; None = unknown.
        dropped: keys before the first one of this call, which a sliding cache no longer holds.
    """

    q_len: int
    k_len: int
    rule: MaskSpec | None
    key_keep: Tensor | None
    rows: Tensor | None
    first: int | Tensor | None
    dropped: int = 0
    ndim = 4  # generate() makes masks early and models ask once more: 4 says that it is made

    def contiguous(self) -> LayerMask:
        """Return itself; generate() asks every mask for it."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Say what to do where a model takes the mask for a tensor."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"'LayerMask' object has no attribute {name!r}")
        raise StofUnsupportedError(
            f"attention 'stof': the model computes with its attention mask ({name}), which is a "
            "rule here and no tensor; take set_attn_implementation('sdpa') or 'eager' for this "
            "model, which torch.compile(model, backend='stof') compiles as well"
        )

    def _computed(self, *others: Any) -> Any:
        return self.add

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __getitem__ = _computed
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _computed


def set_mask(model: modeling_utils.PreTrainedModel, mask: MaskLike | Mapping[str, Any]) -> None:
    """And a mask with the model's own, at every self-attention or at those named.

    Positions are those of the sequence, with a cache as well. An earlier mask is replaced.

    Args:
        model: after ``model.set_attn_implementation("stof")``.
        mask: a rule of `stof_compile.masks`, a mask_mod, a bool tensor [q_len, k_len] (True =
            attend), a dict from module path (as the option ``mask`` has) to one of those, or None
            for none. Cross-attention is masked only where a key matches nothing else.
    Raises:
        StofMaskError: the mask is no mask, or a path matches no attention.
        StofUnsupportedError: no model of transformers, or not set to "stof".
    """
    kind, pretrained = type(model).__name__, isinstance(model, modeling_utils.PreTrainedModel)
    attention = {n: m for n, m in model.named_modules() if _attends(m)} if pretrained else {}
    if not attention:
        raise StofUnsupportedError(
            f"set_mask takes a PreTrainedModel whose attention can be set, got {kind}; "
            "torch.compile(model, backend='stof', options={'mask': ...}) takes any model"
        )
    for name, module in attention.items():
        chosen = getattr(module, "config", model.config)._attn_implementation
        if mask is not None and chosen != "stof":
            raise StofUnsupportedError(
                f"set_mask: attention {name!r} of {kind} is set to {chosen!r}; call "
                "model.set_attn_implementation('stof') first"
            )
    sites: list[Any] = [SimpleNamespace(name=n, path=tuple(n.split("."))) for n in attention]
    for site in sites:
        site.cross = _is_cross(site.name, model, attention)
    for key in mask if isinstance(mask, Mapping) else ():
        if not any(path_matches(key, site.path) for site in sites):
            raise StofMaskError(
                f"set_mask: path {key!r} matches no attention of {kind}: {', '.join(attention)}"
            )
    found = resolve_masks(mask, sites, path_known=True, whole_model=True).by_site
    for name, module in attention.items():
        module.__dict__["_stof_mask"] = found.get(name)
    apart = [] if mask is None or isinstance(mask, Mapping) else _out_of_reach(model, attention)
    if apart:
        more = f" and {len(apart) - SHOWN} more" if len(apart) > SHOWN else ""
        logger.warning(
            "set_mask: of %s these compute attention themselves and stay without the mask: %s%s. "
            "Name the attention that is meant by a dict from module paths, or compile with "
            "torch.compile(model, backend='stof', options={'mask': ...})",
            kind, ", ".join(apart[:SHOWN]), more,
        )  # fmt: skip


def _attends(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _is_cross(name: str, model: nn.Module, attention: Mapping[str, nn.Module]) -> bool:
    """Whether an attention reads another sequence: its name says so, its class, or that of a module
    around it that has no other attention. No attribute is common to all models.
    """
    if any(word in name.lower() for word in CROSS):
        return True
    path = name.split(".")
    for depth in range(len(path), 0, -1):
        around = ".".join(path[:depth])
        if sum(other == around or other.startswith(f"{around}.") for other in attention) > 1:
            return False
        if "cross" in type(model.get_submodule(around)).__name__.lower():
            return True
    return False


def _out_of_reach(model: nn.Module, attention: Mapping[str, nn.Module]) -> list[str]:
    """Names of modules that compute attention without asking transformers for a function."""
    ours = set(attention.values())
    held = {inner for module in ours for inner in module.modules()}
    return [
        name
        for name, module in model.named_modules()
        if module not in held and "attention" in type(module).__name__.lower()
        and _computes_weights(type(module)) and ours.isdisjoint(module.modules())
    ]  # fmt: skip


def _computes_weights(kind: type[nn.Module]) -> bool:
    functions = [inspect.unwrap(f) for f in vars(kind).values() if inspect.isfunction(f)]
    codes = [getattr(function, "__code__", None) for function in functions]
    return any(code is not None and WEIGHTS.intersection(code.co_names) for code in codes)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function "stof": `sparse_attention` as transformers calls it.

    Args:
        module: the calling layer. query [B, H, Q, D], key [B, KV, K, D], value [B, KV, K, V].
        attention_mask: of `layer_mask`, or [B, 1 or H, Q, K], bool (True = attend) or added float.
        sliding_window, is_causal: read where there is no mask; otherwise the mask has them.
        position_bias: float, broadcastable to [B, H, Q, K].
        dropout, kwargs: refused where they would change the result.
    Returns:
        out [B, Q, H, V] in the dtype of query, contiguous; None in place of the weights.
    Raises:
        StofUnsupportedError: dropout, output_attentions, attention sinks, an unknown argument.
    """
    (q_len, k_len), bias, own = (query.shape[2], key.shape[2]), position_bias, attention_mask
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for name, given in {"dropout": dropout or None, **kwargs}.items():
        if name not in HARMLESS and given is not None and given is not False:
            _refuse(module, name, given)
    if isinstance(own, LayerMask):
        held = own
        if (held.q_len, held.k_len) != (q_len, k_len):
            _refuse(module, f"mask of {held.q_len} x {held.k_len} with tokens", (q_len, k_len))
        known = q_len > 1 and isinstance(held.rule, Band | Dense)
        if known and is_causal is (not isinstance(held.rule, Band) or held.rule.hi != held.first):
            _refuse(module, "is_causal", is_causal)
    else:
        rule, rows, first = None, None, 0 if q_len == k_len else None
        if own is None and q_len > 1 and causal:
            rule = Band(None if sliding_window is None else 1 - sliding_window, 0)
            if first is None:
                _refuse(module, "causal attention without a mask, so at an unknown offset", rule)
        elif own is not None and own.dtype == torch.bool:
            rows = own[..., :k_len]
        elif own is not None:
            bias = own[..., :k_len] if bias is None else bias + own[..., :k_len]
        held = LayerMask(q_len, k_len, rule, None, rows, first)
    mask, rows = _with_user_mask(module, held, query)
    alone = mask is None and bias is None and not softcap and torch.compiler.is_compiling()
    if rows is not None and not alone:
        zero = query.new_zeros(()) if bias is None else bias
        bias, rows = torch.where(rows, zero, -float("inf")), None
    # rows alone are one SDPA call in a compiled graph, and backend="stof" finds the rule in them
    how: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "bias": bias}
    how |= {"key_keep": held.key_keep, "enable_gqa": query.shape[1] != key.shape[1]}
    out = sparse_attention(query, key, value, mask if rows is None else rows, **how)
    assert isinstance(out, Tensor), "only return_lse makes it a pair"
    return out.transpose(1, 2).contiguous(), None


def layer_mask(batch_size: int, q_length: int, kv_length: int, **said: Any) -> LayerMask:
    """Mask function "stof": the rule and the padding a model asks for, as a `LayerMask`.

    Args:
        batch_size, q_length, kv_length: of the attention, the lengths in tokens.
        said: the other keywords of transformers' mask functions, such as ``mask_function`` and
            ``attention_mask``, the padding, bool [batch, tokens].
    """
    padding, function = said.get("attention_mask"), said["mask_function"]
    if isinstance(padding, LayerMask):
        return padding
    compiling, rule, rows, dropped = torch.compiler.is_compiling(), None, None, said["kv_offset"]
    first = said["q_offset"] - dropped
    if q_length > 1 and isinstance(first, Tensor) and not compiling:
        first = int(first)  # one read a forward pass, and none while decoding
    keep = masking_utils.prepare_padding_mask(padding, kv_length, dropped)
    keep = None if keep is None else keep[:, dropped : dropped + kv_length]
    if q_length > 1 and not isinstance(first, Tensor):
        rule = _known_rule(function, first, said)
        if rule is None and not compiling:
            offsets = (first + dropped, dropped)
            rule = masks.rule(masking_utils.add_offsets_to_mask_function(function, *offsets))
    if rule is None:  # a single query, whose row says which keys stay; or compiled and not known
        said |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        rows = masking_utils.sdpa_mask(batch_size, q_length, kv_length, **said)
        keep, rows = (rows[:, 0, 0], None) if q_length == 1 else (None, rows)
    if keep is not None and not compiling and bool(keep.all()):
        keep = None  # one read a forward pass; kernels without padding are faster in every layer
    return LayerMask(q_length, kv_length, rule, keep, rows, first, dropped)


def _known_rule(function: Any, first: int, said: dict[str, Any]) -> MaskSpec | None:
    """Rule of a mask function for queries from ``first`` on; None = not known.

    Windows are told by the arguments beside it: Dynamo cannot look into a closure.
    """
    if function is masking_utils.bidirectional_mask_function:
        return masks.dense()
    if function is masking_utils.causal_mask_function:
        return Band(None, first)
    width, chunks = said.get("local_size"), getattr(said["config"], "attention_chunk_size", None)
    if width is None or chunks is not None or said["use_vmap"]:
        return None
    if "allow_is_bidirectional_skip" in said:
        return Band(first - width, first + width)
    # False where sequences are packed or blocks are added
    return Band(first + 1 - width, first) if said.get("allow_is_causal_skip") else None


def _refuse(module: nn.Module, what: str, value: object) -> NoReturn:
    shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    raise StofUnsupportedError(
        f"attention 'stof' in {type(module).__name__} of layer "
        f"{getattr(module, 'layer_idx', None)}: {what}={shown} is not supported: "
        + NEXT_STEP.get(what, "leave it out, or take another attn_implementation")
    )


def _with_user_mask(
    module: nn.Module, held: LayerMask, query: Tensor
) -> tuple[MaskSpec | None, Tensor | None]:
    """Rule of the layer and of `set_mask`, and what only rows can say: bool [.., q_len, k_len]."""
    user: MaskSpec | None = getattr(module, "_stof_mask", None)
    rule = None if isinstance(held.rule, Dense) else held.rule
    if user is None:
        return rule, held.rows
    if held.first is None:
        _refuse(module, "set_mask where a mask leaves the query offset open", user)
    if isinstance(held.rule, Dense) and held.q_len > 1 and _has_other_keys(held):
        _refuse(module, "set_mask over keys of another sequence", user)
    if not isinstance(held.first, Tensor) and held.first == 0 and held.dropped == 0:
        if rule is not None:
            user = rule & user if torch.compiler.is_compiling() else _both(rule, user)
        return user, held.rows
    if user.moves_with_length:
        raise StofMaskError(
            f"set_mask: the pattern of {user} moves with the length, so that of a decoding step is "
            "no prefix of the next one; take longformer, or bigbird with max_len"
        )
    place, begin, end = query.device, held.dropped, held.dropped + held.k_len
    positions = torch.arange(held.q_len, device=place) + (held.first + begin)
    # a read from the device only where the rule itself counts from the lengths
    start = int(positions[0]) if user.depends_on_lengths else 0
    b = torch.arange(query.shape[0], device=place)[:, None, None, None]
    h = torch.arange(query.shape[1], device=place)[:, None, None]
    bound = user.bind(held.q_len, end, start, place)
    rows = bound.keep(b, h, positions[:, None], torch.arange(begin, end, device=place))
    rows = rows[(None,) * (4 - rows.dim())]  # a rule that reads no batch row has fewer dimensions
    return rule, rows if held.rows is None else rows & held.rows


def _has_other_keys(held: LayerMask) -> bool:
    """Whether a mask that keeps all keys cannot be that of self-attention: only decoders have a
    cache, and theirs is causal.
    """
    alone = not isinstance(held.first, Tensor) and held.first == 0 and held.dropped == 0
    return alone and held.q_len != held.k_len


# one object for equal rules of model and user: its key, which reads their tensors, is made once
_both = lru_cache(maxsize=64)(operator.and_)

modeling_utils.AttentionInterface.register("stof", attend)
masking_utils.AttentionMaskInterface.register("stof", layer_mask)
