"""Processes that compile, for candidates of segments."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from stof_compile.budget import Budget
from stof_compile.device import cuda_index
from stof_compile.fusion.recipe import Recipe
from stof_compile.search.candidate import LIBRARY, Candidate
from stof_compile.search.compile_pool import CompilePool, Job, start_pool
from stof_compile.search.library import inductor_settings, needs_compiling
from stof_compile.triton_environment import TritonEnvironment


@dataclass
class SegmentWorkers:
    """Candidates that are compiled while others are timed.

    Args:
        pool: the processes, ended by :meth:`close`; started when they are first needed where there
            are none.
    Attributes:
        waited_s: seconds spent waiting for them.
    """

    pool: CompilePool | None = None
    waited_s: float = 0.0
    _jobs: dict[tuple[str, Candidate], tuple[Job, Future[str]]] = field(default_factory=dict)
    _settings: bytes = b""  # of Inductor
    _hurried: str = ""  # the recipe whose candidates went to the front last

    def send(
        self,
        recipe: Recipe,
        candidates: Sequence[Candidate],
        device: torch.device,
        compiled: Collection[str],
    ) -> None:
        """Have candidates compiled, each once.

        Args:
            compiled: templates that need no compiling.
        """
        self._settings = self._settings or inductor_settings()
        ready = set(compiled)
        # beside a product Inductor may time others: not in many processes at once
        if recipe.contractions or not needs_compiling(recipe) or not self._settings:
            ready.add(LIBRARY)
        wanted = [
            c for c in candidates if c.template not in ready and (recipe.key, c) not in self._jobs
        ]
        self.pool = self.pool or (start_pool() if wanted else None)
        if not wanted or self.pool is None or not self.pool.alive:
            return
        index = cuda_index(device)
        environment = TritonEnvironment.of_this_process(device)
        for c in wanted:
            of_inductor = self._settings if c.template == LIBRARY else b""
            job = Job(recipe, c.template, c.config, f"cuda:{index}", environment, of_inductor)
            self._jobs[recipe.key, c] = job, self.pool.submit(job)
        if self._hurried == recipe.key:
            self._hurried = ""  # these have not been

    def wait(self, recipe: Recipe, candidate: Candidate, budget: Budget) -> bool:
        """Wait until a candidate is compiled, or could not be; then it fails again, and is
        recorded, where it is measured.

        Returns:
            Whether it may be measured: not where the budget ends meanwhile, since compiling it in
            this process would take more. Who asks with a spent budget is not kept waiting.
        """
        job, future = self._jobs.get((recipe.key, candidate), (None, None))
        if job is None or future is None or (candidate.template == LIBRARY and future.cancel()):
            return True  # Inductor takes less time for a segment than waiting for its turn may
        started = time.monotonic()
        try:
            spent = budget.spent  # who asks then wants to know all the same
            if not future.done() and self.pool is not None:
                self._hurry(self.pool, recipe, job, future)
            while not future.done():
                if budget.spent:
                    return spent
                if self.pool is None or not self.pool.alive:
                    return True
                if not self.pool.ready and future.cancel():
                    return True  # no worker has started yet: not worth waiting for
                wait([future], timeout=0.05)
        finally:
            self.waited_s += time.monotonic() - started
        return True

    def is_busy_with(self, recipe: Recipe, candidate: Candidate) -> bool:
        """Whether a candidate was sent and is not compiled yet."""
        _, future = self._jobs.get((recipe.key, candidate), (None, None))
        return future is not None and not future.done()

    def _hurry(self, pool: CompilePool, recipe: Recipe, job: Job, future: Future[str]) -> None:
        """Let a candidate go first, and behind it the others of its segment: they come next."""
        if self._hurried != recipe.key:
            self._hurried = recipe.key
            alike = [held for (key, _), held in self._jobs.items() if key == recipe.key]
            for other_job, other in reversed(alike):
                pool.hurry(other_job, other)
        pool.hurry(job, future)

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
