"""What fusion did to a graph, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from stof_compile.packing import PackedWeights
from stof_compile.plan import ChainPlan, PackPlan


@dataclass
class FusionResult:
    """What fusion did to a graph.

    Args:
        chains: chain key -> plan, of the chains where a template was considered; products with
            rotary embeddings are among them, as chains of two operations.
        packs: pack key -> decision, of the packs whose copies have room.
        refused_packs: pack key -> the same for others: they stay apart, unmeasured.
        rotated: products whose rotations are in their epilogue.
        apart: why other rotations stay apart from their product -> how many.
        segments: segments replaced by a template.
        joined: others, without a product, that Inductor computes in one kernel with its own ops.
        folded: copies of transposed operands that products now read through strides.
        patches: patch embeddings that are products now, and were convolutions.
        marked: checks for infinities that the kernels of products do.
        packed: keeps packed weights equal to the originals; None where nothing is packed.
        trials: candidates measured in this compile.
        refusal: why fusion left the whole graph alone, empty where it did not.
        repeats: (chain in words, how often, how many of these within longer chains) of what the
            graph repeats, the most frequent first.
        unplanned: chains in words that a template takes a part of and that a plan made for other
            graphs does not have.
        seconds: spent in all. measuring_s: of these, spent compiling, checking and timing.
            compiling_s, first_calls_s, timing_s: parts of that; first_calls: the second by
            template. All as of ``DeviceBench``.
    """

    chains: dict[str, ChainPlan] = field(default_factory=dict)
    packs: dict[str, PackPlan] = field(default_factory=dict)
    refused_packs: dict[str, PackPlan] = field(default_factory=dict)
    rotated: int = 0
    apart: dict[str, int] = field(default_factory=dict)
    segments: int = 0
    joined: int = 0
    folded: int = 0
    patches: int = 0
    marked: int = 0
    packed: PackedWeights | None = None
    trials: int = 0
    refusal: str = ""
    repeats: list[tuple[str, int, int]] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)
    seconds: float = 0.0
    measuring_s: float = 0.0
    compiling_s: float = 0.0
    first_calls_s: float = 0.0
    timing_s: float = 0.0
    first_calls: dict[str, list[float]] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether the graph is another one than before."""
        packed = any(pack.packed for pack in self.packs.values())
        counts = (self.segments, self.rotated, self.folded, self.patches)
        return any(counts) or packed
