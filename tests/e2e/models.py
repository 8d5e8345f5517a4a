"""Model zoo: every small model whose attention layers the backend has to find.

Each row builds an untrained model (two layers, hidden size 64, at most 64 tokens) with its inputs.
Two
layers are enough to see what differs between layers (names, alternating windows) and keep a
compile short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN = 64
HEADS = 4
LENGTH = 32
BATCH = 2
VOCABULARY = 96

Built = tuple[nn.Module, dict[str, Any]]


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


def token_ids(length: int = LENGTH) -> Tensor:
    """Random token ids [BATCH, length]; 0 and 1 are left to padding and start tokens."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, VOCABULARY, (BATCH, length), generator=generator)


def padding_mask(length: int = LENGTH, side: str = "right") -> Tensor:
    """Attention mask [BATCH, length] in Hugging Face's convention (1 = attend); the second row is
    shorter."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    if side == "right":
        mask[1, length - 8 :] = 0
    else:
        mask[1, :8] = 0
    return mask


# -- Hugging Face ----------------------------------------------------------------------------------


def _text_inputs(padded: bool, side: str = "right") -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": token_ids()}
    if padded:
        inputs["attention_mask"] = padding_mask(side=side)
    return inputs


def hf_bert(implementation: str, padded: bool) -> Built:
    """BERT encoder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
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


def _llama_config(implementation: str, **overrides: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        attn_implementation=implementation,
        **overrides,
    )


def hf_llama(implementation: str, padded: bool) -> Built:
    """LLaMA: RoPE, grouped query heads, no cache."""
    from transformers import LlamaModel

    torch.manual_seed(0)
    model = LlamaModel(_llama_config(implementation, use_cache=False)).eval()
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


def hf_mistral(implementation: str, padded: bool) -> Built:
    """Mistral: causal sliding window of 8."""
    from transformers import MistralConfig, MistralModel

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
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


def hf_t5(implementation: str, padded: bool) -> Built:
    """T5: encoder, decoder and cross-attention; a learned position bias; no scaling."""
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=128,
        num_layers=2,
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


# -- torch.nn --------------------------------------------------------------------------------------


def _hidden_states(length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(BATCH, length, HIDDEN, generator=generator)


class SelfAttentionBlock(nn.Module):
    """Residual block around nn.MultiheadAttention."""

    def __init__(self, need_weights: bool, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=batch_first, **options)
        self.norm = nn.LayerNorm(HIDDEN)
        self.need_weights = need_weights
        self.batch_first = batch_first

    def forward(
        self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Attention over x [B, S, HIDDEN]; padding [B, S], True = pad."""
        y = x if self.batch_first else x.transpose(0, 1)
        out, weights = self.attention(
            y, y, y, key_padding_mask=padding, attn_mask=mask, need_weights=self.need_weights
        )
        out = out if self.batch_first else out.transpose(0, 1)
        out = self.norm(x + out)
        return out if weights is None else out + weights.mean()


def nn_mha(
    need_weights: bool, padded: bool, batch_first: bool = True, masked: bool = False, **options: Any
) -> Built:
    """Two blocks of nn.MultiheadAttention; ``masked`` adds a causal float mask as a buffer."""
    torch.manual_seed(0)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                SelfAttentionBlock(need_weights, batch_first, **options) for _ in range(2)
            )
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if masked else None
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            for block in self.blocks:
                x = block(x, padding, self.mask)
            return x

    inputs: dict[str, Any] = {"x": _hidden_states()}
    if padded:
        inputs["padding"] = padding_mask() == 0
    return Stack().eval(), inputs


def nn_encoder(padded: bool, norm_first: bool = False, activation: str = "relu") -> Built:
    """nn.TransformerEncoder; in evaluation without gradients a layer is one fused call."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        HIDDEN,
        HEADS,
        128,
        dropout=0.1,
        batch_first=True,
        norm_first=norm_first,
        activation=activation,
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    inputs: dict[str, Any] = {"src": _hidden_states()}
    if padded:
        inputs["src_key_padding_mask"] = padding_mask() == 0
    return encoder, inputs


def nn_encoder_causal() -> Built:
    """nn.TransformerEncoder with a causal mask."""
    encoder, inputs = nn_encoder(False)
    inputs["mask"] = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    inputs["is_causal"] = True
    return encoder, inputs


def nn_encoder_train() -> Built:
    """nn.TransformerEncoder in training mode without dropout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return encoder.train(), {"src": _hidden_states()}


def nn_decoder() -> Built:
    """nn.TransformerDecoder with a causal mask made outside."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(HIDDEN, HEADS, 128, batch_first=True)
    inputs = {
        "tgt": _hidden_states(24),
        "memory": _hidden_states(),
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(24),
        "tgt_is_causal": True,
    }
    return nn.TransformerDecoder(layer, 2).eval(), inputs


def nn_transformer() -> Built:
    """nn.Transformer: encoder, decoder, cross-attention."""
    torch.manual_seed(0)
    model = nn.Transformer(HIDDEN, HEADS, 2, 2, 128, batch_first=True).eval()
    return model, {"src": _hidden_states(), "tgt": _hidden_states(24)}


# -- written by hand -------------------------------------------------------------------------------


class HandWritten(nn.Module):
    """Attention as people write it; ``style`` picks the spelling."""

    def __init__(self, style: str, kv_heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.style = style
        self.kv_heads = kv_heads
        self.head_dim = HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, kv_heads * self.head_dim)
        self.value = nn.Linear(HIDDEN, kv_heads * self.head_dim)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64, dtype=torch.bool))[None, None])

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, HIDDEN] -> [B, S, HIDDEN]."""
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = getattr(self, f"_{self.style}")
        q = self._split(self.query(x), HEADS)
        k = self._split(self.key(x), self.kv_heads)
        v = self._split(self.value(x), self.kv_heads)
        y = attend(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.out(y)

    def _masked_fill_buffer(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[2]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / self.head_dim**0.5)
        scores = scores.masked_fill(self.tril[:, :, :s, :s].logical_not(), float("-inf"))
        return self.dropout(F.softmax(scores, dim=-1)) @ v

    def _masked_fill_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[2]
        scores = torch.matmul(q, k.transpose(2, 3)).div_(self.head_dim**0.5)
        scores.masked_fill_(self.tril[:, :, :s, :s] == 0, float("-inf"))
        return torch.matmul(scores.softmax(-1), v)

    def _where_einsum(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.arange(q.shape[2], device=q.device)
        scores = torch.einsum("bhid,bhjd->bhij", q * self.head_dim**-0.5, k)
        scores = torch.where(s[:, None] >= s[None, :], scores, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    def _einsum_bshd(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.head_dim**0.5
        out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)
        return out.transpose(1, 2)

    def _bmm(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        q, k, v = (t.reshape(b * h, s, d) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / self.head_dim**0.5
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(b, h, s, d)

    def _baddbmm(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        q, k, v = (t.reshape(b * h, s, d) for t in (q, k, v))
        bias = torch.zeros(s, s, device=q.device).masked_fill(~self.tril[0, 0, :s, :s], -1e4)
        scores = torch.baddbmm(bias[None], q, k.mT, beta=1, alpha=d**-0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(b, h, s, d)

    def _repeat_interleave(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = HEADS // self.kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def _weights_escape(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT / self.head_dim**0.5, dim=-1)
        return weights @ v + weights.mean()

    def _sdpa_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    def _scale_both(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = self.head_dim**-0.25
        scores = torch.matmul(q * factor, k.transpose(-1, -2) * factor)
        return torch.matmul(torch.nn.Softmax(dim=3)(scores), v)

    def _sdpa_user_and_rule(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.arange(q.shape[2], device=q.device)
        window = (s[:, None] - s[None, :]).abs() <= 4
        return F.scaled_dot_product_attention(q, k, v, attn_mask=window)


def hand_written(style: str, **options: Any) -> Built:
    """Two hand-written attention layers with a residual."""
    torch.manual_seed(0)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(HandWritten(style, **options) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    return Stack().eval(), {"x": _hidden_states()}


# -- the matrix ------------------------------------------------------------------------------------

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
        "llama-sdpa-prefill", partial(hf_llama_prefill, "sdpa"), 2, causal=2, notes="fills a cache"
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
