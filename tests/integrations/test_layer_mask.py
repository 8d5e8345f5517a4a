"""What travels as a model's attention mask is no tensor, and says so."""

import pytest
import torch

from stof_compile import StofUnsupportedError
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
