"""The backend: ``torch.compile(model, backend="stof")``.

capture -> normalise -> match attention -> resolve masks -> choose kernels -> rewrite -> Inductor ->
dump.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._logging._internal import warning_once
from torch.fx import GraphModule, Node

import stof_compile.ops
import stof_compile.ops_cpu  # noqa: F401
from stof_compile.attention.functional import current_override
from stof_compile.attention.keep import mask_near_misses
from stof_compile.attention.lower import LoweringContext, lower_attention
from stof_compile.attention.match import AttentionSite, NearMiss, match_attention
from stof_compile.attention.regions import region_near_misses
from stof_compile.attention.resolve import ResolvedMasks, path_matches, resolve_masks
from stof_compile.attention.select import Budget
from stof_compile.attention.site_report import SiteReport
from stof_compile.capture import CaptureFacts, read_capture
from stof_compile.device import device_facts
from stof_compile.dump import Record, SiteRecord, graph_text, write_dump
from stof_compile.emit import erase_unused
from stof_compile.errors import StofError, StofMaskError, StofUnsupportedError
from stof_compile.folded import FoldedBuffers
from stof_compile.inductor import compile_with_inductor
from stof_compile.normalize import normalize
from stof_compile.options import StofOptions
from stof_compile.plan import Plan
from stof_compile.static_values import StaticValues
from stof_compile.store import Store, default_root, environment_key, write_atomic

logger = logging.getLogger("stof_compile")

DYNAMO_ATTRIBUTES = (
    "_param_name_to_source",
    "compile_subgraph_reason",
    "_backend_id",
)  # read by AOTAutograd and by us


def stof(
    gm: GraphModule,
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
    captured = _copy(gm)
    outcome = _improve(gm, facts, opts)
    record, started = outcome.record, time.monotonic()
    compiled = compile_with_inductor(outcome.gm, example_inputs, opts)
    record.timings_s["inductor"] = time.monotonic() - started
    if opts.dump_dir is not None:
        folder = write_dump(record, opts.dump_dir)
        write_atomic(folder / "plan.json", outcome.plan.to_json())
    folded = FoldedBuffers(facts.inputs, outcome.folded, example_inputs)
    return _callable(compiled, (captured, facts), opts, record, folded)


@dataclass(frozen=True)
class Outcome:
    """A graph after STOF's passes; ``folded`` names the buffers a static mask was read from."""

    record: Record
    plan: Plan
    gm: GraphModule
    folded: frozenset[str] = frozenset()


def _improve(gm: GraphModule, facts: CaptureFacts, opts: StofOptions) -> Outcome:
    """Run STOF's own passes; when one fails the original graph is compiled.

    Raises:
        StofMaskError: one failed and the options have a mask, which would be lost.
    """
    original, started = _copy(gm), time.monotonic()
    record = Record(device=device_facts(facts.device).to_json(), options=opts.to_json())
    record.graphs["captured"] = graph_text(gm)
    outcome = Outcome(record, Plan(environment_key(device_facts(facts.device))), original)
    try:
        outcome = _rewrite(gm, facts, opts, record)
    except StofError:
        raise
    except Exception as failure:  # architecture.md: the second of the two allowed catch-alls
        reason = f"a pass of STOF failed: {type(failure).__name__}: {failure}"
        if opts.mask is not None:
            raise StofMaskError(
                f"the mask of the options cannot be put into this graph, {reason}; run without the "
                "option's mask, and report this error"
            ) from failure
        if opts.strict:
            raise
        logger.warning("this graph is left to torch.compile, %s", reason, exc_info=True)
        record.sites.clear()
        record.fallbacks.clear()
        record.add_fallback("graph", reason)
    outcome.gm.graph.lint()
    outcome.gm.recompile()
    record.graphs["rewritten"] = graph_text(outcome.gm)
    record.timings_s["stof"] = time.monotonic() - started
    return outcome


def _rewrite(gm: GraphModule, facts: CaptureFacts, opts: StofOptions, record: Record) -> Outcome:
    normalize(gm, facts)
    record.graphs["normalized"] = graph_text(gm)
    sites, near_misses = match_attention(gm, facts)
    near_misses += region_near_misses(gm, facts)
    resolved = resolve_masks(
        opts.mask,
        (*sites, *near_misses),
        path_known=facts.path_known,
        whole_model=facts.whole_model,
    )
    record.mask_paths = {key: list(names) for key, names in resolved.by_path.items()}
    _warn_of_unmatched(resolved, facts)
    _refuse_lost_mask(resolved, (*sites, *near_misses), opts, record)
    mask_near_misses(gm, near_misses, resolved.by_site)
    _report_near_misses(near_misses, opts, record)
    environment = environment_key(device_facts(facts.device))
    store = Store(opts.cache_dir or default_root(), environment)
    plan = None if opts.plan is None else Plan.load(opts.plan, environment)
    ctx = LoweringContext(facts, opts, store, Budget(opts.tune_budget_s), plan, {})
    reports = lower_attention(gm, sites, resolved, ctx)
    erase_unused(gm.graph)  # views and mask parts written for sites that stayed
    for report in reports:
        record.sites.append(_site_record(report))
        if report.status != "rewritten":
            record.add_fallback(report.name, report.reason)
    folded = facts.static.folded.union(*(report.folded for report in reports))
    return Outcome(record, Plan(environment, dict(ctx.choices)), gm, frozenset(folded))


def _report_near_misses(near_misses: Sequence[NearMiss], opts: StofOptions, record: Record) -> None:
    for miss in near_misses:
        record.add_near_miss(miss.name, miss.node.name, miss.reason)
        logger.info("%s is left to PyTorch: %s", miss.name, miss.reason)
        if opts.strict and opts.attention != "off":
            raise StofUnsupportedError(
                f"{miss.name} is left to PyTorch: {miss.reason} (strict=True; {miss.source})"
            )


def _warn_of_unmatched(resolved: ResolvedMasks, facts: CaptureFacts) -> None:
    """Warn once of a mask path no graph of a model in several graphs can match."""
    modules = facts.module_paths.values()
    for key in resolved.unmatched:
        if not any(path_matches(key, path) for path in modules):
            warning_once(
                logger,
                "options['mask']: the path %r names no module of the compiled model, so no "
                "attention takes this mask",
                key,
            )


def _refuse_lost_mask(
    resolved: ResolvedMasks,
    places: Sequence[AttentionSite | NearMiss],
    opts: StofOptions,
    record: Record,
) -> None:
    """Say it when one mask was given for all attention and none of this graph's takes it."""
    if opts.mask is None or isinstance(opts.mask, Mapping) or not places or resolved.by_site:
        return
    message = (
        "the mask of the options was put into no attention of this graph: "
        f"{', '.join(place.name for place in places[:4])} reads keys of another sequence than its "
        "queries (cross-attention); name it by path, or call sparse_attention"
    )
    if opts.strict:
        raise StofMaskError(message + " (strict=True)")
    record.notes.append(message)
    warning_once(logger, message)


def _site_record(report: SiteReport) -> SiteRecord:
    return SiteRecord(
        name=report.name,
        form=report.form,
        status=report.status,
        kernel=report.kernel,
        source=report.source,
        shape=report.shape,
        mask=report.mask,
        statistics=report.statistics,
        choice=report.choice,
        notes=[report.reason] if report.reason else [],
    )


def _copy(gm: GraphModule) -> GraphModule:
    """Copy a graph with its meta; tensors and submodules are shared."""
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, twin in copies.items():
        if hasattr(node, "_dynamo_source"):  # AOTAutograd wants to know where each input is from
            twin._dynamo_source = node._dynamo_source
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    for name in DYNAMO_ATTRIBUTES:
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))
    return copied


def _callable(
    compiled: Callable[..., Any],
    captured: tuple[GraphModule, CaptureFacts],
    opts: StofOptions,
    record: Record,
    folded: FoldedBuffers,
) -> Callable[..., Any]:
    """Wrap the compiled graph.

    It reads ``attention_kernel(...)`` at call time and keeps one variant per kernel and input
    shapes, and another that reads its masks at run time once a buffer taken for constant changes.
    """
    variants: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*inputs: Any) -> Any:
        kernel = current_override()
        constant = folded.unchanged(inputs)
        if kernel is None and constant:
            return compiled(*inputs)
        shapes = (tuple(i.shape) if isinstance(i, torch.Tensor) else i for i in inputs)
        key = (kernel, constant, *shapes)
        if key not in variants:
            forced = opts if kernel is None else replace(opts, attention=kernel)
            variants[key] = _variant(*captured, inputs, replace(forced, dump_dir=None), constant)
        return variants[key](*inputs)

    run.stof_record = record  # type: ignore[attr-defined]
    return run


def _variant(
    captured: GraphModule,
    facts: CaptureFacts,
    inputs: Sequence[Any],
    opts: StofOptions,
    constant: bool,
) -> Callable[..., Any]:
    """Compile the captured graph once more; not ``constant``: buffers are read at run time."""
    gm = _copy(captured)
    here = read_capture(gm, inputs)
    here = replace(  # what Dynamo's frames told at compile time is not to be seen at call time
        here,
        static=here.static if constant else StaticValues(gm.graph, {}),
        module_paths=facts.module_paths,
        path_known=facts.path_known,
        whole_model=facts.whole_model,
    )
    return compile_with_inductor(_improve(gm, here, opts).gm, inputs, opts)
