"""Finals of attention candidates: the fastest once more, within the products of a layer.

A trial reads tensors that have left the L2 cache, on a GPU at its full clock. In a model the
products in front have just written q, k and v, and the clock has fallen under the power that the
products of the layer draw. There forms that were some per cent apart change places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from stof_compile.attention.call import bind_kernel
from stof_compile.attention.decision_table import family
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.trial import random_extras
from stof_compile.budget import Budget
from stof_compile.measure import time_in_turns
from stof_compile.plan import Candidate

FINALISTS, REACH = 4, 1.15  # how many, and how much slower than the fastest one may be
GAIN = 0.003  # of a layer's products and attention, for which another candidate is taken
EACH_S, ROUNDS = 0.4, 3  # seconds of a finalist, and turns that they are spent in
LONGEST_US = 5000.0  # of the fastest: longer calls gain little from what is in the cache
OWN_ROWS = 512  # from which on products on Hopper are ours (templates/hopper_linear.py)
MLP_WIDTH = 4  # times the columns of q, as most Transformers have it
CACHE_BYTES = 120e6  # sets of weights rotate through more than this
MOST_BYTES = 2 << 30  # of all sets

logger = logging.getLogger("stof_compile")


class View(NamedTuple):
    """What is seen in a matrix: arguments of ``as_strided``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


class Scene(NamedTuple):
    """What one layer reads: x and the weight of q, k and v, padding and bias or None, and the
    weights of the products behind attention."""

    x: Tensor
    weight: Tensor
    extras: tuple[Tensor | None, Tensor | None]
    rest: tuple[Tensor, ...]


def settle(
    problem: AttentionProblem,
    measured: Sequence[Candidate],
    generator: torch.Generator,
    budget: Budget,
) -> tuple[Candidate, str]:
    """The candidate to take, and how it won the finals; empty where there were none.

    Finals that fail change nothing: the trials have an answer.

    Args:
        measured: candidates that passed their gate, with their times; at least one.
    """
    ranked = sorted(measured, key=_time)
    finalists = list(_first_of_kinds(c for c in ranked if _time(c) <= REACH * _time(ranked[0])))
    del finalists[FINALISTS:]
    if (
        len(finalists) < 2
        or problem.device.type != "cuda"
        or problem.training
        or _time(ranked[0]) > LONGEST_US
        or not packed_views(problem)
        or _set_bytes(problem) * _sets(problem) > MOST_BYTES
        or budget.left < 2 * len(finalists) * EACH_S
    ):
        return ranked[0], ""
    try:
        scenes = make_scenes(problem, generator)
        chains = [_chain(problem, finalist) for finalist in finalists]
        # the first of each round meets a clock that is high again: it runs twice
        timings = time_in_turns(
            [chains[0], *chains], scenes, problem.device, budget_s=EACH_S, rounds=ROUNDS
        )[1:]
    except Exception as failure:  # as that of a trial (architecture.md)
        logger.info("finals of attention failed, the trials decide: %r", failure)
        return ranked[0], ""
    times = [timing.median_us for timing in timings]
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] >= times[0] * (1 - GAIN):
        return finalists[0], ""
    told = (
        f"within the products of a layer it is faster than {_words(finalists[0])}, which is "
        f"fastest alone: {times[best]:.1f} against {times[0]:.1f} us together with them"
    )
    return finalists[best], told


def _first_of_kinds(ranked: Iterable[Candidate]) -> Iterator[Candidate]:
    """Candidates whose tile sizes or limits of registers no earlier one has."""
    seen = set()
    for candidate in ranked:
        kind: tuple[object, ...] = family(candidate.kernel, candidate.config)
        if candidate.kernel == "block":
            from stof_compile.kernels.attention_blockwise import BlockConfig

            kind = (*kind, BlockConfig(*candidate.config).registers)
        if kind not in seen:
            seen.add(kind)
            yield candidate


def packed_views(problem: AttentionProblem) -> tuple[View, ...]:
    """q, k and v in the rows of one product's result; empty where they do not come from one.

    They are parts of such rows, or three matrices that a packed product would write as one.
    """
    metas = (problem.q, problem.k, problem.v)
    length, widths = problem.q_len, [_width(meta) for meta in metas]
    pitches = [meta.stride[2] for meta in metas]
    by_token = all(
        m.shape[2] == length and m.stride == (length * m.stride[2], m.shape[3], m.stride[2], 1)
        for m in metas
    )
    pitch = sum(widths)
    if not (by_token and problem.batch * length * pitch and pitches in ([pitch] * 3, widths)):
        return ()
    firsts = (0, widths[0], widths[0] + widths[1])
    return tuple(
        View(meta.shape, (length * pitch, meta.shape[3], pitch, 1), first)
        for meta, first in zip(metas, firsts, strict=True)
    )


def make_scenes(problem: AttentionProblem, generator: torch.Generator) -> list[Scene]:
    """Sets of operands of a layer, so many that its weights come from memory; x stays, as it does
    in a model."""

    def drawn(rows: int, columns: int, spread: float) -> Tensor:
        empty = torch.empty(rows, columns, dtype=problem.q.dtype, device=problem.device)
        return empty.normal_(std=spread, generator=generator)

    shapes = _weights(problem)
    x = drawn(problem.batch * problem.q_len, shapes[0][1], 1.0)
    scenes = []
    for _ in range(_sets(problem)):
        first, *rest = (drawn(rows, columns, columns**-0.5) for rows, columns in shapes)
        scenes.append(Scene(x, first, random_extras(problem, generator), tuple(rest)))
    return scenes


def _weights(problem: AttentionProblem) -> tuple[tuple[int, int], ...]:
    """Shapes of the weights of a layer: packed projection, output, MLP up and down."""
    hidden = _width(problem.q)
    packed = sum(_width(meta) for meta in (problem.q, problem.k, problem.v))
    behind, wide = problem.heads * problem.v.shape[3], MLP_WIDTH * hidden
    return (packed, hidden), (hidden, behind), (wide, hidden), (hidden, wide)


def _set_bytes(problem: AttentionProblem) -> int:
    """Of the weights and the widest results of a layer."""
    elements = sum(rows * columns for rows, columns in _weights(problem))
    elements += problem.batch * problem.q_len * (MLP_WIDTH + 4) * _width(problem.q)
    return elements * problem.q.dtype.itemsize


def _sets(problem: AttentionProblem) -> int:
    return max(1, min(4, ceil(CACHE_BYTES / max(_set_bytes(problem), 1))))


def _chain(problem: AttentionProblem, candidate: Candidate) -> Callable[..., Tensor]:
    call, views = bind_kernel(problem, candidate.kernel, candidate.config), packed_views(problem)

    def run(
        x: Tensor,
        weight: Tensor,
        extras: tuple[Tensor | None, Tensor | None],
        rest: tuple[Tensor, ...],
    ) -> Tensor:
        matrix = _product(x, weight)
        q, k, v = (matrix.as_strided(*view) for view in views)
        out = call.run(q, k, v, *extras, call.buffers)
        made: Tensor = out.transpose(1, 2).reshape(-1, rest[0].shape[1])
        for behind in rest:
            made = _product(made, behind)
        return made

    return run


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by the kernel that a model most likely has there; on Hopper that is ours."""
    from stof_compile.kernels import hopper_linear as ours

    if x.is_cuda and x.shape[0] >= OWN_ROWS:
        capability = torch.cuda.get_device_capability(x.device)
        n, k = weight.shape
        if ours.hopper_linear_refusal(n, k, x.dtype, capability, "") is None:
            config = ours.HopperLinearConfig()
            return ours.hopper_linear_forward(x, weight, None, None, "", config)
    return torch.nn.functional.linear(x, weight)


def _width(meta: TensorMeta) -> int:
    return meta.shape[1] * meta.shape[3]


def _time(candidate: Candidate) -> float:
    assert candidate.median_us is not None, "only measured candidates reach the finals"
    return candidate.median_us


def _words(candidate: Candidate) -> str:
    config = ",".join(map(str, candidate.config))
    return f"{candidate.kernel}[{config}]" if config else candidate.kernel
