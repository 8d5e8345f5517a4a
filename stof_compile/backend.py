"""The backend: ``torch.compile(model, backend="stof")``.

capture -> normalise -> match attention -> resolve masks -> choose kernels -> rewrite -> Inductor -> dump.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import stof_compile.ops  # noqa: F401  registers the operators the rewritten graph calls
import stof_compile.ops_cpu  # noqa: F401
from stof_compile.attention.functional import current_override
from stof_compile.attention.lower import LoweringContext, lower_attention, mask_only
from stof_compile.attention.match import match_attention
from stof_compile.attention.resolve import resolve_masks
from stof_compile.attention.select import Budget
from stof_compile.capture import CaptureFacts, read_capture
from stof_compile.device import device_facts
from stof_compile.dump import Record, start_record, write_dump
from stof_compile.errors import StofError
from stof_compile.inductor import compile_with_inductor
from stof_compile.normalize import normalize
from stof_compile.options import StofOptions
from stof_compile.plan import Plan
from stof_compile.store import Store, default_root, environment_key

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
    record = start_record(device_facts(facts.device), opts)
    record.add_graph("captured", gm)
    improved = _improve(gm, facts, opts, record)
    record.add_graph("rewritten", improved)
    compiled = compile_with_inductor(improved, example_inputs, opts)
    if opts.dump_dir is not None:
        write_dump(record, opts.dump_dir)
    return _callable(compiled, captured, opts, record)


def _improve(gm: GraphModule, facts: CaptureFacts, opts: StofOptions, record: Record) -> GraphModule:
    """Run STOF's own passes; when one fails the original graph is compiled, with the option's mask put in."""
    original = _copy(gm)
    try:
        _rewrite(gm, facts, opts, record)
        return gm
    except StofError:
        raise
    except Exception as failure:  # architecture.md: the second of the two allowed catch-alls
        if opts.strict:
            raise
        logger.warning("STOF left a graph to torch.compile: %s: %s", type(failure).__name__, failure, exc_info=True)
        record.add_fallback("graph", f"a pass failed: {type(failure).__name__}: {failure}")
        record.sites = []
        mask_only(original, facts, opts, record)
        return original


def _rewrite(gm: GraphModule, facts: CaptureFacts, opts: StofOptions, record: Record) -> None:
    normalize(gm, facts)
    record.add_graph("normalized", gm)
    sites, near_misses = match_attention(gm, facts)
    for miss in near_misses:
        record.add_near_miss(miss.name, miss.reason)
        logger.info("%s is left to PyTorch: %s", miss.name, miss.reason)
    resolved = resolve_masks(opts.mask, sites, path_known=facts.paths_known, whole_model=facts.whole_model)
    for key in resolved.unmatched:
        record.add_unmatched(key)
    store, plan = _store(opts, facts), _plan(opts, facts)
    ctx = LoweringContext(facts, opts, store, Budget(opts.tune_budget_s), plan, {})
    reports = lower_attention(gm, sites, near_misses, resolved, ctx)
    for report in reports:
        record.add_site(report.to_dict())
        if report.status != "rewritten":
            record.add_fallback(report.name, report.reason)
    record.plan = Plan(environment_key(device_facts(facts.device)), dict(ctx.choices))
    gm.graph.lint()
    gm.recompile()


def _store(opts: StofOptions, facts: CaptureFacts) -> Store:
    root: Path = opts.cache_dir if opts.cache_dir is not None else default_root()
    return Store(root, environment_key(device_facts(facts.device)))


def _plan(opts: StofOptions, facts: CaptureFacts) -> Plan | None:
    return None if opts.plan is None else Plan.load(opts.plan, environment_key(device_facts(facts.device)))


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
    from dataclasses import replace

    forced = replace(opts, attention=kernel, dump_dir=None)
    gm = _copy(captured)
    facts = read_capture(gm, inputs)
    return compile_with_inductor(_improve(gm, facts, forced, start_record(device_facts(facts.device), forced)), inputs, forced)
