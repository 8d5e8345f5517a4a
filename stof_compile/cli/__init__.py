"""The command ``stof``: doctor, demo, tune, explain, inspect, bench, cache (docs/command_line.md).

``app`` is the list of commands; each stands in a file of its own and imports torch when it runs, so
that help and completion answer at once.
"""

from stof_compile.cli.app import main

__all__ = ["main"]
