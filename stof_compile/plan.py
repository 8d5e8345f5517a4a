"""Plan: what was decided for a graph, serialisable.

A plan is the only thing selection and search return. It holds no tensor and no callable, so it can
be written to disk, compared, and replayed on another machine of the same kind.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stof_compile.errors import StofPlanError

PLAN_VERSION = 1


@dataclass(frozen=True)
class Candidate:
    """One way to run a site: measured, predicted, refused or failed.

    Args:
        kernel: ``block`` | ``row`` | ``gather`` | ``flex`` | ``sdpa``.
        config: tile sizes and launch settings of the kernel; empty when it has none.
        status: ``measured`` | ``predicted`` | ``refused`` | ``failed``.
        median_us, p20_us, p80_us: time of one call in microseconds, None unless measured.
        error: largest relative error against the fp64 reference, None unless measured.
        reason: why it was refused or failed; empty otherwise.
    """

    kernel: str
    config: tuple[int, ...] = ()
    status: str = "predicted"
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    error: float | None = None
    reason: str = ""

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Candidate:
        """Rebuild a candidate from its JSON form."""
        return Candidate(**{**data, "config": tuple(data["config"])})


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel chosen for one attention problem.

    Args:
        kernel, config: the winner (see :class:`Candidate`).
        source: where the choice comes from: ``measured`` | ``store`` | ``table`` | ``paper`` |
            ``forced`` | ``plan`` | ``only`` (nothing else fits).
        reason: one sentence for people.
        candidates: all that was considered, the winner included.
    """

    kernel: str
    config: tuple[int, ...]
    source: str
    reason: str
    candidates: tuple[Candidate, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> AttentionPlan:
        """Rebuild a plan entry from its JSON form."""
        return AttentionPlan(
            kernel=data["kernel"],
            config=tuple(data["config"]),
            source=data["source"],
            reason=data["reason"],
            candidates=tuple(Candidate.from_dict(c) for c in data.get("candidates", ())),
        )


@dataclass(frozen=True)
class Plan:
    """Choices of a whole graph, keyed by attention problem.

    Args:
        environment: device and versions the choices were made on.
        attention: problem key -> choice.
    """

    environment: str
    attention: dict[str, AttentionPlan] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        body = {
            "version": PLAN_VERSION,
            "environment": self.environment,
            "attention": {key: plan.to_dict() for key, plan in sorted(self.attention.items())},
        }
        return json.dumps(body, indent=1)

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        """Read a plan.

        Raises:
            StofPlanError: the text is no plan, or of another version.
        """
        try:
            body = json.loads(text)
            if body["version"] != PLAN_VERSION:
                raise StofPlanError(
                    f"{where}: plan version {body['version']}, this STOF reads version "
                    f"{PLAN_VERSION}; tune again to write a new plan"
                )
            entries = {
                key: AttentionPlan.from_dict(value) for key, value in body["attention"].items()
            }
            return Plan(environment=str(body["environment"]), attention=entries)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise StofPlanError(
                f"{where}: not a STOF plan ({error!r}); write one with dump_dir or tune again"
            ) from error

    @staticmethod
    def load(path: Path, environment: str) -> Plan:
        """Read a plan file and check that it was made for this environment.

        Raises:
            StofPlanError: unreadable, malformed, or made for another device or other versions.
        """
        try:
            text = path.read_text()
        except OSError as error:
            raise StofPlanError(
                f"plan {path}: cannot be read ({error}); check the path of options={{'plan': ...}}"
            ) from error
        plan = Plan.from_json(text, where=f"plan {path}")
        if plan.environment != environment:
            raise StofPlanError(
                f"plan {path} was made for {plan.environment!r}, here is {environment!r}; a plan "
                "holds only for the same device and versions: tune again"
            )
        return plan
