"""Operator fusion of one graph: projections packed, rotations put into the epilogue of theirs,
chains cut into segments, segments replaced by templates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node

from stof_compile.budget import Budget
from stof_compile.capture import CaptureFacts
from stof_compile.device import device_facts
from stof_compile.errors import StofOptionError
from stof_compile.fold_transpose import fold_transposes
from stof_compile.fusion.beside import Neighbours
from stof_compile.fusion.chain import OpChain, find_chains
from stof_compile.fusion.fingerprint import find_repeats
from stof_compile.fusion.graph_refusal import fusion_refusal
from stof_compile.fusion.legality import segment_refusal
from stof_compile.fusion.op_list import op_list, span
from stof_compile.fusion.read_recipe import read_recipe
from stof_compile.fusion.recipe import Recipe
from stof_compile.fusion.rewrite import Segment, rewrite_segments
from stof_compile.fusion.rope import RopeSite, find_rotations
from stof_compile.fusion.rope_rewrite import rewrite_rotations
from stof_compile.fusion_result import FusionResult
from stof_compile.graph_copy import copy_graph
from stof_compile.mark_infinities import mark_infinities
from stof_compile.options import StofOptions
from stof_compile.packing import Pack, apply_packs, find_packs
from stof_compile.packing_memory import parameter_bytes, within_memory
from stof_compile.patch_products import patches_as_products
from stof_compile.placed_segments import PlacedSegment, without_joined
from stof_compile.plan import ChainPlan, PackPlan, Plan
from stof_compile.progress import tuning_progress
from stof_compile.search.attention_workers import AttentionWorkers
from stof_compile.search.bench import DeviceBench
from stof_compile.search.candidate import LIBRARY
from stof_compile.search.compile_pool import start_pool
from stof_compile.search.context import TuningContext
from stof_compile.search.form_workers import FormWorkers, form_workers
from stof_compile.search.gated_choice import gated_recipes
from stof_compile.search.initial import limits_of
from stof_compile.search.pack_choice import choose_packs, prepare_packs
from stof_compile.search.rope_choice import (
    choose_rotation,
    prepare_rotations,
    rope_key,
    template_of,
)
from stof_compile.search.trial import TrialTable
from stof_compile.search.tuner import ChainTuner, chain_key
from stof_compile.static_values import StaticValues
from stof_compile.store import Store
from stof_compile.templates import TEMPLATES

logger = logging.getLogger("stof_compile")

TUNED_KIND = "tuned"  # of the store: graphs that were tuned before
SEARCH_SHARE = 0.6  # of the seconds left when fusion begins; whole graphs are compared after it
LEAST_SHARE = 0.5  # the same, where it is known how long the forms of the graph take to compile
FORMS = 2  # that are compiled after the search
COMPARING_S = 4.0  # to time the forms of a graph
ROPE_SHARE = 0.25  # of the seconds left for the search, for products with rotations


def search_budget(whole: Budget, form_s: float) -> Budget:
    """What the search may use of a budget: comparing whole graphs has to fit in, too.

    Args:
        form_s: seconds that one form of the graph takes to compile; 0 = not known.
    """
    left = whole.left
    if not form_s or not left:
        return whole.slice(SEARCH_SHARE)
    seconds = max(left - FORMS * form_s - COMPARING_S, LEAST_SHARE * left)
    if left - seconds < form_s:  # too little for another form, which will be left out
        seconds = max(left - COMPARING_S, seconds)
    return whole.slice(seconds / left)


class Fusion:
    """Operator fusion of one graph, as a context: the processes that compile end with it.

    Args:
        gm: the normalised graph, changed in place. facts: of its capture. budget: seconds left for
            all that is measured. plan: choices of the user. identity: names the captured graph;
            one that was tuned before measures little or nothing, and gets processes that compile
            only if it asks for them.
    Attributes:
        refusal: why the operators of the graph are left to Inductor, empty when they are not.
    """

    def __init__(
        self,
        gm: GraphModule,
        facts: CaptureFacts,
        opts: StofOptions,
        store: Store | None,
        budget: Budget,
        plan: Plan | None,
        identity: str = "",
    ) -> None:
        self._gm, self._facts, self._opts, self._store = gm, facts, opts, store
        self._plan = plan
        self.refusal = fusion_refusal(gm, facts)
        self._device = device_facts(facts.device)
        self._templates = tuple(t for t in TEMPLATES if self._device.kind in t.device_kinds)
        self._bench = DeviceBench(
            self._templates, self._device, facts.device, TrialTable(store), budget, opts.seed
        )
        self._context = TuningContext(
            self._bench, budget, opts.tune_budget_s, store, plan, opts.seed,
            forced=opts.fusion if opts.fusion not in ("auto", "off") else "",
            measure=opts.tune_budget_s > 0, limits=limits_of(self._device.capability),
        )  # fmt: skip
        self._identity = identity
        if identity and plan is None and self._context.measure and not self.refusal:
            # where other projections may be packed, other products are to be measured
            packs, _ = self._packs(gm, facts)
            self._identity = " ".join([identity, *sorted({pack.key for pack in packs})])

    def __enter__(self) -> Fusion:
        if self._will_measure and self._device.is_cuda:
            self._bench.workers.pool = start_pool()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bench.release()

    @property
    def _will_measure(self) -> bool:
        if self.refusal or self._context.forced or not self._context.measure:
            return False
        known = self._store is not None and self._store.get(TUNED_KIND, self._identity) is not None
        return self._plan is None and not known

    def attention_workers(self) -> AttentionWorkers | None:
        """The processes that compile, for attention; None where there are none."""
        pool = self._bench.workers.pool
        return None if pool is None else AttentionWorkers(pool, self._context.budget)

    def form_workers(self) -> FormWorkers | None:
        """The processes that compile, for whole graphs; None where they are too few."""
        return form_workers(self._bench.workers.pool, self._facts.device)

    def leave_workers(self) -> None:
        """Leave the processes that compile to whoever asked for them: they do not end here."""
        self._bench.workers.pool = None

    def compile_ahead(self) -> bool:
        """Give the processes that compile what the search will most likely ask for.

        Meant to be called before attention is chosen, so that kernels are ready when fusion
        begins; nothing is measured, and the graph stays as it is.

        Returns:
            Whether they were given anything.
        """
        if self._bench.workers.pool is None:
            return False
        gm = copy_graph(self._gm)
        static = StaticValues(gm.graph, self._facts.static.buffers)
        facts = replace(self._facts, static=static)
        fold_transposes(gm, facts)
        patches_as_products(gm)
        packs, _ = self._packs(gm, facts)
        prepare_packs(gm, packs, self._context, self._gated(gm, facts, packs))
        prepare_rotations(_packed_rotations(gm, facts, packs), self._context)
        _, tuners = self._tuners(gm, facts)
        for tuner in tuners:
            tuner.compile_ahead()
        return bool(packs) or any(tuner.can_be_improved for tuner in tuners)

    def run(self, form_s: float = 0.0) -> FusionResult:
        """Fuse the operators.

        Args:
            form_s: seconds that one form of the graph takes to compile; 0 = not known.
        Raises:
            StofPlanError: the user's plan has a chain that cannot be run so here.
            StofOptionError: ``fusion`` is a scheme code that fits no chain.
        """
        started = time.monotonic()
        result = FusionResult(refusal=self.refusal)
        if result.refusal:
            return result
        ctx, bench = self._context, self._bench
        ctx.use(search_budget(ctx.budget, form_s))
        with tuning_progress(ctx.budget) as ctx.progress:
            result.folded = fold_transposes(self._gm, self._facts)
            result.patches = patches_as_products(self._gm)
            self._pack_projections(result)
            self._rotate_in_products(result)
            self._fuse_chains(result)
        result.marked = mark_infinities(self._gm)
        result.trials = ctx.trials
        if self._store is not None and self._identity and result.trials:
            self._store.put(TUNED_KIND, self._identity, {"trials": result.trials})
        result.seconds = time.monotonic() - started
        for part in ("measuring_s", "compiling_s", "first_calls_s", "timing_s", "first_calls"):
            setattr(result, part, getattr(bench, part))
        if ctx.forced and not any(p.source == "forced" for p in result.chains.values()):
            told = (
                "the dump of a compile with fusion='auto' lists the chains and their codes"
                if result.chains
                else "no template of this device takes a part of it, so there is none to force"
            )
            raise StofOptionError(
                f"option 'fusion': no chain of this graph has a legal scheme {ctx.forced!r}; {told}"
            )
        return result

    def _packs(
        self, gm: GraphModule, facts: CaptureFacts
    ) -> tuple[list[Pack], dict[str, PackPlan]]:
        """The packs of a graph whose copies have room; pack key -> the refusal of others."""
        found = find_packs(gm, facts)
        packs, refused = within_memory(found, parameter_bytes(gm, facts), self._opts.pack_memory)
        alike = {key: [pack for pack in found if pack.key == key] for key in refused}
        return packs, {
            key: PackPlan(False, same[0].sizes, "rules", reason=refused[key], count=len(same))
            for key, same in alike.items()
        }

    def _gated(
        self, gm: GraphModule, facts: CaptureFacts, packs: Sequence[Pack]
    ) -> dict[str, Recipe]:
        """Segments that a template may compute at once if their projections stay apart."""
        if not self._templates or all(pack.role != "gate_up" for pack in packs):
            return {}
        return gated_recipes(gm, find_chains(gm, facts), packs)

    def _pack_projections(self, result: FusionResult) -> None:
        gm, facts = self._gm, self._facts
        packs, result.refused_packs = self._packs(gm, facts)
        gated = self._gated(gm, facts, packs)
        on_gpu = self._device.is_cuda
        result.packs = choose_packs(gm, packs, self._context, on_gpu=on_gpu, gated=gated)
        taken = [pack for pack in packs if result.packs[pack.key].packed]
        if taken:
            result.packed = apply_packs(gm, facts, taken)

    def _rotate_in_products(self, result: FusionResult) -> None:
        """Compute products and the rotations behind them in one kernel, where that is faster."""
        if not self._templates:
            return
        sites, refusals = find_rotations(self._gm, self._facts)
        for refusal in refusals:
            logger.info("%s: %s", ", ".join(refusal.results), refusal.reason)
            result.apart[refusal.reason] = result.apart.get(refusal.reason, 0) + 1
        alike: dict[str, list[RopeSite]] = {}
        for site in sites:
            alike.setdefault(rope_key(site.recipe), []).append(site)
        ctx, whole = self._context, self._context.budget
        ctx.use(whole.slice(ROPE_SHARE))
        prepare_rotations([places[0].recipe for places in alike.values()], ctx)
        calls: list[tuple[RopeSite, Callable[[Sequence[Any]], Any]]] = []
        for key, places in alike.items():
            chosen = choose_rotation(places[0].recipe, ctx)
            if chosen is None:
                planned = self._plan is None or self._plan.graph
                if not planned and ctx.bench.first(places[0].recipe) is not None:
                    result.unplanned.append("linear rope")
                continue
            result.chains[key] = replace(chosen, count=len(places))
            segment = template_of(chosen)
            if segment is not None:
                (template,) = (t for t in self._templates if t.name == segment.template)
                call = template.build(places[0].recipe, dict(segment.config))
                calls += [(place, call.run) for place in places]
        ctx.use(whole)
        result.rotated = rewrite_rotations(self._gm, calls)

    def _tuners(
        self, gm: GraphModule, facts: CaptureFacts
    ) -> tuple[dict[str, list[OpChain]], list[ChainTuner]]:
        """The chains of a graph by key, and a tuner for each, the heaviest first."""
        alike: dict[str, list[OpChain]] = {}
        chains = find_chains(gm, facts) if self._templates else []
        beside = Neighbours(gm, chains)
        claimed = {}
        for chain in chains:
            claims = beside.claimed(chain)
            key = chain_key(chain, claims)
            alike.setdefault(key, []).append(chain)
            claimed[key] = claims
        tuners = [
            ChainTuner(
                gm, alike[key][0], partial(_legality, alike[key][0], gm, facts), self._context,
                claimed[key],
            )
            for key in sorted(alike, key=lambda key: -_weight(alike[key]))
        ]  # fmt: skip
        return alike, tuners

    def _fuse_chains(self, result: FusionResult) -> None:
        gm, ctx = self._gm, self._context
        alike, tuners = self._tuners(gm, self._facts)
        counts = [len(alike[tuner.key]) for tuner in tuners]
        repeats = find_repeats([alike[tuner.key][0] for tuner in tuners], counts)
        result.repeats = [
            (tuners[repeat.chain].name, repeat.times, repeat.times - counts[repeat.chain])
            for repeat in repeats
        ]
        for tuner in tuners:
            tuner.compile_ahead()
        # each chain has its share of the time that is left
        weights = {key: _weight(places) for key, places in alike.items()}
        whole = ctx.budget
        for number, tuner in enumerate(tuners):
            ctx.use(whole.slice(weights[tuner.key] / sum(weights.values())))
            for repeat in repeats:
                known = result.chains.get(tuners[repeat.chain].key)
                for longer, first in repeat.within:
                    if longer == number and known is not None:
                        tuner.begin_with(first, known)
            chosen = tuner.choose()
            del weights[tuner.key]
            if chosen is not None:
                result.chains[tuner.key] = replace(chosen, count=len(alike[tuner.key]))
            elif self._plan is not None and not self._plan.graph and tuner.can_be_improved:
                result.unplanned.append(tuner.name)
        ctx.use(whole)
        placed: list[PlacedSegment] = []
        nodes = {node.name: node for node in gm.graph.nodes}
        for key, places in alike.items():
            for chain in places if key in result.chains else ():
                placed += self._placed(chain, key, result.chains[key], nodes)
        if not ctx.forced:
            count = len(placed)
            chains = [chain for places in alike.values() for chain in places]
            placed = without_joined(gm, chains, placed, result.chains)
            result.joined = count - len(placed)
        result.segments = rewrite_segments(gm, [(place.segment, place.run) for place in placed])

    def _placed(
        self, chain: OpChain, key: str, chosen: ChainPlan, nodes: Mapping[str, Node]
    ) -> list[PlacedSegment]:
        """What templates are to compute of one occurrence of a chain."""
        gm = self._gm
        templates = {template.name: template for template in self._templates}
        ops = op_list(chain, nodes)
        placed: list[PlacedSegment] = []
        for segment in chosen.segments:
            if segment.template == LIBRARY:
                continue
            start, stop = span(ops, segment.start, segment.stop)
            reason = segment_refusal(chain, start, stop, gm, self._facts)
            recipe = read_recipe(gm, chain, start, stop, nodes)
            if reason is not None or not isinstance(recipe, Recipe):
                logger.info("%s is left to Inductor: %s", chain.ops[start].name, reason or recipe)
                continue
            template = templates[segment.template]
            refusal = template.refusal(recipe, self._device)  # strides of equal chains may differ
            if refusal is not None:
                logger.info("%s is left to Inductor: %s", chain.ops[start].name, refusal)
                continue
            call = template.build(recipe, dict(segment.config))
            placed.append(PlacedSegment(Segment(chain, start, stop), call.run, key, segment))
        return placed


def _packed_rotations(gm: GraphModule, facts: CaptureFacts, packs: Sequence[Pack]) -> list[Recipe]:
    """Recipes of the products with rotations that there will be if projections are packed."""
    one_each = list({pack.key: pack for pack in packs if pack.role == "attention"}.values())
    if not one_each:
        return []
    packed = copy_graph(gm)  # with the copied weights of one layer of each kind
    apply_packs(packed, facts, one_each)
    sites, _ = find_rotations(packed, facts)
    made = {node.name for node in packed.graph.nodes if "stof_packed" in node.meta}
    recipes = (site.recipe for site in sites if site.operands[1] in made)
    return list({recipe.key: recipe for recipe in recipes}.values())


def _legality(
    chain: OpChain, gm: GraphModule, facts: CaptureFacts, start: int, stop: int
) -> str | None:
    return segment_refusal(chain, start, stop, gm, facts)


def _weight(places: Sequence[OpChain]) -> float:
    """Elements that a chain reads and writes, more for products, times its occurrences."""
    total = 0.0
    for op in places[0].ops:
        for value in (op.value, *(operand.value for operand in op.operands)):
            size = 1.0
            for extent in value.shape:
                size *= extent if isinstance(extent, int) else 1
            total += size * (4 if op.kind.compute_intensive else 1)
    return total * len(places)
