"""``stof bench``: hands on to bench/run.py of the repository."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from stof_compile.cli.output import AsJson, Output, output

WRONG_CALL = 2  # exit code of argparse, and of bench/run.py where two cells failed


def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND ...",
            help="What bench/run.py takes: attention, backward, e2e, tuning, accuracy, cpu, mask, "
            "overhead, operators, passes, density, paper, page, ceilings or report, and options; "
            "`stof bench attention --help` lists them.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the benchmarks of the repository."""
    given = list(arguments or ())
    if "--json" in given:  # it may stand anywhere; bench/run.py has no such option
        given.remove("--json")
        as_json = True
    with output(as_json) as out:
        script = find_bench()
        if script is None:
            _explain_absence(out)
            return
        command = [sys.executable, str(script), *given]
        started = time.monotonic()
        if not as_json:
            with _running(command) as run:
                out.status = run.wait()
            return
        lines = []
        with _running(command, stdout=subprocess.PIPE) as run:
            assert run.stdout is not None, "asked for as a pipe"
            for line in run.stdout:
                lines.append(line.rstrip("\n"))
                typer.echo(lines[-1], err=True)  # it may take hours
            out.status = run.wait()
        out.result = {
            "command": given,
            "exit_code": run.returncode,
            "seconds": time.monotonic() - started,
            "output": lines,
        }
        if run.returncode:
            out.result |= {"error": _failure(run.returncode), "kind": "BenchFailed"}


@contextmanager
def _running(command: Sequence[str], stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that ends with this process, though SIGTERM or Ctrl-C ends it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with subprocess.Popen(command, stdout=stdout, text=True) as run:
        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield run
        except BaseException:
            run.terminate()
            run.wait()  # it has cells to end
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _failure(status: int) -> str:
    """What an exit code of bench/run.py means, in words."""
    what = f"{status} cells failed, of which `output` and stderr say more"
    if status == WRONG_CALL:
        what = (
            "the call was wrong, or 2 cells failed; stderr says which, and `stof bench --help` "
            "what may follow"
        )
    return f"bench/run.py ended with exit code {status}: {what}"


def find_bench() -> Path | None:
    """bench/run.py beside an editable install, or in the current directory; None if neither."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        project, script = root / "pyproject.toml", root / "bench" / "run.py"
        if not (script.is_file() and project.is_file()):
            continue
        if re.search(r'^name = "stof-compile"$', project.read_text("utf-8"), re.MULTILINE):
            return script
    return None


def _explain_absence(out: Output) -> None:
    message = (
        "the benchmarks are no part of the installed package: clone the repository of STOF, then "
        "`pip install -e '.[bench]'` there, or run `stof bench` in its folder"
    )
    out.status = 1
    out.result = {"error": message, "kind": "NoBenchmarks"}
    typer.echo(f"stof: {message}", err=True)
