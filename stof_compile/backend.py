"""The backend: ``torch.compile(model, backend="stof")``.

capture -> normalise -> match attention -> resolve masks -> choose kernels -> rewrite -> fuse ->
compare with the graph as it was -> Inductor -> dump.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stof_compile.fake_encoder_layer
import stof_compile.ops
import stof_compile.ops_cpu  # noqa: F401
from stof_compile.attention.flex_ahead import begin_flex_kernels
from stof_compile.budget import Budget
from stof_compile.capture import CaptureFacts, RootPlace, read_capture
from stof_compile.dump import write_dump
from stof_compile.folded import FoldedBuffers
from stof_compile.forms import Forms
from stof_compile.graph_copy import copy_graph
from stof_compile.improve import Outcome, improve
from stof_compile.inductor import compile_with_inductor
from stof_compile.options import StofOptions
from stof_compile.plan import Plan, PlanFile
from stof_compile.rank_plan import Choosing, on_all_ranks, shares_choices
from stof_compile.store import write_atomic
from stof_compile.unused_mask import check_at_second_call, warn_of_lost_mask
from stof_compile.variants import facts_at_call, with_variants

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
    warn_of_lost_mask(record)
    try:
        compiled = _finished(outcome, example_inputs, opts, timed)
    except Exception as failure:  # Inductor did not take our graph; it may take the captured one
        if outcome.fusion is None or not outcome.fusion.changed or opts.strict:
            raise
        reason = f"Inductor did not take the fused graph: {type(failure).__name__}: {failure}"
        logger.warning("operators are left to Inductor: %s", reason)
        record.notes.append(reason)
        plain = replace(opts, fusion="off", dump_dir=None)
        compiled = _compile_again(captured, facts.place, example_inputs, plain, True)
    record.timings_s["inductor"] = time.monotonic() - started
    if opts.dump_dir is not None:
        _dump(outcome, opts.dump_dir)
    folded = FoldedBuffers(facts.inputs, outcome.folded, example_inputs)
    again = partial(_compile_again, captured, facts.place)
    check = check_at_second_call(record, facts, opts)
    return with_variants(compiled, again, opts, record, folded, check)


def _dump(outcome: Outcome, dump_dir: Path) -> None:
    """Write the dump; where that fails, a graph that took a minute to tune is not thrown away."""
    try:
        folder = write_dump(outcome.record, dump_dir)
        write_atomic(folder / "plan.json", PlanFile.of([outcome.plan]).to_json())
    except OSError as failure:
        reason = f"the dump was not written to {dump_dir}: {failure}"
        logger.warning("%s; `stof_compile.explain` of the compiled function has it", reason)
        outcome.record.notes.append(reason)


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
    with Forms(captured, facts, inputs, opts, budget) as forms:
        return forms.fastest(improve(gm, captured, facts, opts, budget, ahead=forms))


def _decided_together(
    captured: torch.fx.GraphModule,
    facts: CaptureFacts,
    inputs: Sequence[Any],
    opts: StofOptions,
) -> Decided:
    """One rank decides about the whole graph, the others follow its plan."""

    def again() -> tuple[torch.fx.GraphModule, CaptureFacts]:
        gm = copy_graph(captured)
        return gm, facts_at_call(gm, inputs, facts.place, constant=True)

    def decide() -> Decided:
        gm, here = again()
        return _decided_here(gm, captured, here, inputs, opts)

    def follow(plan: Plan) -> Decided:
        gm, here = again()
        return improve(gm, captured, here, opts, given=PlanFile.of([plan])), None

    def otherwise() -> Decided:  # nothing that asks another rank once more
        gm, here = again()
        alone = replace(opts, fusion="off", tune_budget_s=0.0)
        return improve(gm, captured, here, alone), None

    ways = Choosing(decide, lambda decided: decided[0].plan, follow, otherwise)
    decided, remark = on_all_ranks(captured, facts, opts, ways)
    if remark:
        decided[0].record.notes.append(remark)
    return decided


def _compile_again(
    captured: torch.fx.GraphModule,
    place: RootPlace,
    inputs: Sequence[Any],
    opts: StofOptions,
    constant: bool,
) -> Callable[..., Any]:
    """Compile the captured graph once more; not ``constant``: buffers are read at run time."""
    gm = copy_graph(captured)
    here = facts_at_call(gm, inputs, place, constant=constant)
    return _finished(improve(gm, captured, here, opts), inputs, opts)


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
    compiled = timed
    if compiled is None:
        begin_flex_kernels(outcome.gm)
        # a copy, as for timing: names of nodes are part of the key of Inductor's caches
        compiled = compile_with_inductor(copy_graph(outcome.gm), inputs, opts)
    packed = None if outcome.fusion is None else outcome.fusion.packed
    return compiled if packed is None else packed.refreshed_by(compiled)
