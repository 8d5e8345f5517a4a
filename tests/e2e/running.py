"""What end-to-end tests share: eager references with a mask put in, and compiles without C++."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from stof_compile.attention import select
from stof_compile.masks import MaskSpec

NO_TIMING = {"tune_budget_s": 0, "attention": "gather", "strict": True}
"""Options of tests in which neither timing nor the choice of a kernel is the point."""


def without_inductor(gm: torch.fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
    """Hand the rewritten graph to AOTAutograd and run it eagerly: seconds of C++ saved."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, list(inputs))


@contextmanager
def without_flex() -> Iterator[None]:
    """Attention on the CPU is measured without FlexAttention, which compiles C++ for each shape."""
    kernels = tuple(name for name in select.KERNELS["cpu"] if name != "flex")
    with mock.patch.dict(select.KERNELS, cpu=kernels):
        yield


def dense(spec: MaskSpec, q_len: int, k_len: int, batch: int = 1, heads: int = 1) -> Tensor:
    """Evaluate a rule as bool [batch, heads, Q, K]; the queries end where the keys end."""
    bound = spec.bind(q_len, k_len, k_len - q_len)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    q = torch.arange(k_len - q_len, k_len)[:, None]
    return bound.keep(b, h, q, torch.arange(k_len)).expand(batch, heads, q_len, k_len)


@contextmanager
def masked(*specs: MaskSpec | None) -> Iterator[None]:
    """Run a model eagerly with a mask and-ed into its SDPA calls.

    Args:
        specs: one for every call, or as many as there are calls in a forward, in turn.
    """
    original, turn = F.scaled_dot_product_attention, cycle(specs)

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs):
        spec = next(turn)
        if spec is not None:
            (batch, heads, q_len, _), k_len = query.shape, key.shape[2]
            keep = dense(spec, q_len, k_len, batch, heads)
            if is_causal:
                keep = keep & torch.ones(q_len, k_len, dtype=torch.bool).tril()
            if attn_mask is not None and attn_mask.dtype != torch.bool:
                keep = attn_mask.masked_fill(~keep, -torch.inf)
            elif attn_mask is not None:
                keep = attn_mask & keep
            attn_mask, is_causal = keep, False
        return original(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield


def tensors(value: Any) -> list[Tensor]:
    """Floating-point tensors of a model's output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors(item)]
    return []


def assert_same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Compare outputs of two models; ``tolerance`` is relative to the largest value."""
    found, expected = tensors(found), tensors(expected)
    assert len(found) == len(expected) > 0
    for out, ref in zip(found, expected, strict=True):
        assert out.shape == ref.shape
        assert torch.equal(out.isfinite(), ref.isfinite())
        scale = ref.detach().float().nan_to_num().abs().max().clamp(min=1e-12)
        worst = (out.detach().float() - ref.detach().float()).nan_to_num().abs().max() / scale
        assert worst <= tolerance, f"largest relative error {worst:.2e}"
