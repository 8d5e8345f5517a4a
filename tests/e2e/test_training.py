"""Training through rewritten graphs: gradients equal the eager model's with the same mask.

Models of transformers have one layer (T5: one of either side), to compile them in half the time;
those of torch.nn and the checkpointed one have two.
"""

import pytest
import torch
from models import LENGTH, hf_bert, hf_gpt2, hf_llama, hf_t5, nn_encoder_train
from running import NO_TIMING, assert_same, masked, without_inductor
from split_attention import Block

from stof_compile import explain, masks
from stof_compile.attention import dynamic
from stof_compile.errors import StofMaskError

MASK = masks.longformer(4, 2)
GRADIENT_ERROR = 2e-4  # fp32, relative to the largest gradient of a parameter


@pytest.fixture
def quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


def step(forward, model, inputs):
    """Output and gradients of one step."""
    model.zero_grad()
    out = forward(**inputs)
    out = out if isinstance(out, torch.Tensor) else out.last_hidden_state
    # not the mean square: behind a layer norm that is a constant
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check(model, inputs, mask, **options):
    cross = (mask, mask, None)  # T5: cross-attention keeps its own mask
    with masked(*cross if "decoder_input_ids" in inputs else (mask,)):
        expected, gradients = step(model, model, inputs)
    options = {**NO_TIMING, "mask": mask, **options}
    fast = torch.compile(model, backend="stof", options=options)
    found, ours = step(fast, model, inputs)
    assert_same(found, expected)
    assert_same_gradients(ours, gradients)
    return fast


def assert_same_gradients(ours, gradients):
    assert ours.keys() == gradients.keys()
    # some gradients are zero but for rounding: that of a key's bias
    smallest = 1e-3 * max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        error = (ours[name] - gradient).abs().max() / gradient.abs().max().clamp(min=smallest)
        assert error <= GRADIENT_ERROR, f"{name}: {error:.1e}"


@pytest.mark.parametrize("mask", [None, MASK], ids=repr)
@pytest.mark.parametrize("build", [hf_bert, hf_gpt2, hf_llama, hf_t5], ids=lambda b: b.__name__)
def test_gradients(quick, build, mask):
    model, inputs = build("sdpa", True, layers=1)
    fast = check(model, inputs, mask)
    assert {site.status for site in explain(fast).sites} == {"rewritten"}


def test_gradients_of_a_learned_bias(quick):
    model, inputs = hf_t5("eager", False, layers=1)
    reference, _ = hf_t5("sdpa", False, layers=1)
    with masked(None):
        _, expected = step(reference, reference, inputs)
    fast = torch.compile(model, backend="stof", options=NO_TIMING)
    _, gradients = step(fast, model, inputs)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert_same(gradients[name], expected[name], GRADIENT_ERROR)


def test_gradients_of_torch_layers_in_training_mode(quick):
    check(*nn_encoder_train(), MASK)


def test_gradients_through_inductor(fresh_dynamo):
    check(*hf_bert("sdpa", True, layers=1), MASK)


def bert():
    from models import token_ids

    return hf_bert("sdpa", False, layers=1)[0], lambda length: {"input_ids": token_ids(length)}


def block():
    return Block(), lambda length: {"x": torch.randn(2, length, 64)}


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize(
    ("build", "attention"), [(bert, "gather"), (block, "auto"), (block, "sdpa")],
    ids=["model", "auto", "sdpa"],
)  # fmt: skip
def test_gradients_with_symbolic_lengths(quick, build, attention, by_kernels, monkeypatch):
    # what a GPU would say
    monkeypatch.setattr(dynamic, "wants_kernel_gradients", lambda *operands: by_kernels)
    model, inputs_of = build()
    options = {**NO_TIMING, "mask": MASK, "attention": attention}
    fast = torch.compile(model, backend="stof", options=options, dynamic=True)
    for length in (LENGTH, 17):
        inputs = inputs_of(length)
        with masked(MASK):
            expected, gradients = step(model, model, inputs)
        found, ours = step(fast, model, inputs)
        assert_same(found, expected)
        assert_same_gradients(ours, gradients)
    statuses = {site.status for site in explain(fast).sites}
    assert ("rewritten" in statuses) == (by_kernels and attention != "sdpa")


def test_untimed_training_stays_with_the_backward_of_sdpa(quick):
    model, inputs = hf_bert("sdpa", False, layers=1)
    fast = check(model, inputs, MASK, attention="auto")
    assert {site.choice.kernel for site in explain(fast).sites} == {"sdpa"}


def checkpointed():
    model, inputs = hf_gpt2("sdpa", True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, inputs


def test_checkpointed_blocks_are_left_alone_and_a_mask_is_refused(quick):
    fast = check(*checkpointed(), None, strict=False)
    assert {"checkpoint" in miss["reason"] for miss in explain(fast).near_misses} == {True}
    torch._dynamo.reset()
    model, inputs = checkpointed()
    with pytest.raises(StofMaskError, match="checkpoint"):
        torch.compile(model, backend="stof", options={**NO_TIMING, "mask": MASK})(**inputs)
