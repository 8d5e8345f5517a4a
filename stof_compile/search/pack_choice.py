"""Which projections that share an input become one product.

On a GPU the best candidate of the packed product (library or template) stands against the sum of
the best of each; where a template takes a gated MLP's two products and what joins them at once, the
packed product and a kernel behind it stand against that, in turns. On a CPU, where times scatter,
both forms run in turns and Welch's test decides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from stof_compile.compare import compare
from stof_compile.fusion.chain import ChainOp, OpChain, Operand, Value
from stof_compile.fusion.fingerprint import fingerprints
from stof_compile.fusion.op_kind import OpKind
from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec, fp32_products
from stof_compile.node_ops import tensor_meta
from stof_compile.packing import Pack, packs_bytes
from stof_compile.plan import PackPlan
from stof_compile.search.candidate import LIBRARY, Candidate
from stof_compile.search.context import TuningContext
from stof_compile.search.draw import draw_candidates, draw_learned
from stof_compile.search.gated_choice import joining
from stof_compile.search.learned import Learned
from stof_compile.search.stage1 import SAMPLES

log = logging.getLogger("stof_compile")

STORE_KIND = "packs"
MIN_GAIN = 0.02  # share of the time that packing must save on a GPU: it costs memory
ROUNDS = 10


def choose_pack(
    gm: GraphModule, pack: Pack, ctx: TuningContext, *, on_gpu: bool, gated: Recipe | None = None
) -> PackPlan:
    """Decide about all packs of one key.

    Args:
        pack: one of them. on_gpu: which of the two ways of measuring is used.
        gated: the segment from its products to where they are joined (see ``gated_choice``).
    """
    if gated is not None and (not on_gpu or ctx.bench.first(gated) is None):
        gated = None  # no template takes it
    if ctx.plan is not None:
        held = ctx.plan.packs.get(pack.key)
        if held is None:
            return PackPlan(False, pack.sizes, "plan", reason="not in the plan")
        return replace(held, source="plan")
    if not ctx.measure:
        return PackPlan(False, pack.sizes, "rules", reason="nothing may be measured")
    key = f"{pack.key} {fp32_products()}{' beside ' + gated.key if gated else ''}"
    held_value = None if ctx.store is None else ctx.store.get(STORE_KIND, key)
    if held_value is not None:
        try:
            return replace(PackPlan.from_dict(held_value), source="store")
        except (KeyError, TypeError) as error:
            log.warning("a stored decision cannot be read (%r) and is made anew", error)
    if ctx.budget.spent:
        return PackPlan(False, pack.sizes, "rules", reason="the time budget was spent")
    try:
        if gated is not None:
            plan = _against_gated(gm, pack, gated, ctx)
        else:
            plan = _by_trials(gm, pack, ctx) if on_gpu else _by_rounds(gm, pack, ctx)
    except KeyboardInterrupt:
        log.warning("tuning interrupted: going on with the best that was measured")
        ctx.budget.stop()
        return PackPlan(False, pack.sizes, "rules", reason="interrupted")
    if ctx.store is not None and not ctx.budget.spent:
        ctx.store.put(STORE_KIND, key, plan.to_dict())
    return plan


def _by_trials(gm: GraphModule, pack: Pack, ctx: TuningContext) -> PackPlan:
    parts = [_product(gm, pack, (i,)) for i in range(len(pack.sizes))]
    whole = _product(gm, pack, range(len(pack.sizes)))
    drawn = {recipe.key: _drawn(recipe, ctx) for recipe in (*parts, whole)}
    # what is good for one form is tried for the other too: luck of the draw decides nothing
    for_parts = [_best(part, ctx, drawn[part.key])[1] for part in parts]
    together, for_whole = _best(whole, ctx, [*drawn[whole.key], *for_parts])
    found = [_best(part, ctx, [*drawn[part.key], for_whole]) for part in parts]
    apart = sum(us for us, _ in found)
    for recipe, winner in ((whole, for_whole), *zip(parts, (c for _, c in found), strict=True)):
        _note(recipe, winner, ctx)
    return _measured(pack, apart, together, f"{apart:.1f} us apart, {together:.1f} us packed")


def _against_gated(gm: GraphModule, pack: Pack, gated: Recipe, ctx: TuningContext) -> PackPlan:
    rest = joining(gated)
    assert rest is not None, "gated_recipes gives those that have one"
    product = _product(gm, pack, range(len(pack.sizes)))
    found = [
        (recipe, *_best(recipe, ctx, _drawn(recipe, ctx))) for recipe in (gated, product, rest)
    ]
    for recipe, _, winner in found:
        _note(recipe, winner, ctx)
    apart = together = math.inf
    if all(math.isfinite(us) for _, us, _ in found) and not ctx.budget.spent:
        one, *two = [(recipe, candidate) for recipe, _, candidate in found]
        apart, together = ctx.bench.compare([[one], two])
    return _measured(
        pack,
        apart,
        together,
        f"{apart:.1f} us by {found[0][2].template} with what joins them, {together:.1f} us packed "
        "and joined",
    )


def _measured(pack: Pack, apart: float, together: float, reason: str) -> PackPlan:
    packed = together < apart * (1 - MIN_GAIN)
    known = math.isfinite(apart) and math.isfinite(together)
    return PackPlan(
        packed and known,
        pack.sizes,
        "measured",
        separate_us=apart if known else None,
        packed_us=together if known else None,
        reason=reason,
    )


def _best(
    recipe: Recipe, ctx: TuningContext, wanted: Sequence[Candidate]
) -> tuple[float, Candidate]:
    """The best of some candidates, with its microseconds; when the budget is spent, of those that
    are known.

    Args:
        wanted: candidates; those that do not exist for the recipe are left out.
    """
    candidates = [
        c for c in dict.fromkeys(wanted) if c.template == LIBRARY or ctx.bench.offers(recipe, c)
    ]
    ctx.bench.prepare(recipe, candidates)
    best, winner = math.inf, candidates[0]
    for candidate in candidates:
        trial = ctx.bench.known(recipe, candidate)
        if trial is None and ctx.budget.spent:
            continue
        if trial is None:
            trial = ctx.bench.trial(recipe, candidate)
            ctx.count(recipe, candidate, "projections", min(best, trial.cost_us))
        if trial.cost_us < best:
            best, winner = trial.cost_us, candidate
    return best, winner


def _note(recipe: Recipe, winner: Candidate, ctx: TuningContext) -> None:
    """Remember what a product got for the like of it."""
    trial = ctx.bench.known(recipe, winner)
    if trial is not None and math.isfinite(trial.cost_us) and not ctx.budget.spent:
        _learned(ctx).note_config(_fingerprints(recipe), winner)


def _drawn(recipe: Recipe, ctx: TuningContext) -> list[Candidate]:
    space, seed = ctx.bench.candidates(recipe), f"{ctx.seed} {recipe.key}"
    learned = _learned(ctx).config(_fingerprints(recipe), space)
    if learned is not None:
        return draw_learned(learned, space, seed, library=True)
    return draw_candidates(space, SAMPLES + 1, seed, library=True)


def _learned(ctx: TuningContext) -> Learned:
    return Learned(ctx.store, "projections")


def _fingerprints(recipe: Recipe) -> tuple[int, ...]:
    """Fingerprints of a product, as of a chain of this one op; of longer segments none."""
    step, x = recipe.steps[0], recipe.operands[0]
    if len(recipe.steps) > 1 or step.kind != "linear":
        return ()
    kind = OpKind("linear", "contraction", "contraction")
    read, made = (Value(v.shape, str(v.dtype), "contiguous", x.device) for v in (x, step))
    op = ChainOp("y", ("y",), kind, made, (Operand("x", None, read),), "")
    return fingerprints(OpChain((op,)), 0, 1)


def _by_rounds(gm: GraphModule, pack: Pack, ctx: TuningContext) -> PackPlan:
    parts = [_product(gm, pack, (i,)) for i in range(len(pack.sizes))]
    whole = _product(gm, pack, range(len(pack.sizes)))
    bench: Any = ctx.bench
    x, *weights = bench.operands(whole)
    biases = [None] * len(parts) if len(weights) == 1 else weights[1].split(pack.sizes)
    dim = 1 if pack.layout == "kn" else 0
    kept = [part.contiguous() for part in weights[0].split(pack.sizes, dim)]
    kept = [part.t() if pack.layout == "kn" else part for part in kept]
    packed_weight = weights[0].t() if pack.layout == "kn" else weights[0]

    def apart(value: Tensor) -> list[Tensor]:
        return [F.linear(value, w, b) for w, b in zip(kept, biases, strict=True)]

    def together(value: Tensor) -> list[Tensor]:
        bias = None if len(weights) == 1 else weights[1]
        return list(F.linear(value, packed_weight, bias).split(pack.sizes, -1))

    base, new = bench.rounds([apart, together], (x,), ROUNDS)
    ctx.trials += 2
    verdict = compare(base, new)
    apart_us, packed_us = (median(us for part in form for us in part) for form in (base, new))
    reason = (
        f"Welch's test: {verdict.verdict}, {verdict.speedup:.3f}x, p = {verdict.p:.2g} over "
        f"{verdict.n} samples"
    )
    won = verdict.verdict == "win"
    return PackPlan(won, pack.sizes, "measured", apart_us, packed_us, reason)


def _product(gm: GraphModule, pack: Pack, which: Sequence[int] | range) -> Recipe:
    """The recipe of some layers of a pack as one product."""
    nodes = {node.name: node for node in gm.graph.nodes}
    x = tensor_meta(nodes[pack.x])
    weight = tensor_meta(nodes[pack.weights[0]])
    assert x is not None and weight is not None, "packs are made of tensors"
    n, k, kn = sum(pack.sizes[i] for i in which), pack.width, pack.layout == "kn"
    device = x.device.type
    shape = (k, n) if kn else (n, k)
    operands = [
        TensorSpec(tuple(x.shape), tuple(x.stride()), x.dtype, device),
        TensorSpec(shape, (shape[1], 1), weight.dtype, device),
    ]
    if any(pack.biases[i] for i in which):
        operands.append(TensorSpec((n,), (1,), weight.dtype, device))
    attrs = (("weight_kn", True),) if kn else ()
    inputs = tuple(Ref("operand", i) for i in range(len(operands)))
    step = Step("linear", inputs, (*x.shape[:-1], n), x.dtype, attrs)
    return Recipe(tuple(operands), (step,))


def choose_packs(
    gm: GraphModule,
    packs: Sequence[Pack],
    ctx: TuningContext,
    *,
    on_gpu: bool,
    gated: Mapping[str, Recipe],
) -> dict[str, PackPlan]:
    """Decide about the packs of a graph: key -> decision, with the number of its groups.

    Args:
        on_gpu: which way of measuring is used. gated: see :func:`gated_recipes`.
    """
    alike: dict[str, list[Pack]] = {}
    for pack in packs:
        alike.setdefault(pack.key, []).append(pack)
    chosen = {}
    for key, group in alike.items():
        plan = choose_pack(gm, group[0], ctx, on_gpu=on_gpu, gated=gated.get(key))
        nbytes = packs_bytes(group) if plan.packed else 0
        chosen[key] = replace(plan, count=len(group), nbytes=nbytes)
    return chosen


def prepare_packs(
    gm: GraphModule, packs: Sequence[Pack], ctx: TuningContext, gated: Mapping[str, Recipe]
) -> None:
    """Have the candidates compiled that :func:`choose_packs` will ask for on a GPU."""
    for pack in {pack.key: pack for pack in packs}.values():
        count = len(pack.sizes)
        whole = gated.get(pack.key)
        if whole is None or ctx.bench.first(whole) is None:
            recipes = [_product(gm, pack, (i,)) for i in range(count)]
        else:
            rest = joining(whole)
            recipes = [whole] if rest is None else [whole, rest]
        for recipe in (*recipes, _product(gm, pack, range(count))):
            ctx.bench.prepare(recipe, _drawn(recipe, ctx))
