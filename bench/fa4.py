"""FlashAttention 4 (``flash_attn.cute``), a peer and a ceiling where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
MASKS = ("causal", "dense", "sliding")


def load_fa4() -> Callable[..., Any] | None:
    """Its function; None where it is not installed, also where only an older FlashAttention is."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    found: Callable[..., Any] = flash_attn_func
    return found


def fa4_attention(
    function: Callable[..., Any], mask: str = "dense", window: int = 0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Its attention of ``[batch, heads, seq, head_dim]``.

    Args:
        function: of :func:`load_fa4`. mask: one of ``MASKS``.
        window: of "sliding", so many keys on either side.
    """
    asked: dict[str, Any] = {"causal": mask == "causal"}
    if mask == "sliding":
        asked["window_size"] = (window, window)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(*(x.transpose(1, 2) for x in (q, k, v)), **asked)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return run
