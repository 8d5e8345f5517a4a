"""Nothing a user owns changes: buffers, caches, random numbers; what is on disk is safe."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from models import BATCH, LENGTH, hand_written, hf_bert, hf_llama, token_ids
from running import assert_same, masked, without_flex, without_inductor
from torch import nn

from stof_compile import explain, masks
from stof_compile.attention import select
from stof_compile.folded import FoldedBuffers

WINDOW = masks.sliding_window(4)
TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    with without_flex():
        yield


def tuned(folder, **options):
    """Options of a compile that measures attention."""
    asked = {"tune_budget_s": 30, "mask": WINDOW, "cache_dir": folder, "strict": True}
    return {**asked, "fusion": "off", **options}


class Counting(nn.Module):
    """Counts its calls in a buffer and keeps a running mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(64, 192)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        q, k, v = self.proj(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).flatten(2) + self.mean + torch.rand_like(x)


@torch.no_grad()
def test_buffers_and_random_numbers_after_tuning(tmp_path):
    x = torch.randn(BATCH, LENGTH, 64)
    reference, model = Counting(), Counting()
    torch.manual_seed(3)
    with masked(WINDOW):
        expected = [reference(x) for _ in range(2)]
    after = torch.get_rng_state()
    fast = torch.compile(model, backend="stof", options=tuned(tmp_path))
    torch.manual_seed(3)
    found = [fast(x) for _ in range(2)]
    assert_same(found, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert int(model.calls) == 2
    assert torch.equal(model.mean, reference.mean)
    assert explain(fast).sites[0].choice.source == "measured"


@torch.no_grad()
def test_a_cache_after_tuning(tmp_path):
    from transformers import StaticCache

    model, _ = hf_llama("sdpa", False, layers=1)
    mask, ids = masks.sliding_window(6, causal=True), token_ids(13)

    def generate(forward):
        cache = StaticCache(config=model.config, max_cache_len=32)
        for a, b in ((0, 12), (12, 13)):
            forward(ids[:, a:b].clone(), past_key_values=cache, use_cache=True)
        return [t for layer in cache.layers for t in (layer.keys, layer.values)]

    with masked(
        mask
    ):  # exact for the prefill; the decoded token's window is masked by its position
        expected = generate(model)
    options = tuned(tmp_path, mask=mask, strict=False)
    found = generate(torch.compile(model, backend="stof", options=options))
    assert_same([t[:, :, :12] for t in found], [t[:, :, :12] for t in expected])
    assert all(float(t[:, :, 13:].abs().max()) == 0 for t in found)


def fail(*args, **kwargs):
    raise AssertionError("measured again")


@torch.no_grad()
def test_a_corrupt_store_is_measured_anew(tmp_path, caplog):
    model, inputs = hf_bert("sdpa", False, layers=1)
    fast = torch.compile(model, backend="stof", options=tuned(tmp_path))
    expected = fast(**inputs)
    files = [path for path in tmp_path.rglob("*.json") if "attention" in str(path)]
    assert files
    for path in files:
        path.write_text('{"kernel": "fl')
    torch._dynamo.reset()
    again = torch.compile(model, backend="stof", options=tuned(tmp_path))
    assert_same(again(**inputs), expected)
    assert explain(again).sites[0].choice.source == "measured"
    assert any(record.levelname == "WARNING" for record in caplog.records)


@torch.no_grad()
def test_an_unknown_entry_of_the_store_is_measured_anew(tmp_path):
    model, inputs = hf_bert("sdpa", False, layers=1)
    torch.compile(model, backend="stof", options=tuned(tmp_path))(**inputs)
    for path in tmp_path.rglob("*.json"):
        body = json.loads(path.read_text())
        for part in (body, body.get("value", {})):
            part.pop("kernel", None)
        path.write_text(json.dumps(body))
    torch._dynamo.reset()
    again = torch.compile(model, backend="stof", options=tuned(tmp_path))
    again(**inputs)
    assert explain(again).sites[0].choice.source == "measured"


SCRIPT = """
import sys
import torch
from models import hand_written  # importing transformers would take half of the time
from running import without_flex, without_inductor
import stof_compile.backend as backend
from stof_compile import explain, masks

backend.compile_with_inductor = without_inductor
model, inputs = hand_written("scale_both")
mask = masks.sliding_window(4)
options = {"tune_budget_s": 60, "mask": mask, "cache_dir": sys.argv[1], "fusion": "off"}
fast = torch.compile(model, backend="stof", options=options)
with torch.no_grad(), without_flex():
    fast(**inputs)
choice = explain(fast).sites[0].choice
print("RESULT", choice.source, choice.kernel, flush=True)
"""


def start(folder):
    paths = os.pathsep.join(str(p) for p in (TESTS, TESTS.parent))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def result(process):
    text = process.communicate(timeout=200)[0]
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("RESULT")]
    assert lines, text
    return tuple(lines[0])


@torch.no_grad()
def test_processes_share_what_was_measured(tmp_path, monkeypatch):
    both = [result(process) for process in [start(tmp_path), start(tmp_path)]]
    assert sorted(source for source, _ in both) == ["measured", "store"]
    assert len({kernel for _, kernel in both}) == 1
    monkeypatch.setattr(select, "measure_candidate", fail)  # a third process, later
    model, inputs = hand_written("scale_both")
    fast = torch.compile(model, backend="stof", options=tuned(tmp_path))
    fast(**inputs)
    choice = explain(fast).sites[0].choice
    assert (choice.source, choice.kernel) == ("store", both[0][1])


def test_a_mask_buffer_that_changes_is_noticed(fresh_dynamo):
    """Its contents went into the compiled mask; writing to it must not leave the old mask there."""
    model, inputs = hand_written("masked_fill_buffer")
    options = {"tune_budget_s": 0, "attention": "gather"}
    with torch.no_grad():
        fast = torch.compile(model, backend="stof", options=options)
        torch.testing.assert_close(fast(**inputs), model(**inputs), rtol=1e-4, atol=1e-5)
        before = fast(**inputs)
        for layer in model.layers:
            layer.tril.copy_(layer.tril.clone())  # the same contents: nothing to do
        assert torch.equal(fast(**inputs), before)
        for layer in model.layers:
            layer.tril[..., 5:, :3] = False
        after = fast(**inputs)
        torch.testing.assert_close(after, model(**inputs), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(after, before)


class Masked(nn.Module):
    """Attention under a mask that lies in a buffer."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def registered(model, mask):
    model.register_buffer("mask", mask)


def loaded(model, mask):
    model.load_state_dict({"mask": mask}, assign=True)


@pytest.mark.parametrize("put", [registered, loaded])
@torch.no_grad()
def test_a_mask_buffer_in_memory_that_comes_back(put):
    """As an allocator hands it out again: neither address nor version differ."""
    mask, memory = torch.ones(16, 16, dtype=torch.bool).tril(), numpy.empty((16, 16), dtype=bool)
    model, (q, k, v) = Masked(mask), torch.randn(3, 1, 2, 16, 8)
    fast = torch.compile(model, backend="stof", options={"tune_budget_s": 0, "attention": "gather"})
    before = fast(q, k, v)
    memory[:] = mask.numpy()
    put(model, torch.from_numpy(memory))
    assert torch.equal(fast(q, k, v), before)
    state = model.mask.data_ptr(), model.mask._version
    put(model, mask)  # frees the memory
    memory[:] = mask.fliplr().logical_or(mask).numpy()
    put(model, torch.from_numpy(memory))
    assert (model.mask.data_ptr(), model.mask._version) == state
    torch.testing.assert_close(fast(q, k, v), model(q, k, v), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(fast(q, k, v), before)


def test_contents_of_mask_buffers_are_compared_once():
    buffers = [torch.ones(4) for _ in range(3)]
    folded = FoldedBuffers(("x", "a", "b", "c"), {"a", "b", "c"}, (torch.ones(1), *buffers))

    def compared():
        with mock.patch.object(torch, "equal", wraps=torch.equal) as equal:
            same = folded.unchanged((torch.ones(1), *buffers))
        return same, equal.call_count

    assert compared() == (True, 0)
    buffers[0].mul_(1.0)
    buffers[2] = torch.ones(4)
    assert compared() == (True, 2)
    buffers[1].add_(1.0)
    assert compared() == (False, 1)
    assert compared() == (False, 0)
    buffers[1].sub_(1.0)
    assert compared() == (True, 1)


def test_a_scale_buffer_that_changes_is_noticed(fresh_dynamo):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.tensor(0.25))

        def forward(self, q, k, v):
            return torch.softmax(q @ k.transpose(-2, -1) * self.factor, -1) @ v

    model = Scaled()
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    with torch.no_grad():
        fast = torch.compile(model, backend="stof", options={"tune_budget_s": 0})
        torch.testing.assert_close(fast(q, k, v), model(q, k, v), rtol=1e-4, atol=1e-5)
        model.factor.fill_(4.0)
        torch.testing.assert_close(fast(q, k, v), model(q, k, v), rtol=1e-4, atol=1e-5)
