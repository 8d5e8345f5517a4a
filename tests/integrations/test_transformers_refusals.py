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


def pix2struct():
    import transformers

    text = {"vocab_size": 96, "hidden_size": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 48, "d_kv": 8}
    config = transformers.Pix2StructConfig(
        text_config={**text, "num_heads": 4, "decoder_start_token_id": 0},
        vision_config={
            **vision, "num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 24,
        },
    )  # fmt: skip
    return transformers.Pix2StructForConditionalGeneration(config).eval()


def test_cross_attention_is_told_by_the_class_around_it():
    """Pix2Struct calls it encoder_decoder_attention, of the class that self-attention has, too."""
    model, rule = pix2struct(), masks.sliding_window(3)
    model.set_attn_implementation("stof")
    integration.set_mask(model, rule)
    for name, module in model.named_modules():
        if "_stof_mask" in module.__dict__:
            masked = module.__dict__["_stof_mask"] is not None
            assert masked == ("encoder_decoder" not in name), name
    layer = model.decoder.layer[0]
    attention = {"around.attention": layer.encoder_decoder_attention.attention}
    root = torch.nn.Module()
    root.around = layer.encoder_decoder_attention  # a name that says nothing
    assert integration._is_cross("around.attention", root, attention)
    root.around = layer.self_attention
    assert not integration._is_cross("around.attention", root, attention)


@torch.no_grad()
def test_keys_of_another_sequence_are_refused_where_no_name_told():
    model, rule = pix2struct(), masks.sliding_window(3)
    model.set_attn_implementation("stof")
    integration.set_mask(model, rule)
    for layer in model.decoder.layer:
        layer.encoder_decoder_attention.attention._stof_mask = rule
    given = {"flattened_patches": torch.rand(1, 24, 50), "attention_mask": torch.ones(1, 24)}
    with pytest.raises(StofUnsupportedError, match="keys of another sequence"):
        model(**given, decoder_input_ids=torch.randint(1, 96, (1, 9)))


def test_attention_that_does_not_dispatch_is_named(caplog):
    import transformers

    config = transformers.LongT5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, local_radius=4,
    )  # fmt: skip
    model, rule = transformers.LongT5ForConditionalGeneration(config), masks.block_diagonal(2)
    model.set_attn_implementation("stof")
    for mask, warned in ((rule, True), ({"decoder": rule}, False), (None, False)):
        caplog.clear()
        integration.set_mask(model, mask)
        said = [r.getMessage() for r in caplog.records if r.name == "stof_compile"]
        assert bool(said) == warned
        if warned:
            assert "encoder.block.0.layer.0.LocalSelfAttention" in said[0]
            assert "decoder" not in said[0]
    whole = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=32,
        )
    )  # fmt: skip
    whole.set_attn_implementation("stof")
    caplog.clear()
    integration.set_mask(whole, rule)
    assert not caplog.records
