"""A recording backend: what STOF's front half says about each graph Dynamo captures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from stof_compile.kernels.reference import attention_reference
from torch.fx import GraphModule

from stof_compile.attention.match import match_attention
from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.capture import CaptureFacts, read_capture
from stof_compile.dead_code import erase_dead
from stof_compile.masks.split import MaskParts, split_mask
from stof_compile.normalize import normalize


@dataclass
class Graph:
    """One captured graph, analysed."""

    gm: GraphModule
    facts: CaptureFacts
    passes: dict[str, int]
    again: dict[str, int]
    sites: list[AttentionSite]
    misses: list[NearMiss]
    parts: list[MaskParts]


def reference_attention(q, k, v, padding, bias, dynamic, site: AttentionSite, static):
    """What a site computes according to its parts, by the kernels' reference."""
    k = k.transpose(-2, -1) if site.k_transposed else k
    keep = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    for part in (static, dynamic):
        keep = keep if part is None else keep & part
    keep = keep.tril() if site.is_causal else keep
    return attention_reference(
        q, k, v, keep=keep, key_keep=padding, bias=bias, scale=site.scale, softcap=site.softcap
    )


class Recorder(list):
    """Backend that remembers what it sees, replaces every site by the reference and runs in eager
    mode."""

    def __call__(self, gm: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        facts = read_capture(gm, inputs)
        passes = normalize(gm, facts)
        again = normalize(gm, facts)
        sites, misses = match_attention(gm, facts)
        parts = [split_mask(gm, facts, site) for site in sites]
        for site, part in zip(sites, parts, strict=True):
            if site.form in ("sdpa", "softmax") and part.static_graph is None:
                replace(gm, site, part)
        erase_dead(gm.graph)
        gm.graph.lint()
        self.append(Graph(gm, facts, passes, again, sites, misses, parts))
        gm.recompile()
        return gm.forward

    def sites(self) -> list[AttentionSite]:
        return [site for graph in self for site in graph.sites]

    def misses(self) -> list[NearMiss]:
        return [miss for graph in self for miss in graph.misses]

    def parts(self) -> list[MaskParts]:
        return [part for graph in self for part in graph.parts]


def replace(gm: GraphModule, site: AttentionSite, part: MaskParts) -> None:
    """Put the reference in place of a site."""

    def attend(*tensors: Any) -> torch.Tensor:
        return reference_attention(*tensors, site=site, static=part.static)

    given = (site.q, site.k, site.v, part.padding, part.bias, part.dynamic)
    with gm.graph.inserting_before(site.output):
        new = gm.graph.call_function(attend, given)
    site.output.replace_all_uses_with(new)


@pytest.fixture
def recorder(fresh_dynamo: None) -> Recorder:
    return Recorder()


@pytest.fixture
def record(recorder: Recorder) -> Callable[..., Recorder]:
    """Compile a callable with the recording backend, call it once, return the recording."""

    def run(
        fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any
    ) -> Recorder:
        torch.compile(fn, backend=recorder, dynamic=dynamic)(*args, **kwargs)
        return recorder

    return run
