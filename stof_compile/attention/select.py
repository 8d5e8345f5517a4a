"""Selection: which kernel runs an attention problem, and why.

``auto`` measures the plausible kernels once per (mask statistics, shape, dtype, device) on random
tensors of the
problem's layout and keeps the result in the store; SDPA is always among them, so a sparse kernel
is only taken where
it wins. ``paper`` follows Equation 1 of the STOF paper. A budget of 0 asks the committed decision
table.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from stof_compile.attention.agree import agree
from stof_compile.attention.ahead import Kernel, Workers
from stof_compile.attention.call import CUDNN
from stof_compile.attention.decision_table import decide, packs_well, plausible_configs
from stof_compile.attention.problem import AttentionProblem
from stof_compile.attention.trial import compile_together, measure_candidate
from stof_compile.budget import Budget
from stof_compile.config_fields import hopper_programs
from stof_compile.device import device_facts
from stof_compile.errors import StofOptionError, StofPlanError, StofUnsupportedError
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.hopper_arrays import HOPPER_TILES
from stof_compile.masks.spec import MaskSpec
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, Candidate, Plan
from stof_compile.store import Store

logger = logging.getLogger("stof_compile")

TAU = 1.2  # Equation 1 of the paper
KERNELS = {"cuda": ("block", "gather", "row", "sdpa"), "cpu": ("gather", "flex", "sdpa")}
PAPER_KERNELS = {
    "cuda": {"row": "row", "block": "block"},
    "cpu": {"row": "gather", "block": "flex"},
}
ROW_QUERIES, ROW_KEYS = 16, 32  # beyond both the row-wise kernel is not worth its compile time
NO_MEMORY = torch.OutOfMemoryError.__name__  # how the reason of a candidate begins
FAMILY_RATIO = 1.4
"""A family of configs whose first is this much slower than the best so far is measured no further.
Within one family the first was at most 1.2x the best (BERT-base with BigBird, (8, 512) and
(16, 2048), H200, 2026-11-21)."""


def paper_choice(
    spec: MaskSpec, q_len: int, k_len: int, q_offset: int = 0, batch: int = 1, heads: int = 1
) -> tuple[str, float]:
    """Choose ``row`` or ``block`` by Equation 1 of the STOF paper.

    ``threshold = tiles / (n_q n_k) - tau / log2(sqrt(n_q n_k))^2`` with the non-empty 16x16 tiles
    of the mask and
    ``n = ceil(len / 16)``; row-wise below zero. One tile per side is row-wise (the logarithm is
    zero). A mask that differs between ``batch`` rows or ``heads`` counts with its mean.

    Returns:
        The kernel and the threshold (``-inf`` for one tile per side).
    Source: STOF paper, Equation 1, tau 1.2.
    """
    n_q, n_k = math.ceil(q_len / 16), math.ceil(k_len / 16)
    if n_q * n_k <= 1:
        return "row", -math.inf
    block_mask = build_block_mask(
        spec, q_len, k_len, 16, q_offset=q_offset, batch=batch, heads=heads
    )
    tiles = block_mask.col_idx.numel() / block_mask.planes
    threshold = tiles / (n_q * n_k) - TAU / math.log2(math.sqrt(n_q * n_k)) ** 2
    return ("row" if threshold < 0 else "block"), threshold


def choose(
    problem: AttentionProblem,
    options: StofOptions,
    store: Store | None,
    budget: Budget,
    plan: Plan | None = None,
    workers: Workers | None = None,
) -> AttentionPlan:
    """Choose the kernel of one problem.

    Args:
        problem: what has to run.
        options: ``attention`` and ``tune_budget_s`` decide how it is chosen.
        store: measured choices kept on disk, None to keep nothing.
        budget: seconds left for measurements, shared by all problems of a compile.
        plan: choices given by the user; they win over everything.
        workers: processes that compile candidates, None where there are none.
    Raises:
        StofOptionError: a kernel was forced that this device does not have.
        StofUnsupportedError: a kernel was forced that cannot run this problem, or none runs it in
            fp8.
        StofPlanError: the plan has a choice that no problem on this device can have.
    """
    if plan is not None and problem.key in plan.attention:
        given = plan.attention[problem.key]
        wrong = _impossible(given, problem.device.type, problem.fp8)
        if wrong:
            where = "the plan" if options.plan is None else f"plan {options.plan}"
            raise StofPlanError(
                f"{where}: the choice for {problem.describe()} cannot be followed: {wrong}; tune "
                "again"
            )
        return replace(given, source="plan", candidates=())
    device = problem.device.type
    kernels = KERNELS.get(device)
    if kernels is None:
        return AttentionPlan("sdpa", (), "only", f"no STOF kernel for device {device!r}")
    if options.attention == "paper":
        return _choose_by_paper(problem, device)
    if options.attention != "auto":
        return _choose_forced(problem, options.attention, kernels)
    if options.tune_budget_s <= 0:
        kernel, config, reason = decide(problem)
        return AttentionPlan(kernel, config, "table", reason)

    def held_choice() -> AttentionPlan | None:
        held = None if store is None else store.get("attention", problem.key)
        if held is None:
            return None
        try:
            found = AttentionPlan.from_dict(held)
        except (KeyError, TypeError, AttributeError) as error:
            logger.warning("a stored choice cannot be read (%r) and is measured anew", error)
            return None
        wrong = _impossible(found, device, problem.fp8)
        if wrong:
            logger.warning("a stored choice cannot be followed (%s) and is measured anew", wrong)
            return None
        return replace(found, source="store")

    def decide_here() -> AttentionPlan:
        found = held_choice()
        if found is not None or store is None:
            return found or _choose_by_measuring(problem, options, None, budget, workers)
        with store.lock(problem.key):  # another process may be measuring the same
            found = held_choice()
            return found or _choose_by_measuring(problem, options, store, budget, workers)

    return agree(
        f"attention/{device_facts(problem.device).arch}/{problem.key}",
        decide_here,
        otherwise=lambda: AttentionPlan(
            *decide(problem)[:2], "table", "another rank did not answer in time"
        ),
        patience_s=options.tune_budget_s + 60.0,
    )


def send_ahead(
    problem: AttentionProblem, store: Store | None, plan: Plan | None, workers: Workers
) -> None:
    """Have compiled what :func:`choose` will measure first, where it will measure."""
    given = plan is not None and problem.key in plan.attention
    held = store is not None and store.get("attention", problem.key) is not None
    if problem.device.type != "cuda" or given or held:
        return
    with contextlib.suppress(StofUnsupportedError):  # said, or done without, where it is chosen
        workers.send(problem, _first_of_families(_candidates(problem)))


def _impossible(choice: AttentionPlan, device: str, fp8: bool = False) -> str:
    """Why no problem on a device has such a choice, empty when one may."""
    kernels, config = KERNELS.get(device, ("sdpa",)), choice.config
    if fp8 and (choice.kernel != "block" or hopper_programs(config)):
        return f"{choice.kernel!r} with config {list(config)} has no e4m3 form"
    if choice.kernel not in kernels:
        return f"kernel {choice.kernel!r} is none of {device}: {', '.join(kernels)}"
    if choice.kernel == "sdpa":
        wrong, legal = config not in ((), CUDNN), f"[], {list(CUDNN)}"
    else:
        edges, legal = tuple(config[:2]), "two edges of a tile, powers of two"
        known = not any(n < 1 or n & (n - 1) for n in edges)
        if choice.kernel == "block" and hopper_programs(config):
            known = edges in HOPPER_TILES
            legal = "a Hopper tile of " + ", ".join(f"{q} x {k}" for q, k in HOPPER_TILES)
        wrong = len(edges) < 2 or min(config) < 0 or not known
        legal += ", and no number below 0"
    return f"config {list(config)} is none of {choice.kernel}, which has {legal}" if wrong else ""


def _choose_by_paper(problem: AttentionProblem, device: str) -> AttentionPlan:
    if problem.spec is None:
        return AttentionPlan("sdpa", (), "paper", "no mask: Equation 1 does not apply")
    name, threshold = paper_choice(
        problem.spec,
        problem.q_len,
        problem.k_len,
        problem.q_offset,
        problem.batch,
        problem.heads,
    )
    kernel = PAPER_KERNELS[device][name]
    config = _first_config(problem, kernel)
    return AttentionPlan(
        kernel, config, "paper", f"Equation 1: threshold {threshold:+.4f} means {name}-wise"
    )


def _choose_forced(problem: AttentionProblem, kernel: str, kernels: Sequence[str]) -> AttentionPlan:
    if kernel not in kernels:
        raise StofOptionError(
            f"attention={kernel!r} has no kernel for device {problem.device.type!r}; valid there: "
            f"auto, paper, off, {', '.join(kernels)}"
        )
    return AttentionPlan(
        kernel, _first_config(problem, kernel), "forced", f"attention={kernel!r} was asked for"
    )


def _first_config(problem: AttentionProblem, kernel: str) -> tuple[int, ...]:
    if kernel == "sdpa":
        return ()
    configs = plausible_configs(problem, kernel)
    if not configs:
        raise StofUnsupportedError(f"kernel {kernel!r} cannot run {problem.describe()}")
    return configs[0]


def _candidates(problem: AttentionProblem) -> list[Kernel]:
    """What may be fastest, the decision table's choice first: what is measured before the budget
    ends must contain the likely winner."""
    table = decide(problem)[:2]
    candidates = [
        (kernel, config)
        for kernel in KERNELS[problem.device.type]
        if kernel != "row" or _few_keys(problem)
        for config in plausible_configs(problem, kernel)
        if kernel != "gather" or problem.device.type == "cpu" or packs_well(problem, config)
    ]
    candidates.sort(key=lambda c: (c != table, c[0] != "sdpa"))
    return candidates


def _choose_by_measuring(
    problem: AttentionProblem,
    options: StofOptions,
    store: Store | None,
    budget: Budget,
    workers: Workers | None,
) -> AttentionPlan:
    """Measure the plausible candidates; fall back to the decision table when the budget is
    spent."""
    table_kernel, table_config, table_reason = decide(problem)
    candidates = _candidates(problem)
    generator = torch.Generator(device=problem.device).manual_seed(options.seed)
    results: list[Candidate] = []
    complete = True
    best_us: dict[tuple[object, ...], float] = {}  # of each family
    leading = _first_of_families(candidates)
    for group in (leading, [c for c in candidates if c not in leading]):
        kept = [c for c in group if _ratio(best_us, *c) <= FAMILY_RATIO]
        if problem.device.type == "cuda" and not budget.spent:
            _have_compiled(problem, kept, workers)
        for kernel, config in group:
            ratio = _ratio(best_us, kernel, config)
            if workers is not None and ratio <= FAMILY_RATIO and not budget.spent:
                workers.wait(problem, (kernel, config))
            if budget.left <= 0:
                complete = False
                reason = "the time budget was spent"
            elif (kernel, config) not in kept or ratio > FAMILY_RATIO:
                reason = f"the first config of its tile sizes took {ratio:.1f}x the best one's time"
            else:
                found = measure_candidate(problem, kernel, config, generator)
                results.append(found)
                if found.median_us is not None:
                    family = _family(kernel, config)
                    best_us[family] = min(found.median_us, best_us.get(family, math.inf))
                continue
            results.append(Candidate(kernel, config, "predicted", reason=reason))
    measured = [c for c in results if c.status == "measured" and c.median_us is not None]
    wrong = [c.reason for c in results if c.status in ("failed", "refused")]
    if problem.fp8 and wrong and not measured:  # SDPA is no candidate that would be left
        raise StofUnsupportedError(f"no e4m3 candidate runs {problem.describe()}: {wrong[0]}")
    if not measured:
        return AttentionPlan(
            table_kernel,
            table_config,
            "table",
            f"nothing could be measured; {table_reason}",
            tuple(results),
        )
    best = min(measured, key=lambda c: c.median_us or math.inf)
    runner_up = min(
        (c for c in measured if c.kernel != best.kernel),
        key=lambda c: c.median_us or math.inf,
        default=None,
    )
    versus = (
        f", next kernel {runner_up.kernel} {runner_up.median_us:.1f} us"
        if runner_up is not None
        else ""
    )
    plan = AttentionPlan(
        best.kernel,
        best.config,
        "measured",
        f"fastest of {len(measured)} measured: {best.median_us:.1f} us{versus}",
        tuple(results),
    )
    # memory that others hold now may be free next time
    complete = complete and not any(c.reason.startswith(NO_MEMORY) for c in results)
    if store is not None and complete:
        store.put("attention", problem.key, plan.to_dict())
    return plan


def _have_compiled(
    problem: AttentionProblem, candidates: Sequence[Kernel], workers: Workers | None
) -> None:
    """Have candidates compiled by other processes, or here where there are none."""
    if workers is not None:
        workers.send(problem, candidates)
        candidates = [c for c in candidates if not workers.has(problem, c)]
    compile_together(problem, candidates)


def _family(kernel: str, config: tuple[int, ...]) -> tuple[object, ...]:
    """What decides most of a candidate's time: the kernel and its tile sizes."""
    if kernel != "block":
        return (kernel, *config[:2])
    from stof_compile.kernels.attention_blockwise import BlockConfig

    how = BlockConfig(*config)
    return (kernel, how.block_q, how.block_k, bool(how.hopper))


def _ratio(best_us: dict[tuple[object, ...], float], kernel: str, config: tuple[int, ...]) -> float:
    """How many times slower a candidate's family is than the best; 0 while nothing is known."""
    known = best_us.get(_family(kernel, config))
    return 0.0 if known is None else known / min(best_us.values())


def _first_of_families(candidates: Sequence[Kernel]) -> list[Kernel]:
    """The first candidate of each family."""
    firsts: dict[tuple[object, ...], Kernel] = {}
    for candidate in candidates:
        firsts.setdefault(_family(*candidate), candidate)
    return list(firsts.values())


def _few_keys(problem: AttentionProblem) -> bool:
    """Whether the row-wise kernel has a chance: few query rows, or few keys kept by each."""
    density = 1.0 if problem.spec is None else float(problem.statistics["density"])
    return problem.q_len <= ROW_QUERIES or density * problem.k_len <= ROW_KEYS
