"""One worker of ``compile_pool``: reads jobs from its input, answers on its output.

Both carry pickles; the first answer says that the worker is ready.
"""

from __future__ import annotations

import os
import pickle
import sys
from functools import cache
from typing import Any, BinaryIO

import torch
import torch._inductor.config
from torch._guards import TracingContext, tracing

import stof_compile.ops
import stof_compile.ops_cpu  # noqa: F401 (operators of attention register where they are imported)
from stof_compile.attention.trial import compile_candidate
from stof_compile.graph_bytes import from_bytes
from stof_compile.inductor import compile_with_settings
from stof_compile.search.candidate import LIBRARY
from stof_compile.search.compile_pool import AnyJob, AttentionJob, FormJob, Job
from stof_compile.search.library import library_call
from stof_compile.search.trial import is_device_fault
from stof_compile.templates import TEMPLATES
from stof_compile.templates.base import TILELANG


def main() -> None:
    """Serve until the input ends."""
    # what a library prints must not end up among the answers
    answers: BinaryIO = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _launch_nothing()
    _answer(answers, "ready")
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _answer(answers, run(job))


def run(job: AnyJob) -> str:
    """Compile one candidate; returns "" or why it failed."""
    try:
        device = torch.device(job.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        job.environment.take()
        if isinstance(job, AttentionJob):
            compile_candidate(pickle.loads(job.problem), job.template, job.config)
        elif isinstance(job, FormJob):
            _compile_form(job)
        else:
            _compile_segment(job, device)
    except Exception as failure:  # told to the pool: the candidate is compiled where it is timed
        if is_device_fault(failure):
            raise  # it would fail all jobs after this one: the others take them
        return f"{type(failure).__name__}: {failure}"
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the process that times needs the memory
    return ""


def _compile_form(job: FormJob) -> None:
    gm, inputs, mode = from_bytes(job.form)
    torch._inductor.config.load_config(pickle.loads(job.inductor))
    with job.modes.on(), tracing(TracingContext(mode)):
        compile_with_settings(gm, inputs, pickle.loads(job.settings), trains=False)


def _compile_segment(job: Job, device: torch.device) -> None:
    operands = [
        torch.empty_strided(o.shape, o.stride, dtype=o.dtype, device=device)
        for o in job.recipe.operands
    ]
    if job.template == LIBRARY:
        if job.inductor:  # kernels are found by their source, which follows from it
            torch._inductor.config.load_config(pickle.loads(job.inductor))
        with torch.no_grad():
            library_call(job.recipe, operands)
        return
    (template,) = (t for t in TEMPLATES if t.name == job.template)
    if template.name.startswith(TILELANG):
        _launch_no_tiles()
    with torch.no_grad():
        template.build(job.recipe, dict(job.config)).run(operands)


def _launch_nothing() -> None:
    """Make every Triton launch of this process a compilation only, of its C launcher too."""
    try:
        from triton.compiler import CompiledKernel
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton, no kernels
        return
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled is not None:  # the launcher is a module of its own, built by gcc
            driver.active.launcher_cls(compiled.src, compiled.metadata)
        return compiled

    def bound_to_nothing(self: Any, grid: Any) -> Any:
        return lambda *args: None

    JITFunction.run = compile_only
    CompiledKernel.__getitem__ = bound_to_nothing


@cache
def _launch_no_tiles() -> None:
    """Make every launch of a TileLang kernel in this process do nothing.

    Not before the first such job: importing TileLang takes seconds.
    """
    from tilelang.jit.kernel import JITKernel

    def launch_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        """In place of the launch."""

    JITKernel.__call__ = launch_nothing


def _answer(answers: BinaryIO, value: str) -> None:
    pickle.dump(value, answers)
    answers.flush()
