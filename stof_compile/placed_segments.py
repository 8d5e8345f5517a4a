"""Segments of all chains of a graph, and which of them are better left to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from stof_compile.fusion.beside import Neighbours
from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.rewrite import Segment
from stof_compile.plan import ChainPlan, SegmentPlan
from stof_compile.search.candidate import LIBRARY


@dataclass(frozen=True)
class PlacedSegment:
    """A segment of one occurrence of a chain that a template is to compute.

    Args:
        segment: where it is. run: function of its operands that returns the result.
        key: of the chain. part: the segment in the chain's plan.
    """

    segment: Segment
    run: Callable[[Sequence[Any]], Any]
    key: str
    part: SegmentPlan


def without_joined(
    gm: GraphModule,
    chains: Iterable[OpChain],
    placed: Sequence[PlacedSegment],
    plans: dict[str, ChainPlan],
) -> list[PlacedSegment]:
    """The segments that Inductor would not compute in one kernel with an op beside them.

    Args:
        gm: the graph, not rewritten yet. chains: all of it. placed: segments of all chains.
        plans: chain key -> plan; what no occurrence of a chain keeps is Inductor's there, too.
    """
    joined = Neighbours(gm, chains).joined([place.segment for place in placed])
    kept = [place for place, left in zip(placed, joined, strict=True) if not left]
    held = {(place.key, place.part) for place in kept}
    for key, part in {(place.key, place.part) for place in placed} - held:
        left = replace(part, template=LIBRARY, config=(), median_us=part.library_us)
        segments = tuple(left if s == part else s for s in plans[key].segments)
        plans[key] = replace(plans[key], segments=segments)
    return kept
