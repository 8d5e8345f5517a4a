"""The forms of one graph (fused, attention only, as torch.compile runs it): made, and the fastest
taken.

The form as torch.compile runs it needs nothing of the search, the one with attention rewritten only
needs the choice of kernels. Where a search with processes that compile is ahead, these compile both
meanwhile, and this process finds them in Inductor's cache. Where there are few processes, or the
graph is not for them, the first form is compiled here, before the search, while they are busy with
candidates. Its seconds also tell how many the compilation of the other forms will take, so that the
search can leave them that.
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
from stof_compile.inductor import config_patches
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, PackPlan
from stof_compile.record_fusion import notes_without_fusion
from stof_compile.search.form_workers import FormWorkers
from stof_compile.store import Store, default_root, environment_key
from stof_compile.variants import facts_at_call
from stof_compile.verdict import (
    AS_TORCH,
    CompiledAhead,
    compile_for_timing,
    fastest_form,
    for_timing,
)

logger = logging.getLogger("stof_compile")

FUSED, ATTENTION_ONLY = "fused", "attention only"
AHEAD_FROM_S = 30.0  # budgets below are for callers in a hurry
AHEAD_SHARE = 0.25  # of the budget
LIKELY_S = 20.0  # that a form takes elsewhere, while not known: 23 to 39 on busy H100 hosts
# Seconds after the search for each form but the fused one, as part of those that the form as
# torch.compile runs it took elsewhere. To load it where Inductor has it in its cache: 0.08 to 0.17
# on H100 hosts (LLaMA, T5, BERT, GPT2 at 1 x 128), 0.19 on a CPU; one run each. The rest is for the
# fused form, which is compiled here: without it BERT-base took 66 to 72 s of a budget of 60.
FORM_SHARE = 0.35


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
        self._workers: FormWorkers | None = None
        self._owns_workers = False
        self._graphs: dict[str, torch.fx.GraphModule] = {}  # of the forms that were sent to them
        # graphs that write to their inputs are not run here; their segments are compared one by one
        unmeasured = opts.tune_budget_s <= 0 or opts.plan is not None or opts.fusion != "auto"
        self._compared = not (unmeasured or facts.mutated_inputs or has_effects(captured.graph))

    @property
    def _with_torch(self) -> bool:
        """Whether the form without us takes part; else the user's choice would be undone."""
        return self._compared and self._opts.attention == "auto" and not self._opts.strict

    def __enter__(self) -> Forms:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._owns_workers and self._workers is not None:
            self._workers.close()

    def begin(self, workers: FormWorkers | None) -> float:
        """Have the form as torch.compile runs it compiled, or compile it here before the search.

        Args:
            workers: processes that compile; None = there are none, or too few.
        Returns:
            The seconds it took here; 0 where the form takes no part, or did not compile.
        """
        opts, budget = self._opts, self._budget
        if not self._with_torch or opts.fp8 or opts.tune_budget_s < AHEAD_FROM_S or budget.spent:
            return 0.0
        self._workers, started = workers, budget.clock()
        if self._send(AS_TORCH, "sdpa", {}):
            return budget.clock() - started
        return 0.0 if budget.spent else self._compile_ahead()

    def attention_chosen(self, choices: Mapping[str, AttentionPlan]) -> None:
        """Have the form with attention rewritten only compiled, where other processes compile the
        first one.

        Args:
            choices: attention problem -> what was chosen for it.
        """
        begun = self._workers is not None and self._workers.has(AS_TORCH)
        if begun and not _all_left_to_torch(choices):
            self._send(ATTENTION_ONLY, self._opts.attention, choices)

    def form_s(self) -> float:
        """Seconds that each form but the fused one will take after the search; 0 = not known.

        Where another process could not compile the first one, it is compiled here now.
        """
        workers = self._workers
        if workers is not None and workers.has(AS_TORCH):
            if workers.done(AS_TORCH):
                return FORM_SHARE * workers.seconds(AS_TORCH)
            if not workers.failed(AS_TORCH):
                return FORM_SHARE * max(LIKELY_S, workers.seconds(AS_TORCH))
            self._workers = None
            if not self._budget.stopped:  # Ctrl-C ends those processes, too
                self._compile_ahead()
        ahead = self._ahead
        return 0.0 if ahead is None or ahead.compiled is None else ahead.seconds

    def keeps_workers(self) -> bool:
        """Whether the processes that compile are still busy with forms when the search has ended:
        they do nothing else from then on, and end with this object.
        """
        workers = self._workers
        if workers is None or not workers.busy:
            return False
        workers.keep_only_these()
        self._owns_workers = True
        return True

    def _send(self, name: str, attention: str, choices: Mapping[str, AttentionPlan]) -> bool:
        """Make a form and send it to a process that compiles; whether it was sent."""
        if self._workers is None or self._budget.spent:
            return False
        try:
            gm = self._made(attention, choices).gm
        except KeyboardInterrupt:
            logger.warning("interrupted: the forms of the graph are not compared")
            self._budget.stop()
            return False
        except Exception as failure:  # a form that fails is out
            logger.warning("%s could not be made for timing: %r", name, failure)
            return False
        self._graphs[name] = gm
        settings = config_patches(for_timing(self._opts))
        return self._workers.send(name, gm, self._inputs, settings)

    def _compile_ahead(self) -> float:
        """Compile the form as torch.compile runs it, before the search.

        It takes at most a quarter of the budget: what it needs beyond that, torch.compile would
        need as well, and the search has the time it had.
        """
        opts, budget = self._opts, self._budget
        logger.info("a form to compare with is compiled first: %s", AS_TORCH)
        started, compiled = budget.clock(), None
        try:
            gm = self._graphs.get(AS_TORCH) or self._made("sdpa", {}).gm
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

        def make(name: str) -> Outcome:
            if name not in forms:
                forms[name] = self._made(*earlier[name])
            return forms[name]

        def graph(name: str) -> torch.fx.GraphModule:
            return self._graphs.get(name) or make(name).gm

        names = [FUSED, ATTENTION_ONLY]  # in the order in which they are tried while there is time
        fp8 = torch.ops.stof.attention_fp8.default  # rounded on purpose
        if self._with_torch and all(node.target is not fp8 for node in outcome.gm.graph.nodes):
            names.insert(1, AS_TORCH)
            if _all_left_to_torch(chosen):
                names.remove(ATTENTION_ONLY)  # the same graph
        device = self._facts.device
        store = Store(opts.cache_dir or default_root(), environment_key(device_facts(device)))
        graphs, asked = outcome.record.graphs, outcome.record.options
        options = [asked[name] for name in ("mask", "inductor", "mode", "attention")]
        told = [graphs["captured"], graphs["rewritten"], *options, fp32_products()]
        identity = json.dumps(told)
        makers = {name: partial(graph, name) for name in names}
        started = time.monotonic()
        fastest = fastest_form(
            makers, self._inputs, device, opts, store, identity, self._budget, self._ahead,
            self._workers,
        )  # fmt: skip
        outcome.record.timings_s["verdict"] = time.monotonic() - started
        verdict = fastest.verdict
        if verdict is None:
            return outcome, fastest.compiled
        logger.info("%s", verdict)
        kept, found = make(verdict.winner), outcome.record
        if kept is not outcome:  # what was tried and cost time is part of the story
            kept.record.options = found.options  # the user's
            kept.record.chains = found.chains
            kept.record.packs = [_left_apart(pack) for pack in found.packs]
            kept.record.timings_s = found.timings_s
            kept.record.notes = notes_without_fusion(found.notes)
        kept.record.notes += [note for note in (str(verdict), verdict.remark) if note]
        return kept, fastest.compiled

    def _made(self, attention: str, choices: Mapping[str, AttentionPlan]) -> Outcome:
        """The graph with attention rewritten so, and its operators left to Inductor."""
        gm = copy_graph(self._captured)
        here = facts_at_call(gm, self._inputs, self._facts.place, constant=True)
        asked = replace(self._opts, fusion="off", strict=False, attention=attention)
        return improve(gm, self._captured, here, asked, self._budget, choices)


def _all_left_to_torch(choices: Mapping[str, AttentionPlan]) -> bool:
    return all(choice.kernel == "sdpa" and not choice.config for choice in choices.values())


def _left_apart(pack: PackPlan) -> PackPlan:
    """The decision about projections where the graph that is kept has none of them packed."""
    if not pack.packed:
        return pack
    reason = f"{pack.reason}; the graph that was kept leaves them apart"
    return replace(pack, packed=False, nbytes=0, reason=reason)


def _left_to_torch(choice: AttentionPlan) -> AttentionPlan:
    """The choice for an attention where the whole graph is faster without us."""
    reason = (
        f"the whole graph is faster as torch.compile runs it; of the kernels alone "
        f"{choice.kernel} won: {choice.reason}"
    )
    return replace(choice, kernel="sdpa", config=(), source="graph", reason=reason)
