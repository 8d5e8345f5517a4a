"""Attention candidates that other processes compile before they are measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch.fx import GraphModule

from stof_compile.attention.fp8 import fp8_obstacle
from stof_compile.attention.match import match_attention
from stof_compile.attention.nested import read_nested
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.resolve import ResolvedMasks
from stof_compile.attention.site import AttentionSite
from stof_compile.attention.site_problem import (
    BoundMasks,
    attention_problem,
    has_dynamic_lengths,
    static_obstacle,
    static_spec,
)
from stof_compile.capture import CaptureFacts
from stof_compile.graph_copy import copy_graph
from stof_compile.masks.spec import MaskSpec
from stof_compile.masks.split import MaskParts, split_mask
from stof_compile.measure import real_tensors
from stof_compile.options import StofOptions
from stof_compile.static_values import StaticValues

Kernel = tuple[str, tuple[int, ...]]  # a kernel and its config


class Workers(Protocol):
    """Processes that compile attention candidates; they help, and nothing depends on them."""

    def send(self, problem: AttentionProblem, candidates: Sequence[Kernel]) -> None:
        """Have candidates compiled; what was sent before, or cannot be sent, is left out."""

    def has(self, problem: AttentionProblem, candidate: Kernel) -> bool:
        """Whether a candidate was sent and is, or will be, compiled."""

    def wait(self, problem: AttentionProblem, candidate: Kernel) -> None:
        """Wait until a candidate is compiled, or will not be."""


def problems_ahead(
    gm: GraphModule,
    facts: CaptureFacts,
    resolved: ResolvedMasks,
    options: StofOptions,
    bound: BoundMasks,
) -> list[AttentionProblem]:
    """The problems that lowering a graph will choose kernels for, each once.

    The graph stays as it is. Sites whose lengths or masks only the run knows are left out.
    """
    if options.attention != "auto" or options.tune_budget_s <= 0:
        return []
    copy = copy_graph(gm)
    facts = replace(facts, static=StaticValues(copy.graph, facts.static.buffers))
    found: dict[str, AttentionProblem] = {}
    seen: set[Hashable] = set()
    for site in match_attention(copy, facts)[0]:
        if site.form == "flex":
            continue
        option = resolved.by_site.get(site.name)
        alike = _signature(site, option)
        if alike is not None and alike in seen:
            continue
        seen.add(alike)
        parts = None if site.form == "stof" else split_mask(copy, facts, site)
        with real_tensors(), torch.inference_mode(False):
            problem = _problem(site, option, parts, facts, bound)
            if problem is None:
                continue
            if options.fp8 and not fp8_obstacle(problem, options.attention):
                problem = replace(problem, fp8=True)
            found.setdefault(problem.key, problem)
    return list(found.values())


def _signature(site: AttentionSite, option: MaskSpec | None) -> Hashable:
    """Equal for sites of equal problems, as the layers of a model are; None where it is not known
    without working the problem out.
    """
    if site.form == "stof":
        return None
    operands = [TensorMeta.of(node.meta["example_value"]) for node in (site.q, site.k, site.v)]
    terms = [(t.kind, t.node, t.rank, t.factor, t.fill) for t in site.terms]
    numbers = (site.scale, site.softcap, site.is_causal, site.cross, site.k_transposed)
    return (site.form, id(option), str(site.offset), *numbers, *operands, *terms)


def _problem(
    site: AttentionSite,
    option: MaskSpec | None,
    parts: MaskParts | None,
    facts: CaptureFacts,
    bound: BoundMasks,
) -> AttentionProblem | None:
    """What a site asks for, None where that is not known or it will stay.

    Args:
        parts: of its mask; None for a call of ``sparse_attention``.
    """
    if parts is None:
        nested = read_nested(site, option, facts)
        if isinstance(nested, str):
            return None
        parts = MaskParts(padding=nested.padding, bias=nested.bias)
        problem = attention_problem(nested.site, parts, nested.spec, nested.offset, facts)
        return replace(problem, fp8=nested.fp8)
    if parts.static_graph is not None or has_dynamic_lengths(site, option):
        return None
    if static_obstacle(site, option, parts):
        return None
    return attention_problem(site, parts, *static_spec(site, option, parts, bound), facts)
