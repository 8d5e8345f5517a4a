"""The attention output has the layout the next linear reads: no transpose copy remains. Readers
that count on another one get it."""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from models import hf_bert
from running import NO_TIMING, without_inductor
from torch._inductor import config

from stof_compile import explain, masks


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
            post_grad_custom_post_pass=kept, fx_graph_cache=False, force_disable_caches=True
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
