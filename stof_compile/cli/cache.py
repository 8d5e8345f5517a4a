"""``stof cache ls | show | prune | clear | export | import``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from stof_compile.cli.output import AsJson, Output, output

cache = typer.Typer(help="What was measured before: look at it, delete it, take it elsewhere.")

DAY_S = 24 * 3600.0

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Folder given as cache_dir; default: the user's."),
]
Environment = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Key of an environment, as `stof cache ls` lists it, or a part that no other has; "
        "default: of this machine.",
    ),
]


@cache.command()
def ls(folder: Folder = None, as_json: AsJson = False) -> None:
    """List the environments: device and versions, how much is stored, since when."""
    from stof_compile.cli.environments import environments_here, environments_in
    from stof_compile.store import damaged_files, entries, environment_parts

    root = _root(folder)
    with output(as_json) as out:
        found, damaged = environments_in(entries(root), environments_here()), damaged_files(root)
        out.result = {
            "dir": str(root),
            "exists": root.exists(),
            "damaged": [str(path) for path in damaged],
            "environments": [
                {
                    "environment": stored.key,
                    "parts": environment_parts(stored.key),
                    "here": stored.devices,
                    "entries": stored.kinds.total(),
                    "kinds": dict(stored.kinds),
                    "bytes": stored.size_bytes,
                    "oldest": _iso(stored.oldest_s),
                    "newest": _iso(stored.newest_s),
                }
                for stored in found
            ],
        }
        if damaged:
            out.say(_damage(damaged, f"in {root}"))
        if not found:
            out.say(f"nothing stored in {root}{_absence(root)}")
            return
        table = _table(str(root), "environment", "entries", "kB", "oldest", "newest")
        for stored in found:
            here = f"\n(here: {', '.join(stored.devices)})" if stored.devices else ""
            kinds = "\n".join(f"{name} {count}" for name, count in sorted(stored.kinds.items()))
            table.add_row(
                escape(stored.key + here),
                escape(f"{stored.kinds.total()}\n{kinds}"),
                f"{stored.size_bytes / 1e3:.1f}",
                _iso(stored.oldest_s)[:10],
                _iso(stored.newest_s)[:10],
            )
        out.show(table)


@cache.command()
def show(environment: Environment = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show what is stored for one environment: kinds, entries, best configs."""
    from stof_compile.cli.environments import choose_environment
    from stof_compile.cli.stored_values import in_words
    from stof_compile.store import entries, environment_parts

    root = _root(folder)
    with output(as_json) as out:
        key = choose_environment(root, environment)
        found = [entry for entry in entries(root) if entry.environment == key]
        rows: list[dict[str, Any]] = [
            {
                "kind": entry.kind,
                "key": entry.key,
                "best": "of another format, never read"
                if entry.value is None
                else in_words(entry.kind, entry.value),
                "bytes": entry.size_bytes,
                "modified": _iso(entry.modified_s),
            }
            for entry in sorted(found, key=lambda entry: (entry.kind, entry.key))
        ]
        out.result = {
            "dir": str(root),
            "environment": key,
            "parts": environment_parts(key),
            "entries": rows,
        }
        table = _table(key, "kind", "key", "best", "date")
        for row in rows:
            short = row["key"] if len(row["key"]) <= 40 else row["key"][:37] + "..."
            table.add_row(row["kind"], escape(short), escape(row["best"]), row["modified"][:10])
        out.show(table)


@cache.command()
def prune(
    older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0.0, help="What was written longer ago."),
    ] = None,
    other_environments: Annotated[
        bool,
        typer.Option("--other-environments", help="What is of no device and versions here."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, delete nothing.")
    ] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Files that cannot be read, alone or beside these.")
    ] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Delete what is old or of other environments (of both options, what both hold for)."""
    from stof_compile.cli.environments import environments_here
    from stof_compile.errors import StofOptionError
    from stof_compile.store import damaged_files, entries

    chosen = older_than is not None or other_environments
    if not chosen and not damaged:
        raise StofOptionError(
            "cache prune: say what to delete with --older-than DAYS, --other-environments, both, "
            "or --damaged; `stof cache clear` deletes everything"
        )
    root = _root(folder)
    with output(as_json) as out:
        here = set(environments_here().values())
        before_s = time.time() - (older_than or 0.0) * DAY_S
        going = [
            entry
            for entry in entries(root)
            if chosen
            and (older_than is None or entry.modified_s < before_s)
            and not (other_environments and entry.environment in here)
        ]
        broken = damaged_files(root) if damaged else []
        if not dry_run:
            for path in (*(entry.path for entry in going), *broken):
                path.unlink(missing_ok=True)
        size = sum(entry.size_bytes for entry in going)
        out.result = {
            "dir": str(root),
            "dry_run": dry_run,
            "entries": len(going),
            "bytes": size,
            "environments": sorted({entry.environment for entry in going}),
            "damaged": len(broken),
        }
        for key in out.result["environments"]:
            count = sum(entry.environment == key for entry in going)
            out.say(f"{key}: {count} entries")
        done = "would be deleted" if dry_run else "deleted"
        files = f" and {len(broken)} damaged files" if damaged else ""
        out.say(
            f"{len(going)} entries ({size / 1e3:.1f} kB){files} {done} in {root}{_absence(root)}"
        )


@cache.command()
def clear(folder: Folder = None, as_json: AsJson = False) -> None:
    """Delete everything that is stored."""
    from stof_compile import store

    root = _root(folder)
    with output(as_json) as out:
        count = store.clear(root)
        out.result = {"dir": str(root), "entries": count}
        out.say(f"{count} entries deleted in {root}{_absence(root)}")


@cache.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tuning file to write.")],
    environment: Environment = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Write a tuning file: what is stored for one environment."""
    from stof_compile.cli.environments import choose_environment
    from stof_compile.cli.tuning_file import TuningFile
    from stof_compile.errors import StofOptionError
    from stof_compile.store import damaged_files

    root = _root(folder)
    with output(as_json) as out:
        if file.is_dir():
            raise StofOptionError(f"{file} is a folder; name a file")
        tuning = TuningFile.of(root, choose_environment(root, environment))
        if not tuning.items:
            raise StofOptionError(
                f"{root} holds only entries of another format for {tuning.environment}: tune again"
            )
        tuning.write(file)
        size = file.stat().st_size
        damaged = damaged_files(root, tuning.environment)
        out.result = {
            "file": str(file),
            "environment": tuning.environment,
            "entries": len(tuning.items),
            "bytes": size,
            "damaged": [str(path) for path in damaged],
        }
        out.say(
            f"{file}: {len(tuning.items)} entries ({size / 1e3:.1f} kB) for {tuning.environment}"
        )
        if damaged:
            out.say(_damage(damaged, "left out"))


@cache.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `stof cache export`.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace entries that are here already.")
    ] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Take over a tuning file that was made on such a device with such versions."""
    from stof_compile.cli.environments import differences, environments_here
    from stof_compile.cli.tuning_file import TuningFile
    from stof_compile.store import FORMAT, Store

    root = _root(folder)
    with output(as_json) as out:
        tuning = TuningFile.read(file)
        found = differences(tuning.environment, environments_here())
        if tuning.store_format != FORMAT:
            formats = str(tuning.store_format), str(FORMAT)
            found.append(("format of entries", *formats))
        if found:
            _refuse(out, file, found)
            return
        done = Store(root, tuning.environment).put_all(tuning.items, overwrite=overwrite)
        out.result = {
            "file": str(file),
            "dir": str(root),
            "environment": tuning.environment,
            "added": done.added,
            "replaced": done.replaced,
            "kept": done.kept,
        }
        hint = " (--overwrite replaces them)" if done.kept else ""
        out.say(
            f"{done.added} entries added, {done.replaced} replaced, {done.kept} kept as they were"
            f"{hint}, in {root}"
        )


def _refuse(out: Output, file: Path, found: list[tuple[str, str, str]]) -> None:
    message = (
        f"{file} was made in another environment, and what was measured there says nothing here; "
        "nothing was imported"
    )
    out.status = 1
    out.result = {
        "error": message,
        "kind": "OtherEnvironment",
        "differences": [{"what": what, "file": left, "here": right} for what, left, right in found],
    }
    typer.echo(f"stof: {message}", err=True)
    for what, left, right in found:
        typer.echo(f"  {what}: {left} in the file, {right} here", err=True)
    typer.echo("tune here (`stof tune`), or make the environments equal", err=True)


def _root(folder: Path | None) -> Path:
    """The cache that a command is about.

    Raises:
        StofOptionError: there is a file in its place; a folder that is not there is an empty cache.
    """
    from stof_compile.errors import StofOptionError
    from stof_compile.store import default_root

    root = default_root() if folder is None else folder
    there = next(place for place in (root.absolute(), *root.absolute().parents) if place.exists())
    if not there.is_dir():
        given = f"the cache {root}" if folder is None else f"--dir {root}"
        why = "is a file" if there == root.absolute() else f"cannot be there, {there} is a file"
        raise StofOptionError(f"{given} {why}; name the folder of a cache (--dir DIR)")
    return root


def _absence(root: Path) -> str:
    """What to add where nothing was found, since perhaps another folder was meant."""
    return "" if root.exists() else ", which does not exist"


def _damage(files: Sequence[Path], done: str) -> str:
    """What became of files that cannot be read, and how they go."""
    return (
        f"damaged files {done}: {len(files)}; what they held is measured anew when it is needed, "
        "and `stof cache prune --damaged` deletes them"
    )


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title))
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column == "kB" else "left")
    return table
