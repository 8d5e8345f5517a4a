"""Plan: what was decided for a graph, serialisable; plans of several graphs are one file.

A plan is the only thing selection and search return. It holds no tensor and no callable, so it can
be written to disk, compared, and replayed on another machine of the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from stof_compile.errors import StofPlanError
from stof_compile.typed_json import built, part, problem_told, read_json

PLAN_VERSION = 3


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


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel chosen for one attention problem.

    Args:
        kernel, config: the winner (see :class:`Candidate`).
        source: where the choice comes from: ``measured`` | ``store`` | ``table`` | ``paper`` |
            ``forced`` | ``plan`` | ``only`` (nothing else fits) | ``graph`` (the whole graph is
            faster so).
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
        """Rebuild a plan entry from its JSON form.

        Raises:
            TypeError: it is none; also those of the entries below.
        """
        return built(AttentionPlan, data)


@dataclass(frozen=True)
class SegmentPlan:
    """What runs one segment of a scheme.

    Args:
        start, stop: its ops in the vertical op list, ``start <= i < stop``.
        template: name of the template; "inductor" leaves the ops as they are.
        config: (dimension, value) pairs of the template, sorted.
        median_us: microseconds of one call where it was measured, None otherwise.
        library_us: microseconds of the same ops under Inductor, None where not measured.
        flops, nbytes: what one call computes and has to move at least; 0 = not known.
        trials: (template and config in words, microseconds) of the fastest candidates measured;
            None = it failed. measured: how many there were.
    """

    start: int
    stop: int
    template: str
    config: tuple[tuple[str, int | float | str | bool], ...] = ()
    median_us: float | None = None
    library_us: float | None = None
    flops: int = 0
    nbytes: int = 0
    trials: tuple[tuple[str, float | None], ...] = ()
    measured: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", tuple(sorted(self.config)))


@dataclass(frozen=True)
class MovePlan:
    """One step that the search of a scheme tried.

    Args:
        name: ``expand`` | ``seize`` | ``compete``.
        before, after: codes of the schemes in hexadecimal.
        before_us, after_us: time of the segments it touches in either scheme; None where that was
            not measured, or no kernel ran them.
        outcome: ``kept`` | ``rolled back`` | ``illegal``.
        reason: why it is illegal; empty otherwise.
    """

    name: str
    before: str
    after: str
    before_us: float | None = None
    after_us: float | None = None
    outcome: str = "rolled back"
    reason: str = ""


@dataclass(frozen=True)
class ChainPlan:
    """The scheme of one op chain.

    Args:
        kinds: kind of each op of the vertical op list.
        code: the scheme, toggling bits in hexadecimal.
        initial: the scheme that rules chose, in the same form.
        segments: what runs each segment, from left to right.
        source: ``measured`` | ``store`` | ``rules`` | ``forced`` | ``plan``.
        count: how often the chain occurs in the graph.
        initial_us, final_us: time of the initial scheme and of this one, None where not measured.
        reason: one sentence for people.
        unfinished_s: the time budget that ended before the search did; 0 where the search ended.
        moves: what the search of the scheme tried, in order; every kept one, the first of others.
        moves_left_out: how many moves are not in that list.
    """

    kinds: tuple[str, ...]
    code: str
    initial: str
    segments: tuple[SegmentPlan, ...]
    source: str
    count: int = 1
    initial_us: float | None = None
    final_us: float | None = None
    reason: str = ""
    unfinished_s: float = 0.0
    moves: tuple[MovePlan, ...] = ()
    moves_left_out: int = 0

    def choice(self) -> ChainPlan:
        """The same without the path of the search: all that following it takes."""
        segments = tuple(replace(segment, trials=()) for segment in self.segments)
        return replace(self, segments=segments, moves=(), moves_left_out=0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ChainPlan:
        """Rebuild a chain from its JSON form."""
        return built(ChainPlan, data)


@dataclass(frozen=True)
class PackPlan:
    """Whether projections that share an input become one product.

    Args:
        packed: the decision.
        sizes: rows of each weight.
        separate_us, packed_us: time of either form, None where not measured.
        source: as of :class:`ChainPlan`. reason: one sentence for people.
        count: how often such a group occurs in the graph. nbytes: memory of all packed copies.
    """

    packed: bool
    sizes: tuple[int, ...]
    source: str
    separate_us: float | None = None
    packed_us: float | None = None
    reason: str = ""
    count: int = 1
    nbytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> PackPlan:
        """Rebuild a decision from its JSON form."""
        return built(PackPlan, data)


@dataclass(frozen=True)
class Plan:
    """Choices of a whole graph.

    Args:
        environment: device and versions the choices were made on.
        attention: problem key -> choice.
        chains: chain key -> scheme and templates, of chains with a template at least.
        packs: pack key -> decision.
        graph: key of the captured graph (``graph_key``), empty where it is for no graph alone.
        about: that graph in words.
        fusion: whether its operators were looked at; False leaves all of them to Inductor.
    """

    environment: str
    attention: dict[str, AttentionPlan] = field(default_factory=dict)
    chains: dict[str, ChainPlan] = field(default_factory=dict)
    packs: dict[str, PackPlan] = field(default_factory=dict)
    graph: str = ""
    about: str = ""
    fusion: bool = True

    def joined(self, other: Plan) -> Plan:
        """The choices of both, this one's where both have one; graph and words of this one."""
        return replace(
            self,
            fusion=self.fusion or other.fusion,
            attention={**other.attention, **self.attention},
            chains={**other.chains, **self.chains},
            packs={**other.packs, **self.packs},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "graph": self.graph,
            "about": self.about,
            "environment": self.environment,
            "fusion": self.fusion,
            "attention": {key: plan.to_dict() for key, plan in sorted(self.attention.items())},
            "chains": {key: plan.choice().to_dict() for key, plan in sorted(self.chains.items())},
            "packs": {key: plan.to_dict() for key, plan in sorted(self.packs.items())},
        }

    @staticmethod
    def from_dict(data: dict[str, Any], place: str = "plan") -> Plan:
        """Rebuild a plan from its JSON form; ``place``: of it in a file, for errors."""
        made = built(Plan, data, place)
        lacking = [item.name for item in fields(Plan) if item.name not in data]
        if lacking:  # empty ones are written, too: the file is damaged
            raise TypeError(f"the field {place}.{lacking[0]} is missing")
        return made


@dataclass(frozen=True)
class PlanFile:
    """Plans of the graphs of a model, as they stand in one file.

    Args:
        plans: one for each graph and environment.
    """

    plans: tuple[Plan, ...] = ()

    @staticmethod
    def of(plans: Iterable[Plan]) -> PlanFile:
        """A file of some plans; those of equal graphs are joined, the first one's choices first."""
        found: dict[tuple[str, str], Plan] = {}
        for plan in plans:
            place = plan.graph, plan.environment
            found[place] = found[place].joined(plan) if place in found else plan
        return PlanFile(tuple(found.values()))

    def for_graph(self, key: str) -> Plan:
        """The plan of a graph; where there is none, the choices of all graphs together.

        A graph that is no longer the same (a head was added, a line moved into another function)
        may still have their chains. ``graph`` of the result is empty then.
        """
        for plan in self.plans:
            if plan.graph == key:
                return plan
        together = Plan("")
        for plan in self.plans:
            together = together.joined(plan)
        return together

    def to_json(self) -> str:
        """Return the file as indented JSON."""
        body = {"version": PLAN_VERSION, "graphs": [plan.to_dict() for plan in self.plans]}
        return json.dumps(body, indent=1)

    @staticmethod
    def from_json(text: str, where: str = "plan") -> PlanFile:
        """Read a plan file.

        Raises:
            StofPlanError: the text is no plan, or of another version.
        """
        try:
            body = read_json(text)
            if "stof_tuning_file" in body:
                raise StofPlanError(
                    f"{where}: a tuning file, which `stof cache import` takes; `stof tune` writes "
                    "a plan"
                )
            if body["version"] != PLAN_VERSION:
                raise StofPlanError(
                    f"{where}: plan version {body['version']}, this STOF reads version "
                    f"{PLAN_VERSION}; tune again to write a new plan"
                )
            graphs = enumerate(part(body, "graphs", list))
            return PlanFile.of(Plan.from_dict(plan, f"graphs[{i}]") for i, plan in graphs)
        except StofPlanError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StofPlanError(
                f"{where}: not a STOF plan, or a damaged one ({problem_told(error)}); write one "
                "with dump_dir or tune again"
            ) from error

    @staticmethod
    def load(path: Path, environment: str) -> PlanFile:
        """Read the plans of a file that were made for this environment.

        Raises:
            StofPlanError: unreadable, malformed, or made for another device or other versions only.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StofPlanError(
                f"plan {path}: cannot be read ({error}); check the path of options={{'plan': ...}}"
            ) from error
        plans = PlanFile.from_json(text, where=f"plan {path}").plans
        here = tuple(plan for plan in plans if plan.environment == environment)
        if not here:
            made = " and ".join(sorted({repr(plan.environment) for plan in plans})) or "no graph"
            raise StofPlanError(
                f"plan {path} was made for {made}, here is {environment!r}; a plan "
                "holds only for the same device and versions: tune again"
            )
        return PlanFile(here)
