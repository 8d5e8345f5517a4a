"""Lowering of attention: every site of a graph gets its mask, its kernel and its place in the
rewritten graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule

from stof_compile.attention.ahead import Workers
from stof_compile.attention.call import KernelCall, bind_kernel
from stof_compile.attention.dynamic import lower_dynamic_site
from stof_compile.attention.fp8 import fp8_obstacle
from stof_compile.attention.keep import keep_site
from stof_compile.attention.nested import add_to_rule, read_nested
from stof_compile.attention.problem import AttentionProblem
from stof_compile.attention.resolve import ResolvedMasks
from stof_compile.attention.rewrite import replace_site
from stof_compile.attention.select import choose
from stof_compile.attention.site import AttentionSite
from stof_compile.attention.site_problem import (
    BoundMasks,
    attention_problem,
    has_dynamic_lengths,
    static_obstacle,
    static_spec,
)
from stof_compile.attention.site_report import SiteReport, site_shape
from stof_compile.budget import Budget
from stof_compile.capture import CaptureFacts
from stof_compile.errors import StofMaskError, StofUnsupportedError
from stof_compile.masks.spec import MaskSpec
from stof_compile.masks.split import MaskParts, split_mask
from stof_compile.measure import real_tensors
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, Plan
from stof_compile.store import Store

logger = logging.getLogger("stof_compile")


@dataclass(frozen=True)
class LoweringContext:
    """What every site of one graph shares."""

    facts: CaptureFacts
    options: StofOptions
    store: Store | None
    budget: Budget
    plan: Plan | None
    choices: dict[str, AttentionPlan]  # problem key -> choice of this compile
    bound: BoundMasks = field(default_factory=BoundMasks)
    workers: Workers | None = None  # that compile candidates


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
        report = SiteReport(
            site.name,
            site.form,
            site.source,
            kernel=site.form,
            cross=site.cross,
            shape=site_shape(site),
        )
        option = resolved.by_site.get(site.name)
        report.option_mask = "" if option is None else repr(option)
        _lower_site(gm, site, option, ctx, report)
        logger.info("%s: %s (%s)", site.name, report.status, report.reason)
        if report.no_fp8:
            logger.info("%s: fp8 is not used: %s", site.name, report.no_fp8)
        reports.append(report)
    return reports


def _lower_site(
    gm: GraphModule,
    site: AttentionSite,
    option: MaskSpec | None,
    ctx: LoweringContext,
    report: SiteReport,
) -> None:
    def keep(reason: str, *, by_choice: bool = False) -> None:
        keep_site(gm, site, option, report, reason)
        if ctx.options.strict and not by_choice:
            raise StofUnsupportedError(f"{site.name} is left to PyTorch: {reason} (strict=True)")

    if ctx.options.attention == "off":
        keep("attention='off'", by_choice=True)
    elif site.form == "flex":
        keep("FlexAttention written by the user is kept", by_choice=True)
    elif site.form == "stof":
        _lower_nested(gm, site, option, ctx, report)
    else:
        parts = split_mask(gm, ctx.facts, site)
        report.padding, report.bias = parts.padding is not None, parts.bias is not None
        report.folded = parts.buffers
        # a mask that depends on a size (the batch too) is a rule of that size, not a tensor
        if parts.static_graph is not None or has_dynamic_lengths(site, option):
            outcome = lower_dynamic_site(gm, site, option, parts, ctx.options)
            report.reason = outcome.reason
            if outcome.rule is None:
                keep(outcome.reason, by_choice=outcome.by_choice)
            else:
                report.status, report.static_mask = "rewritten", repr(outcome.rule)
                report.kernel = "rule"
                if ctx.options.fp8:
                    _without_fp8("its lengths are symbolic", ctx, report)
            return
        obstacle = static_obstacle(site, option, parts)
        if not obstacle:
            obstacle = _lower_static(gm, site, option, parts, ctx, report)
        if obstacle:
            keep(obstacle)


def _lower_static(
    gm: GraphModule,
    site: AttentionSite,
    option: MaskSpec | None,
    parts: MaskParts,
    ctx: LoweringContext,
    report: SiteReport,
) -> str:
    """Choose a kernel for a site with known lengths and put it in; returns why it must stay."""
    with real_tensors(), torch.inference_mode(False):
        spec, q_offset = static_spec(site, option, parts, ctx.bound)
        problem = attention_problem(site, parts, spec, q_offset, ctx.facts)
        problem, choice = _chosen(problem, ctx.options.fp8, ctx, report)
        if choice.source == "only":
            return choice.reason
        # SDPA that is there already stays, unless it reads a mask it can do without
        there = choice.kernel == "sdpa" and not choice.config and site.form == "sdpa"
        if there and option is None and not _reads_in_vain(site, parts, problem):
            report.reason = f"SDPA was chosen and is already there ({choice.reason})"
            return ""
        try:
            call = bind_kernel(problem, choice.kernel, choice.config)
        except StofUnsupportedError as refusal:
            return str(refusal)
    _put(gm, site, call, parts, choice, report, fp8=problem.fp8)
    return ""


def _chosen(
    problem: AttentionProblem, fp8: bool, ctx: LoweringContext, report: SiteReport
) -> tuple[AttentionProblem, AttentionPlan]:
    """The problem and its choice; on e4m3 operands where that is asked for and can be."""
    if fp8:
        obstacle = fp8_obstacle(problem, ctx.options.attention)
        if not obstacle:
            rounded = replace(problem, fp8=True)
            try:
                return rounded, _choice(rounded, ctx, report)
            except StofUnsupportedError as refusal:
                obstacle = str(refusal)
        _without_fp8(obstacle, ctx, report)
    return problem, _choice(problem, ctx, report)


def _without_fp8(reason: str, ctx: LoweringContext, report: SiteReport) -> None:
    report.no_fp8 = reason
    if ctx.options.strict:
        raise StofUnsupportedError(f"{report.name} is not run in fp8: {reason} (strict=True)")


def _reads_in_vain(site: AttentionSite, parts: MaskParts, problem: AttentionProblem) -> bool:
    """Whether the mask SDPA reads says nothing, or no more than its causal flag would.

    One that is read from a buffer or has a part that only the run knows is left as it is. So is a
    causal one of moderate numbers, which large scores outweigh.
    """
    if not site.terms or not (problem.spec is None or problem.causal_only):
        return False
    if site.mask is not None:  # bool
        return True
    known = parts.bias is None and parts.padding is None and not parts.buffers
    return known and parts.empty_rows != "unmasked"


def _choice(problem: AttentionProblem, ctx: LoweringContext, report: SiteReport) -> AttentionPlan:
    report.static_mask = "" if problem.spec is None else repr(problem.spec)
    report.key = problem.key
    if problem.spec is not None:
        report.statistics, report.tiles = dict(problem.statistics), problem.tile_map
    choice = ctx.choices.get(problem.key)
    if choice is None:
        choice = choose(problem, ctx.options, ctx.store, ctx.budget, ctx.plan, ctx.workers)
        ctx.choices[problem.key] = choice
    report.choice = choice
    return choice


def _put(
    gm: GraphModule,
    site: AttentionSite,
    call: KernelCall,
    parts: MaskParts,
    choice: AttentionPlan,
    report: SiteReport,
    *,
    fp8: bool,
) -> None:
    replace_site(gm, site, call, parts.padding, parts.bias)
    report.status, report.kernel = "rewritten", choice.kernel
    how = f"{choice.kernel} {list(choice.config)}{' in fp8' if fp8 else ''}"
    report.reason = f"{how}: {choice.reason}"


def _lower_nested(
    gm: GraphModule,
    site: AttentionSite,
    option: MaskSpec | None,
    ctx: LoweringContext,
    report: SiteReport,
) -> None:
    """Lower the user's own ``sparse_attention`` in the graph; it is sparse already where it stays.

    Raises:
        StofMaskError: the option's mask cannot be joined with the one it has.
        StofUnsupportedError: the call asks for fp8 and cannot have it.
    """
    with real_tensors(), torch.inference_mode(False):
        nested = read_nested(site, option, ctx.facts)
        if not isinstance(nested, str):
            report.padding, report.bias = nested.padding is not None, nested.bias is not None
            parts = MaskParts(padding=nested.padding, bias=nested.bias)
            problem = attention_problem(nested.site, parts, nested.spec, nested.offset, ctx.facts)
            if nested.fp8 and (obstacle := fp8_obstacle(problem, ctx.options.attention)):
                raise StofUnsupportedError(f"sparse_attention: fp8 cannot be used: {obstacle}")
            if nested.fp8:
                problem = replace(problem, fp8=True)
                choice = _choice(problem, ctx, report)
            else:
                problem, choice = _chosen(problem, ctx.options.fp8, ctx, report)
            try:
                call = bind_kernel(problem, choice.kernel, choice.config)
            except StofUnsupportedError as refusal:
                nested = str(refusal)
    if not isinstance(nested, str):
        _put(gm, nested.site, call, parts, choice, report, fp8=problem.fp8)
        return
    report.reason = f"sparse_attention in the graph is kept: {nested}"
    if option is not None:
        refusal_text = add_to_rule(gm, site, option)
        if refusal_text:
            raise StofMaskError(
                f"{site.name}: the mask of the options cannot be joined with the mask of "
                f"sparse_attention ({refusal_text}; {nested})"
            )
        report.status = "masked"
