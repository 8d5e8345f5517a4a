"""The list of commands, and what becomes of their errors."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from stof_compile.cli.bench import bench
from stof_compile.cli.cache import cache
from stof_compile.cli.doctor import doctor
from stof_compile.cli.dumps import explain, inspect
from stof_compile.cli.output import print_json, watched_stdout
from stof_compile.cli.runs import demo, tune

READER_GONE = 128 + 13  # as a shell says it of a program that SIGPIPE ended
WRONG = 2
# UsageError, which typer does not export
WrongCall = cast(type[Exception], typer.BadParameter.__mro__[1])
INTERRUPTED = 128 + 2  # the same of SIGINT
INTERRUPTED_WORDS = (
    "interrupted before the end; call it again, it goes on with what was measured until now (in "
    "the cache)"
)
OF_PLACES = frozenset(
    getattr(errno, name)
    for name in ("EACCES", "EDQUOT", "EISDIR", "ENOENT", "ENOSPC", "ENOTDIR", "EPERM", "EROFS")
)
DYNAMO_TRAILERS = ("\n\nfrom user code:\n", "\n\nSet TORCHDYNAMO_VERBOSE=1")
"""What Dynamo appends to an error that went through it, about its own internals."""

app = typer.Typer(
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
for command in (doctor, demo, tune, explain, inspect):
    app.command()(command)
app.command(
    # what follows the first word belongs to bench/run.py
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)(bench)
app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stof {import_module('stof_compile').__version__}")
        raise typer.Exit


@app.callback()
def stof(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Sparse attention and fused operators for torch.compile: tools around the backend."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: without the program's name; None = of this process.
    Returns:
        Exit code: 0 done, 1 it cannot be done here, 2 the call was wrong, 130 interrupted, 141
        nobody read the answer to its end.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with watched_stdout() as reader_has_gone:
        status = _run(arguments)
        # rich and typer end with 1 where a pipe breaks
        return READER_GONE if status == 1 and reader_has_gone() else status


def _run(arguments: list[str]) -> int:
    try:
        ended = typer.main.get_command(app)(args=arguments, prog_name="stof", standalone_mode=False)
    except SystemExit as end:  # completion, a broken pipe, bench that was told to end
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Abort:  # Ctrl-C under an older typer
        ended = INTERRUPTED
    except WrongCall as error:
        return _tell(WRONG, _put_right(error, arguments), error, arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        status, message = _told(error)
        if status is None:
            raise
        return _tell(status, message, error, arguments)
    if ended == INTERRUPTED:
        return _tell(INTERRUPTED, INTERRUPTED_WORDS, KeyboardInterrupt(), arguments)
    return ended if isinstance(ended, int) else 0


def _put_right(error: Any, arguments: list[str]) -> str:
    """What typer says about a call, and where to read what it may be."""
    words = str(error.format_message()).rstrip(". ")
    path = " ".join(["stof", *arguments[:1]]) if error.ctx is None else error.ctx.command_path
    return f"{words[:1].lower()}{words[1:]}; `{path} --help` says how it is called"


def _tell(status: int, message: str, error: BaseException, arguments: list[str]) -> int:
    if "--json" in arguments:
        _print_error(message, error)
    console = Console(stderr=True)
    console.print(f"stof: {message}", markup=False, highlight=False, soft_wrap=True)
    return status


def _print_error(message: str, error: BaseException) -> None:
    with suppress(BrokenPipeError):  # what was wrong counts more than that nobody reads it
        print_json({"error": message, "kind": type(error).__name__})


def _told(error: Exception) -> tuple[int | None, str]:
    """Exit code and message of an error that a user can do something about; None for ours."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        what = f"{where}{error.strerror or error}"
        if error.errno not in OF_PLACES:  # whatever a user's own function met
            return 1, f"{what} ({type(error).__name__})"
        return 1, (
            f"{what}: make room, or name a place that can be read and written to (options of this "
            "command; XDG_CACHE_HOME moves the user's cache)"
        )
    if isinstance(error, ModuleNotFoundError):
        known = error.name == "torch"
        return (1 if known else None), f"{error}: `stof doctor` says how to get it"
    from stof_compile.errors import StofError, StofPlaceError, StofUnsupportedError

    if not isinstance(error, StofError):
        return None, ""
    message = str(error.args[0])
    for trailer in DYNAMO_TRAILERS:
        message = message.partition(trailer)[0]
    return (1 if isinstance(error, StofUnsupportedError | StofPlaceError) else 2), message
