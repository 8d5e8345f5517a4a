"""Progress of tuning on stderr: one live line on a terminal, a plain line now and then elsewhere.

It shows when the logger ``stof_compile`` is enabled for INFO, and nothing otherwise. ``stof tune``
enables it while it runs. rich is imported when something is shown: its import draws from Python's
random numbers, whose state is the user's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stof_compile.budget import Budget

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

logger = logging.getLogger("stof_compile")

Report = Callable[[str, float, int], None]
"""(what is tuned, best microseconds so far, trials measured)"""

PLAIN_EVERY_S = 2.0
NAME_WIDTH = 48


def no_progress(what: str, best_us: float, trials: int) -> None:
    """Show nothing."""


@contextmanager
def tuning_progress(
    budget: Budget,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Report]:
    """Show how far tuning is.

    Args:
        budget: its seconds left are shown.
        console: where to; None = stderr. clock: seconds of a steady clock.
    Yields:
        A function to call after every trial; :func:`no_progress` where nothing is to be shown.
    """
    if not logger.isEnabledFor(logging.INFO):
        yield no_progress
        return
    from rich.console import Console
    from rich.markup import escape

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _plain(budget, console, clock)
        return
    with _live(budget, console) as shown:
        task = shown.add_task("tuning", total=None)

        def report(what: str, best_us: float, trials: int) -> None:
            shown.update(task, description=escape(line(what, best_us, trials)))

        yield report


def line(what: str, best_us: float, trials: int) -> str:
    """One state of the search in words."""
    short = what if len(what) <= NAME_WIDTH else what[: NAME_WIDTH - 3] + "..."
    best = f"best {best_us:.1f} us" if math.isfinite(best_us) else "nothing fits yet"
    return f"tuning {short}: {best}, trial {trials}"


def _plain(budget: Budget, console: Console, clock: Callable[[], float]) -> Report:
    last = -math.inf

    def report(what: str, best_us: float, trials: int) -> None:
        nonlocal last
        now = clock()
        if now - last < PLAIN_EVERY_S:
            return
        last = now
        text = f"{line(what, best_us, trials)}, {_left(budget)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    return report


def _left(budget: Budget) -> str:
    return f"{budget.left:.0f} s left"


def _live(budget: Budget, console: Console) -> Progress:
    """One line with a spinner, and the seconds left, which count down while a trial compiles."""
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    class SecondsLeft(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_left(budget), style="progress.remaining")

    columns = (SpinnerColumn(), TextColumn("{task.description}"), SecondsLeft())
    return Progress(*columns, console=console, transient=True)
