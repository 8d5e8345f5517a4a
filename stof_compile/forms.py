"""The forms of one graph (fused, attention only, as torch.compile runs it): made, and the fastest
taken.

The form as torch.compile runs it needs nothing of the search. Where a search with processes that
compile is ahead, it is compiled first, while they are busy: its seconds also tell how many the
compilation of the other forms will take, so that the search can leave them that.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stof_compile.between import has_effects
from stof_compile.budget import Budget
from stof_compile.capture import CaptureFacts
from stof_compile.device import device_facts
from stof_compile.fusion.recipe import fp32_products
from stof_compile.graph_copy import copy_graph
from stof_compile.improve import Outcome, improve
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan
from stof_compile.store import Store, default_root, environment_key
from stof_compile.variants import facts_at_call
from stof_compile.verdict import AS_TORCH, CompiledAhead, compile_for_timing, fastest_form

logger = logging.getLogger("stof_compile")

FUSED, ATTENTION_ONLY = "fused", "attention only"
AHEAD_FROM_S = 30.0  # budgets below are for callers in a hurry
AHEAD_SHARE = 0.25  # of the budget


class Forms:
    """The forms of one graph.

    Args:
        captured: the graph, which stays as it is. facts: of its capture. inputs: its real inputs,
            which are read only. budget: seconds left for all that is measured.
    """

    def __init__(
        self,
        captured: torch.fx.GraphModule,
        facts: CaptureFacts,
        inputs: Sequence[Any],
        opts: StofOptions,
        budget: Budget,
    ) -> None:
        self._captured, self._facts, self._inputs = captured, facts, inputs
        self._opts, self._budget = opts, budget
        self._ahead: CompiledAhead | None = None
        # graphs that write to their inputs are not run here; their segments are compared one by one
        unmeasured = opts.tune_budget_s <= 0 or opts.plan is not None or opts.fusion != "auto"
        self._compared = not (unmeasured or facts.mutated_inputs or has_effects(captured.graph))

    @property
    def _with_torch(self) -> bool:
        """Whether the form without us takes part; else the user's choice would be undone."""
        return self._compared and self._opts.attention == "auto" and not self._opts.strict

    def compile_ahead(self) -> float:
        """Compile the form as torch.compile runs it, before the search.

        It takes at most a quarter of the budget: what it needs beyond that, torch.compile would
        need as well, and the search has the time it had.

        Returns:
            The seconds it took; 0 where the form takes no part, or did not compile.
        """
        opts, budget = self._opts, self._budget
        if not self._with_torch or opts.fp8 or opts.tune_budget_s < AHEAD_FROM_S or budget.spent:
            return 0.0
        logger.info("a form to compare with is compiled first: %s", AS_TORCH)
        started, compiled = budget.clock(), None
        try:
            gm = self._made("sdpa", {}).gm
            compiled = compile_for_timing(gm, self._inputs, opts)
        except KeyboardInterrupt:
            logger.warning("interrupted: the forms of the graph are not compared")
            budget.stop()
            return 0.0
        except Exception as failure:  # a form that fails is out
            logger.warning("%s could not be compiled for timing: %r", AS_TORCH, failure)
        seconds = budget.clock() - started
        budget.extend(max(0.0, seconds - AHEAD_SHARE * opts.tune_budget_s))
        self._ahead = CompiledAhead(AS_TORCH, compiled, seconds)
        return seconds if compiled is not None else 0.0

    def fastest(self, outcome: Outcome) -> tuple[Outcome, Callable[..., Any] | None]:
        """Take the rewritten graph, or an earlier form of it where that is faster as a whole.

        Returns:
            The form, and what Inductor made of it where it was compiled as the options ask for.
        """
        fusion, opts = outcome.fusion, self._opts
        if fusion is None or not fusion.changed or not self._compared:
            return outcome, None
        chosen = outcome.plan.attention
        plain = {key: _left_to_torch(choice) for key, choice in chosen.items()}
        earlier = {ATTENTION_ONLY: (opts.attention, chosen), AS_TORCH: ("sdpa", plain)}
        forms: dict[str, Outcome] = {FUSED: outcome}

        def make(name: str) -> torch.fx.GraphModule:
            if name not in forms:
                forms[name] = self._made(*earlier[name])
            return forms[name].gm

        names = [FUSED, ATTENTION_ONLY]  # in the order in which they are tried while there is time
        fp8 = torch.ops.stof.attention_fp8.default  # rounded on purpose
        if self._with_torch and all(node.target is not fp8 for node in outcome.gm.graph.nodes):
            names.insert(1, AS_TORCH)
            if all(c.kernel == "sdpa" and not c.config for c in chosen.values()):
                names.remove(ATTENTION_ONLY)  # the same graph
        device = self._facts.device
        store = Store(opts.cache_dir or default_root(), environment_key(device_facts(device)))
        graphs, asked = outcome.record.graphs, outcome.record.options
        options = [asked[name] for name in ("mask", "inductor", "mode", "attention")]
        told = [graphs["captured"], graphs["rewritten"], *options, fp32_products()]
        identity = json.dumps(told)
        makers = {name: partial(make, name) for name in names}
        started = time.monotonic()
        fastest = fastest_form(
            makers, self._inputs, device, opts, store, identity, self._budget, self._ahead
        )
        outcome.record.timings_s["verdict"] = time.monotonic() - started
        verdict = fastest.verdict
        if verdict is None:
            return outcome, fastest.compiled
        logger.info("%s", verdict)
        make(verdict.winner)
        kept, found = forms[verdict.winner], outcome.record
        if kept is not outcome:  # what was tried and cost time is part of the story
            kept.record.options = found.options  # the user's
            kept.record.chains, kept.record.packs = found.chains, found.packs
            kept.record.timings_s, kept.record.notes = found.timings_s, found.notes
        kept.record.notes += [note for note in (str(verdict), verdict.remark) if note]
        return kept, fastest.compiled

    def _made(self, attention: str, choices: Mapping[str, AttentionPlan]) -> Outcome:
        """The graph with attention rewritten so, and its operators left to Inductor."""
        gm = copy_graph(self._captured)
        here = facts_at_call(gm, self._inputs, self._facts, constant=True)
        asked = replace(self._opts, fusion="off", strict=False, attention=attention)
        return improve(gm, self._captured, here, asked, self._budget, choices)


def _left_to_torch(choice: AttentionPlan) -> AttentionPlan:
    """The choice for an attention where the whole graph is faster without us."""
    reason = (
        f"the whole graph is faster as torch.compile runs it; of the kernels alone "
        f"{choice.kernel} won: {choice.reason}"
    )
    return replace(choice, kernel="sdpa", config=(), source="graph", reason=reason)
