"""Lowering of attention: every site of a graph gets its mask, its kernel and its place in the
rewritten graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy

from stof_compile import masks
from stof_compile.attention.call import bind_kernel
from stof_compile.attention.dynamic import lower_dynamic_site
from stof_compile.attention.match import AttentionSite
from stof_compile.attention.mask_only import dense_keep
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.resolve import ResolvedMasks
from stof_compile.attention.rewrite import and_mask_into_sdpa, and_mask_into_softmax, replace_site
from stof_compile.attention.select import Budget, choose
from stof_compile.capture import CaptureFacts
from stof_compile.errors import StofMaskError, StofUnsupportedError
from stof_compile.masks.spec import MaskSpec
from stof_compile.masks.split import MaskParts, split_mask
from stof_compile.measure import real_tensors
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, Plan
from stof_compile.store import Store

logger = logging.getLogger("stof_compile")


@dataclass
class SiteReport:
    """What became of one attention site.

    Args:
        status: ``rewritten`` (a STOF call took its place) | ``kept`` (left as it was) | ``masked``
            (left, with the
            option's mask and-ed into it).
        reason: why, in one sentence.
        kernel: what runs there now.
        option_mask, static_mask: the option's mask for this site and all static masks joined, as
            text.
        shape: sizes and dtype, for people.
        statistics: of the block mask. choice: the decision with its candidates; key: of its
            problem.
    """

    name: str
    form: str
    source: str
    status: str = "kept"
    reason: str = ""
    kernel: str = ""
    option_mask: str = ""
    static_mask: str = ""
    padding: bool = False
    bias: bool = False
    cross: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    choice: AttentionPlan | None = None
    key: str = ""

    @property
    def mask(self) -> str:
        """All that restricts the keys, in words."""
        parts = [self.static_mask or self.option_mask, "padding" if self.padding else "", "bias" if self.bias else ""]
        return " & ".join(part for part in parts if part) or "none"


@dataclass(frozen=True)
class LoweringContext:
    """What every site of one graph shares."""

    facts: CaptureFacts
    options: StofOptions
    store: Store | None
    budget: Budget
    plan: Plan | None
    choices: dict[str, AttentionPlan]  # problem key -> choice of this compile


def lower_attention(
    gm: GraphModule, sites: Sequence[AttentionSite], resolved: ResolvedMasks, ctx: LoweringContext
) -> list[SiteReport]:
    """Rewrite the attention of a graph in place.

    Returns:
        One report per site.
    Raises:
        StofMaskError: the option's mask cannot be put into a site.
        StofUnsupportedError: ``strict`` and a site had to be left alone.
    """
    reports = []
    for site in sites:
        report = SiteReport(site.name, site.form, site.source, kernel=site.form, cross=site.cross, shape=site_shape(site))
        option = resolved.by_site.get(site.name)
        report.option_mask = "" if option is None else repr(option)
        _lower_site(gm, site, option, ctx, report)
        logger.info("%s: %s (%s)", site.name, report.status, report.reason)
        reports.append(report)
    return reports


def _lower_site(
    gm: GraphModule, site: AttentionSite, option: MaskSpec | None, ctx: LoweringContext, report: SiteReport
) -> None:
    parts = split_mask(gm, ctx.facts, site)
    report.padding, report.bias = parts.padding is not None, parts.bias is not None
    if ctx.options.attention == "off":
        _keep(gm, site, option, ctx, report, "attention='off'")
        return
    if has_dynamic_lengths(site):
        if not lower_dynamic_site(gm, site, option, parts, ctx.options, report):
            _keep(gm, site, option, ctx, report, report.reason)
        return
    if parts.dynamic is not None:
        _keep(gm, site, option, ctx, report, "; ".join(parts.reasons) or "its mask is known only at run time")
        return
    if option is not None and option_offset(site, *lengths(site)) is None:
        _keep(gm, site, option, ctx, report, "the position of the queries is known only at run time")
        return
    if site.form == "flex":
        _keep(gm, site, option, ctx, report, "FlexAttention written by the user is kept")
        return
    with real_tensors():
        spec, q_offset = static_spec(site, option, parts)
        problem = attention_problem(site, parts, spec, q_offset, ctx.facts)
        report.static_mask, report.key = ("" if spec is None else repr(spec)), problem.key
        report.statistics = {} if spec is None else dict(problem.statistics)
        choice = ctx.choices.get(problem.key)
        if choice is None:
            choice = choose(problem, ctx.options, ctx.store, ctx.budget, ctx.plan)
            ctx.choices[problem.key] = choice
        report.choice, report.kernel = choice, choice.kernel
        # SDPA that is there already stays, unless it carries a mask it can do without
        simpler = site.form != "sdpa" or option is not None or (site.mask is not None and (spec is None or problem.causal_only))
        if choice.kernel == "sdpa" and not simpler:
            report.reason = f"SDPA was chosen and is already there ({choice.reason})"
            return
        try:
            call = bind_kernel(problem, choice.kernel, choice.config)
        except StofUnsupportedError as refusal:
            call, report.reason = None, str(refusal)
    if call is None:
        _keep(gm, site, option, ctx, report, report.reason)
        return
    replace_site(gm, site, call, parts.padding, parts.bias)
    report.status, report.reason = "rewritten", f"{choice.kernel} {list(choice.config)}: {choice.reason}"


def site_shape(site: AttentionSite) -> dict[str, Any]:
    """Return sizes and dtype of a site as plain values; symbols as text."""
    q, k = site.q.meta["example_value"], site.k.meta["example_value"]
    k_len = k.shape[-1] if site.k_transposed else k.shape[-2]
    names = ("batch", "q_heads", "q_len", "head_dim", "kv_heads", "k_len")
    sizes = (*q.shape, k.shape[1], k_len)
    shape: dict[str, Any] = {n: (str(s) if isinstance(s, torch.SymInt) else int(s)) for n, s in zip(names, sizes, strict=True)}
    return {**shape, "dtype": str(q.dtype).removeprefix("torch.")}


def has_dynamic_lengths(site: AttentionSite) -> bool:
    """Tell whether a length or the head dim of a site is a symbol."""
    q, k = (n.meta["example_value"] for n in (site.q, site.k))
    return any(isinstance(n, torch.SymInt) for t in (q, k) for n in t.shape[1:])


def attention_problem(
    site: AttentionSite, parts: MaskParts, spec: MaskSpec | None, q_offset: int, facts: CaptureFacts
) -> AttentionProblem:
    """Describe a site with static lengths as a problem; a symbolic batch is taken at its hint."""
    q, k, v = (n.meta["example_value"] for n in (site.q, site.k, site.v))
    if site.k_transposed:
        k = k.transpose(-2, -1)
    bias = None if parts.bias is None else TensorMeta.of(parts.bias.meta["example_value"])
    training = facts.grad_enabled and any(t.requires_grad for t in (q, k, v))
    return AttentionProblem(
        q=TensorMeta.of(q),
        k=TensorMeta.of(k),
        v=TensorMeta.of(v),
        spec=spec,
        q_offset=q_offset,
        device=q.device,
        scale=float(q.shape[-1]) ** -0.5 if site.scale is None else float(site.scale),
        softcap=float(site.softcap),
        padding=parts.padding is not None,
        bias=bias,
        training=training,
        allow_tf32=torch.backends.cuda.matmul.allow_tf32,
    )


def static_spec(site: AttentionSite, option: MaskSpec | None, parts: MaskParts) -> tuple[MaskSpec | None, int]:
    """And the model's static mask, its causal flag and the option's mask.

    Returns:
        The mask (None when every key is kept) and the position of the first query row.
    Raises:
        StofMaskError: the option needs the position of the queries and it cannot be told.
    """
    q_len, k_len = lengths(site)
    own = None if parts.static is None else masks.recognise(parts.static)
    if site.is_causal:
        own = masks.causal() if own is None else own & masks.causal()
    if own is not None and own.key == masks.dense().key:
        own = None
    if option is None:
        return own, 0
    offset = option_offset(site, q_len, k_len)
    assert offset is not None, "sites with a run-time position are kept"
    option = option.bind(q_len, k_len, offset, site.q.meta["example_value"].device)
    if offset == 0:
        return (option if own is None else own & option), 0
    if own is None:
        return option, offset
    # the model's mask counts rows from 0, the option's from the offset: join them as tensors, the
    # lengths are fixed
    device = site.q.meta["example_value"].device
    planes = masks.build_block_mask(option, q_len, k_len, 64, q_offset=offset, device=device).to_dense()
    mine = masks.build_block_mask(own.bind(q_len, k_len), q_len, k_len, 64, device=device).to_dense()
    return masks.recognise(planes & mine), 0


def lengths(site: AttentionSite) -> tuple[int, int]:
    """Return query and key length of a site with static lengths."""
    k = site.k.meta["example_value"]
    return int(site.q.meta["example_value"].shape[-2]), int(k.shape[-1] if site.k_transposed else k.shape[-2])


def option_offset(site: AttentionSite, q_len: int, k_len: int) -> int | None:
    """Return the position of the first query for the option's mask; None when only the run tells
    it.

    Cross-attention counts queries and keys from 0 each.

    Raises:
        StofMaskError: the position cannot be told.
    """
    where = site.offset
    if site.cross:
        return 0
    if where.kind == "unknown":
        raise StofMaskError(
            f"{site.name}: the mask of the options needs the position of the queries and it cannot be told "
            f"({where.reason}; {q_len} queries, {k_len} keys); give the mask inside the model, or name other layers by path"
        )
    if where.kind == "position":
        return where.value
    return k_len - q_len


# -- sites that stay ------------------------------------------------------------------------------


def _keep(
    gm: GraphModule,
    site: AttentionSite,
    option: MaskSpec | None,
    ctx: LoweringContext,
    report: SiteReport,
    reason: str,
) -> None:
    """Leave a site to PyTorch; the option's mask is and-ed into it, or it is an error."""
    report.reason = reason
    if ctx.options.strict and ctx.options.attention != "off":
        raise StofUnsupportedError(f"{site.name} is left to PyTorch: {reason} (strict=True)")
    if option is None:
        return
    if site.form == "sdpa":
        and_mask_into_sdpa(gm, site.output, option_keep(gm, site, option))
    elif site.form == "softmax" and site.softmax is not None:
        and_mask_into_softmax(gm, site.softmax, option_keep(gm, site, option))
    else:
        raise StofMaskError(f"{site.name}: the mask of the options cannot be put into an attention of form {site.form!r} ({reason})")
    report.status = "masked"


def option_keep(
    gm: GraphModule, site: AttentionSite, option: MaskSpec
) -> Callable[[Callable[[Node], Proxy]], Any]:
    """Return a builder of the option's mask (and SDPA's causal flag) as ``[B|1, H|1, Q, K]`` for a
    site.

    Raises:
        StofMaskError: the position of the queries cannot be told.
    """
    where = site.offset
    if not site.cross and where.kind == "unknown":
        raise StofMaskError(
            f"{site.name}: the mask of the options needs the position of the queries and it cannot be told "
            f"({where.reason}); give the mask inside the model, or name other layers by path"
        )

    def positions(proxy: Callable[[Node], Proxy], rows: Proxy) -> Any:
        if site.cross:
            return rows
        if where.node is None:
            return rows + where.value
        start = proxy(where.node)
        example = where.node.meta.get("example_value")
        whole = isinstance(example, torch.Tensor) and example.numel() > 1
        return start.reshape(-1) if whole else rows + start

    def sizes(proxy: Callable[[Node], Proxy]) -> tuple[Proxy, Proxy]:
        return proxy(site.q).size(-2), proxy(site.k).size(-1 if site.k_transposed else -2)

    known = site.cross or where.node is not None or where.value is not None
    return dense_keep(gm, option, site.q, sizes, causal=site.is_causal, positions=positions if known else None)
