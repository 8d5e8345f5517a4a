"""Processes that compile candidates ahead of the one that times them.

Triton keeps what it compiles on disk, under a key of source, arguments and options. A worker makes
the same call as the timing process with launches switched off, so that the timing process finds
every kernel there. Workers are forked by a process of its own (``fork_server.py``), not by the
user's: nothing of the user's program is imported again, and it may use threads and a GPU. They are
an optimisation only: what a worker cannot do, the timing process does.
"""

from __future__ import annotations

import contextlib
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from typing import IO, Any

import torch

from stof_compile.bytecode import keeping_bytecode
from stof_compile.fusion.recipe import Recipe
from stof_compile.search.fork_server import CUDA
from stof_compile.store import default_root
from stof_compile.torch_modes import TorchModes
from stof_compile.triton_environment import TritonEnvironment

log = logging.getLogger("stof_compile")

WORKER_MODULE = "stof_compile.search.compile_worker"
FORK_SERVER = str(Path(__file__).with_name("fork_server.py"))
SETTINGS = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a worker has no pool
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for a GPU must not begin to use it before a fork
}
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


@dataclass
class _Worker:
    """One worker, seen from here.

    Args:
        jobs, answers: the ends of its pipes. said: what it writes to standard error.
    """

    jobs: IO[bytes]
    answers: IO[bytes]
    said: IO[bytes]
    exit_code: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        for file in (self.jobs, self.answers, self.said):
            with contextlib.suppress(OSError):  # a pipe whose other end is closed
                file.close()


class CompilePool:
    """Workers and the jobs they still have to do.

    Args:
        workers: how many; they are started at once and take jobs when they are ready.
        module: what a worker is: it has a ``main()``; tests pass their own.
        cuda: whether workers use a GPU.
    Attributes:
        ready: whether a worker has started.
    Raises:
        OSError, ValueError: no process can be started.
    """

    def __init__(self, workers: int, module: str = WORKER_MODULE, *, cuda: bool = False) -> None:
        self._jobs: PriorityQueue[tuple[int, int, _Item]] = PriorityQueue()
        self._numbers = count()  # jobs of a kind keep their order
        self._beginning = threading.Lock()
        self._closed = False
        self._started = time.monotonic()
        self.ready = False
        self._workers: list[_Worker] = []
        try:
            self._server = self._start(workers, [module, *[CUDA] * cuda])
        except BaseException:
            for worker in self._workers:
                worker.close()
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        try:
            for thread in (threading.Thread(target=self._listen, daemon=True), *self._threads):
                thread.start()
        except BaseException:  # no thread can be started: the processes do not stay
            self.close()
            raise

    def _start(self, workers: int, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Open the files of the workers, and start the process that forks them."""
        with ExitStack() as theirs:  # ends of pipes that the workers have
            while (taken := os.open(os.devnull, os.O_RDWR)) <= 2:  # closed here, standard there
                theirs.callback(os.close, taken)
            os.close(taken)
            files = [self._open(theirs) for _ in range(workers)]
            named = [":".join(map(str, own)) for own in files]
            return subprocess.Popen(
                [sys.executable, FORK_SERVER, *arguments, *named],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._workers[0].said,
                pass_fds=[file for own in files for file in own],
                env=_environment(),
            )  # fmt: skip

    def _open(self, theirs: ExitStack) -> tuple[int, int, int]:
        """Open the files of one worker; its standard input, output and error."""
        said = tempfile.TemporaryFile()  # noqa: SIM115 (_Worker.close does)
        (job, jobs), (answers, answer) = os.pipe(), os.pipe()
        for end in (job, answer):
            theirs.callback(os.close, end)
        self._workers.append(_Worker(os.fdopen(jobs, "wb"), os.fdopen(answers, "rb"), said))
        return job, answer, said.fileno()

    def _listen(self) -> None:
        """Take in what becomes of the workers."""
        assert self._server.stdout is not None
        with self._server.stdout as lines:
            for number, code in (map(int, line.split()) for line in lines):
                worker = self._workers[number]
                worker.exit_code = code
                worker.ended.set()
        for worker in self._workers:
            worker.ended.set()

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
        self._server.terminate()
        for _ in self._workers:
            self._jobs.put((-2, next(self._numbers), None))
        self._server.wait()

    def _begins(self, future: Future[str]) -> bool:
        """Whether a job is to be done now: neither cancelled, nor begun where it was hurried."""
        with self._beginning:
            if future.running() or future.done():
                return False
            return future.set_running_or_notify_cancel()

    def _serve(self, worker: _Worker) -> None:
        """Give one worker a job after the other."""
        try:
            self._give_jobs(worker)
        finally:
            worker.close()

    def _give_jobs(self, worker: _Worker) -> None:
        try:
            pickle.load(worker.answers)  # it says that it is ready
        except Exception as failure:  # whatever else was printed there is no pickle
            log.debug("a compile worker did not start: %r; %s", failure, _last_words(worker.said))
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
                pickle.dump(job, worker.jobs)
                worker.jobs.flush()
                failed = str(pickle.load(worker.answers))
                if failed:
                    what = job.template, job.config, failed
                    log.debug("a worker could not compile %s %s: %s", *what)
                future.set_result(failed)
            except Exception as failure:  # the worker is of no use any more
                if not self._closed:
                    worker.ended.wait(timeout=1.0)
                    ended = job.template, job.config, worker.exit_code, _last_words(worker.said)
                    log.info("compiling %s %s ended a worker (exit code %s): %s", *ended)
                future.set_result(f"the worker ended: {failure!r}")
                return


def _environment() -> dict[str, str]:
    """That of the processes: ours, with their settings; torch's bytecode is kept where it lacks."""
    # files are known by name, size and date: one date for all, as some images have, needs the rest
    folder = default_root() / "bytecode" / f"torch-{torch.__version__}"
    return {**keeping_bytecode(os.environ, folder, Path(torch.__file__).parent), **SETTINGS}


def _last_words(said: IO[bytes]) -> str:
    """The end of what a worker wrote to its standard error, on one line."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - LAST_WORDS))
    return " | ".join(said.read().decode(errors="replace").split("\n")).strip(" |")


_Item = tuple[AnyJob, "Future[str]"] | None


def start_pool() -> CompilePool | None:
    """A pool for this machine, None where no process can be started or one core is all it has."""
    workers = worker_count()
    if not workers or not sys.executable or not hasattr(os, "fork"):
        return None
    try:
        return CompilePool(workers, cuda=torch.cuda.is_initialized())
    except (OSError, ValueError) as failure:
        log.info("candidates are compiled one by one: no worker can be started (%r)", failure)
        return None


def worker_count() -> int:
    """Workers for this machine: two for three cores, so that the process that times is not kept
    waiting; at most :data:`MAX_WORKERS`, none on one core.
    """
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MAX_WORKERS, (mine or 1) * 2 // 3)
