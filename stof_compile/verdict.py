"""The last word on a rewritten graph: timed as a whole against what it would be without us.

Segments are measured alone; what Inductor would have fused across their borders shows only in the
whole graph. So the finished graph, the graph as torch.compile would run it and, while
there is time, the graph with attention rewritten only are compiled and timed in turns, once per
graph, device and versions, and the fastest is kept: the one with the shortest time on the device.
Where kernels are launched one by one, in a mode without CUDA graphs, a call lasts as long as the
host takes, if that is longer: only the forms that are shortest to call take part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from stof_compile.budget import Budget
from stof_compile.early_start import early_start_settings
from stof_compile.errors import StofUnsupportedError
from stof_compile.graph_copy import copy_graph
from stof_compile.inductor import compile_with_inductor, is_replayed, uses_cuda_graphs
from stof_compile.measure import Timing, time_as_in_use, time_in_turns
from stof_compile.options import StofOptions
from stof_compile.search.form_workers import FormWorkers
from stof_compile.store import Store
from stof_compile.typed_json import typed

logger = logging.getLogger("stof_compile")

STORE_KIND = "graphs"
TIME_S = 0.3  # for each form
# the same on a GPU: seconds of a turn, of which half is not counted, and turns. What a form draws
# has time to move the clock then, as it does where the model is used
LASTING_S, LASTING_TURNS = 0.3, 2
LAUNCHED_S = 0.2  # the same, launched one by one
NO_GRAPHS = {"triton.cudagraphs": False}  # the timer captures graphs of its own
AS_TORCH = "as torch.compile runs it"  # a form
TIE = 1.05  # calls within this factor are taken for equally long: hosts are noisy


@dataclass(frozen=True)
class Verdict:
    """The fastest form of a graph.

    Args:
        winner: name of the form. times_us: form -> microseconds of one call; empty where there was
            no time to compare.
        source: ``measured`` | ``store``.
        unfinished_s: the budget, where it ended before all forms were timed; else 0.
        launched_us: form -> microseconds of one call whose kernels are launched one by one; empty
            where they are not, or there is nothing to compare with.
    """

    winner: str
    times_us: dict[str, float]
    source: str = "measured"
    unfinished_s: float = 0.0
    launched_us: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.times_us:
            untimed = "not compared, the time budget was spent"
            return f"whole graph: {untimed}; kept: {self.winner} (default)"
        return f"whole graph: {_in_words(self.times_us)}; kept: {self.winner} ({self.source})"

    @property
    def remark(self) -> str:
        """What launches had to do with it; empty where they had nothing."""
        if not self.launched_us:
            return ""
        text = f"launched one by one: {_in_words(self.launched_us)}"
        shortest = min(self.times_us, key=lambda name: self.times_us[name])
        if shortest != self.winner:
            text += f"; {shortest} would win if replayed, as with mode='reduce-overhead'"
        return text


def _in_words(times_us: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {us:.1f} us" for name, us in times_us.items())


@dataclass(frozen=True)
class CompiledAhead:
    """A form that :func:`compile_for_timing` compiled before the search.

    Args:
        compiled: None where it could not be compiled. seconds: it took.
    """

    name: str
    compiled: Callable[..., Any] | None
    seconds: float


@dataclass(frozen=True)
class FastestForm:
    """What :func:`fastest_form` found.

    Args:
        verdict: the times and the winner; None when the forms could not be timed and the first is
            kept.
        compiled: the form that is kept as it was timed, where that is just what the options ask
            for; else None.
    """

    verdict: Verdict | None
    compiled: Callable[..., Any] | None = None


def fastest_form(
    forms: Mapping[str, Callable[[], GraphModule]],
    inputs: Sequence[Any],
    device: torch.device,
    opts: StofOptions,
    store: Store | None,
    identity: str,
    budget: Budget,
    ahead: CompiledAhead | None = None,
    workers: FormWorkers | None = None,
) -> FastestForm:
    """Compile and time the forms of one graph.

    Args:
        forms: name -> a function that makes the graph anew; the first is the one that is kept on
            a tie, and none of them writes to its inputs.
        inputs: real inputs of the graph, which are read only.
        opts: its Inductor settings apply, but for CUDA graphs.
        store: where the verdict is kept. identity: text that names the graph and what was asked.
        budget: once it is spent no further form is compiled for timing. The first form, which the
            user waits for anyway, takes nothing from it.
        ahead: a form that was compiled before; no other one is begun with less time left than it
            took.
        workers: processes that compile some of the forms. That as torch.compile runs it is waited
            for, and takes part whether there is time left or not; the user's Ctrl-C ends that.
    """
    launched = device.type == "cuda" and not is_replayed(opts)
    told = [identity, sorted(forms), "shortest to call" if launched else ""]
    key = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    held = _held(store, key, forms)
    if held is not None and not opts.tune_budget_s > held.unfinished_s > 0:
        return FastestForm(held)
    compiled: dict[str, Callable[..., Any]] = {}
    verdict = None
    try:
        complete = _compile(forms, inputs, opts, budget, compiled, ahead, workers)
        verdict = _timed(compiled, inputs, device, launched) if len(compiled) > 1 else None
        if not complete:
            verdict = verdict or Verdict(next(iter(forms)), {})
            verdict = replace(verdict, unfinished_s=opts.tune_budget_s)
    except KeyboardInterrupt:
        logger.warning("interrupted: the forms of the graph are not compared")
        budget.stop()
    if verdict is not None and store is not None:
        store.put(STORE_KIND, key, asdict(verdict))
    kept = next(iter(forms)) if verdict is None else verdict.winner
    return FastestForm(verdict, None if uses_cuda_graphs(opts) else compiled.get(kept))


def _held(store: Store | None, key: str, forms: Collection[str]) -> Verdict | None:
    value = None if store is None else store.get(STORE_KIND, key)
    if value is None:
        return None
    try:
        held = typed(Verdict(**value))
    except TypeError as error:
        logger.warning("a stored verdict cannot be read (%r) and is taken anew", error)
        return None
    return replace(held, source="store") if held.winner in forms else None


def _compile(
    forms: Mapping[str, Callable[[], GraphModule]],
    inputs: Sequence[Any],
    opts: StofOptions,
    budget: Budget,
    compiled: dict[str, Callable[..., Any]],
    ahead: CompiledAhead | None,
    workers: FormWorkers | None,
) -> bool:
    """Compile the forms while there is time, into ``compiled``; whether none was left out."""
    left = budget.left
    for number, (name, make) in enumerate(forms.items()):
        if ahead is not None and name == ahead.name:
            if ahead.compiled is not None:
                compiled[name] = ahead.compiled
            continue
        if number and not _has_time(name, budget, ahead, workers):
            logger.info("%s is not timed: the time budget was spent", name)
            return False
        started = time.monotonic()
        try:
            compiled[name] = compile_for_timing(make(), inputs, opts)
        except Exception as failure:  # a form that fails is out; the next one may be the answer
            if opts.strict:
                raise
            logger.warning("%s could not be compiled for timing: %r", name, failure)
        if not number:
            budget = replace(budget, seconds=left)
        elif workers is not None and workers.has(name):
            took = workers.seconds(name), time.monotonic() - started
            logger.debug("%s took another process %.1f s, and this one %.1f s", name, *took)
    return True


def _has_time(
    name: str, budget: Budget, ahead: CompiledAhead | None, workers: FormWorkers | None
) -> bool:
    """Whether a form behind the first takes part."""
    here = not budget.spent and (ahead is None or budget.left >= ahead.seconds)
    if workers is None or not workers.has(name):
        return here
    if budget.stopped:
        return workers.done(name)
    if name == AS_TORCH:  # we promise never to be slower
        workers.wait(name, None)
        return True
    return here and (workers.wait(name, budget) or not budget.spent)


def compile_for_timing(
    gm: GraphModule, inputs: Sequence[Any], opts: StofOptions
) -> Callable[..., Any]:
    """Compile a form of a graph as its options ask, but without CUDA graphs of Inductor."""
    return compile_with_inductor(copy_graph(gm), inputs, for_timing(opts))


def for_timing(opts: StofOptions) -> StofOptions:
    """Options without CUDA graphs of Inductor, else just as in the end: Inductor's caches know what
    was compiled for timing, then.
    """
    if uses_cuda_graphs(opts):
        return replace(opts, inductor=early_start_settings({**opts.inductor, **NO_GRAPHS}))
    return opts


def _timed(
    compiled: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Any],
    device: torch.device,
    launched: bool,
) -> Verdict | None:
    forms, sets = list(compiled.values()), [tuple(inputs)]

    def by_name(timings: Sequence[Timing]) -> dict[str, float]:
        return {name: t.median_us for name, t in zip(compiled, timings, strict=True)}

    def turns(budget_s: float, capture: bool) -> Sequence[Timing]:
        return time_in_turns(forms, sets, device, budget_s=budget_s, rounds=5, capture=capture)

    calls: dict[str, float] = {}
    try:
        if device.type == "cuda":
            timings = time_as_in_use(forms, sets, device, turn_s=LASTING_S, rounds=LASTING_TURNS)
            times = by_name(timings)
        else:
            times = by_name(turns(TIME_S, True))
    except (RuntimeError, StofUnsupportedError) as failure:  # out of memory, mostly
        logger.warning("the forms of the graph could not be timed: %s", failure)
        return None
    if launched:
        try:
            calls = by_name(turns(LAUNCHED_S, False))
        except RuntimeError as failure:
            logger.warning("calls of the graph's forms could not be timed: %s", failure)
    shortest = min(calls.values(), default=0.0)
    allowed = [name for name in times if not calls or calls[name] <= TIE * shortest]
    return Verdict(min(allowed, key=lambda name: times[name]), times, launched_us=calls)
