"""Attention candidates compiled by the processes that compile for the search of fusion."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from stof_compile.attention.ahead import Kernel
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.budget import Budget
from stof_compile.device import cuda_index
from stof_compile.search.compile_pool import AttentionJob, CompilePool, worker_count
from stof_compile.triton_environment import TritonEnvironment

log = logging.getLogger("stof_compile")

MOST_PICKLED = 16 * 2**20  # bytes of a problem, which is written to a pipe with each candidate
MOST_SCORES = 2**24  # of a mask: each process builds its own
MEMORY_SHARE = 0.25  # of the free device memory, for the operands of all processes
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)  # of others a worker would import the class


@dataclass
class AttentionWorkers:
    """See ``Workers`` of ``attention/ahead.py``.

    Args:
        pool: the processes. budget: seconds left; nothing is waited for beyond it.
    """

    pool: CompilePool
    budget: Budget
    _sent: dict[tuple[str, Kernel], Future[str]] = field(default_factory=dict)
    _pickled: dict[str, bytes] = field(default_factory=dict)

    def send(self, problem: AttentionProblem, candidates: Sequence[Kernel]) -> None:
        """See ``Workers``."""
        wanted = [c for c in candidates if c[0] != "sdpa" and (problem.key, c) not in self._sent]
        if not wanted or not self.pool.alive or self.budget.spent:
            return
        if problem.key not in self._pickled:
            self._pickled[problem.key] = _pickled(problem)
        data = self._pickled[problem.key]
        if not data:
            return
        index = cuda_index(problem.device)
        environment = TritonEnvironment.of_this_process(problem.device)
        for kernel, config in wanted:
            job = AttentionJob(data, kernel, config, f"cuda:{index}", environment)
            self._sent[problem.key, (kernel, config)] = self.pool.submit(job)

    def has(self, problem: AttentionProblem, candidate: Kernel) -> bool:
        """See ``Workers``."""
        future = self._sent.get((problem.key, candidate))
        if future is None:
            return False
        if future.done():
            return not future.cancelled() and not future.result()
        # where no worker has started yet, threads of this process are faster
        return self.pool.alive and (self.pool.ready or not future.cancel())

    def wait(self, problem: AttentionProblem, candidate: Kernel) -> None:
        """See ``Workers``."""
        future = self._sent.get((problem.key, candidate))
        while future is not None and not future.done():
            # what no worker has begun is compiled sooner where it is measured
            if not self.pool.alive or self.budget.spent or future.cancel():
                return
            wait([future], timeout=0.05)


def _pickled(problem: AttentionProblem) -> bytes:
    """A problem as bytes; empty where it is not sent, for a reason that the log has."""
    data, reason = b"", ""
    try:
        reason = _unfit(problem)
        if not reason:
            data = pickle.dumps(problem)  # a mask is written as data, whatever function it was
    except Exception as failure:  # a rule of the user's own class may raise anything
        reason = f"its mask cannot be sent: {failure!r}"
    if len(data) > MOST_PICKLED:
        data, reason = b"", f"its mask takes {len(data) / 2**20:.0f} MiB"
    if reason:
        log.debug("candidates of attention are compiled in this process: %s", reason)
    return data


def _unfit(problem: AttentionProblem) -> str:
    """Why a problem is not for many processes: what it takes there, or the classes it holds."""
    if problem.spec is not None:
        if problem.q_len * problem.k_len > MOST_SCORES:
            return f"a mask of {problem.q_len} x {problem.k_len} is large"
        tensors = problem.spec.tensors()
        size = sum(tensor.nbytes for tensor in tensors)
        if size > MOST_PICKLED:
            return f"its mask takes {size / 2**20:.0f} MiB"
        others = [type(tensor).__qualname__ for tensor in tensors if type(tensor) not in PLAIN]
        if others:
            return f"its mask holds a {others[0]}"
    sizes = [_extent_bytes(meta) for meta in (problem.q, problem.k, problem.v, problem.bias)]
    one = sum(sizes) + 2 * max(sizes)  # random values are made in fp32
    one += prod((*problem.q.shape[:-1], problem.v.shape[-1])) * problem.q.dtype.itemsize
    free = torch.cuda.mem_get_info(problem.device)[0]
    if one * worker_count() > MEMORY_SHARE * free:
        return f"its operands take {one / 2**20:.0f} MiB in every process"
    return ""


def _extent_bytes(meta: TensorMeta | None) -> int:
    """Bytes from the first to the last element of a tensor; 0 for none."""
    if meta is None or 0 in meta.shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True))
    return (last + 1) * meta.dtype.itemsize
