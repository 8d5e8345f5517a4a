"""Which columns each command writes, and whether a file that is to grow has them."""

from __future__ import annotations

import argparse
import importlib

from results import LOG_FIELDS, check_header, log_path

MODULES = {"cpu": "attention", "mask": "maskbuild"}  # of the others: named as the command


def check_columns(args: argparse.Namespace) -> None:
    """See that the rows of a settled command can be added to what its ``--out`` holds.

    Raises:
        SystemExit: the file, or its log, was written with other columns.
    """
    if args.command == "ceilings":  # writes no rows
        return
    module = "sweep" if args.sweep else MODULES.get(args.command, args.command)
    check_header(args.out, importlib.import_module(module).FIELDS)
    check_header(log_path(args.out), LOG_FIELDS)
