"""Trials of attention candidates: compiled, checked against fp64, timed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from stof_compile.attention.call import KernelCall, bind_kernel
from stof_compile.attention.problem import AttentionProblem
from stof_compile.errors import StofUnsupportedError
from stof_compile.measure import check_close, time_callable
from stof_compile.plan import Candidate

logger = logging.getLogger("stof_compile")

COMPILE_THREADS = 6
OWN_GRADIENTS = {"cuda": ("block", "row", "gather")}  # kernels with a backward pass of ours
GRADIENT_SCALE = 4.0  # on the tolerance: gradients are sums of products of rounded results
GATE_ROWS = (
    256  # query rows a candidate is checked on against fp64, in the first and the last plane
)


def measure_candidate(
    problem: AttentionProblem, kernel: str, config: tuple[int, ...], generator: torch.Generator
) -> Candidate:
    """Time one candidate on random tensors after it passed the correctness gate; a failure is a
    recorded trial."""
    try:
        # not the caller's: those of a checkpoint would run the model anew, which compiles it again
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            return _measure(problem, kernel, config, generator)
    except StofUnsupportedError as refusal:
        return Candidate(kernel, config, "refused", reason=str(refusal))
    except Exception as failure:  # a failed candidate is a recorded trial (architecture.md)
        logger.info("attention candidate %s %s failed: %r", kernel, config, failure)
        return Candidate(
            kernel, config, "failed", reason=f"{type(failure).__name__}: {failure}"[:300]
        )


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _measure(
    problem: AttentionProblem, kernel: str, config: tuple[int, ...], generator: torch.Generator
) -> Candidate:
    call = bind_kernel(problem, kernel, config)
    sets = [_random_inputs(problem, generator) for _ in range(_input_sets(problem))]
    error = _gate(problem, call, sets[0])
    if error is None:
        return Candidate(kernel, config, "failed", reason="output differs from the fp64 reference")
    ours = (
        kernel in OWN_GRADIENTS.get(problem.device.type, ())
        and problem.training
        and not problem.bias_grad
    )
    if ours and not _gradients_agree(problem, call, sets[0], generator):
        reason = "gradients differ from the fp64 reference"
        return Candidate(kernel, config, "failed", reason=reason)
    timing = time_callable(_timed(problem, call), _prepared(call, sets), problem.device)
    return Candidate(
        kernel, config, "measured", timing.median_us, timing.p20_us, timing.p80_us, error
    )


def _input_sets(problem: AttentionProblem) -> int:
    """Enough copies that a GPU's L2 (about 60 MB) cannot hold them all, four at most."""
    if problem.device.type != "cuda":
        return 1
    one = (
        3
        * problem.batch
        * problem.heads
        * problem.q_len
        * problem.head_dim
        * problem.q.dtype.itemsize
    )
    return max(1, min(4, math.ceil(120e6 / max(one, 1))))


def _random_inputs(problem: AttentionProblem, generator: torch.Generator) -> tuple[Any, ...]:
    from stof_compile.kernels.biased_sdpa import bias_dtype

    device = problem.device
    q, k, v = (meta.random(device, generator) for meta in (problem.q, problem.k, problem.v))
    keep = (
        torch.ones(problem.batch, problem.k_len, dtype=torch.bool, device=device)
        if problem.padding
        else None
    )
    bias = problem.bias.random(device, generator) if problem.bias is not None else None
    if bias is not None and bias_dtype(q.dtype, bias.dtype) != q.dtype:
        bias = bias + 256.0  # the softmax is that of before; rounded to q's dtype it would not be
    return q, k, v, keep, bias


def _prepared(call: KernelCall, sets: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Sets of inputs with the operands that the kernel itself takes."""
    with torch.no_grad():
        return [(*call.prepare(*inputs[:3]), *inputs[3:]) for inputs in sets]


def _timed(problem: AttentionProblem, call: KernelCall) -> Callable[..., Any]:
    if not problem.training:

        def forward(*inputs: Any) -> Any:
            with torch.no_grad():
                q, k, v, key_keep, bias = inputs
                return call.attend(q, k, v, key_keep, bias, call.buffers)

        return forward

    def forward_backward(q: Any, k: Any, v: Any, key_keep: Any, bias: Any) -> Any:
        with torch.enable_grad():
            wanted = (q, k, v, bias) if problem.bias_grad else (q, k, v)
            leaves = [t.detach().requires_grad_() for t in wanted]
            added = leaves[3] if problem.bias_grad else bias
            out = call.run(leaves[0], leaves[1], leaves[2], key_keep, added, call.buffers)
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return forward_backward


def _gate(problem: AttentionProblem, call: KernelCall, inputs: tuple[Any, ...]) -> float | None:
    """Return the largest relative error on sampled rows of a few planes, None when it is out of
    tolerance.

    Rows are sampled so that the check costs O(rows x K) at any length.
    """
    from stof_compile.kernels.reference import attention_reference, rounded_to_e4m3

    q, k, v, key_keep, bias = inputs
    exact = rounded_to_e4m3 if problem.fp8 else torch.Tensor.double  # of whole heads
    dtype = torch.float8_e4m3fn if problem.fp8 else problem.q.dtype
    reference: torch.Tensor
    with torch.no_grad():
        # the second launch goes past Triton, the third past all checks: bound_launch.py
        for _ in range(2 if problem.device.type == "cuda" else 0):
            call.run(q, k, v, key_keep, bias, call.buffers)
        out = call.run(q, k, v, key_keep, bias, call.buffers)
    device, group = problem.device, problem.heads // problem.k.shape[1]
    stride = max(1, problem.q_len // GATE_ROWS)
    rows = torch.arange(0, problem.q_len, stride, device=device)
    rows = torch.cat([rows, rows.new_tensor([problem.q_len - 1])])
    keys = torch.arange(problem.k_len, device=device)
    worst = 0.0
    for b, h in sorted({(0, 0), (problem.batch - 1, problem.heads - 1)}):
        keep = None
        if problem.spec is not None:
            spec = problem.spec.bind(problem.q_len, problem.k_len, problem.q_offset, device)
            plane = (torch.tensor(b, device=device), torch.tensor(h, device=device))
            keep = spec.keep(*plane, (rows + problem.q_offset)[:, None], keys[None, :])
            keep = keep.expand(rows.numel(), problem.k_len)[None, None]
        row_bias = None
        if bias is not None:
            whole = bias.expand(problem.batch, problem.heads, problem.q_len, problem.k_len)
            row_bias = whole[b : b + 1, h : h + 1, rows].double()
        reference = attention_reference(  # type: ignore[assignment]
            exact(q[b : b + 1, h : h + 1])[:, :, rows],
            exact(k[b : b + 1, h // group : h // group + 1]),
            exact(v[b : b + 1, h // group : h // group + 1]),
            keep=keep,
            key_keep=None if key_keep is None else key_keep[b : b + 1],
            bias=row_bias,
            scale=problem.scale,
            softcap=problem.softcap,
        )
        report = check_close(out[b : b + 1, h : h + 1, rows], reference, dtype)
        if not report.ok:
            return None
        worst = max(worst, report.max_rel)
    return worst


def _gradients_agree(
    problem: AttentionProblem,
    call: KernelCall,
    inputs: tuple[Any, ...],
    generator: torch.Generator,
) -> bool:
    """Whether the gradients of q, k and v are those of the reference formula in fp64, for the
    first and the last key head and its queries."""
    from stof_compile.kernels.reference import attention_backward_reference, strip_rows

    q, k, v, key_keep, bias = inputs
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = call.run(leaves[0], leaves[1], leaves[2], key_keep, bias, call.buffers)
        # as a reader of the next layer would give it: of the same kind as the output
        wanted = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        wanted.normal_(generator=generator)
        gradients = torch.autograd.grad(out, leaves, wanted)
    kv_heads, device = problem.k.shape[1], problem.device
    group = problem.heads // kv_heads
    keys = torch.arange(problem.k_len, device=device)
    for b, head in sorted({(0, 0), (problem.batch - 1, kv_heads - 1)}):
        batch, heads = slice(b, b + 1), slice(head * group, (head + 1) * group)
        head_numbers = torch.arange(problem.heads, device=device)[heads]
        whole_bias = None
        if bias is not None:
            whole = bias.expand(problem.batch, problem.heads, problem.q_len, problem.k_len)
            whole_bias = whole[batch, heads]
        queries, of_keys = q[batch, heads].double(), slice(head, head + 1)
        expected = attention_backward_reference(
            wanted[batch, heads].double(),
            None,
            queries,
            k[batch, of_keys].double(),
            v[batch, of_keys].double(),
            partial(_kept, problem, b, head_numbers, keys),
            None if key_keep is None else key_keep[batch],
            whole_bias,
            problem.scale,
            problem.softcap,
            strip=strip_rows(queries, problem.k_len, 1),
        )
        places = ((batch, heads), (batch, of_keys), (batch, of_keys))
        for found, reference, place in zip(gradients, expected, places, strict=False):
            dtype = problem.q.dtype
            if not check_close(found[place], reference, dtype, scale=GRADIENT_SCALE).ok:
                return False
    return True


def _kept(
    problem: AttentionProblem,
    b: int,
    heads: torch.Tensor,
    keys: torch.Tensor,
    first: int,
    last: int,
) -> torch.Tensor | None:
    """The mask of some query rows and heads, [1, heads, rows, K]; None for all kept."""
    if problem.spec is None:
        return None
    spec = problem.spec.bind(problem.q_len, problem.k_len, problem.q_offset, keys.device)
    rows = torch.arange(first, last, device=keys.device) + problem.q_offset
    plane = torch.tensor(b, device=keys.device)
    keep = spec.keep(plane, heads[:, None, None], rows[:, None], keys[None, :])
    return keep.expand(heads.numel(), last - first, keys.numel())[None]


def compile_together(
    problem: AttentionProblem, candidates: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Call Triton candidates once on a GPU, in threads: most of a compilation runs without Python's
    lock.

    One that fails does so again, and is recorded, where it is measured.
    """
    wanted = [c for c in candidates if c[0] != "sdpa"]
    if len(wanted) < 2:
        return
    inputs = _inputs_for_compiling(problem)

    def call_once(candidate: tuple[str, tuple[int, ...]]) -> None:
        try:
            with torch.cuda.device(problem.device):
                _timed(problem, calls[candidate])(*_prepared(calls[candidate], [inputs])[0])
        except Exception as failure:  # told where it is measured
            logger.debug("attention candidate %s failed in a thread: %r", candidate, failure)

    calls = {}
    for candidate in wanted:
        try:
            calls[candidate] = bind_kernel(problem, *candidate)
        except StofUnsupportedError:  # told where it is measured
            continue
    with ThreadPoolExecutor(min(COMPILE_THREADS, len(wanted))) as threads:
        list(threads.map(call_once, calls))
    torch.cuda.synchronize(problem.device)


def compile_candidate(problem: AttentionProblem, kernel: str, config: tuple[int, ...]) -> None:
    """Compile a Triton candidate in a process that launches nothing.

    Raises:
        StofUnsupportedError: no such kernel, or one that cannot run the problem.
        Exception: whatever a compiler raises.
    """
    call = bind_kernel(problem, kernel, config)
    _timed(problem, call)(*_prepared(call, [_inputs_for_compiling(problem)])[0])


def _inputs_for_compiling(problem: AttentionProblem) -> tuple[Any, ...]:
    return _random_inputs(problem, torch.Generator(problem.device).manual_seed(0))
