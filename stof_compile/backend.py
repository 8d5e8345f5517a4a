"""The backend: ``torch.compile(model, backend="stof")``.

capture -> normalise -> match attention -> resolve masks -> choose kernels -> rewrite -> Inductor -> dump.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

import stof_compile.ops  # noqa: F401  registers the operators the rewritten graph calls
import stof_compile.ops_cpu  # noqa: F401
from stof_compile.attention.functional import current_override
from stof_compile.attention.lower import LoweringContext, SiteReport, lower_attention
from stof_compile.attention.mask_only import mask_near_misses, mask_only
from stof_compile.attention.match import match_attention
from stof_compile.attention.resolve import resolve_masks
from stof_compile.attention.select import Budget
from stof_compile.capture import CaptureFacts, read_capture
from stof_compile.device import device_facts
from stof_compile.dump import Record, SiteRecord, graph_text, write_dump
from stof_compile.errors import StofError
from stof_compile.inductor import compile_with_inductor
from stof_compile.normalize import normalize
from stof_compile.options import StofOptions
from stof_compile.plan import Plan
from stof_compile.store import Store, default_root, environment_key, write_atomic

logger = logging.getLogger("stof_compile")

DYNAMO_ATTRIBUTES = ("_param_name_to_source", "compile_subgraph_reason", "_backend_id")  # read by AOTAutograd and by us


def stof(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
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
    record, plan, improved = _improve(gm, facts, opts)
    started = time.monotonic()
    compiled = compile_with_inductor(improved, example_inputs, opts)
    record.timings_s["inductor"] = time.monotonic() - started
    if opts.dump_dir is not None:
        folder = write_dump(record, opts.dump_dir)
        write_atomic(folder / "plan.json", plan.to_json())
    return _callable(compiled, captured, opts, record)


def _improve(gm: GraphModule, facts: CaptureFacts, opts: StofOptions) -> tuple[Record, Plan, GraphModule]:
    """Run STOF's own passes; when one fails the original graph is compiled, with the option's mask put in."""
    original, started = _copy(gm), time.monotonic()
    record = Record(device=device_facts(facts.device).to_json(), options=opts.to_json())
    record.graphs["captured"] = graph_text(gm)
    plan = Plan(environment_key(device_facts(facts.device)))
    try:
        plan = _rewrite(gm, facts, opts, record)
        improved = gm
    except StofError:
        raise
    except Exception as failure:  # architecture.md: the second of the two allowed catch-alls
        if opts.strict:
            raise
        reason = f"a pass of STOF failed: {type(failure).__name__}: {failure}"
        logger.warning("this graph is left to torch.compile, %s", reason, exc_info=True)
        record.sites.clear()
        record.add_fallback("graph", reason)
        mask_only(original, facts, opts)
        improved = original
    improved.graph.lint()
    improved.recompile()
    record.graphs["rewritten"] = graph_text(improved)
    record.timings_s["stof"] = time.monotonic() - started
    return record, plan, improved


def _rewrite(gm: GraphModule, facts: CaptureFacts, opts: StofOptions, record: Record) -> Plan:
    normalize(gm, facts)
    record.graphs["normalized"] = graph_text(gm)
    sites, near_misses = match_attention(gm, facts)
    for miss in near_misses:
        record.add_near_miss(miss.name, miss.node.name, miss.reason)
        logger.info("%s is left to PyTorch: %s", miss.name, miss.reason)
    resolved = resolve_masks(opts.mask, sites, path_known=facts.path_known, whole_model=facts.whole_model)
    record.mask_paths = {key: list(names) for key, names in resolved.by_path.items()}
    if opts.mask is not None:
        mask_near_misses(gm, near_misses, opts.mask)
    environment = environment_key(device_facts(facts.device))
    store = Store(opts.cache_dir or default_root(), environment)
    plan = None if opts.plan is None else Plan.load(opts.plan, environment)
    ctx = LoweringContext(facts, opts, store, Budget(opts.tune_budget_s), plan, {})
    for report in lower_attention(gm, sites, resolved, ctx):
        record.sites.append(_site_record(report))
        if report.status != "rewritten":
            record.add_fallback(report.name, report.reason)
    return Plan(environment, dict(ctx.choices))


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
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    for name in DYNAMO_ATTRIBUTES:
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))
    return copied


def _callable(
    compiled: Callable[..., Any], captured: GraphModule, opts: StofOptions, record: Record
) -> Callable[..., Any]:
    """Wrap the compiled graph: it reads ``attention_kernel(...)`` at call time and keeps one variant per kernel."""
    variants: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*inputs: Any) -> Any:
        kernel = current_override()
        if kernel is None:
            return compiled(*inputs)
        key = (kernel, *(tuple(i.shape) if isinstance(i, torch.Tensor) else i for i in inputs))
        if key not in variants:
            variants[key] = _variant(captured, inputs, opts, kernel)
        return variants[key](*inputs)

    run.stof_record = record  # type: ignore[attr-defined]
    return run


def _variant(captured: GraphModule, inputs: Sequence[Any], opts: StofOptions, kernel: str) -> Callable[..., Any]:
    forced = replace(opts, attention=kernel, dump_dir=None)
    gm = _copy(captured)
    _, _, improved = _improve(gm, read_capture(gm, inputs), forced)
    return compile_with_inductor(improved, inputs, forced)
