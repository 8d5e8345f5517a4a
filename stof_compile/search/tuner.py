"""The tuner: which scheme each op chain of a graph gets, and which template each of its segments.

Every distinct chain is tuned once, whatever its number of occurrences. A choice comes from the
user's plan, from the store, or from the search: stage 1 finds the scheme, stage 2 the configs, and
the result is measured once more against the initial scheme, in turns, before it is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from torch.fx import GraphModule

from stof_compile.errors import StofPlanError
from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.op_list import op_list
from stof_compile.fusion.recipe import fp32_products
from stof_compile.fusion.segment_key import segment_key
from stof_compile.plan import ChainPlan, Plan
from stof_compile.search.chain_search import ChainSearch
from stof_compile.search.context import TuningContext
from stof_compile.search.segments import ChainSegments
from stof_compile.store import Store

log = logging.getLogger("stof_compile")

STORE_KIND = "chains"


def chain_key(chain: OpChain, claimed: Collection[int] = ()) -> str:
    """The exact key of a whole chain, of how fp32 matrices are multiplied, and of the ops that are
    ``claimed`` by what stands beside them.
    """
    beside = f" beside {','.join(map(str, sorted(claimed)))}" if claimed else ""
    return f"{segment_key(chain, 0, len(chain))} {fp32_products()}{beside}"


class ChainTuner:
    """Chooses the scheme and the templates of one chain.

    Args:
        legality: (start, stop) of ops of the chain -> why they cannot be one kernel.
        claimed: ops that Inductor joins with what stands beside them (``fusion.beside``).
    """

    def __init__(
        self,
        gm: GraphModule,
        chain: OpChain,
        legality: Callable[[int, int], str | None],
        ctx: TuningContext,
        claimed: Collection[int] = (),
    ) -> None:
        ops = op_list(chain, {node.name: node for node in gm.graph.nodes})
        self.key = chain_key(chain, claimed)
        self._segments = ChainSegments(gm, chain, ops, legality, ctx, claimed)
        self._search = ChainSearch(self._segments)
        self._ctx = ctx

    @property
    def name(self) -> str:
        """The chain in words."""
        return self._segments.name

    @property
    def can_be_improved(self) -> bool:
        """Whether a template accepts any legal segment of it."""
        return self._segments.can_be_improved

    def compile_ahead(self) -> None:
        """Have the configs compiled that stage 1 will most likely ask for, if it has to run."""
        ctx = self._ctx
        if ctx.plan is not None or ctx.forced or not ctx.measure:
            return
        if _held(ctx.store, self.key, self._search) is None and self._segments.can_be_improved:
            self._search.compile_ahead()

    def begin_with(self, first: int, run: ChainPlan) -> None:
        """Let the search begin at what was found for a chain that is a run of this one.

        Args:
            first: op of this chain at which the run begins. run: the plan of the other chain.
        """
        if run.source in ("measured", "store") and not run.unfinished_s:
            self._search.start.begin_with(first, run)

    def choose(self) -> ChainPlan | None:
        """The plan of the chain; None where no template accepts anything: it stays as it is.

        Raises:
            StofPlanError: the user's plan has another chain under this key.
        """
        ctx, search = self._ctx, self._search
        if ctx.plan is not None:
            return _from_plan(ctx.plan, self.key, search)
        by_search = ctx.measure and not ctx.forced
        held = _held(ctx.store, self.key, search) if by_search else None
        if held is not None:  # asked first: every segment is read to know what can be improved
            return held
        if not self._segments.can_be_improved:
            return None
        if ctx.forced:
            return search.forced(ctx.forced)
        if not ctx.measure:
            return search.by_rules()
        if ctx.store is None:
            return search.searched()
        try:
            with ctx.store.lock(f"{STORE_KIND}/{self.key}"):  # another process may be tuning it
                held = _held(ctx.store, self.key, search)
                if held is not None:
                    return held
                plan = search.searched()
                ctx.store.put(STORE_KIND, self.key, plan.to_dict())
        except KeyboardInterrupt:  # while it waited for the other process
            self._segments.interrupted()
            plan = search.searched()
        return plan


def _held(store: Store | None, key: str, search: ChainSearch) -> ChainPlan | None:
    value = None if store is None else store.get(STORE_KIND, key)
    if value is None:
        return None
    try:
        plan = ChainPlan.from_dict(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("a stored scheme cannot be read (%r) and is searched anew", error)
        return None
    if search.ctx.budget_s > plan.unfinished_s > 0:
        return None  # there is more time now: the search goes on with the trials it has
    difference = search.difference(plan)
    if difference:
        log.warning("a stored scheme does not fit (%s) and is searched anew", difference)
        return None
    return replace(plan, source="store")


def _from_plan(plan: Plan, key: str, search: ChainSearch) -> ChainPlan | None:
    held = plan.chains.get(key)
    if held is None:
        return None
    difference = search.difference(held)
    if difference:
        raise StofPlanError(
            f"the plan's scheme {held.code} of the chain {' '.join(held.kinds)} does not fit: "
            f"{difference}; tune again"
        )
    return replace(held, source="plan")
