"""Problems that tests of the attention kernels share, compared with the reference in fp64."""

from dataclasses import dataclass

import torch
from close import assert_close
from stof_compile.kernels.reference import attention_reference, rounded_to_e4m3

from stof_compile import masks


@dataclass(frozen=True)
class Case:
    q_len: int = 33
    k_len: int = 57
    rule: str = "sliding"
    batch: int = 1
    heads: int = 2
    group: int = 1
    head_dim: int = 16
    value_dim: int = 16
    block: tuple[int, int] = (16, 16)
    band: bool = False
    padding: bool = False
    bias: str = ""
    softcap: float = 0.0
    scale: float = 0.25
    dtype: torch.dtype = torch.float32
    packed: bool = False
    q_offset: int | None = None


def rule_of(case):
    if case.rule == "random":
        generator = torch.Generator().manual_seed(3)
        shape = (case.batch, case.heads, case.q_len, case.k_len)
        keep = torch.rand(shape, generator=generator) < 0.3
        keep[:, :, 2] = False  # a row without keys
        keep[:, :, :, 5] = False  # a key that nobody sees
        keep[:, :, 16:32, 16:48] = True  # full tiles
        return masks.from_tensor(keep)
    return {
        "sliding": masks.sliding_window(9),
        "longformer": masks.longformer(6, 5),
        "causal longformer": masks.longformer(6, 5) & masks.causal(),
        "causal": masks.causal(),
        "dense": masks.dense(),
        "left half": masks.block_diagonal(16) & masks.causal(),
    }[case.rule]


def bias_of(case):
    torch.manual_seed(5)
    full = torch.randn(case.batch, case.heads, case.q_len, case.k_len)
    if case.bias == "row":
        return full[:1, :, :1]
    if case.bias == "-inf":
        full[..., :7] = float("-inf")
        full[:, :, 4] = float("-inf")
    if case.bias == "lowest":
        full[:, :, 4] = torch.finfo(torch.float32).min
    return full if case.bias else None


def operands(case):
    torch.manual_seed(7)
    b, h, d = case.batch, case.heads, case.head_dim
    if case.packed:
        return torch.randn(b, case.q_len, 3, h, d, dtype=case.dtype).permute(2, 0, 3, 1, 4)
    kv = h // case.group
    return (
        torch.randn(b, h, case.q_len, d, dtype=case.dtype),
        torch.randn(b, kv, case.k_len, d, dtype=case.dtype),
        torch.randn(b, kv, case.k_len, case.value_dim, dtype=case.dtype),
    )


def offset_of(case):
    return case.k_len - case.q_len if case.q_offset is None else case.q_offset


def stored_mask(case):
    return masks.build_block_mask(
        rule_of(case), case.q_len, case.k_len, case.block, q_offset=offset_of(case),
        batch=case.batch, heads=case.heads,
    )  # fmt: skip


def gather(packed, q, k, v, arrays, key_keep, bias, scale, softcap, offset, band, config, lse):
    """The gathering kernel with the arguments of the others, for ``check``.

    Args:
        packed: of the same mask as ``arrays``.
    """
    from stof_compile.kernels.attention_gather import attention_gather_forward

    return attention_gather_forward(
        q, k, v, arrays, packed, key_keep, bias, scale, softcap, config, lse
    )


FP8_LSE_ERROR = 0.0607
"""Of a log-sum-exp over weights rounded to e4m3: log(1 + 2 ** -4)."""


def check(launch, config, case, fp8=False):
    """Compare a launcher with fp64.

    Args:
        fp8: ``launch`` rounds q, k and v to e4m3; its result is compared with fp64 on those.
    """
    q, k, v = operands(case)
    offset = offset_of(case)
    stored = stored_mask(case)
    band = []
    if case.band:
        assert stored.band is not None
        band = list(stored.band.as_ints())
    key_keep = None
    if case.padding:
        ends = torch.tensor([case.k_len - 7, case.k_len // 2])[: case.batch]
        key_keep = torch.arange(case.k_len) < ends[:, None]
    bias = bias_of(case)
    out, lse = launch(
        q, k, v, stored.tensors, key_keep, bias, case.scale, case.softcap, offset, band,
        list(config), True,
    )  # fmt: skip
    assert out.transpose(1, 2).is_contiguous()
    # the lowest finite bias swallows the scores in fp32 and must do so in the reference too
    wide = [rounded_to_e4m3(x) if fp8 else x.double() for x in (q, k, v)]
    wanted, wanted_lse = attention_reference(
        *wide, stored.to_dense(), key_keep,
        None if bias is None else bias.double(), case.scale, case.softcap, True,
    )  # fmt: skip
    assert_close(out, wanted, torch.float8_e4m3fn if fp8 else case.dtype)
    finite = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    if fp8:
        assert (lse[finite] - wanted_lse[finite]).abs().max() <= FP8_LSE_ERROR
        return
    assert_close(lse[finite], wanted_lse[finite], torch.float32)


def check_training(attend, leaves, keep, part):
    """Result and gradients of attention with a scale of 1 / 8.

    Args:
        attend: ``(q, k, v) -> out``. leaves: q, k and v, which require gradients.
        keep: bool [1, 1, queries, keys]. part: index of batch and heads that are compared.
    """
    out = attend(*leaves)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, upstream)
    wide = [leaf.detach()[part].double().requires_grad_() for leaf in leaves]
    expected = attention_reference(*wide, keep, None, None, 0.125)
    assert_close(out[part], expected, out.dtype)
    wanted = torch.autograd.grad(expected, wide, upstream[part].double())
    for a, b in zip(found, wanted, strict=True):
        assert_close(a[part], b, out.dtype, scale=2.0)


CASES = {
    "sliding": Case(),
    "sliding band": Case(band=True),
    "longformer band": Case(rule="longformer", band=True),
    "causal longformer band": Case(rule="causal longformer", band=True),
    "causal longformer bitmap": Case(rule="causal longformer"),
    "causal, more queries than keys": Case(
        q_len=40, k_len=21, q_offset=0, rule="causal", band=True
    ),
    "dense": Case(q_len=32, k_len=48, rule="dense"),
    "random planes": Case(rule="random", batch=2),
    "padding": Case(rule="random", batch=2, padding=True),
    "bias": Case(rule="random", bias="full"),
    "row bias": Case(rule="causal", band=True, bias="row", softcap=2.0),
    "-inf bias": Case(rule="causal", bias="-inf"),
    "lowest bias": Case(rule="causal", band=True, bias="lowest"),
    "softcap": Case(rule="random", softcap=1.5),
    "zero scale": Case(rule="random", scale=0.0),
    "negative scale": Case(rule="random", scale=-0.3),
    "odd head dims": Case(head_dim=24, value_dim=40),
    "head dims of two products": Case(rule="random", heads=1, head_dim=192, value_dim=192),
    "odd ones": Case(rule="longformer", band=True, head_dim=152, value_dim=136, padding=True),
    "only the keys'": Case(band=True, heads=2, group=2, head_dim=192, value_dim=128),
    "only the values'": Case(rule="random", head_dim=64, value_dim=160, dtype=torch.float16),
    "groups": Case(rule="causal", heads=4, group=4, q_len=21, k_len=37, band=True),
    "groups and planes": Case(rule="random", heads=4, group=2, q_len=33, k_len=49),
    "decode": Case(q_len=1, heads=4, group=2, rule="sliding", band=True),
    "packed": Case(q_len=33, k_len=33, batch=2, packed=True),
    "half": Case(rule="random", dtype=torch.float16),
}
