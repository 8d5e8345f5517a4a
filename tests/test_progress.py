"""Progress of tuning: live on a terminal, sparse lines elsewhere, silent by default."""

import io
import logging
import math
import subprocess
import sys

import pytest
from rich.console import Console

from stof_compile.budget import Budget
from stof_compile.progress import line, no_progress, tuning_progress


@pytest.fixture
def shown(caplog):
    caplog.set_level(logging.INFO, logger="stof_compile")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_silent_unless_the_logger_is_enabled():
    out = io.StringIO()
    with tuning_progress(Budget(10.0), Console(file=out)) as report:
        assert report is no_progress
        report("linear gelu", 12.0, 1)
    assert out.getvalue() == ""


def test_plain_lines_come_every_two_seconds(shown):
    clock, out = Clock(), io.StringIO()
    budget = Budget(60.0, clock=clock)
    with tuning_progress(budget, Console(file=out), clock=clock) as report:
        report("linear gelu", math.inf, 1)
        clock.now += 1.9
        report("linear gelu", 20.0, 2)
        clock.now += 0.2
        report("linear gelu", 12.34, 3)
    assert out.getvalue().splitlines() == [
        "tuning linear gelu: nothing fits yet, trial 1, 60 s left",
        "tuning linear gelu: best 12.3 us, trial 3, 58 s left",
    ]


def test_a_terminal_gets_one_line_that_goes_away(shown):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with tuning_progress(Budget(60.0), console) as report:
        report("linear [gelu]", 12.34, 7)
    printed = out.getvalue()
    assert "tuning linear [gelu]: best 12.3 us, trial 7" in printed
    assert "s left" in printed
    assert printed.rstrip().endswith("\x1b[2K")  # erased


def test_a_long_chain_is_cut():
    text = line("linear gelu residual_add layer_norm " * 4, 1.0, 1)
    assert "..." in text and len(text) < 90


def test_compiling_leaves_the_random_numbers_of_python_alone():
    # rich draws some when it is imported
    code = """if True:
        import random
        before = random.getstate()
        import stof_compile.backend
        assert random.getstate() == before
    """
    subprocess.run([sys.executable, "-c", code], check=True)
