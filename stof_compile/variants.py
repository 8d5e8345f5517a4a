"""Variants of a compiled graph that only a call can ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch.fx import GraphModule

from stof_compile.attention.functional import current_override
from stof_compile.capture import CaptureFacts, RootPlace, read_capture
from stof_compile.dump import Record
from stof_compile.errors import StofPlanError
from stof_compile.folded import FoldedBuffers
from stof_compile.options import StofOptions
from stof_compile.static_values import StaticValues

logger = logging.getLogger("stof_compile")


def with_variants(
    compiled: Callable[..., Any],
    compile_again: Callable[[Sequence[Any], StofOptions, bool], Callable[..., Any]],
    opts: StofOptions,
    record: Record,
    folded: FoldedBuffers,
    second_call: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """Wrap the compiled graph.

    It reads ``attention_kernel(...)`` at call time and keeps one variant per kernel and input
    shapes, and another that reads its masks at run time once a buffer taken for constant changes.

    Args:
        compile_again: (inputs, options, constant) -> the captured graph compiled once more; not
            ``constant``: buffers are read at run time.
        second_call: called when the graph has run for the second time.
    """
    calls, due = count(), [] if second_call is None else [second_call]
    variants: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def run(*inputs: Any) -> Any:
        result = variant_for(inputs)(*inputs)
        if due and next(calls) > 0:
            for check in tuple(due):  # another thread may be through with it
                check()
            due.clear()
        return result

    def variant_for(inputs: Sequence[Any]) -> Callable[..., Any]:
        kernel = current_override()
        constant = folded.unchanged(inputs)
        if kernel is None and constant:
            return compiled
        shapes = (tuple(i.shape) if isinstance(i, torch.Tensor) else i for i in inputs)
        key = (kernel, constant, *shapes)
        if key not in variants:
            with compile_lock:  # of all threads one traces at a time, as where Dynamo calls us
                if key not in variants:
                    forced = opts if kernel is None else replace(opts, attention=kernel)
                    forced = replace(forced, dump_dir=None)
                    variants[key] = _compiled(compile_again, inputs, forced, constant)
        return variants[key]

    run.stof_record = record  # type: ignore[attr-defined]
    return run


def _compiled(
    compile_again: Callable[[Sequence[Any], StofOptions, bool], Callable[..., Any]],
    inputs: Sequence[Any],
    opts: StofOptions,
    constant: bool,
) -> Callable[..., Any]:
    try:
        return compile_again(inputs, opts, constant)
    except StofPlanError as error:
        if constant:
            raise
        # its plan has the attention of masks that were constant; a call is no time for a search
        logger.warning("a mask buffer has changed, and the plan no longer fits: %s", error)
        return compile_again(inputs, replace(opts, plan=None, tune_budget_s=0.0), constant)


def facts_at_call(
    gm: GraphModule, inputs: Sequence[Any], place: RootPlace, *, constant: bool
) -> CaptureFacts:
    """Facts of a captured graph with the inputs of a call; ``place`` is that of compile time."""
    here = read_capture(gm, inputs)
    static = here.static if constant else StaticValues(gm.graph, {})
    return replace(here, static=static, place=place)
