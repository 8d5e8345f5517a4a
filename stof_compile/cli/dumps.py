"""``stof explain | inspect``: commands that read a dump."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stof_compile.cli.output import AsJson, output

if TYPE_CHECKING:
    from stof_compile.dump import Record
    from stof_compile.report.model import GraphReport


def explain(
    dump: Annotated[
        Path, typer.Argument(metavar="DUMP", help="Folder given as dump_dir, or one graph of it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print what a dump says."""
    from stof_compile.explanation import Explanation
    from stof_compile.report.load import load_dump

    with output(as_json) as out:
        explanation = Explanation(tuple(load_dump(dump)))
        out.result = {
            "dump": str(dump),
            "graphs": [record_json(record) for record in explanation.graphs],
        }
        out.say(str(explanation))


def inspect(
    dump: Annotated[
        Path | None,
        typer.Argument(metavar="DUMP", help="Folder given as dump_dir, or one graph of it."),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="The difference of two dumps.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one page.")] = None,
    ceilings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the device can do at most (written by bench/), for shares of the floor.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at a dump: in the terminal, as one HTML page, as JSON, or beside another dump."""
    from stof_compile.errors import StofOptionError
    from stof_compile.report.diff import diff_json, diff_reports, print_diff
    from stof_compile.report.model import to_json
    from stof_compile.report.terminal import print_report

    with output(as_json) as out:
        if diff is not None and dump is None and html is None and ceilings is None:
            first, second = diff
            changes = diff_reports(_reports(first), _reports(second))
            out.result = diff_json(changes, str(first), str(second))
            if not as_json:
                print_diff(changes, str(first), str(second), out.console)
        elif diff is None and dump is not None:
            reports = _reports(dump, ceilings)
            out.result = to_json(reports, str(dump))
            if html is not None:
                _write_page(reports, str(dump), html)
                out.say(f"written: {html}")
            elif not as_json:
                print_report(reports, out.console)
        else:
            raise StofOptionError(
                "inspect takes one DUMP, or --diff A B without --html and --ceilings: "
                "`stof inspect --help` shows both"
            )


def record_json(record: Record) -> dict[str, Any]:
    """A record as it stands in ``record.json`` of a dump."""
    body: dict[str, Any] = json.loads(record.to_json())
    return body


def _reports(dump: Path, ceilings: Path | None = None) -> list[GraphReport]:
    from stof_compile.report.load import load_ceilings, load_dump
    from stof_compile.report.model import read_report

    records = load_dump(dump, graphs=True)
    most = None if ceilings is None else load_ceilings(ceilings, records)
    return [read_report(number, record, most) for number, record in enumerate(records)]


def _write_page(reports: list[GraphReport], dump: str, page: Path) -> None:
    from stof_compile.errors import StofOptionError
    from stof_compile.places import not_written
    from stof_compile.report.html import write_html

    if page.is_dir():
        raise StofOptionError(
            f"--html {page} is a folder; name a file, for instance {page / 'report.html'}"
        )
    try:
        write_html(reports, dump, page)
    except OSError as error:
        raise not_written(f"--html {page}", error) from error
