"""Spelled-out RMSNorm, GELU and SiLU become one node each, and only where that is the same."""

import math
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from e2e import models
from e2e.running import tensors
from torch import nn

from stof_compile.capture import read_capture
from stof_compile.emit import autocast_at, fake_result
from stof_compile.node_ops import argument, operation
from stof_compile.normalize import normalize

PASSES = ("rewrite_rms_norms", "rewrite_gelus", "rewrite_silus")
WIDTH = 24


class Normalized:
    """What normalisation made of a call: counts of the three passes, the graph, the result."""

    def __init__(self, fn, *args, dynamic=False, **kwargs):
        self.counts, self.again, self.gm = (), (), None

        def backend(gm, inputs):
            facts = read_capture(gm, inputs)
            runs = [normalize(gm, facts) for _ in range(2)]
            self.counts, self.again = ([run[name] for name in PASSES] for run in runs)
            self.gm = gm
            return gm.forward

        torch._dynamo.reset()
        self.result = torch.compile(fn, backend=backend, dynamic=dynamic)(*args, **kwargs)

    @property
    def names(self):
        return Counter(operation(n) for n in self.gm.graph.nodes)

    def assert_values_are_true(self):
        for node in self.gm.graph.nodes:
            old = node.meta.get("example_value")
            if node.op not in ("call_function", "call_method") or not isinstance(old, torch.Tensor):
                continue
            with autocast_at(self.gm.graph, node):
                new = fake_result(node)
            assert (new.shape, new.dtype, new.stride()) == (old.shape, old.dtype, old.stride())


def rows(dtype=torch.float32, width=WIDTH):
    return torch.randn(3, 33, width, generator=torch.Generator().manual_seed(0)).to(dtype)


# -- models ----------------------------------------------------------------------------------------


def built(name, **config):
    """A small causal model of transformers by its configuration's name."""
    import transformers

    torch.manual_seed(0)
    small = dict(
        vocab_size=models.VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        head_dim=16,
        max_position_embeddings=64,
        use_cache=False,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    made = getattr(transformers, f"{name}Config")(**small | config)
    return getattr(transformers, f"{name}Model")(made).eval(), {"input_ids": models.token_ids()}


MODELS = {
    "llama": (partial(models.hf_llama, "sdpa", True), (5, 0, 0)),
    "mistral": (partial(models.hf_mistral, "sdpa", False), (5, 0, 0)),
    "gemma": (partial(built, "Gemma"), (5, 0, 0)),
    "gemma2": (partial(models.hf_gemma2, False), (9, 0, 0)),
    "qwen3": (partial(built, "Qwen3"), (9, 0, 0)),
    "olmo2": (partial(built, "Olmo2"), (9, 0, 0)),
    "t5": (partial(models.hf_t5, "sdpa", False), (12, 0, 0)),
    "gpt2": (partial(models.hf_gpt2, "sdpa", False), (0, 2, 0)),
    "gpt2-fast": (
        partial(models.hf_gpt2, "sdpa", False, activation_function="gelu_fast"),
        (0, 2, 0),
    ),
    "gpt2-quick": (
        partial(models.hf_gpt2, "sdpa", False, activation_function="quick_gelu"),
        (0, 0, 0),
    ),
    "gpt2-python": (
        partial(models.hf_gpt2, "sdpa", False, activation_function="gelu_python"),
        (0, 2, 0),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype, fresh_dynamo):
    build, counts = MODELS[name]
    model, inputs = build()
    with torch.no_grad():
        wanted = tensors(model.double()(**inputs))
        model, inputs = build()
        model = model.to(dtype)
        plain = tensors(model(**inputs))
        found = Normalized(model, **inputs)
    assert tuple(found.counts) == counts
    assert not any(found.again)
    assert found.names["rsqrt"] == 0 and found.names["rms_norm"] == counts[0]
    for out, eager, ref in zip(tensors(found.result), plain, wanted, strict=True):
        error, usual = ((t.double() - ref).abs() for t in (out, eager))
        assert error.max() <= 1.5 * usual.max() and error.mean() <= 1.1 * usual.mean()


# -- spellings -------------------------------------------------------------------------------------


def weight(dtype=torch.float32):
    return torch.linspace(0.5, 1.5, WIDTH).to(dtype)


def llama(x, w):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def t5(x, w):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def gemma(x, w):
    wide = x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + w.float())).type_as(x)


def olmo(x, w):
    wide = x.float()
    out = wide * torch.rsqrt(torch.mean(wide * wide, [-1], True) + 1e-6)
    return (w * out).to(x.dtype)


def divided(x, w):
    wide = x.float()
    return (wide / torch.sqrt(1e-6 + torch.square(wide).mean(dim=2, keepdim=True))).to(x.dtype) * w


def inverted(x, w):
    wide = x.float()
    root = (wide**2).mean(axis=-1, keepdim=True).add(1e-6).sqrt()
    return (1.0 / root * wide).to(x.dtype) * w


def powered(x, w):
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5).to(x.dtype) * w


def no_weight(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS = [llama, t5, gemma, olmo, divided, inverted, powered, no_weight]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_norms(norm, dtype, fresh_dynamo):
    x, w = rows(dtype), weight(dtype)
    found = Normalized(norm, x, w)
    assert found.counts == [1, 0, 0] and found.again == [0, 0, 0]
    assert not {"rsqrt", "sqrt", "mean", "pow"} & set(found.names)
    assert found.result.dtype == dtype
    assert_close(found.result, norm(x.double(), w.double()))
    found.assert_values_are_true()


def test_the_width_of_gemmas_computation_is_kept(fresh_dynamo):
    found = Normalized(gemma, rows(torch.bfloat16), weight(torch.bfloat16))
    (norm,) = (n for n in found.gm.graph.nodes if operation(n) == "rms_norm")
    assert norm.meta["example_value"].dtype == torch.float32
    assert operation(argument(norm, 2, "weight")) == "add"  # 1 + weight is a node of its own


def test_a_weight_of_another_dtype_stays_outside(fresh_dynamo):
    x, w = rows(torch.bfloat16), weight()
    found = Normalized(llama, x, w)
    assert found.counts == [1, 0, 0] and found.result.dtype == torch.float32
    (norm,) = (n for n in found.gm.graph.nodes if operation(n) == "rms_norm")
    assert argument(norm, 2, "weight") is None
    assert torch.equal(found.result, llama(x, w))


def test_a_half_weight_after_a_wide_input(fresh_dynamo):
    """T5 with an fp32 residual stream: the norm is wide, the product half."""

    def run(x, w):
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * wide.to(w.dtype)

    x, w = rows(), weight(torch.bfloat16)
    found = Normalized(run, x, w)
    assert found.counts == [1, 0, 0]
    assert torch.equal(found.result, run(x, w))


def test_no_rounding_is_dropped(fresh_dynamo):
    """A wide result of a rounded value: a wide norm would give other digits."""

    def run(x, w):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * wide.to(torch.bfloat16).float()

    x, w = rows(), weight()
    found = Normalized(run, x, w)
    assert torch.equal(found.result, run(x, w))


def test_a_strided_input(fresh_dynamo):
    x = rows().transpose(0, 1)
    found = Normalized(llama, x, weight())
    assert_close(found.result, llama(x.double(), weight().double()))
    found.assert_values_are_true()


def test_a_symbolic_length(fresh_dynamo):
    x = rows()
    torch._dynamo.mark_dynamic(x, 1)

    def run(x, w):
        x = llama(x, w)
        return new_gelu(x * torch.sigmoid(x))

    found = Normalized(run, x, weight())
    assert found.counts == [1, 1, 1]
    assert any(isinstance(n.meta.get("example_value"), torch.SymInt) for n in found.gm.graph.nodes)
    assert_close(found.result, run(x.double(), weight().double()), scale=3)


def test_bad_rows_stay_bad(fresh_dynamo):
    x = rows()
    x[0, 0, 3], x[0, 1, 4], x[0, 2] = torch.nan, torch.inf, 0.0
    found = Normalized(llama, x, weight())
    assert torch.equal(found.result.isnan(), llama(x, weight()).isnan())
    torch.testing.assert_close(found.result, llama(x, weight()), equal_nan=True)


def quick(x):
    return x * torch.sigmoid(1.702 * x)


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def multiplied_out(x):
    return x * (0.5 * (torch.tanh(0.79788456 * x + 0.035677408 * x**3) + 1))


def python_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def halved(x):
    return (x / 2) * (1 + torch.erf(x * 0.70710678))


ACTIVATIONS = {
    "new": (new_gelu, (0, 1, 0)),
    "fast": (fast_gelu, (0, 1, 0)),
    "multiplied-out": (multiplied_out, (0, 1, 0)),
    "python": (python_gelu, (0, 1, 0)),
    "halved": (halved, (0, 1, 0)),
    "silu": (lambda x: x * torch.sigmoid(x), (0, 0, 1)),
    "silu-method": (lambda x: x.sigmoid() * x, (0, 0, 1)),
    "silu-quotient": (lambda x: x / (1 + torch.exp(-x)), (0, 0, 1)),
    "of-a-product": (lambda x: new_gelu(x * x.roll(1, -1)), (0, 1, 0)),
    "of-a-sum": (lambda x: new_gelu(x + x.roll(1, -1)), (0, 1, 0)),
    "quick": (quick, (0, 0, 0)),
    "other-constant": (lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x**3))), (0, 0, 0)),
    "without-half": (lambda x: x * (1 + torch.erf(x / math.sqrt(2.0))), (0, 0, 0)),
    "of-two": (lambda x: 0.5 * x.roll(1, -1) * (1 + torch.erf(x * 0.70710678)), (0, 0, 0)),
    "gated": (lambda x: x.roll(1, -1) * torch.sigmoid(x), (0, 0, 0)),
    "read-elsewhere": (lambda x: torch.cat((x * (s := torch.sigmoid(x)), s)), (0, 0, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype, fresh_dynamo):
    activation, counts = ACTIVATIONS[name]
    x = rows(dtype) * 3
    found = Normalized(activation, x)
    assert tuple(found.counts) == counts and found.again == [0, 0, 0]
    wanted, usual = activation(x.double()), activation(x)
    error, usual = ((t.double() - wanted).abs().max() for t in (found.result, usual))
    assert error <= 1.01 * usual + 1e-6
    found.assert_values_are_true()


# -- what stays ------------------------------------------------------------------------------------


def shared_variance(x, w):
    variance = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + 1e-6) * w + variance


def half_computation(x, w):
    x = x.half()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


def other_dimension(x, w):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w


def two_dimensions(x, w):
    return x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-6) * w


def cube(x, w):
    return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6) * w


def other_factor(x, w):
    return x.roll(1, -1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def narrowed(x, w):
    x = x.double()
    wide = x.float()
    return x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * w


STAYS = [
    shared_variance,
    half_computation,
    other_dimension,
    two_dimensions,
    cube,
    other_factor,
    narrowed,
]


@pytest.mark.parametrize("fn", STAYS, ids=lambda f: f.__name__)
def test_what_stays(fn, fresh_dynamo):
    x, w = rows(), weight()
    found = Normalized(fn, x, w)
    assert found.counts == [0, 0, 0]
    assert torch.equal(found.result, fn(x, w))


def test_a_write_on_the_way(fresh_dynamo):
    def run(x, w):
        squares = x.pow(2).mean(-1, keepdim=True)
        x[:, :1] = 0.0
        return x * torch.rsqrt(squares + 1e-6) * w

    found = Normalized(run, rows(), weight())
    assert found.counts == [0, 0, 0]
    assert torch.equal(found.result, run(rows(), weight()))

    def gate(x):
        opened = torch.sigmoid(x)
        x.add_(1.0)
        return x * opened

    found = Normalized(gate, rows())
    assert found.counts == [0, 0, 0]
    assert torch.equal(found.result, gate(rows()))


def test_a_write_behind_a_cast(fresh_dynamo):
    """The wide copy keeps the old values."""

    def run(x, w):
        wide = x.float()
        x.zero_()
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (out * w).to(x.dtype)

    x, w = rows(torch.bfloat16), weight(torch.bfloat16)
    found = Normalized(run, x.clone(), w)
    assert torch.equal(found.result, run(x.clone(), w))


def test_gradients(fresh_dynamo):
    x = rows().requires_grad_()
    found = Normalized(lambda x, w: F.relu(llama(x, w)) * torch.sigmoid(x), x, weight())
    assert found.counts == [0, 0, 0]
    w = nn.Parameter(weight())
    assert Normalized(lambda x: llama(x, w) + x * x.sigmoid(), rows()).counts == [0, 0, 0]


def test_autocast_decides_the_dtype(fresh_dynamo):
    def run(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, torch.eye(WIDTH))
            return llama(y, w) * 2 + y * torch.sigmoid(y)

    x, w = rows(), weight()
    found = Normalized(run, x, w)
    assert found.result.dtype == run(x, w).dtype
    torch.testing.assert_close(found.result, run(x, w), rtol=1e-2, atol=1e-2)
    found.assert_values_are_true()
