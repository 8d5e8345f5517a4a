"""Whether a plan that the user gave fits the graph that was compiled with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stof_compile.errors import StofPlanError
from stof_compile.fusion_result import FusionResult
from stof_compile.plan import AttentionPlan, PackPlan, Plan, PlanFile

MAX_TOLD = 4  # graphs of a file that an error describes


def refuse_other_plan(
    file: PlanFile,
    followed: Plan,
    attention: Mapping[str, AttentionPlan],
    result: FusionResult,
    about: str,
    where: Path | str,
) -> None:
    """Refuse a plan of other graphs; called when a graph was fused by it.

    The plan of this very graph has to fit as a whole: its chains and packs are found here, and it
    has all attention that is chosen here. (It may have more: that of an equal graph under other
    masks.) Where the file has none, one of its graphs has to fit: all of its chains and packs are
    found here, or it has none and its attention is. A graph in which there is nothing to be chosen
    needs no plan. Projections that a plan packs have to have room for their copies here, too.

    Args:
        followed: what ``file.for_graph`` gave. attention: problem key -> choice, of this graph.
        result: of fusion. about: the graph in words. where: the file, for the message.
    Raises:
        StofPlanError: with what is there and what is not found here.
    """
    if result.refusal:
        return
    if followed.graph and isinstance(where, Path):  # another rank may have other buffers in masks
        refuse_other_attention(followed, attention, about, where)
    for key, pack in followed.packs.items():
        if pack.packed and key in result.refused_packs:
            raise StofPlanError(
                f"plan {where} packs projections of {_rows(pack)} rows, and here "
                f"{result.refused_packs[key].reason}: give the option pack_memory that the plan "
                "was made with, or tune again"
            )
    if followed.graph:
        missing = _missing(followed, result)
        if missing:
            raise StofPlanError(
                f"plan {where} was made for this graph ({about}) and no longer fits: not found are "
                f"{'; '.join(missing)}; tune again, with the options that are used now"
            )
        return
    if not result.unplanned and not result.packs and not result.chains:
        return
    if any(_fits(plan, attention, result) for plan in file.plans):
        return
    held = [f"{plan.about}, not found: {_difference(plan, result)}" for plan in file.plans]
    told = "".join(f"\n  {text}" for text in held[:MAX_TOLD])
    if len(held) > MAX_TOLD:
        told += f"\n  and {len(held) - MAX_TOLD} more"
    raise StofPlanError(
        f"plan {where} was made for another graph than this one ({about}; chains: "
        f"{', '.join(result.unplanned) or 'none that are not in the plan'}). It has {len(held)}:"
        f"{told}\ntune this model, or give the plan of its own dump"
    )


def refuse_other_attention(
    plan: Plan, attention: Mapping[str, AttentionPlan], about: str, where: Path | str
) -> None:
    """Refuse a plan of this very graph that lacks attention of it.

    Args:
        attention: problem key -> choice, of this graph. about: the graph, in words.
        where: the plan's file.
    Raises:
        StofPlanError: it does.
    """
    asked = [choice for key, choice in attention.items() if key not in plan.attention]
    if not asked:
        return
    held = [choice for key, choice in plan.attention.items() if key not in attention]
    raise StofPlanError(
        f"plan {where} was made for this graph ({about}) and no longer fits: it does not have "
        f"{len(asked)} of the {len(attention)} attention problems of this graph (chosen here: "
        f"{_kernels(asked)}), and has {len(held)} others (chosen there: {_kernels(held)}). The "
        "mask, also one in a buffer of the model, fp8 and TF32 are part of a problem: give what "
        "the plan was made with, or tune again"
    )


def _kernels(choices: Sequence[AttentionPlan]) -> str:
    told = [" ".join([c.kernel, str(list(c.config)) if c.config else ""]) for c in choices]
    more = f" and {len(told) - MAX_TOLD} more" if len(told) > MAX_TOLD else ""
    return (", ".join(text.strip() for text in told[:MAX_TOLD]) or "nothing") + more


def _fits(plan: Plan, attention: Mapping[str, AttentionPlan], result: FusionResult) -> bool:
    """Whether all operators of a plan are here, and something of it is."""
    if plan.chains or plan.packs:
        return not _missing(plan, result)
    return any(key in attention for key in plan.attention)


def _difference(plan: Plan, result: FusionResult) -> str:
    return "; ".join(_missing(plan, result)) or "its attention"


def _missing(plan: Plan, result: FusionResult) -> list[str]:
    """Chains and packs of a plan that are not in a graph, in words."""
    missing = [
        f"{' '.join(chain.kinds)} ({chain.count} times)"
        for key, chain in plan.chains.items()
        if key not in result.chains
    ]
    return missing + [
        f"projections of {_rows(pack)} rows"
        for key, pack in plan.packs.items()
        if key not in result.packs and key not in result.refused_packs
    ]


def _rows(pack: PackPlan) -> str:
    return " + ".join(map(str, pack.sizes))
