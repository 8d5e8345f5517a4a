"""Models for end-to-end runs, with random weights from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},  # transformers' defaults: 12 layers, 768 hidden, 12 heads
    "bert-tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
    },
}
FLEX_NAME = "bench_flex"


def build_model(name: str, seq: int, attention: str, seed: int) -> nn.Module:
    """An eval-mode fp32 encoder on the CPU; equal seeds give equal weights.

    Args:
        attention: transformers' ``attn_implementation``.
    """
    from transformers import BertConfig, BertModel

    if name not in SIZES:
        raise SystemExit(f"no model {name!r}; models: {', '.join(SIZES)}")
    torch.manual_seed(seed)
    config = BertConfig(
        max_position_embeddings=max(512, seq), attn_implementation=attention, **SIZES[name]
    )
    return BertModel(config, add_pooling_layer=False).eval()


def make_tokens(name: str, batch: int, seq: int, seed: int, device: torch.device) -> Tensor:
    """Random token ids ``[batch, seq]``."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = SIZES[name].get("vocab_size", 30522)
    return torch.randint(0, vocabulary, (batch, seq), generator=generator).to(device)


def register_flex(block_mask: BlockMask, options: Any, device: torch.device) -> None:
    """Make ``attn_implementation=FLEX_NAME`` call FlexAttention with this block mask.

    On a CPU FlexAttention is compiled apart from the model: Inductor's CPU template cannot read a
    query that is a view of a linear's output (torch 2.13), so it needs a graph break around it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    flex = flex_attention
    if device.type == "cpu":
        apart = torch.compile(flex_attention, dynamic=False)
        flex = torch._dynamo.disable(lambda *a, **k: apart(*a, **k), recursive=False)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert dropout == 0.0, "FlexAttention has no dropout"
        out = flex(
            query, key, value, block_mask=block_mask, scale=scaling, kernel_options=options or None
        )
        return out.transpose(1, 2), None

    def no_mask(*args: Any, **kwargs: Any) -> None:
        return None

    AttentionInterface.register(FLEX_NAME, attend)
    AttentionMaskInterface.register(FLEX_NAME, no_mask)


def call_with_mask(model: Callable[..., Any], mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """``tokens -> last hidden state``; the model's callable stays the compiled one."""
    if mask is None:
        return lambda tokens: model(input_ids=tokens).last_hidden_state
    return lambda tokens: model(input_ids=tokens, attention_mask=mask).last_hidden_state
