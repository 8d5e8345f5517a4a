"""The backend: ``torch.compile(model, backend="stof")``.

capture -> normalise -> match attention -> resolve masks -> choose kernels -> rewrite -> fuse ->
compare with the graph as it was -> Inductor -> dump.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import stof_compile.ops
import stof_compile.ops_cpu  # noqa: F401
from stof_compile.attention.keep import mask_near_misses
from stof_compile.attention.lower import LoweringContext, lower_attention
from stof_compile.attention.match import match_attention
from stof_compile.attention.regions import region_near_misses
from stof_compile.attention.resolve import resolve_masks
from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.between import has_effects
from stof_compile.budget import Budget
from stof_compile.capture import CaptureFacts, read_capture
from stof_compile.device import device_facts
from stof_compile.dump import Record, graph_text, write_dump
from stof_compile.emit import erase_unused
from stof_compile.errors import StofError
from stof_compile.fallback import fall_back
from stof_compile.folded import FoldedBuffers
from stof_compile.fuse import Fusion, FusionResult
from stof_compile.fusion.recipe import fp32_products
from stof_compile.graph_copy import copy_graph
from stof_compile.graph_key import graph_key, graph_words
from stof_compile.inductor import compile_with_inductor
from stof_compile.normalize import normalize
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, Plan, PlanFile
from stof_compile.plan_fit import refuse_other_plan
from stof_compile.rank_plan import Choosing, on_all_ranks, shares_choices
from stof_compile.record_attention import record_near_misses, record_sites
from stof_compile.record_fusion import record_fusion
from stof_compile.short_gelu import shorten_gelu
from stof_compile.store import Store, default_root, environment_key, write_atomic
from stof_compile.unused_mask import refuse_lost_mask, warn_of_unmatched
from stof_compile.variants import facts_at_call, with_variants
from stof_compile.verdict import AS_TORCH, fastest_form

logger = logging.getLogger("stof_compile")


def stof(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph captured by Dynamo; found by torch.compile under the name ``stof``.

    Args:
        gm: torch-level graph; example_inputs: its inputs, real or fake.
        mode, options: as given to ``torch.compile`` (see :class:`StofOptions`).
    Returns:
        A callable like the graph; ``stof_record`` on it holds what was found and chosen.
    Raises:
        StofOptionError, StofMaskError, StofPlanError: the user's options do not fit.
        StofUnsupportedError: ``strict`` and a part had to be left to PyTorch.
    """
    opts = StofOptions.from_compile_kwargs(mode, options)
    facts = read_capture(gm, example_inputs)
    captured = copy_graph(gm)
    if shares_choices(gm, facts, opts):
        outcome, timed = _decided_together(captured, facts, example_inputs, opts)
    else:
        outcome, timed = _decided_here(gm, captured, facts, example_inputs, opts)
    record, started = outcome.record, time.monotonic()
    try:
        compiled = _finished(outcome, example_inputs, opts, timed)
    except Exception as failure:  # Inductor did not take our graph; it may take the captured one
        if outcome.fusion is None or not outcome.fusion.changed or opts.strict:
            raise
        reason = f"Inductor did not take the fused graph: {type(failure).__name__}: {failure}"
        logger.warning("operators are left to Inductor: %s", reason)
        record.notes.append(reason)
        plain = replace(opts, fusion="off", dump_dir=None)
        compiled = _compile_again(captured, facts, example_inputs, plain, True)
    record.timings_s["inductor"] = time.monotonic() - started
    if opts.dump_dir is not None:
        folder = write_dump(record, opts.dump_dir)
        write_atomic(folder / "plan.json", PlanFile.of([outcome.plan]).to_json())
    folded = FoldedBuffers(facts.inputs, outcome.folded, example_inputs)
    return with_variants(compiled, partial(_compile_again, captured, facts), opts, record, folded)


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


Decided = tuple[Outcome, Callable[..., Any] | None]
"""A form of the graph, and what Inductor made of it where it was compiled as the options ask."""


def _decided_here(
    gm: torch.fx.GraphModule,
    captured: torch.fx.GraphModule,
    facts: CaptureFacts,
    inputs: Sequence[Any],
    opts: StofOptions,
) -> Decided:
    budget = Budget(opts.tune_budget_s)
    outcome = _improve(gm, facts, opts, budget)
    return _fastest(outcome, captured, facts, inputs, opts, budget)


def _decided_together(
    captured: torch.fx.GraphModule,
    facts: CaptureFacts,
    inputs: Sequence[Any],
    opts: StofOptions,
) -> Decided:
    """One rank decides about the whole graph, the others follow its plan."""

    def again() -> tuple[torch.fx.GraphModule, CaptureFacts]:
        gm = copy_graph(captured)
        return gm, facts_at_call(gm, inputs, facts, constant=True)

    def decide() -> Decided:
        gm, here = again()
        return _decided_here(gm, captured, here, inputs, opts)

    def follow(plan: Plan) -> Decided:
        gm, here = again()
        return _improve(gm, here, opts, given=PlanFile.of([plan])), None

    def otherwise() -> Decided:  # nothing that asks another rank once more
        gm, here = again()
        alone = replace(opts, fusion="off", tune_budget_s=0.0)
        return _improve(gm, here, alone), None

    ways = Choosing(decide, lambda decided: decided[0].plan, follow, otherwise)
    decided, remark = on_all_ranks(captured, facts, opts, ways)
    if remark:
        decided[0].record.notes.append(remark)
    return decided


def _improve(
    gm: torch.fx.GraphModule,
    facts: CaptureFacts,
    opts: StofOptions,
    budget: Budget | None = None,
    choices: Mapping[str, AttentionPlan] | None = None,
    given: PlanFile | None = None,
) -> Outcome:
    """Run STOF's own passes; when one fails the original graph is compiled.

    Args:
        budget: seconds left for measurements; None = all that the options give.
        choices: attention problem -> what was chosen for it in this compile.
        given: a plan to follow in place of that of the options.
    Raises:
        StofMaskError: one failed and the options have a mask, which would be lost.
    """
    original, started = copy_graph(gm), time.monotonic()
    budget = budget or Budget(opts.tune_budget_s)
    device = device_facts(facts.device)
    record = Record(device=device.to_json(), options=opts.to_json())
    record.graphs["captured"] = graph_text(gm)
    made = Plan(
        environment_key(device),
        graph=graph_key(gm, grad_enabled=facts.grad_enabled),
        about=graph_words(
            gm, (fact.example for fact in facts.inputs.values() if fact.kind == "user")
        ),
    )
    outcome = Outcome(record, made, original)
    try:
        if given is None and opts.plan is not None:
            given = PlanFile.load(opts.plan, made.environment)
        outcome = _rewrite(gm, facts, opts, outcome, budget, choices or {}, given)
    except StofError:
        raise
    except Exception as failure:  # architecture.md: the second of the two allowed catch-alls
        fall_back(failure, opts, record)
    outcome.gm.graph.lint()
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
) -> Outcome:
    record, made = before.record, before.plan
    normalize(gm, facts)
    record.graphs["normalized"] = graph_text(gm)
    sites, near_misses = match_attention(gm, facts)
    near_misses += region_near_misses(gm, facts)
    places: list[AttentionSite | NearMiss] = [*sites, *near_misses]
    resolved = resolve_masks(
        opts.mask, places, path_known=facts.path_known, whole_model=facts.whole_model
    )
    record.mask_paths = {key: list(names) for key, names in resolved.by_path.items()}
    warn_of_unmatched(resolved, facts)
    refuse_lost_mask(resolved, places, opts, record)
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
            operators.compile_ahead()
        started = time.monotonic()
        reports = lower_attention(gm, sites, resolved, ctx)
        record.timings_s["attention"] = time.monotonic() - started
        erase_unused(gm.graph)  # views and mask parts written for sites that stayed
        record_sites(reports, record)
        if operators is not None:
            fusion = operators.run()
            record_fusion(fusion, record)
            if given is not None and plan is not None:
                where = opts.plan or "of another rank"
                refuse_other_plan(given, plan, ctx.choices, fusion, made.about, where)
    if wanted and not facts.grad_enabled:
        shortened = shorten_gelu(gm)
        if shortened:
            record.notes.append(f"exact GELU in half precision, written shorter: {shortened}")
    folded = facts.static.folded.union(*(report.folded for report in reports))
    made = replace(made, attention=dict(ctx.choices), fusion=wanted)
    if fusion is not None:
        made = replace(made, chains=fusion.chains, packs=fusion.packs)
    return Outcome(record, made, gm, frozenset(folded), fusion)


def _fastest(
    outcome: Outcome,
    captured: torch.fx.GraphModule,
    facts: CaptureFacts,
    inputs: Sequence[Any],
    opts: StofOptions,
    budget: Budget,
) -> tuple[Outcome, Callable[..., Any] | None]:
    """Take the rewritten graph, or an earlier form of it where that is faster as a whole.

    Graphs that write to their inputs are not run here; their segments were compared one by one.

    Returns:
        The form, and what Inductor made of it where it was compiled as the options ask for.
    """
    fusion = outcome.fusion
    unmeasured = opts.tune_budget_s <= 0 or opts.plan is not None or opts.fusion != "auto"
    if fusion is None or not fusion.changed or unmeasured or facts.mutated_inputs:
        return outcome, None
    if has_effects(captured.graph):
        return outcome, None

    chosen = outcome.plan.attention
    plain = {key: _left_to_torch(choice) for key, choice in chosen.items()}
    earlier = {"attention only": (opts.attention, chosen), AS_TORCH: ("sdpa", plain)}
    forms: dict[str, Outcome] = {"fused": outcome}

    def make(name: str) -> torch.fx.GraphModule:
        if name not in forms:
            attention, choices = earlier[name]
            gm = copy_graph(captured)
            here = facts_at_call(gm, inputs, facts, constant=True)
            asked = replace(opts, fusion="off", strict=False, attention=attention)
            forms[name] = _improve(gm, here, asked, budget, choices)
        return forms[name].gm

    names = ["fused", "attention only"]  # in the order in which they are tried while there is time
    if opts.attention == "auto" and not opts.strict:  # else the user's choice would be undone
        names.insert(1, AS_TORCH)
    store = Store(opts.cache_dir or default_root(), environment_key(device_facts(facts.device)))
    graphs, asked = outcome.record.graphs, outcome.record.options
    options = [asked[name] for name in ("mask", "inductor", "mode", "attention")]
    told = [graphs["captured"], graphs["rewritten"], *options, fp32_products()]
    identity = json.dumps(told)
    makers = {name: partial(make, name) for name in names}
    started = time.monotonic()
    fastest = fastest_form(makers, inputs, facts.device, opts, store, identity, budget)
    outcome.record.timings_s["verdict"] = time.monotonic() - started
    verdict = fastest.verdict
    if verdict is None:
        return outcome, fastest.compiled
    logger.info("%s", verdict)
    make(verdict.winner)
    kept, found = forms[verdict.winner], outcome.record
    if kept is not outcome:  # what was tried and cost time is part of the story
        kept.record.chains, kept.record.packs = found.chains, found.packs
        kept.record.timings_s, kept.record.notes = found.timings_s, found.notes
    kept.record.notes += [note for note in (str(verdict), verdict.remark) if note]
    return kept, fastest.compiled


def _left_to_torch(choice: AttentionPlan) -> AttentionPlan:
    """The choice for an attention where the whole graph is faster without us."""
    reason = (
        f"the whole graph is faster as torch.compile runs it; of the kernels alone "
        f"{choice.kernel} won: {choice.reason}"
    )
    return replace(choice, kernel="sdpa", config=(), source="graph", reason=reason)


def _compile_again(
    captured: torch.fx.GraphModule,
    facts: CaptureFacts,
    inputs: Sequence[Any],
    opts: StofOptions,
    constant: bool,
) -> Callable[..., Any]:
    """Compile the captured graph once more; not ``constant``: buffers are read at run time."""
    gm = copy_graph(captured)
    here = facts_at_call(gm, inputs, facts, constant=constant)
    return _finished(_improve(gm, here, opts), inputs, opts)


def _finished(
    outcome: Outcome,
    inputs: Sequence[Any],
    opts: StofOptions,
    timed: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The compiled graph, which looks after its packed weights at each call.

    Args:
        timed: the graph as it was compiled for timing; None = it is compiled here.
    """
    # a copy, as for timing: names of nodes are part of the key of Inductor's caches
    compiled = timed or compile_with_inductor(copy_graph(outcome.gm), inputs, opts)
    packed = None if outcome.fusion is None else outcome.fusion.packed
    if packed is None:
        return compiled

    def run(*given: Any) -> Any:
        packed.refresh(given)
        return compiled(*given)

    return run
