"""Where a command prints: text for people, or one JSON object for programs."""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
]
STDOUT = 1  # file descriptor


class Output:
    """What a command has to say.

    Attributes:
        console: for what happens meanwhile: stdout, with --json stderr.
        result: what --json prints when the command is through.
        status: exit code of the command.
    """

    def __init__(self, as_json: bool) -> None:
        console = Console(stderr=as_json)
        # tables stay whole when the output is no terminal
        self.console = console if console.is_terminal else Console(stderr=as_json, width=120)
        self.as_json = as_json
        self.result: dict[str, Any] = {}
        self.status = 0

    def say(self, text: str) -> None:
        """Print a line of the answer as it is, for people."""
        if not self.as_json:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """Print a table of the answer, for people."""
        if not self.as_json:
            self.console.print(table)


@contextmanager
def output(as_json: bool) -> Iterator[Output]:
    """Run the body of a command; stdout is kept for its JSON if there is one to print.

    Raises:
        typer.Exit: with the status, where the body has set one.
    """
    out = Output(as_json)
    if as_json:
        with _stdout_is_stderr():
            yield out
        print_json(out.result)
    else:
        yield out
    if out.status:
        raise typer.Exit(out.status)


def print_json(body: Mapping[str, Any]) -> None:
    """Print an object on stdout; JSON has no NaN and no infinity, so these become null."""
    sys.stdout.write(json.dumps(_finite(body), indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()  # a reader that has gone is found here, not when the process ends


@contextmanager
def watched_stdout() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether nobody reads stdout any more.

    If so, as behind ``stof cache ls | head -1``, stdout leads to nowhere from then on: what is
    still held for it would raise when the process ends.
    """
    if sys.stdout is None or not hasattr(select, "poll"):  # closed; Windows
        yield lambda: False
        return
    kept = os.dup(STDOUT)  # rich puts /dev/null in the place of a broken pipe
    try:
        yield lambda: _reader_has_gone(kept)
    finally:
        os.close(kept)


def _reader_has_gone(file: int) -> bool:
    waiting = select.poll()
    waiting.register(file, 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))
    if gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDOUT)
        os.close(nowhere)
    return gone


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    # compilers and libraries print, too: what they write to the file descriptor goes along
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(2, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C libraries have printed and still hold
        os.dup2(kept, STDOUT)
        os.close(kept)
