"""Times on a CUDA device: replays of a graph of several calls, or single calls between events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

log = logging.getLogger(__name__)

MIN_RUNS = 3
MAX_RUNS = 1000
GRAPH_US = 500.0
"""Length of one graph replay, long against its launch and the 5 us resolution of events."""

SLOW_US = 20 * GRAPH_US
"""A call of the function that long shows no launch cost and is not repeated only to be sized up."""

MAX_TURNS = 200

MANY_SETS = 16
"""From so many input sets on a graph holds them all once and may last half of ``GRAPH_US``: they
are there for short calls, and making them in Python takes longer than timing them."""

WARM_S = 0.2
"""Of replays before functions are timed under load."""

PAUSE_S = 0.1
"""Before a burst. After 20 ms an H200 already begins at its full clock again."""

BURST_S = 0.02
"""Of replays behind a pause, the one that wakes the device included."""

LONGEST_BURST_S = 0.03
"""So long an H200 keeps its full clock, whatever it draws."""

BURSTS = 5


def time_on_cuda(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    budget_s: float,
    capture: bool,
    least: int = MIN_RUNS,
) -> tuple[list[float], str]:
    """Time a function on the current CUDA device.

    Args:
        fn, input_sets, budget_s, capture: as for ``measure.time_callable``.
        least: samples, whatever they cost.
    Returns:
        Microseconds of one call, a sample each, and how they were taken: "cuda-graph" or
        "events (why)".
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for inputs in input_sets:  # compiles, picks library algorithms, fills the allocator
            fn(*inputs)
        stream.synchronize()
        samples = None
        method = "events (single calls asked for)"
        if capture:
            try:
                samples = _time_replay(fn, input_sets, budget_s, stream, least)
                method = "cuda-graph"
            except RuntimeError as error:  # something in fn cannot be captured, or failed in it
                reason = (str(error).strip().splitlines() or ["no reason given"])[0]
                log.debug("timing without a CUDA graph: %s", reason)
                method = f"events ({reason})"
                torch.cuda.synchronize()
        if samples is None:
            turn = iter(_endless(input_sets))
            rough_us = _event_samples(lambda: fn(*next(turn)), 1)[0]
            samples = _event_samples(lambda: fn(*next(turn)), _runs(budget_s, rough_us, least))
        stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return samples, method


def time_in_bursts(
    fn: Callable[..., Any], input_sets: Sequence[tuple[Any, ...]]
) -> list[float] | None:
    """Time a function on the current CUDA device in bursts, ``PAUSE_S`` apart, that end before a
    GPU that draws all the power it may have lowers its clock: as a kernel runs whose neighbours
    draw less. The first replay of each wakes the device and does not count.

    Args:
        fn, input_sets: as for ``measure.time_callable``.
    Returns:
        Microseconds of one call, a sample each replay; None where the function cannot be captured,
        or two replays of a call on each input set take longer than ``LONGEST_BURST_S``.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    taken: list[float] = []
    with torch.cuda.stream(stream):
        for inputs in input_sets:
            fn(*inputs)
        stream.synchronize()
        try:
            graph, calls, one_us = _long_graph(fn, input_sets, stream)
            runs = _runs(BURST_S, one_us, 2)
            for _ in range(BURSTS if runs * one_us <= LONGEST_BURST_S * 1e6 else 0):
                stream.synchronize()
                time.sleep(PAUSE_S)
                samples = _event_samples(graph.replay, runs)
                taken += [us / calls for us in samples[1:]]
        except RuntimeError as error:  # as in ``time_on_cuda``
            log.debug("timing without bursts: %s", error)
            taken.clear()
            torch.cuda.synchronize()
        stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return taken or None


def time_under_load(
    fns: Sequence[Callable[..., Any]],
    input_sets: Sequence[tuple[Any, ...]],
    turn_s: float,
    rounds: int,
) -> list[list[float]] | None:
    """Time functions against each other on the current CUDA device, which hardly gets a pause.

    A GPU that is busy for long draws all the power it may have and lowers its clock, so that what
    takes less energy is faster: an order that bursts do not show. All graphs are captured first
    and are there together; the first is replayed for ``WARM_S``, and then all in turns, of which
    the first half is not counted: there the clock still is what the function before made it. Each
    turn is launched as a whole; between two of them the host waits for the first's end.

    Args:
        fns: called as ``fn(*inputs)``. input_sets: used in turn.
        turn_s: seconds of a turn, a replay at least. rounds: turns of each function; every other
            round goes backwards.
    Returns:
        Samples of each function, microseconds of one call; None where one cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    taken: list[list[float]] = [[] for _ in fns]
    with torch.cuda.stream(stream):
        try:
            held = []
            for fn in fns:
                for inputs in input_sets:
                    fn(*inputs)
                held.append(_long_graph(fn, input_sets, stream))
            graph, _, one_us = held[0]
            _event_samples(graph.replay, _runs(WARM_S, one_us, 1))
            order = list(range(len(fns)))
            for number in range(rounds):
                for index in order if number % 2 == 0 else reversed(order):
                    graph, calls, one_us = held[index]
                    samples = _event_samples(graph.replay, _runs(turn_s, one_us, 1))
                    taken[index] += [us / calls for us in samples[len(samples) // 2 :]]
        except RuntimeError as error:  # as in ``time_on_cuda``, or too little memory for all graphs
            log.debug("timing without a lasting load: %s", error)
            torch.cuda.synchronize()
            return None
        stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return taken


def _time_replay(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    budget_s: float,
    stream: torch.cuda.Stream,
    least: int,
) -> list[float]:
    graph, calls, one_us = _long_graph(fn, input_sets, stream)
    samples = _event_samples(graph.replay, _runs(budget_s, one_us, least))
    return [sample / calls for sample in samples]


def _long_graph(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    stream: torch.cuda.Stream,
) -> tuple[torch.cuda.CUDAGraph, int, float]:
    """A graph of some ``GRAPH_US``, the calls in it, and the microseconds of a replay."""
    many = len(input_sets) >= MANY_SETS
    turn = iter(_endless(input_sets))
    # with the launches in it, this is too long for short kernels, by any factor
    rough_us = (
        GRAPH_US if many else _event_samples(lambda: [fn(*next(turn)) for _ in input_sets], 1)[0]
    )
    turns = _turns(1, rough_us)
    graph = _capture(fn, input_sets, turns, stream)
    one_us = _event_samples(graph.replay, 1)[0]
    if max(one_us, rough_us) <= SLOW_US:
        one_us = min(one_us, *_event_samples(graph.replay, 2))
    if _turns(turns, one_us) > turns and not (many and one_us > GRAPH_US / 2):
        turns = _turns(turns, one_us)
        graph = _capture(fn, input_sets, turns, stream)
        one_us = _event_samples(graph.replay, 1)[0]
    return graph, turns * len(input_sets), one_us


def _turns(turns: int, took_us: float) -> int:
    """Turns over the input sets that make a graph long enough, if so many take so long."""
    return max(1, min(round(turns * GRAPH_US / max(took_us, 1.0)), MAX_TURNS))


def _capture(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    turns: int,
    stream: torch.cuda.Stream,
) -> torch.cuda.CUDAGraph:
    """A graph of whole turns over the input sets, so that every set counts the same; replayed once.

    Not with torch.cuda.graph: it may collect garbage and empties the allocator's cache first, and
    what runs next has to get its memory from the driver again. thread_local: other threads of the
    process may allocate meanwhile without spoiling the capture.
    """
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(turns):
            for inputs in input_sets:
                fn(*inputs)
    except Exception:  # goes on as it came, or as what the end of an invalid capture raises
        graph.capture_end()
        raise
    except BaseException:  # Ctrl-C stays what it is, where the end of what it broke fails as well
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
    graph.replay()
    stream.synchronize()
    return graph


def _endless(input_sets: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    while True:
        yield from input_sets


def _event_samples(run: Callable[[], Any], runs: int) -> list[float]:
    """Microseconds of each of ``runs`` calls on the current stream."""
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(runs)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(runs)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.current_stream().synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]


def _runs(budget_s: float, sample_us: float, least: int) -> int:
    return int(max(least, min(MAX_RUNS, budget_s * 1e6 / max(sample_us, 1.0))))
