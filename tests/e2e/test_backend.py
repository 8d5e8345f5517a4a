"""The backend as users meet it: options, fallbacks, overrides, explain, dump and plan."""

import json
import logging

import pytest
import torch
from models import BATCH, HEADS, LENGTH, HandWritten, hand_written, hf_bert, hf_gpt2
from running import NO_TIMING, assert_same, masked, without_flex, without_inductor
from torch import nn
from torch._inductor import list_mode_options
from torch.nn import functional as F

from stof_compile import attention_kernel, backend, explain, masks
from stof_compile.attention import lower, select
from stof_compile.errors import StofOptionError, StofPlanError, StofUnsupportedError

WINDOW = masks.sliding_window(4)


@pytest.fixture
def quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


class Attend(nn.Module):
    """One attention between two linear layers; x [B, S, 32]."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.out(y.transpose(1, 2).flatten(2))


def stof(fn, **options):
    return torch.compile(fn, backend="stof", options={**NO_TIMING, **options})


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune_budgt_s": 1}, "did you mean 'tune_budget_s'"),
        ({"tune_budget_s": "1"}, "must be a number of seconds"),
        ({"attention": "blocks"}, "did you mean 'block'"),
        ({"mode": "turbo"}, "valid: default, reduce-overhead"),
        ({"mask": torch.ones(4, 4)}, "bool"),
        ({"attention": "row"}, "has no kernel for device 'cpu'"),
    ],
    ids=["key", "type", "value", "mode", "mask", "device"],
)
def test_a_wrong_option_raises_its_own_type(quick, options, message):
    fast = torch.compile(Attend(), backend="stof", options=options)
    with pytest.raises(StofOptionError, match=message) as raised:
        fast(torch.randn(1, 8, 32))
    assert type(raised.value) is StofOptionError
    assert isinstance(raised.value, ValueError)


def test_mode_of_torch_compile(fresh_dynamo):
    model, x = Attend(), torch.randn(1, 8, 32)
    with pytest.raises(StofOptionError, match="turbo"):
        torch.compile(model, backend="stof", mode="turbo")(x)
    for arguments in (
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {**NO_TIMING, "mode": "reduce-overhead", "mask": WINDOW}},
    ):
        torch._dynamo.reset()
        fast = torch.compile(model, backend="stof", **arguments)
        with masked(WINDOW if "options" in arguments else None):
            expected = model(x)
        with torch.no_grad(), without_flex():
            assert_same(fast(x), expected)
        given = explain(fast).graphs[0].options["mode"]
        assert given == arguments.get("mode", "reduce-overhead")


# -- left to PyTorch -------------------------------------------------------------------------------


def test_dropout_in_training_falls_back(quick, caplog):
    model, x = Attend(dropout=0.5).train(), torch.randn(1, 8, 32)
    with caplog.at_level(logging.INFO, logger="stof_compile"):
        fast = torch.compile(model, backend="stof", options={"tune_budget_s": 0})
        torch.manual_seed(1)
        found = fast(x)
    torch.manual_seed(1)
    assert_same(found, model(x))
    (miss,) = explain(fast).near_misses
    assert "dropout" in miss["reason"]
    assert sum("dropout" in record.getMessage() for record in caplog.records) == 1
    torch._dynamo.reset()
    with pytest.raises(StofUnsupportedError, match="dropout"):
        stof(model)(x)
    torch._dynamo.reset()
    assert_same(stof(model.eval())(x), model(x))


class Mutates(nn.Module):
    def forward(self, q, k, v):
        scores = q @ k.mT
        v.mul_(2)
        return torch.softmax(scores, -1) @ v


class Mixed(nn.Module):
    """The values have another dtype than queries and keys."""

    def forward(self, q, k, v):
        return torch.softmax((q @ k.mT).float(), -1) @ v.float()


def unsupported(case):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    if case == "another user":
        model, inputs = hand_written("weights_escape")
        return model, (inputs["x"],)
    return (Mutates(), (q, k, v)) if case == "mutation" else (Mixed(), (q.double(), k.double(), v))


@pytest.mark.parametrize("case", ["another user", "mutation", "dtype"])
@torch.no_grad()
def test_what_is_unsupported_stays_and_strict_raises(quick, case):
    model, inputs = unsupported(case)
    expected = model(*inputs)
    model, inputs = unsupported(case)
    fast = stof(model, strict=False)
    assert_same(fast(*inputs), expected)
    assert len(explain(fast).near_misses) == len(explain(fast).graphs) * (
        2 if case[0] == "a" else 1
    )
    model, inputs = unsupported(case)
    torch._dynamo.reset()
    with pytest.raises(StofUnsupportedError, match="strict=True"):
        stof(model)(*inputs)


@torch.no_grad()
def test_a_device_without_kernels(quick, monkeypatch):
    monkeypatch.setattr(select, "KERNELS", {})
    model, x = Attend(), torch.randn(1, 8, 32)
    with masked(WINDOW):
        expected = model(x)
    fast = stof(model, mask=WINDOW, strict=False, attention="auto")
    assert_same(fast(x), expected)
    assert explain(fast).sites[0].status == "masked"
    torch._dynamo.reset()
    with pytest.raises(StofUnsupportedError, match="no STOF kernel for device 'cpu'"):
        stof(model, attention="auto")(x)


@torch.no_grad()
def test_a_pass_that_raises_leaves_the_graph_alone(quick, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(lower, "attention_problem", fail)
    model, inputs = hf_gpt2("sdpa", True)
    fast = stof(model, strict=False)
    with caplog.at_level(logging.WARNING, logger="stof_compile"):
        assert_same(fast(**inputs), model(**inputs))
    assert "broken on purpose" in explain(fast).fallbacks[0]["reason"]
    assert any("broken on purpose" in record.getMessage() for record in caplog.records)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="broken on purpose"):
        stof(model)(**inputs)


def test_rows_the_model_gives_the_mean_keep_their_value(quick):
    def attend(q, k, v):
        keep = torch.ones(8, 8, dtype=torch.bool).tril(-1)  # the first row has no key
        scores = (q @ k.mT).masked_fill(~keep, torch.finfo(q.dtype).min)
        return torch.softmax(scores, -1) @ v

    q, k, v = torch.randn(3, 1, 2, 8, 16)
    fast = stof(attend, strict=False)
    assert_same(fast(q, k, v), attend(q, k, v))
    assert "without a key" in explain(fast).fallbacks[0]["reason"]


# -- at call time ----------------------------------------------------------------------------------


@torch.no_grad()
def test_a_forced_kernel_needs_no_new_capture(quick):
    model, inputs = hf_bert("sdpa", True)
    captures = []

    def counted(gm, example_inputs):
        captures.append(gm)
        return backend.stof(gm, example_inputs, options={**NO_TIMING, "mask": WINDOW})

    fast = torch.compile(model, backend=counted)
    expected = fast(**inputs)
    for _ in range(2):
        with attention_kernel("sdpa"):
            assert_same(fast(**inputs), expected)
    assert_same(fast(**inputs), expected)
    assert len(captures) == 1
    with (
        attention_kernel("row"),
        pytest.raises(StofOptionError, match="no kernel for device 'cpu'"),
    ):
        fast(**inputs)


@torch.no_grad()
def test_autocast(quick):
    model, inputs = hf_bert("sdpa", True)
    fast = stof(model, mask=WINDOW)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with masked(WINDOW):
            expected = model(**inputs)
        found = fast(**inputs)
    assert_same(found, expected, tolerance=3e-2)
    assert {s.shape["dtype"] for s in explain(fast).sites} == {"bfloat16"}
    assert {s.status for s in explain(fast).sites} == {"rewritten"}


def test_inference_mode_and_then_training(quick):
    model, x = Attend(), torch.randn(2, 16, 32)
    with masked(WINDOW):
        expected = model(x)
        expected.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fast = stof(model, mask=WINDOW)
    with torch.inference_mode():
        assert_same(fast(x), expected)
    found = fast(x)
    found.sum().backward()
    assert_same(found, expected)
    assert_same([p.grad for p in model.parameters()], grads, tolerance=1e-4)


# -- other libraries -------------------------------------------------------------------------------


def test_lora_layers_are_left_alone(quick):
    peft = pytest.importorskip("peft")
    model, inputs = hf_bert("sdpa", True)
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).eval()
    with masked(WINDOW):
        expected = model(**inputs)
    fast = stof(model, mask=WINDOW)
    assert_same(fast(**inputs), expected)
    assert {s.status for s in explain(fast).sites} == {"rewritten"}
    lora = [n for n, _ in model.named_parameters() if "lora_A" in n]
    assert lora, "the adapters are there"


@torch.no_grad()
def test_quantised_layers_are_left_alone(quick):
    quantization = pytest.importorskip("torchao.quantization")
    model, inputs = hf_bert("sdpa", True)
    try:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    except (AttributeError, ImportError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"torchao cannot quantise on torch {torch.__version__}: {error}")
    weight = model.encoder.layer[0].intermediate.dense.weight
    with masked(WINDOW):
        expected = model(**inputs)
    fast = stof(model, mask=WINDOW)
    assert_same(fast(**inputs), expected, tolerance=1e-3)
    assert {s.status for s in explain(fast).sites} == {"rewritten"}
    assert model.encoder.layer[0].intermediate.dense.weight is weight


# -- explain and dump ------------------------------------------------------------------------------


@torch.no_grad()
def test_explain_modules_functions_and_graph_breaks(quick):
    model, inputs = hf_bert("sdpa", True)
    fast = stof(model, mask=WINDOW)
    assert "nothing compiled" in str(explain(fast))
    fast(**inputs)
    text = str(explain(fast))
    assert "encoder.layer.0.attention.self" in text
    assert "sliding_window(4)" in text
    assert "2 attention site(s), 2 rewritten, 0 left" in text

    layer = HandWritten("scale_both").eval()

    @torch.compile(backend="stof", options={**NO_TIMING, "mask": WINDOW})
    def broken(x):
        y = layer(x)
        torch._dynamo.graph_break()
        return layer(y)

    broken(torch.randn(BATCH, LENGTH, 64))
    assert len(explain(broken).graphs) == 2
    assert len(explain(broken).sites) == 2
    with pytest.raises(StofUnsupportedError, match="compile it first"):
        explain(layer.forward)


@torch.no_grad()
def test_a_dump_and_its_plan_replayed_without_trials(quick, tmp_path, monkeypatch):
    model, inputs = hf_bert("sdpa", True, layers=1)
    measured = {
        "tune_budget_s": 30,
        "strict": True,
        "mask": WINDOW,
        "cache_dir": tmp_path / "store",
    }
    first = torch.compile(
        model, backend="stof", options={**measured, "dump_dir": tmp_path / "dump"}
    )
    expected = first(**inputs)
    (folder,) = (tmp_path / "dump").glob("graph_*")
    names = {
        "captured.py",
        "normalized.py",
        "rewritten.py",
        "record.json",
        "summary.txt",
        "plan.json",
    }
    assert names <= {path.name for path in folder.iterdir()}
    record = json.loads((folder / "record.json").read_text())
    assert record["changes_function"] is True
    site = record["sites"][0]
    assert {"density", "full_tiles", "part_tiles", "empty_tiles"} <= set(site["statistics"])
    assert {c["kernel"] for c in site["choice"]["candidates"]} == {"sdpa", "flex", "gather"}
    assert "scaled_dot_product_attention" in (folder / "captured.py").read_text()

    def fail(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(select, "measure_candidate", fail)
    torch._dynamo.reset()
    empty = {**measured, "cache_dir": tmp_path / "empty"}
    again = torch.compile(model, backend="stof", options={**empty, "plan": folder / "plan.json"})
    assert_same(again(**inputs), expected)
    chosen = explain(again).sites[0].choice
    assert (chosen.source, chosen.kernel) == ("plan", site["choice"]["kernel"])

    body = json.loads((folder / "plan.json").read_text())
    body["graphs"][0]["environment"] = "another device"
    (tmp_path / "other.json").write_text(json.dumps(body))
    torch._dynamo.reset()
    other = torch.compile(model, backend="stof", options={**empty, "plan": tmp_path / "other.json"})
    with pytest.raises(StofPlanError, match="another device"):
        other(**inputs)
    (tmp_path / "broken.json").write_text("{")
    torch._dynamo.reset()
    broken = torch.compile(model, backend="stof", options={"plan": tmp_path / "broken.json"})
    with pytest.raises(StofPlanError, match="not a STOF plan"):
        broken(**inputs)


@torch.no_grad()
def test_the_whole_way_through_inductor(fresh_dynamo):
    model, inputs = hf_bert("sdpa", True)
    fast = stof(model, mask=WINDOW)
    with masked(WINDOW):
        expected = model(**inputs)
    assert_same(fast(**inputs), expected)
    assert explain(fast).sites[0].shape["q_heads"] == HEADS


@torch.no_grad()
def test_a_dump_that_fails_loses_nothing_else(quick, tmp_path, monkeypatch, caplog):
    def full(record, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stof_compile.backend.write_dump", full)
    model, x = Attend(), torch.randn(1, 8, 32)
    with caplog.at_level(logging.WARNING, logger="stof_compile"):
        fast = stof(model, dump_dir=tmp_path)
        assert_same(fast(x), model(x))
    (note,) = (note for note in explain(fast).graphs[0].notes if "dump" in note)
    assert "No space left" in note and note in caplog.text


@pytest.mark.skipif("lite" not in list_mode_options(), reason="this torch has no such mode")
@torch.no_grad()
def test_mode_lite(fresh_dynamo):
    model, inputs = hf_bert("sdpa", True, layers=1)
    with without_flex():
        fast = torch.compile(model, backend="stof", mode="lite")
        assert_same(fast(**inputs), model(**inputs))
