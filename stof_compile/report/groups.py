"""Which operations of the graph before became which operator of STOF after.

A dump has both graphs as text and no list of replacements. Names of untouched operations are the
same in both, and an operator stands where the last operation it replaces stood, with its source
line. So: of the operations that vanished between two untouched ones, those in front of the place
that lead only to the operator are its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stof_compile.plan import ChainPlan, SegmentPlan
from stof_compile.report.graph import Graph, Op

TEMPLATE_OPS = {
    "triton_linear": "fused_linear",
    "hopper_linear": "hopper_linear",
    "cublas_linear": "cublas_linear",
    "triton_gated_linear": "fused_gated_linear",
    "triton_rope_linear": "fused_rope_linear",
    "triton_linear_chain": "fused_linear_chain",
    "triton_linear_norm": "fused_linear_norm",
    "triton_norm": "fused_norm",
    "triton_pointwise": "fused_pointwise",
    "tilelang_linear": "tile_linear_out",
    "tilelang_linear_norm": "tile_linear_norm_out",
    "tilelang_chain": "tile_chain_out",
}
"""Template -> name of the operator it writes into a graph."""


@dataclass(frozen=True)
class Group:
    """An operator of STOF and the operations it stands for.

    Args:
        number: from 1, in graph order. op: the operator.
        members: operations of the graph before, in order; empty where that cannot be told.
        chain, segment: what the search says about it, None where it is no segment of a chain.
        site: name of the attention site, empty where it is none.
    """

    number: int
    op: Op
    members: tuple[str, ...]
    chain: ChainPlan | None = None
    segment: SegmentPlan | None = None
    site: str = ""

    @property
    def is_attention(self) -> bool:
        """Whether the operator is attention."""
        return "attention" in self.op.kind


def find_groups(before: Graph, after: Graph) -> list[Group]:
    """The operators of STOF in ``after``, with the operations of ``before`` they replaced."""
    old = {op.name: op for op in before.ops}
    new_names = {op.name for op in after.ops}
    gaps = _gaps(before, new_names)
    claimed: set[str] = set()
    groups: list[Group] = []
    previous = ""  # the last untouched operation
    taken: dict[str, int] = {}  # gap -> how many of its operations are behind us
    for op in after.ops:
        if op.name in old:
            previous = op.name
            continue
        if not op.is_custom:
            continue
        gap = gaps.get(previous, [])
        start = taken.get(previous, 0)
        last = _last_of(op, [old[name] for name in gap[start:]])
        members: list[str] = []
        if last is not None:
            taken[previous] = gap.index(last.name) + 1
            members = _leading_to(last.name, old, new_names, claimed)
            claimed.update(members)
        groups.append(Group(len(groups) + 1, op, tuple(n for n in old if n in set(members))))
    return groups


def _gaps(before: Graph, kept: set[str]) -> dict[str, list[str]]:
    """Untouched operation -> the vanished ones right behind it; "" = in front of the first."""
    gaps: dict[str, list[str]] = {"": []}
    current = ""
    for op in before.ops:
        if op.name in kept:
            current = op.name
            gaps[current] = []
        else:
            gaps[current].append(op.name)
    return gaps


def _last_of(op: Op, vanished: Sequence[Op]) -> Op | None:
    """The operation in whose place an operator stands: the last one of its line and shape."""
    same_line = [old for old in vanished if old.source == op.source]
    for pool in ([old for old in same_line if old.shape == op.shape or not op.shape], same_line):
        computing = [old for old in pool if not old.is_view] or list(pool)
        if computing:
            return computing[-1]
    return None


def _leading_to(last: str, old: dict[str, Op], kept: set[str], claimed: set[str]) -> list[str]:
    found: list[str] = []
    stack, seen = [last], {last}
    while stack:
        name = stack.pop()
        found.append(name)
        for read in old[name].reads:
            if read in old and read not in kept and read not in claimed and read not in seen:
                seen.add(read)
                stack.append(read)
    return found


def with_plans(
    groups: Sequence[Group], chains: Sequence[ChainPlan], sites: Sequence[tuple[str, str]]
) -> list[Group]:
    """Join groups with what was decided about them.

    Args:
        chains: of the record. sites: (name, kernel) of the rewritten attention, in graph order.
    """
    attention = iter(sites)
    joined = []
    for group in groups:
        name = group.op.kind.removeprefix("stof.").removesuffix("_marked")
        if group.is_attention:
            joined.append(replace(group, site=next(attention, ("", ""))[0]))
            continue
        found = _segment_of(group, name, chains)
        joined.append(group if found is None else replace(group, chain=found[0], segment=found[1]))
    return joined


def _segment_of(
    group: Group, name: str, chains: Sequence[ChainPlan]
) -> tuple[ChainPlan, SegmentPlan] | None:
    """The segment whose template writes this operator with these settings; None if several do."""
    fitting = []
    for chain in chains:
        for segment in chain.segments:
            if _writes(segment, name, group.op.code):
                fitting.append((chain, segment))
    if (
        len({(s.template, s.config, s.median_us, c.kinds[s.start : s.stop]) for c, s in fitting})
        > 1
    ):
        size = sum(1 for member in group.members if member)
        best = [pair for pair in fitting if pair[1].stop - pair[1].start == size]
        fitting = best if len(best) == 1 else []
    return fitting[0] if fitting else None


def _writes(segment: SegmentPlan, name: str, code: str) -> bool:
    """Whether the template of a segment may have written an operator with its settings."""
    if segment.template not in TEMPLATE_OPS:  # one of the user's own: told by its size alone
        return segment.template != "inductor" and name not in TEMPLATE_OPS.values()
    values = {int(value) for _, value in segment.config if isinstance(value, int)}
    if segment.template == "cublas_linear" and repr(dict(segment.config)["activation"]) not in code:
        return False
    return TEMPLATE_OPS[segment.template] == name and values <= set(_last_list(code))


def _last_list(code: str) -> list[int]:
    """The ints of the last list in a call: the settings of the kernel."""
    start, stop = code.rfind("["), code.rfind("]")
    inner = code[start + 1 : stop] if 0 <= start < stop else ""
    return [int(part) for part in inner.split(",") if part.strip().lstrip("-").isdigit()]
