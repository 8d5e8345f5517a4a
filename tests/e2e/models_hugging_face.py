"""Models of the zoo: small ones of Hugging Face's transformers, with their inputs."""

from typing import Any

import torch
from model_inputs import BATCH, HEADS, HIDDEN, VOCABULARY, Built, padding_mask, token_ids


def _text_inputs(padded: bool, side: str = "right") -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": token_ids()}
    if padded:
        inputs["attention_mask"] = padding_mask(side=side)
    return inputs


def hf_bert(implementation: str, padded: bool, layers: int = 2) -> Built:
    """BERT encoder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=128,
        max_position_embeddings=64,
        attn_implementation=implementation,
    )
    return BertModel(config, add_pooling_layer=False).eval(), _text_inputs(padded)


def hf_distilbert(implementation: str, padded: bool) -> Built:
    """DistilBERT encoder."""
    from transformers import DistilBertConfig, DistilBertModel

    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=HIDDEN,
        n_layers=2,
        n_heads=HEADS,
        hidden_dim=128,
        max_position_embeddings=64,
        attn_implementation=implementation,
    )
    return DistilBertModel(config).eval(), _text_inputs(padded)


def hf_gpt2(implementation: str, padded: bool, layers: int = 2, **overrides: Any) -> Built:
    """GPT2; one layer stands for DistilGPT2, which is GPT2 with half the layers."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        n_positions=64,
        attn_implementation=implementation,
        use_cache=False,
        **overrides,
    )
    return GPT2Model(config).eval(), _text_inputs(padded)


def _llama_config(implementation: str, layers: int = 2, **overrides: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        attn_implementation=implementation,
        **overrides,
    )


def hf_llama(implementation: str, padded: bool, layers: int = 2) -> Built:
    """LLaMA: RoPE, grouped query heads, no cache."""
    from transformers import LlamaModel

    torch.manual_seed(0)
    model = LlamaModel(_llama_config(implementation, layers, use_cache=False)).eval()
    return model, _text_inputs(padded, side="left")


def hf_llama_prefill(implementation: str) -> Built:
    """LLaMA filling a fresh cache."""
    from transformers import LlamaModel

    torch.manual_seed(0)
    return LlamaModel(_llama_config(implementation, use_cache=True)).eval(), _text_inputs(False)


def hf_llama_decode(implementation: str, static: bool) -> Built:
    """LLaMA decoding one token after a ten-token prompt, with a growing or a preallocated cache."""
    from transformers import DynamicCache, LlamaModel, StaticCache

    torch.manual_seed(0)
    config = _llama_config(implementation, use_cache=True)
    model = LlamaModel(config).eval()
    cache = StaticCache(config=config, max_cache_len=64) if static else DynamicCache(config=config)
    ids = token_ids(11)
    with torch.no_grad():
        model(input_ids=ids[:, :10], past_key_values=cache)
    return model, {"input_ids": ids[:, 10:], "past_key_values": cache}


def hf_mistral(implementation: str, padded: bool, layers: int = 2) -> Built:
    """Mistral: causal sliding window of 8."""
    from transformers import MistralConfig, MistralModel

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        sliding_window=8,
        attn_implementation=implementation,
        use_cache=False,
    )
    return MistralModel(config).eval(), _text_inputs(padded, side="left")


def hf_gemma2(padded: bool) -> Built:
    """Gemma2: softcap, window and full layers alternate (its authors allow eager attention
    only)."""
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        intermediate_size=128,
        max_position_embeddings=64,
        sliding_window=8,
        attn_implementation="eager",
        use_cache=False,
    )
    return Gemma2Model(config).eval(), _text_inputs(padded, side="left")


def hf_t5(implementation: str, padded: bool, layers: int = 2) -> Built:
    """T5: encoder, decoder and cross-attention; a learned position bias; no scaling."""
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=128,
        num_layers=layers,
        num_heads=HEADS,
        attn_implementation=implementation,
        use_cache=False,
    )
    inputs = _text_inputs(padded)
    inputs["decoder_input_ids"] = token_ids(24)
    return T5Model(config).eval(), inputs


def hf_vit(implementation: str) -> Built:
    """ViT: 16 patches and the class token, 17 keys, no mask."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        attn_implementation=implementation,
    )
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return ViTModel(config, add_pooling_layer=False).eval(), {"pixel_values": pixels}
