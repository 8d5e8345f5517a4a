"""Processes that compile candidates ahead of the one that times them.

Triton keeps what it compiles on disk, under a key of source, arguments and options. A worker makes
the same call as the timing process with launches switched off, so that the timing process finds
every kernel there. Workers are plain ``python -m`` processes: nothing of the user's program is
imported again. They are an optimisation only: what a worker cannot do, the timing process does.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from queue import PriorityQueue
from typing import IO, Any

from stof_compile.fusion.recipe import Recipe
from stof_compile.torch_modes import TorchModes
from stof_compile.triton_environment import TritonEnvironment

log = logging.getLogger("stof_compile")

WORKER_MODULE = "stof_compile.search.compile_worker"
MAX_WORKERS = 12
LAST_WORDS = 2000  # bytes of a worker's standard error that are told when it ends


@dataclass(frozen=True)
class Job:
    """One candidate to compile.

    Args:
        recipe, template, config: what. device: "cuda:<n>". environment: of the timing process.
        inductor: its settings of Inductor, pickled; for segments as Inductor compiles them.
    """

    recipe: Recipe
    template: str
    config: tuple[tuple[str, Any], ...]
    device: str
    environment: TritonEnvironment
    inductor: bytes = b""

    @property
    def turn(self) -> int:
        """Whose turn it is, the lowest first: what Inductor makes of a segment is timed first."""
        return 2 if self.inductor else 3


@dataclass(frozen=True)
class AttentionJob:
    """One attention candidate to compile.

    Args:
        problem: an ``AttentionProblem``, pickled. template, config: the kernel and its config.
        device, environment: as in :class:`Job`.
    """

    problem: bytes
    template: str
    config: tuple[int, ...]
    device: str
    environment: TritonEnvironment
    turn = 1  # attention is chosen before products


@dataclass(frozen=True)
class FormJob:
    """A whole graph to compile, as Inductor is asked for it afterwards.

    Args:
        template: its name, for the log. form: ``graph_bytes.to_bytes`` of it. settings: that
            Inductor is called with, pickled. inductor, device, environment: as in :class:`Job`.
        modes: of torch, in the process that asks.
    """

    template: str
    form: bytes
    settings: bytes
    inductor: bytes
    device: str
    environment: TritonEnvironment
    modes: TorchModes
    config = ()
    turn = 0  # it takes longer than any candidate


AnyJob = Job | AttentionJob | FormJob


class CompilePool:
    """Workers and the jobs they still have to do.

    Args:
        workers: how many; they are started at once and take jobs when they are ready.
        command: how a worker is started; tests pass their own.
    Attributes:
        ready: whether a worker has started.
    Raises:
        OSError, ValueError: no process can be started.
    """

    def __init__(self, workers: int, command: list[str] | None = None) -> None:
        self._jobs: PriorityQueue[tuple[int, int, _Item]] = PriorityQueue()
        self._numbers = count()  # jobs of a kind keep their order
        self._beginning = threading.Lock()
        self._closed = False
        self._started = time.monotonic()
        self.ready = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        started = command or [sys.executable, "-m", WORKER_MODULE]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a worker has no pool
        try:
            for _ in range(workers):
                self._start(started, environment)
        except BaseException:  # those that were started do not stay
            self.close()
            raise

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        said = tempfile.TemporaryFile()  # noqa: SIM115 (what it says of its end; _serve closes it)
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, env=environment)
        thread = threading.Thread(target=self._serve, args=(process, said), daemon=True)
        self._processes.append(process)
        self._threads.append(thread)
        thread.start()

    def submit(self, job: AnyJob) -> Future[str]:
        """Queue a job; its result is "" or why it failed. Cancelled futures are skipped.

        Jobs with a lower ``turn`` go before others that wait.
        """
        future: Future[str] = Future()
        self._jobs.put((job.turn, next(self._numbers), (job, future)))
        return future

    def hurry(self, job: AnyJob, future: Future[str]) -> None:
        """Let a job that was submitted and has not begun go before all others, also before those
        that were hurried earlier.
        """
        if not future.running() and not future.done():
            self._jobs.put((-1, -next(self._numbers), (job, future)))

    def drop_all_but(self, wanted: Collection[Future[str]]) -> None:
        """Cancel the jobs that wait, but for those of the futures given."""
        with self._jobs.mutex:
            waiting = [item for _, _, item in self._jobs.queue]
        for _, future in filter(None, waiting):
            if future not in wanted:
                future.cancel()

    @property
    def alive(self) -> bool:
        """Whether any worker is left."""
        return not self._closed and any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End the workers; jobs not begun are dropped."""
        self._closed = True
        for process in self._processes:
            process.kill()
        for _ in self._processes:
            self._jobs.put((-2, next(self._numbers), None))
        for process in self._processes:
            process.wait()

    def _begins(self, future: Future[str]) -> bool:
        """Whether a job is to be done now: neither cancelled, nor begun where it was hurried."""
        with self._beginning:
            if future.running() or future.done():
                return False
            return future.set_running_or_notify_cancel()

    def _serve(self, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        """Give one worker a job after the other."""
        with said:
            self._give_jobs(process, said)

    def _give_jobs(self, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.load(process.stdout)  # it says that it is ready
        except Exception as failure:  # whatever else was printed there is no pickle
            process.kill()
            log.debug("a compile worker did not start: %r; %s", failure, _last_words(said))
            return
        self.ready = True
        log.debug("a compile worker is ready after %.1f s", time.monotonic() - self._started)
        while not self._closed:
            _, _, item = self._jobs.get()
            if item is None:
                return
            job, future = item
            if not self._begins(future):
                continue
            try:
                pickle.dump(job, process.stdin)
                process.stdin.flush()
                failed = str(pickle.load(process.stdout))
                if failed:
                    what = job.template, job.config, failed
                    log.debug("a worker could not compile %s %s: %s", *what)
                future.set_result(failed)
            except Exception as failure:  # the worker is of no use any more
                code = _exit_code(process)
                if not self._closed:
                    ended = job.template, job.config, code, _last_words(said)
                    log.info("compiling %s %s ended a worker (exit code %s): %s", *ended)
                future.set_result(f"the worker ended: {failure!r}")
                return


def _exit_code(process: subprocess.Popen[bytes]) -> int | str:
    """How a process ended that answers no more; it is killed where it goes on."""
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        return "none, it was killed"


def _last_words(said: IO[bytes]) -> str:
    """The end of what a worker wrote to its standard error, on one line."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - LAST_WORDS))
    return " | ".join(said.read().decode(errors="replace").split("\n")).strip(" |")


_Item = tuple[AnyJob, "Future[str]"] | None


def start_pool() -> CompilePool | None:
    """A pool for this machine, None where no process can be started."""
    if not sys.executable:
        return None
    try:
        return CompilePool(worker_count())
    except (OSError, ValueError) as failure:
        log.info("candidates are compiled one by one: no worker can be started (%r)", failure)
        return None


def worker_count() -> int:
    """Workers for this machine: two for three cores, so that the process that times is not kept
    waiting; at most :data:`MAX_WORKERS`.
    """
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MAX_WORKERS, (mine or 1) * 2 // 3)
