"""Coverage matrix: every model of the zoo through ``torch.compile(backend="stof")``.

Each row states that all attention layers are found, that the compiled model computes what the eager
one does, that there is one graph, as without STOF (attention/test_match_zoo.py counts those), and
that torch's caches take it where they would have taken the captured one (see cache_refusals.py).
With ``STOF_COVERAGE_ROWS=DIR STOF_WRITE_COVERAGE=1`` the rows go to docs/coverage.md.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from cache_refusals import assert_none_is_new, refusals
from models import CASES, ModelCase

from stof_compile import explain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32, two layers; the largest relative error of the output
ERROR_BOUND = 2e-5 if DEVICE == "cpu" else 2e-4
FORCED = {"cpu": "gather", "cuda": "block"}


def _to(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    for layer in getattr(value, "layers", ()):  # a cache that was filled on the CPU
        for name, held in vars(layer).items():
            if isinstance(held, torch.Tensor):
                setattr(layer, name, held.to(device))
        layer.device = torch.device(device)
    return value


def outputs(value):
    """Floating-point tensors of a model's output, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in outputs(item)]
    return []


def real_tokens(inputs):
    """Positions [B, S] that are no padding, None when nothing is padded."""
    if "attention_mask" in inputs:
        return inputs["attention_mask"] == 1
    padded = inputs.get("padding", inputs.get("src_key_padding_mask"))
    return None if padded is None else ~padded


def run(case: ModelCase, compiler):
    """Build the model anew, compile it and call it once; padded queries are left out."""
    torch._dynamo.reset()
    torch.backends.cudnn.allow_tf32 = False  # ViT's convolution: the bound is one of fp32
    model, inputs = case.build()
    keep = real_tokens(inputs)
    model.to(DEVICE)
    inputs = {name: _to(value, DEVICE) for name, value in inputs.items()}
    compiled = compiler(model)
    with torch.set_grad_enabled(case.train):
        torch.manual_seed(3)
        result = outputs(compiled(**inputs))
    if keep is not None:
        result = [
            out[keep.to(out.device)] if out.shape[:2] == keep.shape else out for out in result
        ]
    return compiled, [out.detach() for out in result]


def largest_error(found, expected) -> float:
    assert len(found) == len(expected)
    worst = 0.0
    for out, ref in zip(found, expected, strict=True):
        assert out.shape == ref.shape
        assert torch.equal(out.isfinite(), ref.isfinite())
        worst = max(worst, float((out - ref).abs().max() / ref.abs().max().clamp(min=1e-12)))
    return worst


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_row(case: ModelCase, request: pytest.FixtureRequest):
    _, expected = run(case, lambda model: model)
    # The random numbers of dropout must be eager's. Scalar C++ compiles in half the time, and which
    # instructions Inductor uses is not the point here; test_accuracy.py has what users get.
    options = {
        "attention": FORCED[DEVICE],
        "tune_budget_s": 0,
        "inductor": {"fallback_random": True, "cpp.simdlen": 0},
    }
    with refusals() as refused:
        fast, found = run(case, lambda model: torch.compile(model, backend="stof", options=options))
    seen = explain(fast)
    error = largest_error(found, expected)
    rewritten = sum(site.status == "rewritten" for site in seen.sites)
    folder = os.environ.get("STOF_COVERAGE_ROWS")
    if folder:
        row = {
            "order": CASES.index(case),
            "id": case.id,
            "sites": len(seen.sites),
            "rewritten": rewritten,
            "near_misses": len(seen.near_misses),
            "graphs": len(seen.graphs),
            "error": error,
            "notes": case.notes,
            "reasons": sorted({f["reason"] for f in (*seen.fallbacks, *seen.near_misses)}),
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
            "torch": torch.__version__,
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{case.id}.json").write_text(json.dumps(row))
    assert len(seen.sites) == case.sites
    assert len(seen.near_misses) == case.near_misses
    assert len(seen.graphs) == 1
    assert error <= ERROR_BOUND
    assert_none_is_new(refused)
