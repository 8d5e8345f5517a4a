"""Finals of attention candidates: the fastest once more, within the products of a layer.

A trial reads tensors that have left the L2 cache, on a GPU at its full clock. In a model the
products in front have just written q, k and v, and the clock has fallen under the power that the
products of the layer draw. There forms that were some per cent apart change places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stof_compile.attention.call import bind_kernel
from stof_compile.attention.decision_table import family
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.trial import input_sets, random_extras
from stof_compile.budget import Budget
from stof_compile.measure import time_in_turns
from stof_compile.plan import Candidate

FINALISTS, REACH = 4, 1.15  # how many, and how much slower than the fastest one may be
GAIN = 0.002  # of a layer's products and attention, for which another candidate is taken
EACH_S = 0.4  # seconds of a finalist
MLP_WIDTH = 4  # times the columns of q, as most Transformers have it
OWN_ROWS = 512  # from which on products on Hopper are ours (templates/hopper_linear.py)
MOST_BYTES = 1 << 30  # of one set of q, k and v: longer calls gain little from what is in the cache


class View(NamedTuple):
    """What is seen in a matrix: arguments of ``as_strided``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


class Product(NamedTuple):
    """A product [tokens, columns] in front of attention, and which of q, k and v lie in it."""

    x: Tensor
    weight: Tensor
    views: tuple[View, ...]


Scene = tuple[tuple[Product, ...], tuple[Any, ...], tuple[Tensor, ...]]
"""Products in order, padding and bias or None, and the weights of the products behind attention."""


def settle(
    problem: AttentionProblem,
    measured: Sequence[Candidate],
    generator: torch.Generator,
    budget: Budget,
) -> tuple[Candidate, str]:
    """The candidate to take, and how it won the finals; empty where there were none.

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
        or not 0 < _bytes(problem) <= MOST_BYTES
        or budget.left < len(finalists) * EACH_S
    ):
        return ranked[0], ""
    scenes = make_scenes(problem, generator)
    chains = [_chain(problem, finalist) for finalist in finalists]
    try:
        timings = time_in_turns(chains, scenes, problem.device, budget_s=EACH_S, rounds=3)
    except torch.OutOfMemoryError:  # the trials alone fitted
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


def make_scenes(problem: AttentionProblem, generator: torch.Generator) -> list[Scene]:
    """As many sets of operands as trials rotate over; x stays, as it does in a model."""
    device, dtype = problem.device, problem.q.dtype
    hidden = _width(problem.q)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
        return (values * scale).to(dtype)

    def weight(outputs: int, inputs: int) -> Tensor:
        return drawn(outputs, inputs, scale=inputs**-0.5)

    xs = {n: drawn(problem.batch * n, hidden) for n in (problem.q_len, problem.k_len)}
    behind = problem.heads * problem.v.shape[3]  # columns of attention's result
    wide = MLP_WIDTH * hidden
    scenes: list[Scene] = []
    for _ in range(input_sets(problem)):
        products = []
        for length, columns, members in _matrices(problem):
            products.append(Product(xs[length], weight(columns, hidden), members))
        rest = weight(hidden, behind), weight(wide, hidden), weight(hidden, wide)
        scenes.append((tuple(products), random_extras(problem, generator), rest))
    return scenes


def _matrices(problem: AttentionProblem) -> list[tuple[int, int, tuple[View, ...]]]:
    """(tokens of a sequence, columns, what is seen in it) of the matrices that q, k and v lie in.

    Parts of the same rows are one matrix, and so are three that a packed product would write.
    """
    metas = (problem.q, problem.k, problem.v)
    widths = [_width(meta) for meta in metas]
    length = problem.q_len
    by_token = all(
        m.shape[2] == length and m.stride[1] == m.shape[3] and m.stride[3] == 1 for m in metas
    )
    pitches = {m.stride[2] for m in metas}
    alike = by_token and all(m.stride[0] == length * m.stride[2] for m in metas)
    if alike and (pitches == {sum(widths)} or [m.stride[2] for m in metas] == widths):
        pitch = sum(widths)
        views = []
        for meta, first in zip(metas, (0, widths[0], widths[0] + widths[1]), strict=True):
            stride = (length * pitch, meta.shape[3], pitch, 1)
            views.append(View(meta.shape, stride, first))
        return [(length, pitch, tuple(views))]
    apart: list[tuple[int, int, tuple[View, ...]]] = []
    for meta in metas:
        extent = 1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True))
        columns = ceil(extent / (meta.shape[0] * meta.shape[2]) / 8) * 8
        apart.append((meta.shape[2], columns, (View(meta.shape, meta.stride, 0),)))
    return apart


def _chain(problem: AttentionProblem, candidate: Candidate) -> Callable[..., Tensor]:
    call = bind_kernel(problem, candidate.kernel, candidate.config)

    def run(
        products: tuple[Product, ...], extras: tuple[Any, ...], rest: tuple[Tensor, ...]
    ) -> Tensor:
        seen: list[Tensor] = []
        for x, weight, views in products:
            matrix = _product(x, weight)
            seen += [matrix.as_strided(*view) for view in views]
        (q, k, v), (keep, bias) = seen, extras
        out = call.run(q, k, v, keep, bias, call.buffers)
        made: Tensor = out.transpose(1, 2).reshape(-1, rest[0].shape[1])
        for weight in rest:
            made = _product(made, weight)
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


def _bytes(problem: AttentionProblem) -> int:
    elements = sum(m.shape[0] * m.shape[2] * _width(m) for m in (problem.q, problem.k, problem.v))
    return elements * problem.q.dtype.itemsize


def _time(candidate: Candidate) -> float:
    assert candidate.median_us is not None, "only measured candidates reach the finals"
    return candidate.median_us


def _words(candidate: Candidate) -> str:
    config = ",".join(map(str, candidate.config))
    return f"{candidate.kernel}[{config}]" if config else candidate.kernel
