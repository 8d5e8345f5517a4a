"""Whole models with operators replaced: as near to the fp64 model as torch.compile's own result.

Six models of the zoo with one layer (T5: one of either side) and no mask in the options, so that
the function is the model's own. Templates are made of torch operations; all else is as users get
it, Inductor included.
"""

from dataclasses import replace

import pytest
import torch
from torch_templates import templates_win

from stof_compile import explain, zoo
from stof_compile.verdict import FastestForm

MODELS = ("bert", "gpt2", "llama", "t5", "vit", "distilbert")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# compiling is what takes the time; `bench/run.py accuracy` has every model on a GPU
CASES = [*((name, "fp32") for name in MODELS), ("bert", "bf16"), ("llama", "bf16")]
TOKENS = 12


def errors(out, expected):
    """Largest and mean distance from the fp64 result."""
    error = (out.double() - expected).abs()
    return float(error.max()), float(error.mean())


@pytest.fixture
def small(monkeypatch):
    """Models of one layer; the fused form is kept, though a CPU would not be faster by it."""
    sizes = {name: replace(sizes, layers=1) for name, sizes in zoo.ZOO.items()}
    monkeypatch.setattr(zoo, "ZOO", sizes)
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *given: FastestForm(None))


@pytest.mark.parametrize(("name", "label"), CASES)
@torch.no_grad()
def test_as_accurate_as_inductor(name, label, small, tmp_path, fresh_dynamo):
    dtype = DTYPES[label]
    model, inputs = zoo.build(f"{name}-tiny", 2, TOKENS, dtype=dtype)
    plain = torch.compile(model, dynamic=False)(**inputs).last_hidden_state
    torch._dynamo.reset()
    # attention by name: measuring it would compile FlexAttention for seconds
    options = {"cache_dir": tmp_path, "attention": "sdpa", "strict": True}
    with templates_win():
        fast = torch.compile(model, backend="stof", dynamic=False, options=options)
        ours = fast(**inputs).last_hidden_state
    (record,) = explain(fast).graphs
    assert record.graphs["rewritten"].count("stof_test.recipe") > 1, str(record.summary())
    torch._dynamo.reset()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    expected = model.double()(**wide).last_hidden_state
    unit, size = torch.finfo(dtype).eps, expected.abs()
    floors = unit * float(size.max()), unit * float(size.mean())
    found = zip(errors(ours, expected), errors(plain, expected), floors, strict=True)
    for what, (error, base, floor) in zip(("max", "mean"), found, strict=True):
        told = f"{name} {label}: {what} {error:.2e}, torch.compile {base:.2e}, unit {floor:.2e}"
        assert error <= 2.0 * max(base, floor), told
