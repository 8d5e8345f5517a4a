"""Models of the zoo: attention of torch.nn, with its inputs."""

from typing import Any

import torch
from model_inputs import HEADS, HIDDEN, LENGTH, Built, hidden_states, padding_mask
from torch import Tensor, nn


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

    inputs: dict[str, Any] = {"x": hidden_states()}
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
    inputs: dict[str, Any] = {"src": hidden_states()}
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
    return encoder.train(), {"src": hidden_states()}


def nn_decoder() -> Built:
    """nn.TransformerDecoder with a causal mask made outside."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(HIDDEN, HEADS, 128, batch_first=True)
    inputs = {
        "tgt": hidden_states(24),
        "memory": hidden_states(),
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(24),
        "tgt_is_causal": True,
    }
    return nn.TransformerDecoder(layer, 2).eval(), inputs


def nn_transformer() -> Built:
    """nn.Transformer: encoder, decoder, cross-attention."""
    torch.manual_seed(0)
    model = nn.Transformer(HIDDEN, HEADS, 2, 2, 128, batch_first=True).eval()
    return model, {"src": hidden_states(), "tgt": hidden_states(24)}
