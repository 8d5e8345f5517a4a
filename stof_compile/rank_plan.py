"""Ranks of one model choose alike: one tunes a graph, the others follow its plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch.fx import GraphModule

from stof_compile.attention.agree import agree_text, several_ranks
from stof_compile.capture import CaptureFacts
from stof_compile.device import device_facts
from stof_compile.errors import StofPlanError
from stof_compile.fusion.graph_refusal import fusion_refusal
from stof_compile.fusion.recipe import fp32_products
from stof_compile.graph_key import graph_key
from stof_compile.options import StofOptions
from stof_compile.plan import Plan, PlanFile
from stof_compile.store import environment_key

logger = logging.getLogger("stof_compile")

T = TypeVar("T")

COMPILE_S = 180.0  # for compiling the forms of a graph that are compared
OWN = ("cache_dir", "dump_dir", "plan")  # options in which ranks may differ


@dataclass(frozen=True)
class Choosing(Generic[T]):
    """The ways in which a rank comes to its form of a graph.

    Args:
        decide: tunes the graph; called on one rank. plan_of: the plan of what it returned.
        follow: makes the form of a plan; StofPlanError where it cannot.
        otherwise: the form without a plan; depends on the graph alone and asks no other rank.
    """

    decide: Callable[[], T]
    plan_of: Callable[[T], Plan]
    follow: Callable[[Plan], T]
    otherwise: Callable[[], T]


def shares_choices(gm: GraphModule, facts: CaptureFacts, opts: StofOptions) -> bool:
    """Whether a graph is tuned by one rank for all: several ranks, and operators to be measured."""
    measured = opts.fusion == "auto" and opts.tune_budget_s > 0 and opts.plan is None
    return measured and several_ranks() and not fusion_refusal(gm, facts)


def on_all_ranks(
    gm: GraphModule, facts: CaptureFacts, opts: StofOptions, ways: Choosing[T]
) -> tuple[T, str]:
    """The form of a graph that all ranks with an equal graph and equal options get.

    The rank that asks first tunes it, and while it does it waits for none of the others: nothing
    that is measured talks to them. Ranks whose graphs differ choose apart.

    Args:
        gm: as captured. facts, opts: of it.
    Returns:
        The form, and a remark for the record; empty where this rank has decided.
    """
    made: list[T] = []
    environment = environment_key(device_facts(facts.device))

    def told() -> str:
        made.append(ways.decide())
        return PlanFile.of([ways.plan_of(made[0])]).to_json()

    asked = {name: value for name, value in opts.to_json().items() if name not in OWN}
    key = json.dumps(
        [graph_key(gm, grad_enabled=facts.grad_enabled), environment, asked, fp32_products()]
    )
    # as long as one rank may measure and compile, and at most half of the group's timeout
    text = agree_text(f"graph/{key}", told, 2 * opts.tune_budget_s + COMPILE_S)
    if made:
        return made[0], ""
    reason = "the rank that tunes this graph failed, or was not ready in time"
    if text:
        try:
            (plan,) = PlanFile.from_json(text, "plan of another rank").plans
            return ways.follow(plan), "choices of the rank that tuned this graph are followed"
        except StofPlanError as error:
            reason = f"the plan of the rank that tuned this graph cannot be followed: {error}"
    logger.warning("operators are left to Inductor: %s", reason)
    return ways.otherwise(), f"operators are left to Inductor: {reason}"
