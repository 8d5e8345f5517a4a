"""Trials: every (segment, template, config) is measured once ever on a device and its versions.

A failure is a trial too: it costs infinity and is not run again. The table reads and writes one
file a segment through the store, under the store's lock, so processes share their trials.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stof_compile.budget import Budget
from stof_compile.errors import StofUnsupportedError
from stof_compile.measure import ErrorReport, Timing
from stof_compile.store import Store

log = logging.getLogger(__name__)

STORE_KIND = "trials"
STATUSES = ("measured", "failed", "refused", "nan")

Value = int | float | str | bool
Config = Mapping[str, Value]
"""A point of a config space: dimension -> value, plain JSON."""

TrialRun = Callable[[], tuple[ErrorReport, Timing | None]]
"""Builds, checks and times a candidate; the timing may be None when the check failed."""


@dataclass(frozen=True)
class Trial:
    """What came of one (segment, template, config).

    Args:
        segment: key of the segment: op kinds, shapes, dtypes, parameters. Device and versions are
            in the store's environment.
        template: name of the template.
        config: (dimension, value) pairs, sorted by dimension.
        status: ``measured`` | ``failed`` (raised, or out of tolerance) | ``refused`` (the template
            declined, or the time ended before it was compiled) | ``nan`` (NaN or infinities the
            reference does not have).
        median_us: microseconds of one call, None unless measured.
        error: largest relative error against the reference, None where there is none.
        reason: why it was not measured; empty otherwise.
    """

    segment: str
    template: str
    config: tuple[tuple[str, Value], ...]
    status: str
    median_us: float | None = None
    error: float | None = None
    reason: str = ""

    @property
    def cost_us(self) -> float:
        """Microseconds of one call, infinity unless measured."""
        return math.inf if self.median_us is None else self.median_us

    def to_dict(self) -> dict[str, Any]:
        """The trial as plain JSON values, without its segment."""
        return {
            "template": self.template,
            "config": dict(self.config),
            "status": self.status,
            "median_us": self.median_us,
            "error": self.error,
            "reason": self.reason,
        }

    @staticmethod
    def from_dict(segment: str, data: Mapping[str, Any]) -> Trial:
        """Rebuild a trial of a segment from its JSON form.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the data is no trial.
        """
        status, median_us, error = data["status"], data["median_us"], data["error"]
        if status not in STATUSES:
            raise ValueError(f"status {status!r} of a trial; valid: {', '.join(STATUSES)}")
        if (status == "measured") != (median_us is not None):
            raise ValueError(f"a {status} trial with the time {median_us!r}")
        if median_us is not None and not math.isfinite(median_us):
            raise ValueError(f"time {median_us!r} of a measured trial")
        return Trial(
            segment,
            str(data["template"]),
            _frozen(data["config"]),
            status,
            None if median_us is None else float(median_us),
            None if error is None else float(error),
            str(data["reason"]),
        )


class TrialTable:
    """Trials of this process and, through the store, of all others.

    Args:
        store: where trials are kept, None to keep them in this process only.
        strict: a candidate that raises is raised on, not recorded (refusals are recorded).
    Attributes:
        measured: trials that this table ran.
        reused: times a known trial was asked for.
    """

    def __init__(self, store: Store | None, *, strict: bool = False) -> None:
        self.measured = 0
        self.reused = 0
        self._store = store
        self._strict = strict
        self._known: dict[str, dict[_Key, Trial]] = {}
        self._not_kept: set[tuple[str, _Key]] = set()
        self._device_fault = False

    def measure(
        self,
        segment: str,
        template: str,
        config: Config,
        run: TrialRun,
        budget: Budget | None = None,
    ) -> Trial:
        """The trial of a candidate: the known one, or the one that ``run`` gives now.

        Other processes that want a trial of the same segment wait meanwhile. The caller looks at
        ``budget.spent`` before it asks.
        Args:
            run: called at most once, and only when no process has measured the candidate before.
            budget: one trial is taken off when ``run`` is called.
        """
        key = _key(template, config)
        known = self.known(segment, template, config)
        if known is not None:
            self.reused += 1
            return known
        if self._store is None:
            return self._run(segment, template, config, run, budget)
        with self._store.lock(f"{STORE_KIND}/{segment}"):
            self._read(segment)  # another process may have measured it meanwhile
            known = self._known[segment].get(key)
            if known is not None:
                self.reused += 1
                return known
            trial = self._run(segment, template, config, run, budget)
            self._write(segment)
        return trial

    def known(self, segment: str, template: str, config: Config) -> Trial | None:
        """The trial of a candidate if this process has seen it, on disk or by its own measuring."""
        if segment not in self._known:
            self._read(segment)
        return self._known[segment].get(_key(template, config))

    def trials(self, segment: str) -> tuple[Trial, ...]:
        """All trials of a segment, those of other processes up to now included; sorted by key."""
        self._read(segment)
        held = self._known[segment]
        return tuple(held[key] for key in sorted(held))

    def best(self, segment: str) -> Trial | None:
        """The fastest measured trial of a segment, None when there is none."""
        measured = [trial for trial in self.trials(segment) if trial.status == "measured"]
        return min(measured, key=lambda trial: trial.cost_us, default=None)

    # -- helpers ----------------------------------------------------------------------------------

    def _run(
        self,
        segment: str,
        template: str,
        config: Config,
        run: TrialRun,
        budget: Budget | None,
    ) -> Trial:
        self.measured += 1
        if budget is not None:
            budget.count_trial()
        keep = True
        status, median_us, error, reason = "failed", None, None, ""
        try:
            report, timing = run()
            status, median_us, error, reason = _judged(report, timing)
        except StofUnsupportedError as refusal:
            status, reason = "refused", str(refusal)
        except Exception as failure:  # a failed candidate is a recorded trial (architecture.md)
            if self._strict:
                raise
            reason = f"{type(failure).__name__}: {failure}"[:300]
            log.info("candidate %s %s failed: %s", template, dict(config), reason)
            # memory that others hold now may be free next time; after a fault of the device all
            # later candidates of this process fail, whatever they are worth
            keep = not (self._device_fault or isinstance(failure, torch.OutOfMemoryError))
            self._device_fault |= is_device_fault(failure)
        trial = Trial(segment, template, _frozen(config), status, median_us, error, reason)
        key = _key(template, config)
        self._known.setdefault(segment, {})[key] = trial
        if not keep:
            self._not_kept.add((segment, key))
        return trial

    def _read(self, segment: str) -> None:
        """Add what the store holds of a segment; a file that holds no trials is a warning."""
        held = self._known.setdefault(segment, {})
        value = None if self._store is None else self._store.get(STORE_KIND, segment)
        if value is None:
            return
        try:
            stored = [Trial.from_dict(segment, data) for data in value["trials"]]
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            log.warning("stored trials of %s are unreadable and ignored: %r", segment, problem)
            return
        held.update({_key(trial.template, dict(trial.config)): trial for trial in stored})

    def _write(self, segment: str) -> None:
        assert self._store is not None, "trials are written only where there is a store"
        held = self._known[segment]
        kept = [held[key].to_dict() for key in sorted(held) if (segment, key) not in self._not_kept]
        self._store.put(STORE_KIND, segment, {"trials": kept})


_Key = tuple[str, str]


def _key(template: str, config: Config) -> _Key:
    # as text, because 1 and True are equal as keys and different as values
    return template, ",".join(f"{name}={config[name]!r}" for name in sorted(config))


def _frozen(config: Config) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(config.items()))


def _judged(
    report: ErrorReport, timing: Timing | None
) -> tuple[str, float | None, float | None, str]:
    """Status, time, error and reason of a candidate that ran."""
    if not math.isfinite(report.max_rel):
        return "nan", None, None, "NaN or infinities where the reference has none, or the reverse"
    if not report.ok:
        reason = f"relative error {report.max_rel:.2e} (rms {report.rms_rel:.2e}) out of tolerance"
        return "failed", None, report.max_rel, reason
    assert timing is not None, "a candidate that passed its check was not timed"
    if not math.isfinite(timing.median_us):
        return "nan", None, report.max_rel, f"time {timing.median_us} us"
    return "measured", timing.median_us, report.max_rel, ""


def is_device_fault(failure: Exception) -> bool:
    """Whether nothing more runs on the device in this process."""
    # torch.OutOfMemoryError is none: the device goes on working
    return isinstance(failure, torch.AcceleratorError) and not isinstance(
        failure, torch.OutOfMemoryError
    )
