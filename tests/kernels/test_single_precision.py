"""fp32 numbers multiplied as three products of TF32."""

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from attention_cases import Case, check, gather, operands, rule_of, stored_mask
from sanitize_case import on_gpu
from stof_compile.kernels import (
    attention_backward,
    attention_blockwise,
    attention_gather,
    limits,
)
from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward
from stof_compile.kernels.block_tiles import block_tiles

from stof_compile import masks
from stof_compile.config_fields import multiplies_in_tf32

SINGLE = torch.float32
HEAD_DIMS = (8, 16, 24, 32, 64, 72, 80, 96, 104, 128, 136, 160, 192, 256)
ON_A_GPU = (8, 64, 72, 104, 128, 136, 256)  # each has forms of its own
PARTS = limits.PRECISIONS.index("tf32x3")


# -- which --------------------------------------------------------------------------------------


def test_products(monkeypatch):
    assert limits.exact_products() == limits.exact_products(128) == "tf32x3"
    assert limits.exact_products(256) == "ieee"
    assert limits.fp32_precision(SINGLE) == PARTS
    assert limits.fp32_precision(torch.float16) == limits.fp32_precision(SINGLE, 256) == 0
    monkeypatch.setattr(limits, "tf32_allowed", lambda: True)
    assert limits.PRECISIONS[limits.fp32_precision(SINGLE, 256)] == "tf32"
    assert limits.fp32_precision(torch.bfloat16) == 0
    monkeypatch.setattr(limits, "tf32_allowed", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert limits.exact_products() == "ieee" and limits.fp32_precision(SINGLE) == 0


@pytest.mark.parametrize(
    ("dim", "widths"),
    [(8, (16, 0)), (64, (64, 0)), (65, (64, 32)), (96, (64, 32)), (104, (64, 64)),
     (128, (64, 64)), (136, (128, 32)), (192, (128, 64)), (200, (128, 128)), (256, (128, 128))],
)  # fmt: skip
def test_widths_of_products(dim, widths, monkeypatch):
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        assert limits.product_widths(dim, capability, 4) == widths
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert limits.product_widths(dim, (9, 4), 4)[1] == 0


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_config_multiplies_by_parts(capability, head_dim):
    few = {"q_len": 128, "planes": 12}
    for facts in ({}, few, {"is_band": True}, {"q_len": 1}):
        found = attention_blockwise.configs(head_dim, SINGLE, capability, **facts)
        assert found and {c.tf32 for c in found} == {PARTS} and {c.num_stages for c in found} == {2}
        # warps beside each other are slow, and Triton 3.6 has them read past a short product
        assert all(c.block_q == 128 for c in found if c.num_warps == 8)
    gathering = attention_gather.configs(head_dim, SINGLE, capability)
    assert {c.tf32 for c in gathering} == {PARTS if head_dim <= 128 else 0}


def test_few_rows_take_low_tiles():
    how = {"tallest": 128, "narrow": False}
    assert block_tiles(64, 64, 4, (9, 0), few=True, **how)[0] == (16, 32, 2)
    assert block_tiles(64, 64, 4, (9, 0), few=False, **how)[0] == (64, 64, 4)
    assert block_tiles(64, 256, 4, (9, 0), few=False, **how)[0] == (16, 32, 4)
    assert block_tiles(4096, 64, 4, (9, 0), few=False, **how) == []


def test_gradients_are_told_of_one_product_only():
    """Three are what the gradients' kernels do by themselves."""
    for kernel, config in (
        ("block", BlockConfig()), ("gather", attention_gather.GatherConfig()),
    ):  # fmt: skip
        said = [multiplies_in_tf32(kernel, config._replace(tf32=how)) for how in (0, 1, PARTS)]
        assert said == [False, True, False]
    assert not multiplies_in_tf32("block", BlockConfig()[:4])


# -- what is launched ---------------------------------------------------------------------------


class Launches:
    """In place of a kernel: what it was launched with."""

    def __init__(self):
        self.named = []

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.named.append(named)


def tensors_and_mask(head_dim, value_dim, block):
    q, k = torch.randn(2, 1, 2, 200, head_dim).unbind()
    v = torch.randn(1, 2, 200, value_dim)
    return q, k, v, masks.build_block_mask(masks.sliding_window(40), 200, 200, block)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "widths"),
    [(64, 40, (64, 0, 64, 0)), (72, 128, (64, 32, 64, 64)), (256, 64, (128, 128, 64, 0)),
     (40, 136, (64, 0, 128, 32))],
)  # fmt: skip
@pytest.mark.parametrize("how", range(3))
def test_the_launch_of_the_block_wise_kernel(head_dim, value_dim, widths, how, monkeypatch):
    kernel = Launches()
    monkeypatch.setattr(attention_blockwise, "launchable", lambda *asked: kernel)
    q, k, v, mask = tensors_and_mask(head_dim, value_dim, (16, 32))
    config = list(BlockConfig(16, 32, 2, 2, tf32=how))
    attention_block_forward(q, k, v, mask.tensors, None, None, 0.1, 0.0, 0, [], config, False)
    (named,) = kernel.named
    assert tuple(named[n] for n in ("BLOCK_D", "TAIL_D", "BLOCK_DV", "TAIL_DV")) == widths
    assert named["PRECISION"] == ("ieee", "tf32", "tf32x3")[how]


@pytest.mark.parametrize("how", [-1, 3])
def test_a_way_that_there_is_not_is_refused(how):
    with pytest.raises(ValueError, match=f"tf32 must be 0 to 2, not {how}"):
        limits.products_of(how)


@pytest.mark.parametrize(("width", "exact"), [(64, "tf32x3"), (128, "tf32x3"), (256, "ieee")])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_launches_of_the_gradients(width, exact, tf32, monkeypatch):
    by_query, by_key = Launches(), Launches()
    monkeypatch.setattr(attention_backward, "attention_backward_query_kernel", by_query)
    monkeypatch.setattr(attention_backward, "attention_backward_key_kernel", by_key)
    q, k, v, mask = tensors_and_mask(64, width, (64, 64))
    lists = mask.key_lists
    attention_backward.attention_backward_blockwise(
        torch.randn_like(v), None, q, k, v, v, torch.zeros(1, 2, 200), mask.tensors, *lists, None,
        None, 0.1, 0.0, 0, [], 64, 64, tf32,
    )  # fmt: skip
    for (named,) in (by_query.named, by_key.named):
        assert named["PRECISION"] == ("tf32" if tf32 else exact)
        assert named.get("maxnreg") == (255 if width <= 128 else None)


# -- results ------------------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("loops", [3, 4, 5])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(72, 40), (40, 104), (136, 136), (24, 72)])
def test_heads_of_two_products(head_dim, value_dim, loops):
    case = Case(rule="longformer", head_dim=head_dim, value_dim=value_dim, block=(16, 32))
    check(attention_block_forward, BlockConfig(16, 32, 2, 2, loops, tf32=PARTS), case)


CASES = {
    "ragged": Case(q_len=200, k_len=333, rule="longformer", batch=2),
    "even": Case(q_len=256, k_len=256, rule="causal longformer"),
    "band": Case(q_len=200, k_len=200, rule="causal", band=True),
    "window": Case(q_len=130, k_len=130, rule="sliding", band=True),
    "all": Case(
        q_len=77, k_len=141, rule="random", batch=2, heads=4, group=2, padding=True, bias="row",
        softcap=2.0,
    ),
    "decode": Case(q_len=1, k_len=300, rule="dense", heads=4, group=2),
}  # fmt: skip


def every_config(case):
    """Every config that this problem may run with."""
    offered = attention_blockwise.configs(
        case.head_dim, SINGLE, torch.cuda.get_device_capability(), value_dim=case.value_dim,
        is_band=case.band, q_len=case.q_len,
    )  # fmt: skip
    few = attention_blockwise.configs(
        case.head_dim, SINGLE, torch.cuda.get_device_capability(), value_dim=case.value_dim,
        q_len=case.q_len, planes=1,
    )  # fmt: skip
    return list(dict.fromkeys(config._replace(heads_fast=0) for config in (*offered, *few)))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", ON_A_GPU)
@pytest.mark.parametrize("name", CASES)
def test_gpu_every_config(name, head_dim):
    for value_dim in {head_dim, 80 if name == "all" else head_dim}:
        case = replace(CASES[name], head_dim=head_dim, value_dim=value_dim, dtype=SINGLE)
        for config in every_config(case):
            tiled = replace(case, block=(config.block_q, config.block_k))
            if config.loops >= 6:
                mask = masks.build_block_mask(rule_of(case), case.q_len, case.k_len, tiled.block)
                config = config if mask.is_band else config._replace(loops=3)
            check(on_gpu(attention_block_forward), config, tiled)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", ON_A_GPU)
def test_gpu_every_gathering_config(head_dim):
    for config in attention_gather.configs(head_dim, SINGLE, torch.cuda.get_device_capability()):
        for name in ("ragged", "even", "all"):
            case = replace(CASES[name], head_dim=head_dim, value_dim=head_dim, block=config[:2])
            check(partial(on_gpu(gather), tuple(stored_mask(case).packed)), config, case)


def attend(q, k, v, how):
    mask = masks.build_block_mask(masks.sliding_window(40), 200, 200, 64, device="cuda")
    config = list(BlockConfig(64, 64, 4, 2, tf32=how))
    return torch.ops.stof.attention_block(
        q, k, v, *mask.tensors, None, None, 0.125, 0.0, 0, [], config, False
    )[0]


INF = float("inf")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("number", "where"),
    [*((number, where) for number in (INF, -INF, float("nan"), 1e-38) for where in range(3)),
     (3.4e38, 2)],  # scores of that size have no softmax in fp32
)  # fmt: skip
def test_gpu_infinities_are_where_fp32_has_them(number, where):
    """And numbers at both ends of what fp32 holds."""
    tensors = list(torch.randn(3, 1, 2, 200, 64, device="cuda").unbind())
    tensors[where][:, :, 77, 5] = number
    parts, plain = (attend(*tensors, how) for how in (PARTS, 0))
    assert torch.equal(parts.isnan(), plain.isnan())
    assert torch.equal(parts.isposinf(), plain.isposinf())
    assert torch.equal(parts.isneginf(), plain.isneginf())
    finite = plain.isfinite()
    torch.testing.assert_close(parts[finite], plain[finite], rtol=2e-5, atol=2e-6)


@pytest.mark.gpu
def test_gpu_an_average_is_as_near_as_with_the_ordinary_units():
    q, k, v = (x.cuda() for x in operands(Case(200, 200, heads=4, head_dim=64, value_dim=64)))
    keep = masks.build_block_mask(masks.sliding_window(40), 200, 200, 64, device="cuda").to_dense()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=keep, scale=0.125
    )
    errors = [(attend(q, k, v, how) - wanted).square().mean().sqrt() for how in (0, 1, PARTS)]
    ordinary, rounded, parts = (error.item() for error in errors)
    assert parts <= 2 * ordinary and rounded > 100 * parts
