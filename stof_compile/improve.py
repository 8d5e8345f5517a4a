"""STOF's own passes over one graph: what stands between capture and Inductor.

normalise -> match attention -> resolve masks -> choose kernels -> rewrite -> fuse
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from stof_compile.attention.ahead import problems_ahead
from stof_compile.attention.keep import mask_near_misses
from stof_compile.attention.lower import LoweringContext, lower_attention
from stof_compile.attention.match import match_attention
from stof_compile.attention.regions import region_near_misses
from stof_compile.attention.resolve import ResolvedMasks, resolve_masks
from stof_compile.attention.select import send_ahead
from stof_compile.attention.settle import settle_sizes
from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.budget import Budget
from stof_compile.capture import CaptureFacts
from stof_compile.dead_code import erase_dead
from stof_compile.device import device_facts
from stof_compile.dump import Record, graph_text
from stof_compile.errors import StofError
from stof_compile.fallback import fall_back
from stof_compile.fuse import Fusion
from stof_compile.fusion.graph_refusal import fusion_refusal
from stof_compile.fusion_result import FusionResult
from stof_compile.graph_copy import copy_graph
from stof_compile.graph_key import graph_key, graph_words
from stof_compile.measure import real_tensors
from stof_compile.normalize import normalize
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, Plan, PlanFile
from stof_compile.plan_fit import refuse_other_attention, refuse_other_plan
from stof_compile.record_attention import record_near_misses, record_sites
from stof_compile.record_fusion import notes_without_fusion, record_fusion
from stof_compile.search.form_workers import FormWorkers
from stof_compile.short_gelu import shorten_gelu
from stof_compile.store import Store, default_root, environment_key
from stof_compile.triton_environment import settle_triton_environment
from stof_compile.unused_mask import refuse_lost_mask, warn_of_last_graph, warn_of_unmatched


@dataclass(frozen=True)
class Outcome:
    """A graph after STOF's passes.

    Args:
        folded: names of the buffers a static mask was read from.
        fusion: what became of its operators, None where fusion did not run.
    """

    record: Record
    plan: Plan
    gm: torch.fx.GraphModule
    folded: frozenset[str] = frozenset()
    fusion: FusionResult | None = None


class Ahead(Protocol):
    """Forms of a graph that are compiled while a search has processes that compile."""

    def begin(self, workers: FormWorkers | None) -> float:
        """Begin before attention is chosen; the seconds it took."""

    def attention_chosen(self, choices: Mapping[str, AttentionPlan]) -> None:
        """Go on when attention is chosen."""

    def form_s(self) -> float:
        """Seconds that a form will take after the search; 0 = not known."""

    def keeps_workers(self) -> bool:
        """Whether it takes the processes over when the search has ended."""


def improve(
    gm: torch.fx.GraphModule,
    captured: torch.fx.GraphModule,
    facts: CaptureFacts,
    opts: StofOptions,
    budget: Budget | None = None,
    choices: Mapping[str, AttentionPlan] | None = None,
    given: PlanFile | None = None,
    ahead: Ahead | None = None,
) -> Outcome:
    """Run STOF's own passes; when one fails the original graph is compiled.

    Args:
        gm: the graph, changed in place. captured: another one like it, which stays as it is.
        budget: seconds left for measurements; None = all that the options give.
        choices: attention problem -> what was chosen for it in this compile.
        given: a plan to follow in place of that of the options.
        ahead: the forms that the graph is compared with afterwards.
    Raises:
        StofMaskError: one failed and the options have a mask, which would be lost.
    """
    started = time.monotonic()
    budget = budget or Budget(opts.tune_budget_s)
    device = device_facts(facts.device)
    settle_triton_environment(facts.device)
    record = Record(device=device.to_json(), options=opts.to_json())
    record.graphs["captured"] = graph_text(gm)
    made = Plan(
        environment_key(device),
        graph=graph_key(gm, grad_enabled=facts.grad_enabled),
        about=graph_words(
            gm, (fact.example for fact in facts.inputs.values() if fact.kind == "user")
        ),
    )
    outcome = Outcome(record, made, gm)
    try:
        if given is None and opts.plan is not None:
            given = PlanFile.load(opts.plan, made.environment)
        improved = _rewrite(gm, facts, opts, outcome, budget, choices or {}, given, ahead)
        improved.gm.graph.lint()
        outcome = improved
    except StofError:
        raise
    except Exception as failure:  # architecture.md: the second of the two allowed catch-alls
        fall_back(failure, opts, record)
        record.notes = notes_without_fusion(record.notes)
        outcome = replace(outcome, gm=copy_graph(captured))
    outcome.gm.recompile()
    record.graphs["rewritten"] = graph_text(outcome.gm)
    record.timings_s["stof"] = time.monotonic() - started
    return outcome


def _rewrite(
    gm: torch.fx.GraphModule,
    facts: CaptureFacts,
    opts: StofOptions,
    before: Outcome,
    budget: Budget,
    choices: Mapping[str, AttentionPlan],
    given: PlanFile | None,
    ahead: Ahead | None,
) -> Outcome:
    record, made = before.record, before.plan
    normalize(gm, facts)
    record.graphs["normalized"] = graph_text(gm)
    sites, near_misses = _attention_of(gm, facts)
    if opts.mask is not None and settle_sizes([*sites, *near_misses]):
        sites, near_misses = _attention_of(gm, facts)
    places: list[AttentionSite | NearMiss] = [*sites, *near_misses]
    maskable = [p for p in places if not isinstance(p, NearMiss) or p.maskable]
    root = facts.place
    resolved = resolve_masks(
        opts.mask, maskable, path_known=root.path_known, whole_model=root.whole_model
    )
    record.mask_paths = {key: list(names) for key, names in resolved.by_path.items()}
    record.masked = list(resolved.by_site)
    warn_of_unmatched(resolved, facts)
    warn_of_last_graph(resolved)
    refuse_lost_mask(resolved, places, facts, opts, record)
    mask_near_misses(gm, near_misses, resolved.by_site)
    record_near_misses(near_misses, opts, record)
    store = Store(opts.cache_dir or default_root(), made.environment)
    plan = None if given is None else given.for_graph(made.graph)
    identity = hashlib.sha256(record.graphs["captured"].encode()).hexdigest()
    ctx = LoweringContext(facts, opts, store, budget, plan, dict(choices))
    fusion = None
    wanted = opts.fusion != "off" and (plan is None or plan.fusion)
    with ExitStack() as ending:
        operators = None
        if wanted:
            operators = Fusion(gm, facts, opts, store, budget, plan, identity)
            ending.enter_context(operators)
            ctx = replace(ctx, workers=operators.attention_workers())
            _send_attention(gm, resolved, ctx)
            if operators.compile_ahead() and ahead is not None:
                record.timings_s["form ahead"] = ahead.begin(operators.form_workers())
        started = time.monotonic()
        reports = lower_attention(gm, sites, resolved, ctx)
        record.timings_s["attention"] = time.monotonic() - started
        erase_dead(gm.graph)  # views and mask parts written for sites that stayed
        record_sites(reports, record)
        if operators is not None:
            if ahead is not None:
                ahead.attention_chosen(ctx.choices)
            fusion = operators.run(0.0 if ahead is None else ahead.form_s())
            record_fusion(fusion, record)
            if ahead is not None and ahead.keeps_workers():
                operators.leave_workers()
            if given is not None and plan is not None:
                where = opts.plan or "of another rank"
                refuse_other_plan(given, plan, ctx.choices, fusion, made.about, where)
    alone = operators is None and not fusion_refusal(gm, facts)  # else they vary with the call
    if alone and plan is not None and plan.graph and opts.plan is not None:
        refuse_other_attention(plan, ctx.choices, made.about, opts.plan)
    if wanted and not facts.grad_enabled:
        shortened = shorten_gelu(gm)
        if shortened:
            record.notes.append(f"exact GELU in half precision, written shorter: {shortened}")
    folded = facts.static.folded.union(*(report.folded for report in reports))
    made = replace(made, attention=dict(ctx.choices), fusion=wanted)
    if fusion is not None:
        made = replace(made, chains=fusion.chains, packs=fusion.packs)
    return Outcome(record, made, gm, frozenset(folded), fusion)


def _attention_of(
    gm: torch.fx.GraphModule, facts: CaptureFacts
) -> tuple[list[AttentionSite], list[NearMiss]]:
    sites, near_misses = match_attention(gm, facts)
    return sites, near_misses + region_near_misses(gm, facts)


def _send_attention(
    gm: torch.fx.GraphModule, resolved: ResolvedMasks, ctx: LoweringContext
) -> None:
    """Have the candidates compiled that lowering will measure first."""
    if ctx.workers is None:
        return
    # read as lowering reads them, in the modes of the capture
    problems = problems_ahead(gm, ctx.facts, resolved, ctx.options, ctx.bound)
    with real_tensors(), torch.inference_mode(False):
        for problem in problems:
            if problem.key not in ctx.choices:
                send_ahead(problem, ctx.store, ctx.plan, ctx.workers)
