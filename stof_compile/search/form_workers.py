"""Whole graphs compiled by the processes that compile for the search of fusion.

What such a process compiled lies in Inductor's cache, so that the process that compares the forms
of a graph has it without lowering and compiling it once more.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from stof_compile.budget import Budget
from stof_compile.device import cuda_index
from stof_compile.graph_bytes import UnfitGraphError, to_bytes
from stof_compile.node_ops import dtype_of, operation, shape_of
from stof_compile.search.compile_pool import CompilePool, FormJob, worker_count
from stof_compile.search.library import OWN_SETTINGS, inductor_settings, is_plain
from stof_compile.torch_modes import TorchModes
from stof_compile.triton_environment import TritonEnvironment

log = logging.getLogger("stof_compile")

PATIENCE_S = 30.0
LEAST_WORKERS = 4  # with fewer, candidates would wait for a whole graph
TIMING = (
    "max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning",
    "benchmark_kernel", "benchmark_fusion", "benchmark_combo_kernel", "triton.multi_kernel",
    "cpp_wrapper", "freezing",
)  # fmt: skip
"""Settings under which Inductor times kernels while it compiles, which a process that launches
nothing cannot, or reads the values of weights."""
PRODUCTS = ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm")
ROWS_ONLY = ("linear", "mm", "addmm")  # batches become rows; in the others they may stay apart
ADDED_TO = ("addmm", "baddbmm")  # their first argument is added to the product of the next two


@dataclass
class _Sent:
    future: Future[str]
    begun: float
    seconds: float | None = None  # that it took; None while it runs

    def note(self, now: float) -> None:
        self.seconds = now - self.begun


@dataclass
class FormWorkers:
    """The forms of one graph that other processes compile.

    Args:
        pool: the processes. device: of the graph.
    """

    pool: CompilePool
    device: torch.device
    _sent: dict[str, _Sent] = field(default_factory=dict)

    def send(
        self, name: str, gm: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
    ) -> bool:
        """Have a form compiled as ``inductor.compile_with_settings`` would compile it here.

        Args:
            name: of the form. settings: that Inductor will be called with.
        Returns:
            Whether it was sent; the log says why not.
        """
        try:
            reason = _unfit(gm, settings, self.device) if self.pool.alive else "no process is left"
            job = None if reason else self._job(name, gm, inputs, settings)
        except (UnfitGraphError, RuntimeError) as failure:
            job, reason = None, str(failure)
        if job is None:
            log.debug("%s is compiled in this process: %s", name, reason)
            return False
        sent = self._sent[name] = _Sent(self.pool.submit(job), time.monotonic())
        sent.future.add_done_callback(lambda _: sent.note(time.monotonic()))
        return True

    def _job(
        self, name: str, gm: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
    ) -> FormJob:
        cuda = self.device.type == "cuda"
        return FormJob(
            name, to_bytes(gm, inputs), pickle.dumps(dict(settings)), inductor_settings(),
            f"cuda:{cuda_index(self.device)}" if cuda else str(self.device),
            TritonEnvironment.of_this_process(self.device),
            TorchModes.here(),
        )  # fmt: skip

    def seconds(self, name: str) -> float:
        """Seconds that a form took, or has taken so far; 0 where it was not sent, or failed."""
        sent = self._sent.get(name)
        if sent is None or self.failed(name):
            return 0.0
        return time.monotonic() - sent.begun if sent.seconds is None else sent.seconds

    def done(self, name: str) -> bool:
        """Whether a form was compiled."""
        sent = self._sent.get(name)
        return sent is not None and sent.future.done() and _succeeded(sent.future)

    @property
    def busy(self) -> bool:
        """Whether a form that was sent is not compiled yet."""
        return any(not sent.future.done() for sent in self._sent.values())

    def keep_only_these(self) -> None:
        """Drop the jobs of the pool that wait, but for forms: the search is over."""
        self.pool.drop_all_but([sent.future for sent in self._sent.values()])

    def has(self, name: str) -> bool:
        """Whether a form was sent."""
        return name in self._sent

    def failed(self, name: str) -> bool:
        """Whether a form was sent, and could not be compiled."""
        sent = self._sent.get(name)
        return sent is not None and sent.future.done() and not _succeeded(sent.future)

    def wait(self, name: str, budget: Budget | None) -> bool:
        """Wait for a form that was sent.

        Args:
            budget: nothing is waited for beyond it; None = as long as it has taken so far, and half
                a minute more.
        Returns:
            Whether it was compiled.
        """
        sent = self._sent[name]
        budget = budget or Budget(PATIENCE_S + time.monotonic() - sent.begun)
        while not sent.future.done() and self.pool.alive and not budget.spent:
            wait([sent.future], timeout=0.05)
        return sent.future.done() and _succeeded(sent.future)

    def close(self) -> None:
        """End the processes."""
        self.pool.close()


def form_workers(pool: CompilePool | None, device: torch.device) -> FormWorkers | None:
    """The processes of a pool, for whole graphs; None where they are too few."""
    if pool is None or worker_count() < LEAST_WORKERS:
        return None
    return FormWorkers(pool, device)


def _succeeded(future: Future[str]) -> bool:
    return not future.cancelled() and not future.result()


def _unfit(gm: GraphModule, settings: Mapping[str, Any], device: torch.device) -> str:
    """Why a graph under these settings of Inductor is not for another process."""
    import torch._inductor.config as config

    held = {**config.get_config_copy(), **settings}
    if any(not is_plain(v) for k, v in held.items() if not k.startswith(OWN_SETTINGS)):
        return "a setting of Inductor is code"
    for name in TIMING:
        if held.get(name):
            return f"Inductor's {name} is on"
    disabled = settings.get("force_disable_caches", config.force_disable_caches)
    if not held["fx_graph_cache"] or disabled:
        return "Inductor's cache is off"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    pads = held.get("shape_padding") and not held.get("deterministic") and device.type == "cuda"
    return _padded(gm) if pads else ""


def _padded(gm: GraphModule) -> str:
    """Why Inductor would time a product of a graph to see whether padding it pays.

    It does so where a size is not aligned and arithmetic, not memory, bounds the product.
    """
    for node in gm.graph.nodes:
        if operation(node) not in PRODUCTS:
            continue
        dtype, out = dtype_of(node), shape_of(node) or ()
        operands = [*node.args, *node.kwargs.values()]
        left = operands[1 if operation(node) in ADDED_TO else 0]
        rows = shape_of(left) or ()
        if dtype is None or not dtype.is_floating_point or not all(map(_known, (out, rows))):
            continue
        *outer, columns = out
        *_, inner = rows
        flat = operation(node) in ROWS_ONLY
        for m in {math.prod(outer)} if flat else {outer[-1], math.prod(outer)}:
            sizes = m, inner, columns
            aligned = all(n == 1 or n % (16 // dtype.itemsize) == 0 for n in sizes)
            if not aligned and _bound_by_arithmetic(*sizes, dtype):
                return f"Inductor may time {node.name} to see whether padding it pays"
    return ""


def _known(shape: Sequence[Any]) -> bool:
    """Whether a shape is that of a matrix, or of several, in numbers."""
    return len(shape) > 1 and all(isinstance(size, int) for size in shape)


def _bound_by_arithmetic(m: int, k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether Inductor takes a product for bound by arithmetic; True where it can't be asked."""
    try:
        from torch._inductor.fx_passes.pad_mm import is_mm_compute_bound

        return bool(is_mm_compute_bound(m, k, n, dtype))
    except Exception as failure:  # its own function, of another version of torch
        log.debug("whether products are padded is not known: %r", failure)
        return True
