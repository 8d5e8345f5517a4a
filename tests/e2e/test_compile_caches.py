"""What STOF hands to Inductor is taken by torch's caches of compiled graphs where the captured
graph would have been: else a second process compiles it anew.

test_coverage.py asserts it of every row of the zoo, whose graphs it has; here is what it has not.
"""

import pytest
import torch
from cache_refusals import assert_none_is_new, refusals
from models import CASES
from running import NO_TIMING
from torch._dynamo.utils import counters

from stof_compile import backend

FUSED = ("bert-sdpa", "t5-sdpa", "vit-sdpa", "llama-sdpa")


@pytest.mark.parametrize("case", [c for c in CASES if c.train], ids=lambda case: case.id)
@torch.no_grad()
def test_no_graph_is_refused_that_was_not(case, monkeypatch, fresh_dynamo):
    """Models in training mode without gradients: with them they are rows of test_coverage.py."""
    monkeypatch.setattr(backend, "compile_with_inductor", lambda gm, *_: gm.forward)
    model, inputs = case.build()
    with refusals() as found:
        torch.compile(model, backend="stof", options={**NO_TIMING, "strict": False})(**inputs)
    assert_none_is_new(found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.id in FUSED], ids=lambda c: c.id)
@pytest.mark.parametrize("fusion", ["auto", "off"])
@torch.no_grad()
def test_no_fused_graph_is_refused(case, fusion, fresh_dynamo, tmp_path):
    model, inputs = case.build()
    inputs = {n: (t.half() if t.is_floating_point() else t).cuda() for n, t in inputs.items()}
    options = {"fusion": fusion, "tune_budget_s": 3, "cache_dir": str(tmp_path)}
    counters.clear()
    torch.compile(model.half().cuda(), backend="stof", options=options)(**inputs)
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
