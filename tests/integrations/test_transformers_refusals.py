"""Masks that a model under the attention "stof" cannot have: refused in words."""

import pytest
import torch

from stof_compile import StofMaskError, StofUnsupportedError, masks
from stof_compile.integrations import transformers as integration


def test_a_model_that_computes_with_its_mask_is_refused_in_words():
    import transformers

    config = transformers.BeitConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=8, use_relative_position_bias=True,
    )  # fmt: skip
    model = transformers.BeitModel(config).eval()
    pixels = torch.zeros(1, 3, 32, 32)
    model.set_attn_implementation("stof")
    with pytest.raises(StofUnsupportedError, match="set_attn_implementation"):
        model(pixel_values=pixels)
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_a_tensor'"):
        integration.LayerMask(4, 4, None, None, None, 0).nothing_of_a_tensor  # noqa: B018


@torch.no_grad()
def test_a_pattern_that_moves_with_the_length_has_no_decoding_step():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 96, (1, 41))
    model.set_attn_implementation("stof")
    integration.set_mask(model, masks.longformer_ae(4, 4) | masks.sliding_window(2))
    past = model(ids[:, :40], use_cache=True).past_key_values
    with pytest.raises(StofMaskError, match="moves with the length"):
        model(ids[:, 40:], past_key_values=past)
