"""Budget: seconds and trials that one compile may spend on measuring."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Budget:
    """Seconds and trials left for measurements in one compile.

    Args:
        seconds: allowed from now on.
        clock: seconds of a steady clock; tests pass their own.
        trials: candidates that may still be measured, counted down by :meth:`count_trial`; None =
            as many as the seconds allow. A reused trial costs nothing.
        whole: the budget this one is a slice of; it may end first.
        stopped: the user wants the compile to end.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    trials: int | None = None
    whole: Budget | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        own = max(0.0, self._end - self.clock())
        return own if self.whole is None else min(own, self.whole.left)

    @property
    def spent(self) -> bool:
        """Whether nothing more may be measured."""
        if self.whole is not None and self.whole.spent:
            return True
        return (self.trials is not None and self.trials <= 0) or self.left <= 0

    def slice(self, share: float) -> Budget:
        """A part of what is left: ``share`` of the seconds, and the trials of the whole."""
        return Budget(self.left * share, self.clock, whole=self)

    def extend(self, seconds: float) -> None:
        """Give seconds back that were spent on something else."""
        self._end += seconds

    def stop(self) -> None:
        """Spend all that is left: the user wants the compile to end."""
        self._end, self.stopped = self.clock(), True
        if self.whole is not None:
            self.whole.stop()

    def count_trial(self) -> None:
        """Take one measured trial off."""
        if self.trials is not None:
            self.trials -= 1
        if self.whole is not None:
            self.whole.count_trial()
