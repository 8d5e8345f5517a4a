"""Operators are tuned, packed, replaced and compared: nothing a user owns changes by it.

Models are fp64, so that what is left between a template and the model is far below the tolerance.
"""

import pytest
import torch
import torch.nn.functional as F
from models import hf_gpt2, hf_llama, token_ids
from running import without_inductor
from torch import nn
from torch_templates import templates_win

from stof_compile import explain, verdict
from stof_compile.verdict import FastestForm

TIGHT = 1e-12
FP32_NORM = 1e-6  # LLaMA normalises in fp32 whatever its dtype


def assert_near(found, expected, tolerance=TIGHT):
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


@pytest.fixture(autouse=True)
def timed(monkeypatch, fresh_dynamo):
    """Templates and packs win; the list gets an entry for each candidate that was run."""
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    monkeypatch.setattr(verdict, "compile_with_inductor", without_inductor)
    monkeypatch.setattr(verdict, "TIME_S", 0.02)
    with templates_win() as timed:
        yield timed


class Layer(nn.Module):
    """Attention whose q, k, v are packed, and a feed-forward part, with dropout."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(seen))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Counting(Layer):
    """Counts its calls, keeps a running mean and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return super().forward(x) + self.mean + torch.rand_like(x)


def compiled(model, folder, **options):
    options = {"cache_dir": folder, "strict": True, "tune_budget_s": 30, **options}
    return torch.compile(model, backend="stof", dynamic=False, options=options)


def is_fused(fast):
    """Templates stand in every graph, and some projections are packed."""
    seen = explain(fast)
    assert all("stof_test.recipe" in record.graphs["rewritten"] for record in seen.graphs)
    assert any(pack.packed for pack in seen.packs), str(seen)
    return seen


@torch.no_grad()
def test_buffers_and_random_numbers(tmp_path, timed):
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    reference, model = Counting().double(), Counting().double()
    torch.manual_seed(3)
    expected = [reference(x) for _ in range(3)]
    after = torch.get_rng_state()
    fast = compiled(model, tmp_path)
    torch.manual_seed(3)
    found = [fast(x) for _ in range(3)]
    assert timed and is_fused(fast)
    assert_near(found, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert int(model.calls) == 3
    assert_near(model.mean, reference.mean)
    assert not any(note.startswith("whole graph") for note in explain(fast).notes)  # it writes


@pytest.mark.parametrize(
    ("build", "tolerance"), [(hf_llama, FP32_NORM), (hf_gpt2, TIGHT)], ids=["llama", "gpt2"]
)
@torch.no_grad()
def test_a_static_cache(tmp_path, timed, build, tolerance):
    from transformers import StaticCache

    model = build("sdpa", False, layers=1)[0].double().eval()
    ids = token_ids(13)

    def generate(forward):
        cache = StaticCache(config=model.config, max_cache_len=32)
        outs = []
        for a, b in ((0, 11), (11, 12), (12, 13)):
            given = ids[:, a:b].clone()
            outs.append(forward(given, past_key_values=cache, use_cache=True).last_hidden_state)
            assert torch.equal(given, ids[:, a:b])
        kept = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return outs, kept, [cache.get_seq_length(i) for i in range(len(cache.layers))]

    expected, before, lengths = generate(model)
    fast = compiled(model, tmp_path, strict=False)
    found, after, ours = generate(fast)
    assert timed
    assert all("stof_test.recipe" in r.graphs["rewritten"] for r in explain(fast).graphs)
    assert list(map(int, ours)) == list(map(int, lengths)) == [13] * len(lengths)
    assert_near(found, expected, tolerance)
    assert_near(after, before, tolerance)
    assert all(float(t[:, :, 13:].abs().max()) == 0 for t in after)


@torch.no_grad()
def test_inputs_parameters_and_random_numbers_when_whole_graphs_are_compared(tmp_path, timed):
    class Noisy(Layer):
        def forward(self, x):
            return super().forward(x) + torch.rand_like(x)

    model, x = Noisy().double().eval(), torch.randn(2, 16, 32, dtype=torch.float64)
    kept, given = {k: v.clone() for k, v in model.state_dict().items()}, x.clone()
    versions = [p._version for p in (*model.parameters(), x)]
    torch.manual_seed(3)
    expected = [model(x) for _ in range(2)]
    after = torch.get_rng_state()
    fast = compiled(model, tmp_path, strict=False)
    torch.manual_seed(3)
    found = [fast(x) for _ in range(2)]
    (note,) = (n for n in explain(fast).notes if n.startswith("whole graph"))
    assert timed and all(form in note for form in ("fused", "torch.compile"))
    assert_near(found, expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(x, given) and versions == [p._version for p in (*model.parameters(), x)]
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())


@torch.no_grad()
def test_dropout_of_a_model_in_training_mode(tmp_path, timed):
    """Without gradients fusion runs; dropout stays dropout, with the numbers eager draws."""
    model, x = Layer(dropout=0.5).double().train(), torch.randn(2, 16, 32, dtype=torch.float64)
    torch.manual_seed(3)
    expected = [model(x) for _ in range(2)]
    fast = compiled(model, tmp_path)
    torch.manual_seed(3)
    found = [fast(x) for _ in range(2)]
    assert timed and model.training and all(m.training for m in model.modules())
    assert_near(found, expected)
    assert not torch.equal(found[0], found[1])
    model.eval()
    assert_near(fast(x), model(x))


def test_a_training_step_is_left_alone(tmp_path, timed):
    def step(forward, model):
        torch.manual_seed(3)
        forward(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    x = torch.randn(2, 16, 32, dtype=torch.float64)
    reference, model = (Layer(dropout=0.5).double().train() for _ in range(2))
    expected = step(reference, reference)
    fast = compiled(model, tmp_path, strict=False, attention="off")
    assert_near(step(fast, model), expected, 1e-10)
    assert timed == [] and any("gradients" in note for note in explain(fast).notes)


@torch.no_grad()
def test_running_statistics(tmp_path, timed):
    class Normed(Layer):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(16)

        def forward(self, x):
            return super().forward(self.batch_norm(x))

    x = torch.randn(2, 16, 32, dtype=torch.float64)
    reference, model = (Normed().double().train() for _ in range(2))
    expected = [reference(x) for _ in range(2)]
    fast = compiled(model, tmp_path)
    found = [fast(x) for _ in range(2)]
    assert timed and is_fused(fast)
    assert_near(found, expected)
    assert int(model.batch_norm.num_batches_tracked) == 2
    for name in ("running_mean", "running_var"):
        assert_near(getattr(model.batch_norm, name), getattr(reference.batch_norm, name))
    assert not any(note.startswith("whole graph") for note in explain(fast).notes)


@torch.no_grad()
def test_weights_that_change_after_they_were_packed(tmp_path, monkeypatch):
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *given: FastestForm(None))
    model, x = Layer().double().eval(), torch.randn(2, 16, 32, dtype=torch.float64)
    fast = compiled(model, tmp_path)
    fast(x)
    is_fused(fast)
    model.q.weight.mul_(2.0)
    assert_near(fast(x), model(x))
    model.load_state_dict({k: v.flip(0) for k, v in model.state_dict().items()})
    assert_near(fast(x), model(x))
