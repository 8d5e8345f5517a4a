"""One process that imports what workers need and forks them: they begin at once, and share it.

Run by path, so that nothing is imported before a worker is: ``fork_server.py MODULE [cuda]
JOBS:ANSWERS:SAID ...`` with three open files for each worker, its standard input, output and error.
A worker is a fork that calls ``MODULE.main()``. Without files this process is the worker. (The
server of multiprocessing is one for the whole program, the user's too, and imports its main module
again.)

Each worker that ended is told in a line on standard output, ``<number> <exit code>``. SIGTERM ends
all.
"""

from __future__ import annotations

import sys

# run by path: its folder, which is not there under PYTHONSAFEPATH, is no place to import from
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)

import contextlib
import gc
import importlib
import os
import signal
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

USED_LATER = ("torch._inductor.compile_fx", "torch._inductor.codegen.triton")
"""Modules that workers import with their first job of Inductor."""
CUDA = "cuda"  # an argument: workers use a GPU


def main(arguments: Sequence[str]) -> None:
    """Serve until all workers have ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who asks may ignore it, or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    module, *rest = arguments
    cuda = CUDA in rest
    files = [tuple(map(int, a.split(":"))) for a in rest if a != CUDA]
    sys.path.append(str(Path(__file__).parents[2]))  # where this package is, if nowhere else
    if not files:
        importlib.import_module(module).main()
        return
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what imports print is no such line
    worker = importlib.import_module(module)
    if "torch" in sys.modules:
        for name in USED_LATER:
            with contextlib.suppress(ImportError):  # of another version of torch
                importlib.import_module(name)
    numbers: dict[int, int] = {}  # by process
    ending = False

    def end(*_: object) -> None:
        """Raises nothing: who was forked or waited for this moment would not be in `numbers`."""
        nonlocal ending
        ending = True
        _kill(numbers)

    signal.signal(signal.SIGTERM, end)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends workers, which is told then
    gc.collect()
    gc.freeze()  # what is there stays shared
    try:
        for number, own in enumerate(files):
            pid = os.fork()
            if not pid:
                others = [file for later in files[number + 1 :] for file in later]
                _be_worker(worker, own, [told.fileno(), *others], interrupt, cuda=cuda)
            numbers[pid] = number
            if ending:
                _kill([pid])
            for file in own:
                os.close(file)
        while numbers:
            pid, status = os.wait()
            if pid in numbers:  # else something that an import has started
                code = os.waitstatus_to_exitcode(status)
                print(numbers.pop(pid), code, file=told, flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill(numbers)
        for pid in numbers:
            os.waitpid(pid, 0)
    os._exit(0)  # who closes a pool waits: to take apart what was imported takes 0.3 s


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # waited for this moment
            os.kill(pid, signal.SIGKILL)


def _be_worker(
    worker: Any, own: Sequence[int], others: Sequence[int], interrupt: Any, *, cuda: bool
) -> None:
    """Be one of the workers: what is done in a process that was forked.

    Args:
        own: its three files. others: files that are not its own. interrupt: what SIGINT does.
    """
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupt)
        for standard, file in enumerate(own):
            os.dup2(file, standard)
        for file in (*own, *others):
            os.close(file)
        if cuda and not _has_gpu():
            name = worker.__name__
            os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), name])
        worker.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # it has nothing else of the process that it was forked from


def _has_gpu() -> bool:
    """Whether this fork can use its GPU: not where an import has begun to use CUDA before it."""
    import torch

    try:
        torch.cuda.init()
        return torch.cuda.device_count() > 0
    except Exception as failure:
        sys.stderr.write(f"a fork cannot use CUDA and begins anew: {failure!r}\n")
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
