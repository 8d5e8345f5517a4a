"""Model zoo: every small model whose attention layers the backend has to find.

Each row builds an untrained model (two layers, hidden size 64, at most 64 tokens) with its inputs.
Two layers are enough to see what differs between layers (names, alternating windows) and keep a
compile short. Tests take the models from here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from model_inputs import BATCH, HEADS, HIDDEN, LENGTH, Built, padding_mask, token_ids
from models_by_hand import HandWritten, hand_written
from models_hugging_face import (
    hf_bert,
    hf_distilbert,
    hf_gemma2,
    hf_gpt2,
    hf_llama,
    hf_llama_decode,
    hf_llama_prefill,
    hf_mistral,
    hf_t5,
    hf_vit,
)
from models_torch_nn import (
    nn_decoder,
    nn_encoder,
    nn_encoder_causal,
    nn_encoder_train,
    nn_mha,
    nn_transformer,
)
from torch.torch_version import TorchVersion

__all__ = [
    "BATCH",
    "CASES",
    "HEADS",
    "HIDDEN",
    "LENGTH",
    "HandWritten",
    "ModelCase",
    "hand_written",
    "hf_bert",
    "hf_distilbert",
    "hf_gemma2",
    "hf_gpt2",
    "hf_llama",
    "hf_llama_decode",
    "hf_llama_prefill",
    "hf_mistral",
    "hf_t5",
    "hf_vit",
    "nn_decoder",
    "nn_encoder",
    "nn_encoder_causal",
    "nn_encoder_train",
    "nn_mha",
    "nn_transformer",
    "padding_mask",
    "token_ids",
]


@dataclass(frozen=True)
class ModelCase:
    """One row of the coverage matrix.

    Args:
        id: row name, ``model-implementation[-variant]``.
        build: returns the model and its keyword inputs; seeded, so that two calls agree.
        sites: attention layers that have to be found.
        near_misses: attention that has to be reported with a reason instead.
        static, padding, bias, dynamic: sites whose mask has that part. causal: sites with SDPA's
            flag.
        cross: sites between two sequences.
        names: site names, where they are worth stating.
        train: gradients on (the model is in training mode).
        notes: what the row is there for.
    """

    id: str
    build: Callable[[], Built]
    sites: int
    near_misses: int = 0
    static: int = 0
    padding: int = 0
    bias: int = 0
    dynamic: int = 0
    causal: int = 0
    cross: int = 0
    names: tuple[str, ...] = ()
    train: bool = False
    notes: str = ""


# Dynamo of torch 2.11 takes is_exporting() for True, and in exports transformers writes masks out
FLAG_FOR_CAUSAL = TorchVersion(torch.__version__) >= (2, 13)
BERT_NAMES = ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")
T5_NAMES = (
    "encoder.block.0.layer.0.SelfAttention",
    "encoder.block.1.layer.0.SelfAttention",
    "decoder.block.0.layer.0.SelfAttention",
    "decoder.block.0.layer.1.EncDecAttention",
    "decoder.block.1.layer.0.SelfAttention",
    "decoder.block.1.layer.1.EncDecAttention",
)


def _hugging_face(implementation: str, padded: bool) -> list[ModelCase]:
    """The rows that exist for both implementations, with and without padding."""
    suffix = f"{implementation}-padded" if padded else implementation
    pads = 2 if padded else 0
    both = (implementation, padded)
    layers = ("layers.0.self_attn", "layers.1.self_attn")
    return [
        ModelCase(f"bert-{suffix}", partial(hf_bert, *both), 2, padding=pads, names=BERT_NAMES),
        ModelCase(f"distilbert-{suffix}", partial(hf_distilbert, *both), 2, padding=pads),
        ModelCase(
            f"gpt2-{suffix}",
            partial(hf_gpt2, *both),
            2,
            static=2,
            padding=pads,
            names=("h.0.attn", "h.1.attn"),
        ),
        ModelCase(
            f"llama-{suffix}",
            partial(hf_llama, *both),
            2,
            static=2,
            padding=pads,
            names=layers,
            notes="GQA, RoPE",
        ),
        ModelCase(
            f"mistral-{suffix}",
            partial(hf_mistral, *both),
            2,
            static=2,
            padding=pads,
            notes="window",
        ),
        ModelCase(
            f"t5-{suffix}",
            partial(hf_t5, *both),
            6,
            static=2,
            padding=2 * pads,
            bias=4,
            cross=2,
            names=T5_NAMES,
            notes="learned bias, no scale, cross-attention",
        ),
    ]


CASES: tuple[ModelCase, ...] = (
    *_hugging_face("sdpa", False),
    *_hugging_face("sdpa", True),
    *_hugging_face("eager", False),
    *_hugging_face("eager", True),
    ModelCase(
        "distilgpt2-sdpa",
        partial(hf_gpt2, "sdpa", False, layers=1),
        1,
        static=1,
        notes="GPT2 with fewer layers",
    ),
    ModelCase("vit-sdpa", partial(hf_vit, "sdpa"), 2, notes="17 tokens, no mask"),
    ModelCase("vit-eager", partial(hf_vit, "eager"), 2),
    ModelCase(
        "gemma2-eager",
        partial(hf_gemma2, False),
        2,
        static=2,
        notes="softcap; window and full alternate",
    ),
    ModelCase("gemma2-eager-padded", partial(hf_gemma2, True), 2, static=2, padding=2),
    ModelCase(
        "llama-sdpa-prefill",
        partial(hf_llama_prefill, "sdpa"),
        2,
        static=0 if FLAG_FOR_CAUSAL else 2,
        causal=2 if FLAG_FOR_CAUSAL else 0,
        notes="fills a cache",
    ),
    ModelCase("llama-eager-prefill", partial(hf_llama_prefill, "eager"), 2, static=2),
    ModelCase(
        "llama-sdpa-dynamic-cache",
        partial(hf_llama_decode, "sdpa", False),
        2,
        notes="decodes one token",
    ),
    ModelCase("llama-eager-dynamic-cache", partial(hf_llama_decode, "eager", False), 2),
    ModelCase(
        "llama-sdpa-static-cache",
        partial(hf_llama_decode, "sdpa", True),
        2,
        padding=2,
        notes="decodes one token",
    ),
    ModelCase("llama-eager-static-cache", partial(hf_llama_decode, "eager", True), 2, padding=2),
    ModelCase(
        "mha", partial(nn_mha, False, False), 2, names=("blocks.0.attention", "blocks.1.attention")
    ),
    ModelCase("mha-padded", partial(nn_mha, False, True), 2, padding=2),
    ModelCase(
        "mha-sequence-first",
        partial(nn_mha, False, False, batch_first=False, masked=True),
        2,
        static=2,
    ),
    ModelCase(
        "mha-separate-projections", partial(nn_mha, False, False, kdim=HIDDEN, vdim=HIDDEN), 2
    ),
    ModelCase("mha-bias-kv", partial(nn_mha, False, False, add_bias_kv=True), 0, near_misses=2),
    ModelCase(
        "mha-need-weights",
        partial(nn_mha, True, True),
        0,
        near_misses=2,
        notes="the weights are returned",
    ),
    ModelCase(
        "transformer-encoder",
        partial(nn_encoder, False),
        2,
        names=("layers.0.self_attn", "layers.1.self_attn"),
    ),
    ModelCase(
        "transformer-encoder-padded",
        partial(nn_encoder, True, norm_first=True, activation="gelu"),
        2,
        padding=2,
    ),
    ModelCase(
        "transformer-encoder-causal", nn_encoder_causal, 2, dynamic=2, notes="the mask is an input"
    ),
    ModelCase("transformer-encoder-train", nn_encoder_train, 2, train=True),
    ModelCase("transformer-decoder", nn_decoder, 4, causal=2, cross=2),
    ModelCase("transformer", nn_transformer, 6, cross=2),
    ModelCase("hand-masked-fill-buffer", partial(hand_written, "masked_fill_buffer"), 2, static=2),
    ModelCase(
        "hand-masked-fill-in-place", partial(hand_written, "masked_fill_inplace"), 2, static=2
    ),
    ModelCase("hand-einsum-where", partial(hand_written, "where_einsum"), 2, static=2),
    ModelCase("hand-einsum-bshd", partial(hand_written, "einsum_bshd"), 2),
    ModelCase("hand-bmm", partial(hand_written, "bmm"), 2),
    ModelCase("hand-baddbmm", partial(hand_written, "baddbmm"), 2, static=2),
    ModelCase("hand-scale-on-both", partial(hand_written, "scale_both"), 2),
    ModelCase(
        "hand-repeat-interleave",
        partial(hand_written, "repeat_interleave", kv_heads=2),
        2,
        causal=2,
    ),
    ModelCase("hand-sdpa-rule", partial(hand_written, "sdpa_user_and_rule"), 2, static=2),
    ModelCase("hand-weights-escape", partial(hand_written, "weights_escape"), 0, near_misses=2),
    ModelCase("hand-sdpa-dropout", partial(hand_written, "sdpa_dropout"), 0, near_misses=2),
)
