"""``sparse_attention`` called inside a compiled model: its op is read back into mask and
operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from stof_compile.attention.site import AttentionSite
from stof_compile.attention.site_problem import has_dynamic_lengths, lengths, option_offset
from stof_compile.capture import CaptureFacts, add_buffer
from stof_compile.errors import StofMaskError
from stof_compile.masks.spec import MaskSpec
from stof_compile.node_ops import argument, raw_name, same_size, shape_of

ARGUMENTS = (
    *("q", "k", "v", "rule_tensors", "rule", "key_keep", "bias", "q_positions"),
    *("scale", "softcap", "q_offset", "kernel", "return_lse"),
)


@dataclass(frozen=True)
class Nested:
    """One call of ``stof::attention_rule`` whose mask is known when the graph is compiled.

    Args:
        site: the site with the call's scale and softcap.
        spec: its mask and the option's. offset: position of the first query row.
        padding: bool node [B, K]; bias: float node [B|1, H|1, Q|1, K].
        fp8: the call asks for e4m3 operands.
    """

    site: AttentionSite
    spec: MaskSpec
    offset: int
    padding: Node | None
    bias: Node | None
    fp8: bool = False


def read_nested(site: AttentionSite, option: MaskSpec | None, facts: CaptureFacts) -> Nested | str:
    """Read a call back, the option's mask and-ed in; or say why the call stays as it is."""
    call = _call_of(site)
    if call is None:
        return "its mask is a block mask already"
    given = _arguments(call)
    if has_dynamic_lengths(site, option):
        return "lengths are symbolic"
    if site.output is call or len(call.users) > 1:
        return "its log-sum-exp is used"
    if given["q_positions"] is not None or not isinstance(given["q_offset"], int):
        return "the position of the queries is known only at run time"
    if not all(facts.static.is_static(node) for node in given["rule_tensors"]):
        return "the tensors of its mask are known only at run time"
    padding, bias = given["key_keep"], given["bias"]
    batch, (q_len, k_len) = (shape_of(site.q) or ())[0], lengths(site)
    if padding is not None and not same_size((shape_of(padding) or (None,))[0], batch):
        return "its padding is shared by the batch"
    if bias is not None and len(shape_of(bias) or ()) != 4:
        return "its bias has fewer than four dimensions"
    if not isinstance(given["scale"], float | int) or not isinstance(given["softcap"], float | int):
        return "its scale or softcap is a value of the graph"
    tensors = [facts.static.evaluate(node) for node in given["rule_tensors"]]
    spec, offset = MaskSpec.from_json(given["rule"], tensors), given["q_offset"]
    if option is not None:
        if option_offset(site, q_len, k_len) != offset:
            return "the mask of the options counts its queries from another position"
        spec = spec & option
    spec = spec.bind(q_len, k_len, offset, site.q.meta["example_value"].device)
    known = replace(site, scale=float(given["scale"]), softcap=float(given["softcap"]))
    return Nested(known, spec, offset, padding, bias, given["kernel"] == "fp8")


def add_to_rule(gm: GraphModule, site: AttentionSite, option: MaskSpec) -> str:
    """And the option's mask into the rule of a call that stays; returns why it is impossible."""
    call = _call_of(site)
    if call is None:
        return "it is a block mask"
    given = _arguments(call)
    offset = given["q_offset"]
    q_len, k_axis = (shape_of(site.q) or ())[2], (shape_of(site.k) or ())[2]
    aligned = site.cross or (site.offset.kind == "length" and same_size(q_len, k_axis))
    if given["q_positions"] is not None or offset != 0 or not aligned:
        return "its queries do not start where the option counts from"
    held = list(given["rule_tensors"])
    try:
        rule = MaskSpec.from_json(given["rule"], [node.meta["example_value"] for node in held])
    except StofMaskError as error:
        return str(error)
    joined = rule & option
    device = site.q.meta["example_value"].device
    known = [node.meta["example_value"] for node in held]
    nodes = []
    for number, tensor in enumerate(joined.tensors()):
        same = [node for node, value in zip(held, known, strict=True) if value is tensor]
        name = f"rule_{option.key[:12]}_t{number}"
        nodes.append(same[0] if same else add_buffer(gm, name, tensor.to(device)))
    values: list[Any] = list(given.values())
    values[ARGUMENTS.index("rule_tensors")] = nodes
    values[ARGUMENTS.index("rule")] = joined.to_json()
    call.args, call.kwargs = tuple(values), {}
    return ""


def _call_of(site: AttentionSite) -> Node | None:
    """The ``attention_rule`` call behind a site; None for an op with a block mask."""
    node = site.output
    if raw_name(node) == "getitem" and isinstance(node.args[0], Node):
        node = node.args[0]
    rule = torch.ops.stof.attention_rule
    return node if node.target in (rule, rule.default) else None


def _arguments(call: Node) -> dict[str, Any]:
    return {name: argument(call, i, name) for i, name in enumerate(ARGUMENTS)}
