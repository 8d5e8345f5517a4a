"""The attention output has the layout the next linear reads: no transpose copy remains. Readers
that count on another one get it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from models import hf_bert
from running import NO_TIMING, without_inductor
from torch._inductor import config

from stof_compile import explain, masks
from stof_compile.attention.call import bind_kernel


class KeepGraph:
    """A post-grad pass that records the last graph before code generation."""

    def __init__(self):
        self.targets = []

    def __call__(self, graph):
        self.targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("kernel", ["gather", "sdpa"])
def test_no_copy_between_attention_and_the_next_linear(kernel, fresh_dynamo, tmp_path):
    model, inputs = hf_bert("sdpa", False, layers=1)
    kept = KeepGraph()
    options = {
        "mask": masks.sliding_window(4),
        "attention": kernel,
        "strict": True,
        "cache_dir": str(tmp_path),
    }
    with (
        torch.no_grad(),
        config.patch(
            post_grad_custom_post_pass=kept,
            fx_graph_cache=False,
            force_disable_caches=True,
            **{"cpp.simdlen": 0},
        ),
    ):
        fast = torch.compile(model, backend="stof", options=options)
        fast(**inputs)
    assert [site.kernel for site in explain(fast).sites] == [kernel]
    assert any("attention" in target for target in kept.targets)
    copies = [target for target in kept.targets if "clone" in target or "contiguous" in target]
    assert copies == []


def windowed(q, k, v):
    i = torch.arange(q.shape[2])
    keep = (i[:, None] - i).abs() < 8
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def windowed_by_hand(q, k, v):
    i = torch.arange(q.shape[2])
    far = (i[:, None] - i).abs() >= 8
    return (q @ k.mT * 0.25).masked_fill(far, -torch.inf).softmax(-1) @ v


READERS = {
    "view": lambda y: y.view(8, 256, 16),
    "as_strided": lambda y: torch.as_strided(y, (8, 256, 16), (4096, 16, 1)),
    "returned": lambda y: y,
    "returned view": lambda y: y.mT,
    "asked for strides": lambda y: y + y.stride()[1],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("attend", [windowed, windowed_by_hand])
@pytest.mark.parametrize("reader", READERS)
def test_readers_find_the_memory_they_count_on(reader, attend, dynamic, fresh_dynamo, monkeypatch):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    q, k, v = torch.randn(3, 2, 4, 256, 16).unbind()
    fast = torch.compile(
        lambda *t: READERS[reader](attend(*t)), backend="stof", options=NO_TIMING, dynamic=dynamic
    )
    with torch.no_grad():
        found = fast(q, k, v)
    wide = READERS[reader](attend(q.double(), k.double(), v.double()))
    assert_close(found, wide)
    assert found.stride() == wide.stride()
    assert [site.status for site in explain(fast).sites] == ["rewritten"]


@pytest.mark.parametrize(("reader", "first"), [("returned", True), ("view", True), ("next", False)])
def test_a_kernel_that_can_writes_the_memory_readers_count_on(
    reader, first, fresh_dynamo, monkeypatch
):
    """In place of a copy; where nothing counts on it, the order of the next projection stays."""
    asked, graphs = [], []

    def compiled(gm, *rest, **more):
        graphs.append(gm)
        return without_inductor(gm, *rest, **more)

    def bound(problem, kernel, config):
        call = bind_kernel(problem, kernel, config)

        def heads_first(*given):
            asked.append(problem)
            return call.attend(*given).contiguous()

        return replace(call, heads_first=heads_first)

    readers = {**READERS, "next": lambda y: y.transpose(1, 2).reshape(2, 256, 64)}
    monkeypatch.setattr("stof_compile.attention.lower.bind_kernel", bound)
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", compiled)
    q, k, v = torch.randn(3, 2, 4, 256, 16).unbind()
    fast = torch.compile(
        lambda *t: readers[reader](windowed(*t)), backend="stof", options=NO_TIMING
    )
    with torch.no_grad():
        found = fast(q, k, v)
    assert bool(asked) == first
    wanted = readers[reader](windowed(q.double(), k.double(), v.double()))
    assert_close(found, wanted)
    assert found.stride() == wanted.stride()
    assert not any(node.target == "permute" for gm in graphs for node in gm.graph.nodes)
