"""What STOF hands to Inductor is taken by torch's caches of compiled graphs where the captured
graph would have been: else a second process compiles it anew."""

import pytest
import torch
from models import CASES
from running import NO_TIMING
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

FUSED = ("bert-sdpa", "t5-sdpa", "vit-sdpa", "llama-sdpa")
PLAIN = [case for case in CASES if not case.id.endswith("-padded")]


def refusal(gm):
    try:
        check_cacheable(gm)
    except BypassAOTAutogradCache as why:
        return str(why)
    return ""


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.id)
@torch.no_grad()
def test_no_graph_is_refused_that_was_not(case, monkeypatch, fresh_dynamo):
    found = {"captured": [], "rewritten": []}

    def captured(gm, inputs):
        found["captured"].append(refusal(gm))
        return gm.forward

    def rewritten(gm, inputs, options):
        found["rewritten"].append(refusal(gm))
        return gm.forward

    model, inputs = case.build()
    torch.compile(model, backend=captured)(**inputs)
    torch._dynamo.reset()
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", rewritten)
    torch.compile(model, backend="stof", options={**NO_TIMING, "strict": False})(**inputs)
    assert len(found["rewritten"]) >= len(found["captured"]) > 0
    if not any(found["captured"]):
        assert found["rewritten"] == [""] * len(found["rewritten"])


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
