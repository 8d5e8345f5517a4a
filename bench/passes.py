"""Graph Surgeon's table: what each pass is worth on a model without a mask, with statistics.

A pipeline is torch.compile with some of STOF's passes before it: ``baseline`` none,
``fuse_transpose`` products read transposed views instead of copies, ``qkv`` projections that share
an input packed into one product (all of them, whether or not that pays), ``attention_only`` and
``fusion_only`` STOF without the other half, ``all`` as users get it. A pipeline whose pass finds
nothing is not compared.

Every pipeline is warmed up with as many calls as are timed. The samples are taken in rounds, in
each of which all pipelines run forwards and then backwards (ABBA), so that a drifting machine
favours none. On a GPU a sample is one replay of a CUDA graph between two events, on a CPU one call.
``p_holm`` is Welch's p over all samples, corrected for the number of pipelines; ``round_p`` a
paired test on the means of rounds, which has to agree; ``effect_d`` Cohen's d.
Source: the protocol of the Graph Surgeon write-up, with interleaving (specs/02, section 5).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import significance
import timing
import torch
from details import stof_detail
from e2e import MODEL_RMS
from machine import conditions, version_of
from models import caller, model_names
from results import append_row, log_event, read_rows, say
from torch import Tensor, nn
from turns import one_round

from stof_compile import zoo

FIELDS = (
    "cell", "model", "batch", "seq", "dtype", "pipeline", "changes", "samples", "rounds", "method",
    "mean_us", "sd_us", "median_us", "p5_us", "p95_us", "speedup", "t", "dof", "p", "p_holm",
    "round_t", "round_p", "effect_d", "verdict", "tested_by", "round_means_us",
    "max_rel", "rms_rel", "detail",
    "device", "torch", "triton", "transformers", "stof", "date",
)  # fmt: skip
PIPELINES = ("baseline", "fuse_transpose", "qkv", "attention_only", "fusion_only", "all")
SHAPE = "1x128"  # of the write-up
ROUNDS = 10
STOF_OPTIONS = {
    "attention_only": {"fusion": "off"},
    "fusion_only": {"attention": "off"},
    "all": {},
}  # fmt: skip


@dataclass
class Pipeline:
    """A compiled model.

    Args:
        call: of the model's inputs, in order. changes: places its passes changed, "" unknown.
        take: microseconds of one call. method: how.
    """

    name: str
    call: Callable[..., Tensor]
    changes: int | str
    errors: tuple[float, float]
    detail: str = ""
    take: Callable[[], float] | None = None
    method: str = ""


def pass_units(args: argparse.Namespace) -> list[str]:
    """Cells without rows, ``model/BxS``."""
    done = {f"{row['model']}/{row['cell']}" for row in read_rows(args.out)}
    shapes = args.cells.split(",") if args.cells else [SHAPE]
    names = [f"{m}/{s}" for m in model_names(args.model, args.smoke) for s in shapes]
    return [name for name in names if name not in done]


@torch.no_grad()
def run_passes(args: argparse.Namespace, device: torch.device) -> None:
    """Compile the pipelines of a model, time them in turns, test them; a row each."""
    model_name, shape = args.worker.split("/")
    batch, seq = (int(n) for n in shape.split("x"))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, inputs = zoo.build(model_name, batch, seq, args.seed, "sdpa", dtype, device)
    exact = caller(copy.deepcopy(model).double(), inputs, {})(*inputs.values())
    torch._dynamo.config.recompile_limit = 64  # one code object, many back ends
    wanted = args.peers.split(",") if args.peers else PIPELINES
    found = []
    with timing.own_caches(args.caches, "passes", args.caches / "stof-store"):
        for name in PIPELINES:
            if name not in (*wanted, "baseline"):
                continue
            where = (args.out, args.worker, name, "-")
            pipeline = _compiled(name, model, inputs, exact, args.tune_budget, where)
            if pipeline is not None:
                found.append(pipeline)
                changed = pipeline.changes
                say(
                    f"  {args.worker} {name}: compiled, {changed if changed != '' else '?'} changes"
                )
        timed = [p for p in found if p.changes != 0 or p.name == "baseline"]
        for pipeline in timed:
            pipeline.take, pipeline.method = sampler(pipeline.call, tuple(inputs.values()), device)
        taken = in_turns([p.take for p in timed if p.take is not None], args.samples)
    facts = {
        "cell": shape,
        "model": model_name,
        "batch": batch,
        "seq": seq,
        "dtype": str(dtype).removeprefix("torch."),
        **conditions(device),
        "transformers": version_of("transformers"),
    }
    rounds = dict(zip((p.name for p in timed), taken, strict=True))
    tests = tested(rounds, args.out, args.worker)
    for pipeline in found:
        row = {
            "pipeline": pipeline.name,
            "changes": pipeline.changes,
            "method": pipeline.method,
            "max_rel": pipeline.errors[0],
            "rms_rel": pipeline.errors[1],
            "detail": pipeline.detail,
            **({"verdict": "no match"} if pipeline.name not in rounds else {}),
            **(described(rounds[pipeline.name]) if pipeline.name in rounds else {}),
            **tests.get(pipeline.name, {}),
        }
        append_row(args.out, FIELDS, {**facts, **row})


def tested(rounds: dict[str, list[list[float]]], out: Path, cell: str) -> dict[str, dict]:
    """The columns of the tests of each pipeline against the baseline."""
    base = rounds.get("baseline")
    others = [name for name in rounds if name != "baseline"]
    if base is None or not others:
        return {}
    stats = significance.scipy_stats()
    if stats is None:
        log_event(out, cell, "scipy", "-", "missing", significance.MISSING)
    tested_by = significance.OWN if stats is None else f"scipy {version_of('scipy')}"
    found = {name: significance.difference(base, rounds[name], stats) for name in others}
    corrected = significance.holm([found[name].p for name in others])
    return {
        name: {
            **{key: getattr(found[name], key) for key in (
                "speedup", "t", "dof", "p", "round_t", "round_p", "effect_d"
            )},
            "p_holm": p,
            "tested_by": tested_by,
            "verdict": significance.verdict(found[name], p),
        }
        for name, p in zip(others, corrected, strict=True)
    }  # fmt: skip


def described(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean, spread and percentiles of all samples."""
    samples = [x for r in rounds for x in r]
    return {
        "samples": len(samples),
        "rounds": len(rounds),
        "mean_us": fmean(samples),
        "sd_us": stdev(samples),
        "median_us": median(samples),
        "p5_us": timing.at(samples, 0.05),
        "p95_us": timing.at(samples, 0.95),
        "round_means_us": " ".join(f"{fmean(r):.5g}" for r in rounds),
    }


# -- pipelines -------------------------------------------------------------------------------------


def _compiled(
    name: str,
    model: nn.Module,
    inputs: dict[str, Tensor],
    exact: Tensor,
    budget_s: float,
    where: tuple[Path, str, str, str],
) -> Pipeline | None:
    """A pipeline after its first call, None (and a line of the log) where that went wrong."""
    counted: list[int] = []
    if name in STOF_OPTIONS:
        options = {"tune_budget_s": budget_s, **STOF_OPTIONS[name]}
        compiled = torch.compile(model, backend="stof", dynamic=False, options=options)
    elif name == "baseline":
        compiled = torch.compile(model, dynamic=False)
    else:
        compiled = torch.compile(model, backend=single_pass(name, counted), dynamic=False)
    call = caller(compiled, inputs, {})
    given = tuple(inputs.values())
    try:
        error = call(*given).double() - exact
    except (
        Exception
    ) as failure:  # one pipeline's failure is a line of the log; the others still run
        log_event(*where, "error", f"{type(failure).__name__}: {failure}")
        return None
    dtype = next(model.parameters()).dtype
    rms = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
    largest = float(error.abs().max() / exact.abs().max())
    if not rms <= MODEL_RMS[dtype]:
        log_event(*where, "incorrect", f"rms {rms:.3g} max {largest:.3g} against the fp64 model")
        return None
    changes: int | str = sum(counted) if name not in STOF_OPTIONS and name != "baseline" else ""
    detail = stof_detail(compiled) if name in STOF_OPTIONS else ""
    return Pipeline(name, call, 0 if name == "baseline" else changes, (largest, rms), detail)


def single_pass(name: str, counted: list[int]) -> Callable[..., Callable[..., Any]]:
    """A back end: STOF's normalised graph, one pass over it, Inductor.

    Args:
        counted: gets the number of places that the pass changed in each graph.
    """
    from stof_compile.capture import read_capture
    from stof_compile.fold_transpose import fold_transposes
    from stof_compile.graph_copy import copy_graph
    from stof_compile.inductor import compile_with_inductor
    from stof_compile.normalize import normalize
    from stof_compile.options import StofOptions
    from stof_compile.packing import apply_packs, find_packs

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        facts = read_capture(gm, example_inputs)
        normalize(gm, facts)
        packed = None
        if name == "fuse_transpose":
            counted.append(fold_transposes(gm, facts))
        else:
            packs = find_packs(gm, facts)
            counted.append(len(packs))
            packed = apply_packs(gm, facts, packs) if packs else None
        gm.graph.lint()
        gm.recompile()
        compiled = compile_with_inductor(copy_graph(gm), example_inputs, StofOptions())
        return compiled if packed is None else packed.refreshed_by(compiled)

    return backend


# -- samples ---------------------------------------------------------------------------------------


def sampler(
    call: Callable[..., Any], given: tuple[Tensor, ...], device: torch.device
) -> tuple[Callable[[], float], str]:
    """A function that takes one sample in microseconds, and how it does."""
    if device.type != "cuda":

        def clocked() -> float:
            start = time.perf_counter_ns()
            call(*given)
            return (time.perf_counter_ns() - start) / 1e3

        return clocked, "clock"
    run, method = _replay(call, given)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def between_events() -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    return between_events, method


def _replay(
    call: Callable[..., Any], given: tuple[Tensor, ...]
) -> tuple[Callable[[], object], str]:
    """The replay of a graph of the call, or the call itself where none can be captured."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(*given)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            kept = call(*given)
    except RuntimeError as refused:
        reason = str(refused).splitlines()[0][:80]
        return (lambda: call(*given)), f"events (no graph: {reason})"

    def replay(held: Any = kept) -> None:  # what the graph writes to lives as long as it does
        graph.replay()

    return replay, "cuda-graph"


def in_turns(takers: Sequence[Callable[[], float]], samples: int) -> list[list[list[float]]]:
    """Samples of each in rounds, after as many calls that are not counted.

    A round has all of them forwards, half of its samples each, and then backwards.
    """
    rounds = min(ROUNDS, max(2, samples // 4))
    share = -(-samples // rounds)
    halves = (share - share // 2, share // 2)
    for take in takers:
        for _ in range(samples):
            take()
    taken = [one_round(takers, halves) for _ in range(rounds)]
    return [list(of_one) for of_one in zip(*taken, strict=True)]
