"""The reference itself, against SDPA, autograd and the dense form of block masks."""

import pytest
import torch
from stof_compile.kernels import reference

from stof_compile import masks

LENGTHS = [(33, 33), (1, 57), (40, 21)]


def operands(q_len, k_len, *, batch=2, heads=4, kv_heads=2, dim=8, value_dim=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads, q_len, dim),
        (batch, kv_heads, k_len, dim),
        (batch, kv_heads, k_len, value_dim),
    )
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def random_mask(q_len, k_len, planes=(1, 1), seed=1):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(*planes, q_len, k_len, generator=generator) < 0.4
    keep[..., 0, :] = False
    return keep


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
@pytest.mark.parametrize("bias", [False, True], ids=["mask", "mask+bias"])
def test_forward_equals_sdpa(q_len, k_len, bias):
    q, k, v = operands(q_len, k_len)
    keep = random_mask(q_len, k_len, (2, 4))
    key_keep = torch.arange(k_len)[None] < torch.tensor([k_len, k_len - 5])[:, None]
    added = torch.randn(1, 4, q_len, k_len, dtype=torch.float64) if bias else None
    out, lse = reference.attention_reference(q, k, v, keep, key_keep, added, 0.3, 0.0, True)
    merged = keep & key_keep[:, None, None]
    mask = merged if added is None else added.masked_fill(~merged, float("-inf"))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, wanted)
    assert torch.equal(lse == float("-inf"), ~merged.expand(2, 4, q_len, k_len).any(-1))


def test_no_keys_at_all_gives_zeros():
    q, k, v = operands(5, 0)
    out, lse = reference.attention_reference(q, k, v, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 4, 5, 12, dtype=torch.float64))
    assert torch.isneginf(lse).all()


def test_lowest_finite_bias_keeps_the_uniform_mean():
    q, k, v = (t.float() for t in operands(3, 7))
    bias = torch.full((1, 1, 3, 7), torch.finfo(torch.float32).min)
    out = reference.attention_reference(q, k, v, bias=bias)
    torch.testing.assert_close(out[:, :2, 0], v[:, :1].mean(2).expand(2, 2, 12))


@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("strip", [7, 64], ids=["strips", "one strip"])
def test_backward_equals_autograd(softcap, strip):
    q_len, k_len = 33, 21
    leaves = [t.requires_grad_() for t in operands(q_len, k_len)]
    bias = torch.randn(1, 4, 1, k_len, dtype=torch.float64, requires_grad=True)
    keep = random_mask(q_len, k_len)
    out, lse = reference.attention_reference(*leaves, keep, None, bias, 0.4, softcap, True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    finite = lse.isfinite()
    loss = (out * grad_out).sum() + (lse[finite] * grad_lse[finite]).sum()
    wanted = torch.autograd.grad(loss, [*leaves, bias])
    got = reference.attention_backward_reference(
        grad_out, grad_lse, *(t.detach() for t in leaves),
        lambda first, last: keep[:, :, first:last], None, bias.detach(), 0.4, softcap,
        strip=strip, bias_grad=True,
    )  # fmt: skip
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), got, wanted, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("block", [(16, 16), (16, 32), (32, 16)], ids=str)
def test_tile_rows_are_the_dense_mask(block):
    q_len, k_len = 70, 53
    keep = random_mask(q_len, k_len, (2, 2))
    keep[0, 0, 16:48] = True
    stored = masks.build_block_mask(masks.from_tensor(keep), q_len, k_len, block, batch=2, heads=2)
    rows = reference.tile_keep_rows(stored.tensors, *block, q_len, k_len, 0, [])
    assert torch.equal(rows(0, q_len), keep)
    assert torch.equal(rows(32, 64), keep[:, :, 32:64])


def test_tile_rows_from_a_band():
    spec = masks.longformer(9, 5) & masks.causal()
    stored = masks.build_block_mask(spec, 40, 70, 16, q_offset=30)
    assert stored.band is not None
    rows = reference.tile_keep_rows(stored.tensors, 16, 16, 40, 70, 30, [*stored.band.as_ints()])
    assert torch.equal(rows(0, 40), stored.to_dense())
