"""The attention output has the layout the next linear reads: no transpose copy remains."""

import pytest
import torch
from models import hf_bert
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
