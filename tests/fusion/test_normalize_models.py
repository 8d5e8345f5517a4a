"""Norms and activations of models become one node each, with the results of the eager model."""

from functools import partial

import pytest
import torch
from e2e import models
from e2e.running import tensors
from model_inputs import VOCABULARY
from normalized_calls import Normalized


def built(name, **config):
    """A small causal model of transformers by its configuration's name."""
    import transformers

    torch.manual_seed(0)
    small = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=1,
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
    "llama": (partial(models.hf_llama, "sdpa", True, layers=1), (3, 0, 0)),
    "mistral": (partial(models.hf_mistral, "sdpa", False, layers=1), (3, 0, 0)),
    "gemma": (partial(built, "Gemma"), (3, 0, 0)),
    "gemma2": (partial(models.hf_gemma2, False), (9, 0, 0)),
    "qwen3": (partial(built, "Qwen3"), (5, 0, 0)),
    "olmo2": (partial(built, "Olmo2"), (5, 0, 0)),
    "t5": (partial(models.hf_t5, "sdpa", False, layers=1), (7, 0, 0)),
    "gpt2": (partial(models.hf_gpt2, "sdpa", False, layers=1), (0, 1, 0)),
    "gpt2-fast": (
        partial(models.hf_gpt2, "sdpa", False, layers=1, activation_function="gelu_fast"),
        (0, 1, 0),
    ),
    "gpt2-quick": (
        partial(models.hf_gpt2, "sdpa", False, layers=1, activation_function="quick_gelu"),
        (0, 0, 0),
    ),
    "gpt2-python": (
        partial(models.hf_gpt2, "sdpa", False, layers=1, activation_function="gelu_python"),
        (0, 1, 0),
    ),
}


# The same model with torch's own operator in place of a formula: on CPUs without AVX-512 the error
# of torch's GELU in fp32 is 2.7 times that of x / 2 * (1 + erf(x / sqrt(2))).
OWN_OPERATOR = {
    "gpt2-python": partial(models.hf_gpt2, "sdpa", False, layers=1, activation_function="gelu"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype, fresh_dynamo):
    """No further from fp64 than the model is by itself, or with torch's own operators."""
    build, counts = MODELS[name]
    model, inputs = build()
    with torch.no_grad():
        wanted = tensors(model.double()(**inputs))
        model, inputs = build()
        model = model.to(dtype)
        plain = tensors(model(**inputs))
        other, inputs = OWN_OPERATOR.get(name, build)()
        other = tensors(other.to(dtype)(**inputs))
        found = Normalized(model, **inputs)
    assert tuple(found.counts) == counts
    assert not any(found.again)
    assert found.names["rsqrt"] == 0 and found.names["rms_norm"] == counts[0]
    for out, *usual, ref in zip(tensors(found.result), plain, other, wanted, strict=True):
        error, *usual = ((t.double() - ref).abs() for t in (out, *usual))
        assert error.max() <= 1.5 * max(u.max() for u in usual)
        assert error.mean() <= 1.1 * max(u.mean() for u in usual)
