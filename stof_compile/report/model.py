"""What a report says about one graph, as plain data; all of it is read from the record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof_compile.dump import Record, SiteRecord
from stof_compile.fusion.scheme import Scheme
from stof_compile.plan import AttentionPlan, ChainPlan, SegmentPlan
from stof_compile.report.graph import Graph, read_graph
from stof_compile.report.groups import Group, find_groups, with_plans
from stof_compile.report.load import Ceilings

LIBRARY = "inductor"
BEFORE = ("normalized", "captured")  # the first that a dump has
AFTER = "rewritten"
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
VERDICT = re.compile(r"whole graph: (?P<times>.*); kept: (?P<winner>.+) \((?P<source>\w+)\)$")
FORM = re.compile(r"(?P<name>.+?) (?P<us>[0-9.]+) us$")


@dataclass(frozen=True)
class Verdict:
    """The whole graph in its forms: name -> microseconds, and the one that is kept."""

    times_us: dict[str, float]
    winner: str
    source: str


@dataclass(frozen=True)
class Step:
    """A timed part of the graph: a segment of a chain, or attention.

    Args:
        name: what it is, in words. how: what runs it, with its config.
        count: how often it occurs. us: microseconds of one call; None where not measured.
        library_us: of the same under torch.compile; None where not measured.
        ours: whether STOF runs it.
        flops, nbytes: of one call, 0 = not known. floor_us: None without ceilings.
    """

    name: str
    how: str
    count: int
    us: float | None
    library_us: float | None
    ours: bool
    flops: float = 0.0
    nbytes: float = 0.0
    floor_us: float | None = None

    @property
    def timed(self) -> bool:
        """Whether both times are known."""
        return self.us is not None and self.library_us is not None

    @property
    def gb_s(self) -> float | None:
        """Rate at which the bytes it has to move are moved, GB/s."""
        return self.nbytes / self.us / 1e3 if self.us and self.nbytes else None

    @property
    def tflops(self) -> float | None:
        """Rate at which it computes, TFLOP/s."""
        return self.flops / self.us / 1e6 if self.us and self.flops else None

    @property
    def floor_share(self) -> float | None:
        """Floor / time: 1 is the best a kernel can be."""
        return self.floor_us / self.us if self.us and self.floor_us else None


@dataclass(frozen=True)
class Decision:
    """One choice of an attention kernel, for all the sites that share it."""

    sites: tuple[SiteRecord, ...]
    choice: AttentionPlan

    @property
    def chosen_us(self) -> float | None:
        """Microseconds of the chosen kernel."""
        return _time_of(self.choice, self.choice.kernel, self.choice.config)

    @property
    def sdpa_us(self) -> float | None:
        """Microseconds of PyTorch's SDPA at the same place."""
        return _time_of(self.choice, "sdpa", None)


@dataclass(frozen=True)
class GraphReport:
    """All that a report says about one graph.

    Args:
        number: of the graph in the dump. record: it was read from.
        before, after: the graph as it was matched, and as Inductor gets it; None where the dump
            lacks the text. stages: stage -> number of operations.
        groups: operators of STOF in ``after``. decisions: about attention.
        steps: timed parts, in the order of the report. verdict: None where there was none.
    """

    number: int
    record: Record
    before: Graph | None
    after: Graph | None
    stages: dict[str, int]
    groups: tuple[Group, ...]
    decisions: tuple[Decision, ...]
    steps: tuple[Step, ...]
    verdict: Verdict | None
    ceilings: Ceilings | None = field(default=None)

    @property
    def fused(self) -> tuple[Group, ...]:
        """The groups that are fused operators: all but attention."""
        return tuple(group for group in self.groups if not group.is_attention)


def read_report(number: int, record: Record, ceilings: Ceilings | None = None) -> GraphReport:
    """Make the report of a graph."""
    graphs = {stage: read_graph(stage, text) for stage, text in record.graphs.items()}
    before = next((graphs[stage] for stage in BEFORE if stage in graphs), None)
    after = graphs.get(AFTER)
    groups: list[Group] = []
    if before is not None and after is not None:
        sites = [(s.name, s.kernel) for s in record.sites if s.status == "rewritten"]
        groups = with_plans(find_groups(before, after), record.chains, sites)
    decisions = _decisions(record.sites)
    steps = [_attention_step(decision, ceilings) for decision in decisions]
    for chain in record.chains:
        steps += [_segment_step(chain, segment, ceilings) for segment in chain.segments]
    verdicts = [found for note in record.notes if (found := read_verdict(note)) is not None]
    return GraphReport(
        number,
        record,
        before,
        after,
        {stage: len(graph.ops) for stage, graph in graphs.items()},
        tuple(groups),
        tuple(decisions),
        tuple(steps),
        verdicts[-1] if verdicts else None,
        ceilings,
    )


def alike_sites(sites: Sequence[SiteRecord]) -> list[tuple[SiteRecord, ...]]:
    """Sites that differ in their name only, together, in the order of the first of each."""
    found: dict[str, list[SiteRecord]] = {}
    for site in sites:
        found.setdefault(repr(replace(site, name="")), []).append(site)
    return [tuple(alike) for alike in found.values()]


def named(sites: Sequence[SiteRecord]) -> str:
    """The first name, and how many more."""
    return sites[0].name + (f" and {len(sites) - 1} more" if len(sites) > 1 else "")


def read_verdict(note: str) -> Verdict | None:
    """The verdict on a whole graph in a note of a record; None where the note is another one."""
    found = VERDICT.match(note)
    if not found:
        return None
    times = {}
    for part in found["times"].split(", "):
        form = FORM.match(part)
        if form:
            times[form["name"]] = float(form["us"])
    return Verdict(times, found["winner"], found["source"])


def scheme_bits(chain: ChainPlan, code: str) -> str:
    """A scheme code as bits, one for each operation; the code itself where it is none."""
    try:
        return "".join(map(str, Scheme.from_hex(code, len(chain.kinds)).code))
    except ValueError:
        return code


def spell_config(config: Sequence[tuple[str, Any]]) -> str:
    """The settings of a template as text."""
    return ", ".join(f"{name}={value}" for name, value in config)


def spell_kernel(kernel: str, config: Sequence[int]) -> str:
    """A kernel of attention with its settings as text."""
    return f"{kernel}[{','.join(map(str, config))}]" if config else kernel


def kinds_of(chain: ChainPlan, segment: SegmentPlan) -> str:
    """The operations of a segment as text."""
    return " + ".join(chain.kinds[segment.start : segment.stop])


def untimed(steps: Sequence[Step]) -> int:
    """Parts without a time of their own, each counted as often as it occurs."""
    return sum(step.count for step in steps if not step.timed)


def to_json(reports: Sequence[GraphReport], where: str) -> dict[str, Any]:
    """The reports for programs."""
    return {"report": 1, "dump": where, "graphs": [_graph_json(report) for report in reports]}


# -- parts ----------------------------------------------------------------------------------------


def _decisions(sites: Sequence[SiteRecord]) -> list[Decision]:
    found: dict[str, list[SiteRecord]] = {}
    for site in sites:
        if site.choice is not None:
            key = f"{site.choice!r} {site.shape!r} {site.picture} {site.mask}"
            found.setdefault(key, []).append(site)
    return [
        Decision(tuple(alike), alike[0].choice)
        for alike in found.values()
        if alike[0].choice is not None
    ]


def _time_of(choice: AttentionPlan, kernel: str, config: Sequence[int] | None) -> float | None:
    times = [
        c.median_us
        for c in choice.candidates
        if c.kernel == kernel
        and (config is None or tuple(c.config) == tuple(config))
        and c.median_us is not None
    ]
    return min(times) if times else None


def _attention_step(decision: Decision, ceilings: Ceilings | None) -> Step:
    choice, site = decision.choice, decision.sites[0]
    flops, nbytes = attention_work(site)
    name = f"attention of {named(decision.sites)}"
    return Step(
        name,
        spell_kernel(choice.kernel, choice.config),
        len(decision.sites),
        decision.chosen_us,
        decision.sdpa_us,
        site.status == "rewritten",
        flops,
        nbytes,
        _floor(ceilings, flops, nbytes),
    )


def attention_work(site: SiteRecord) -> tuple[float, float]:
    """Operations on kept elements, and bytes of Q, K, V and the result; 0 where not known."""
    names = ("batch", "q_heads", "kv_heads", "q_len", "k_len", "head_dim")
    sizes = [site.shape.get(name) for name in names]
    size = DTYPE_BYTES.get(str(site.shape.get("dtype", "")).removeprefix("torch."), 0)
    density = site.statistics.get("density")
    if density is None and site.mask == "none":
        density = 1.0
    if not all(isinstance(value, int) for value in sizes) or not size or density is None:
        return 0.0, 0.0
    batch, q_heads, kv_heads, q_len, k_len, head_dim = (int(value or 0) for value in sizes)
    flops = 4.0 * batch * q_heads * q_len * k_len * head_dim * float(density)
    nbytes = 2.0 * batch * head_dim * (q_heads * q_len + kv_heads * k_len) * size
    return flops, nbytes


def _segment_step(chain: ChainPlan, segment: SegmentPlan, ceilings: Ceilings | None) -> Step:
    ours = segment.template != LIBRARY
    config = spell_config(segment.config)
    return Step(
        kinds_of(chain, segment),
        f"{segment.template} {config}".strip() if ours else "torch.compile",
        chain.count,
        segment.median_us,
        segment.library_us,
        ours,
        segment.flops,
        segment.nbytes,
        _floor(ceilings, segment.flops, segment.nbytes),
    )


def _floor(ceilings: Ceilings | None, flops: float, nbytes: float) -> float | None:
    if ceilings is None or not (flops or nbytes):
        return None
    return ceilings.floor_us(flops, nbytes)


def _graph_json(report: GraphReport) -> dict[str, Any]:
    record = report.record
    return {
        "number": report.number,
        "folder": record.folder,
        "device": record.device,
        "versions": record.versions,
        "options": record.options,
        "changes_function": record.changes_function,
        "operations": report.stages,
        "kinds": {
            name: dict(graph.counts.most_common())
            for name, graph in (("before", report.before), ("after", report.after))
            if graph is not None
        },
        "groups": [
            {
                "number": group.number,
                "operator": group.op.kind,
                "name": group.op.name,
                "source": str(group.op.source) if group.op.source else "",
                "members": list(group.members),
                "site": group.site,
                "template": group.segment.template if group.segment else "",
                "config": dict(group.segment.config) if group.segment else {},
            }
            for group in report.groups
        ],
        "sites": [site.to_dict() for site in record.sites],
        "pictures": record.pictures,
        "chains": [
            {**chain.to_dict(), "bits": scheme_bits(chain, chain.code),
             "initial_bits": scheme_bits(chain, chain.initial)}
            for chain in record.chains
        ],
        "packs": [pack.to_dict() for pack in record.packs],
        "steps": [_step_json(step) for step in report.steps],
        "verdict": asdict(report.verdict) if report.verdict else None,
        "near_misses": record.near_misses,
        "fallbacks": record.fallbacks,
        "notes": record.notes,
        "timings_s": record.timings_s,
    }  # fmt: skip


def _step_json(step: Step) -> Mapping[str, Any]:
    rates = {"gb_s": step.gb_s, "tflops": step.tflops, "floor_share": step.floor_share}
    return {**asdict(step), **rates}
