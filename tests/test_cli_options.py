"""Options keep their names whatever typer makes of them."""

from typing import get_type_hints

import pytest
from typer.models import OptionInfo

from stof_compile.cli.app import app


def commands(group):
    for command in group.registered_commands:
        yield command.callback
    for inner in group.registered_groups:
        yield from commands(inner.typer_instance)


@pytest.mark.parametrize("command", list(commands(app)), ids=lambda command: command.__name__)
def test_an_option_with_its_own_name_as_metavar_spells_its_flag_out(command):
    """typer 0.27 would call ``--model MODEL`` ``--MODEL``."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name:
                assert option.default == f"--{name}"  # where Annotated keeps the first flag
