"""Processes of cells, forked from a server that has imported what they need.

Importing torch, Inductor and transformers takes seconds, more than many a cell measures.
multiprocessing's fork server imports ``preload.py`` once and never starts CUDA; a cell is a fork of
it that takes on its environment and its cores and runs ``run.py`` as if called by the command line.
Where that would not be the same (a variable that was read at import has another value, CUDA was
started by an import) the fork replaces itself by an ordinary process and says why.

A cell leads a process group, so that it can be ended with everything it started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

CORES = "STOF_BENCH_CORES"  # of a worker, where workers run side by side
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
TALKS = "STOF_BENCH_TALKS"  # the number of the open file of a connection
# a fork takes these on, although torch is imported already
LATE = (CORES, COMPILE_THREADS, TALKS, "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
NOT_STARTED = 3  # CUDA_ERROR_NOT_INITIALIZED
# multiprocessing collects finished processes whenever one starts: not in two threads at a time
_COLLECTING = threading.Lock()


def start_server() -> None:
    """Have the server import ahead while the caller goes on; nothing where it runs already."""
    path = os.environ.get("PYTHONPATH")
    # Python before 3.12.8 has the server import by its own search path
    folders = [str(Path(__file__).resolve().parent), *([path] if path else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    try:
        forkserver.set_forkserver_preload(["preload"])
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def start(
    command: list[str],
    environment: Mapping[str, str],
    *,
    leads: bool = True,
    talks: Connection | None = None,
) -> BaseProcess:
    """Start ``[python, script, argument, ...]``.

    Args:
        leads: it leads a process group; else it belongs to that of its server.
        talks: an end of a pipe, which :func:`given_connection` gives it.
    Raises:
        OSError, EOFError: the server is gone; the next start begins another.
    """
    process = multiprocessing.get_context("forkserver").Process(
        target=_begin, args=(command, dict(environment), leads, talks)
    )
    with _COLLECTING:
        process.start()
    return process


def finish(process: BaseProcess, limit_s: float | None) -> int | None:
    """Wait for the exit code (minus the signal that ended it); None: it took too long, was ended.

    Without a limit it may take any time. Whatever interrupts the wait ends the process as well.
    """
    try:
        if not connection.wait([process.sentinel], limit_s):
            end(process)
            return None
    except BaseException:
        end(process)
        raise
    with _COLLECTING:
        process.join()
        return process.exitcode


def done(process: BaseProcess) -> bool:
    """Whether it has ended."""
    return bool(connection.wait([process.sentinel], 0))


def end(process: BaseProcess) -> None:
    """Kill a process with its group, if it leads one, and with all that it started."""
    assert process.pid is not None, "started"
    if not done(process):
        started = _descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):  # it leads none, or none yet
            os.killpg(process.pid, signal.SIGKILL)
        for pid in (process.pid, *started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with _COLLECTING:
        process.join()


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and what these have started."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = [pid]
    for one in found:  # it grows
        found += children.get(one, ())
    return found[1:]


def end_all() -> None:
    """Kill all that were started and still run."""
    with _COLLECTING:
        running = multiprocessing.active_children()
    for process in running:
        end(process)


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Nothing that the body has started outlives it, though SIGTERM ends it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # once: it ends the processes from here on
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all()  # while the server can tell which of them run
        _end_server()
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all()
        signal.signal(signal.SIGTERM, before)


def _end_server() -> None:
    """Kill the server with all that it has forked: it may be about to fork a cell that it was asked
    for while it imported, of which nobody else knows.
    """
    # multiprocessing gives its server no public name, and the type stubs leave it out
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for one in (*_descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # its end is left to multiprocessing to collect
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


# -- in the server, and in the fork ----------------------------------------------------------------


def cuda_started() -> bool:
    """Whether this process has started CUDA.

    The driver is asked: open files do not tell, NVML opens the same ones, nor does torch, which is
    not the only one to start it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nobody has loaded it
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_STARTED)


def given_connection() -> Connection | None:
    """The end of a pipe that this process was started with."""
    number = os.environ.pop(TALKS, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return Connection(int(number))


def _begin(
    command: list[str], environment: dict[str, str], leads: bool, talks: Connection | None
) -> None:
    """Be the process that a command line would start."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # its server ignores it: preload.py
    if leads:
        os.setpgid(0, 0)
    if talks is not None:
        number = os.dup(talks.fileno())
        talks.close()
        os.set_inheritable(number, True)
        environment[TALKS] = str(number)
    reason = unfit(environment)
    if reason:
        print(f"  as an ordinary process: {reason}", file=sys.stderr, flush=True)
        os.execve(command[0], command, environment)
    _take(environment)
    sys.argv = command[1:]
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        runpy.run_path(command[1], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def unfit(environment: Mapping[str, str]) -> str:
    """Why a fork cannot be what a new process would be; empty where it can."""
    import torch
    from preload import CUDA_STARTED, STARTED

    held = [STARTED, os.environ]  # libraries set variables, in the caller too
    names = sorted(
        name
        for name in {*STARTED, *environment} - {*LATE}
        if all(environment.get(name) != values.get(name) for values in held)
    )
    if names:
        return f"{', '.join(names)} changed since torch was imported"
    if CUDA_STARTED or torch.cuda._is_in_bad_fork():
        return "an import started CUDA, which a fork cannot use"
    return ""


def _take(environment: Mapping[str, str]) -> None:
    """Take on the environment, and what torch made of it and of the cores at import."""
    import torch
    from preload import STARTED
    from torch._inductor import config

    for name in {*STARTED, *environment}:
        if name not in environment:
            os.environ.pop(name, None)
        elif os.environ.get(name) != environment[name]:
            os.environ[name] = environment[name]
    if CORES in environment:
        cores = [int(core) for core in environment[CORES].split(",")]
        os.sched_setaffinity(0, cores)
        if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & environment.keys():
            torch.set_num_threads(min(torch.get_num_threads(), len(cores)))
    if CORES in environment or environment.get(COMPILE_THREADS) != STARTED.get(COMPILE_THREADS):
        config.compile_threads = config.decide_compile_threads()
