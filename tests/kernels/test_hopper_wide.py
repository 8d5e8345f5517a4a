"""The Hopper kernel for heads of over 128 dims: which problems get it, what it compiles to, and its
results on the GPU. Its protocol with a ring of two is in ``test_hopper_protocol.py``."""

import pytest
import torch
from attention_cases import check_training
from hopper_attention import check_on_gpu, compiled_alone, short_rules
from stof_compile.kernels.attention_blockwise import BlockConfig, configs
from stof_compile.kernels.attention_hopper import attention_hopper_forward
from stof_compile.kernels.attention_hopper_backward import hopper_gradient_refusal
from stof_compile.kernels.hopper_forms import (
    form_refusal,
    tile_of,
)

from stof_compile import masks
from stof_compile.attention.call import with_shifted_tiles
from stof_compile.masks.block_mask import build_block_mask

pytest.importorskip("triton.experimental.gluon")

HALF, BRAIN = torch.float16, torch.bfloat16
HOPPER = (9, 0)
BIG = {"q_len": 2048, "planes": 192, "plain": True}
DIMS = [136, 160, 192, 200, 256]
SHARED = BlockConfig(128, 64, num_stages=2, hopper=1)


# -- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_offered_first_in_two_forms(head_dim, dtype):
    asked = {"pairs": True, "shifted": True, **BIG}
    alone = BlockConfig(num_stages=1 if head_dim > 160 else 2, hopper=2)
    both = [SHARED, alone] if head_dim > 192 else [alone]
    for shared, expected in ((False, [alone]), (True, both)):
        found = configs(head_dim, dtype, HOPPER, **asked, shared=shared)
        assert [config for config in found if config.hopper] == expected == found[: len(expected)]
    assert configs(head_dim, dtype, HOPPER, **BIG)[0].hopper
    assert not configs(head_dim, dtype, HOPPER, **{**BIG, "q_len": 256})[0].hopper


def test_gradients_are_the_portable_kernel_s():
    given = {"plain": True, "tile": (64, 64), "grouped_planes": False}
    assert hopper_gradient_refusal(128, 128, HALF, HOPPER, 4096, **given) is None
    assert "40 to 128 in" in hopper_gradient_refusal(136, 136, HALF, HOPPER, 4096, **given)
    assert "Hopper" in hopper_gradient_refusal(136, 136, HALF, (8, 0), 4096, **given)


@pytest.mark.parametrize(
    ("tile", "programs", "stages", "shifted", "message"),
    [
        ((64, 64), 3, 1, False, r"programs must be one of [1, 2], not 3"),
        ((64, 64), 2, 1, True, "up to 128 dims, not 192"),
        ((64, 128), 1, 2, False, "1 to 128 dims, not 192"),
        ((192, 64), 1, 4, False, "65 to 128 dims, not 192"),
    ],
)
def test_forms_that_are_not_there_are_refused(tile, programs, stages, shifted, message):
    assert form_refusal(tile, programs, stages, 128, shifted=shifted) is None
    assert message in form_refusal(tile, programs, stages, 192, shifted=shifted)


def test_two_consumers_share_keys_of_narrow_and_wide_heads_only():
    assert form_refusal((128, 64), 1, 2, 200) is None
    assert "33 to 64 or 193 to 256 dims, not 192" in form_refusal((128, 64), 1, 2, 192)
    assert "one of (2,), not 4" in form_refusal((128, 64), 1, 4, 256)
    assert tile_of(256, 128, 1) == (64, 128) and tile_of(256, 136, 1) == (128, 64)
    assert tile_of(256, 64, 1) == tile_of(256, 72, 2) == (64, 128)
    assert tile_of(256, 64, 2) == (128, 64)


@pytest.mark.parametrize(
    ("tile", "head_dim", "named", "programs", "stages"),
    [
        ((64, 128), 256, (64, 128), 1, 2),
        ((64, 128), 64, (64, 128), 2, 4),
        ((128, 64), 64, (128, 64), 1, 4),
        ((192, 64), 128, (64, 64), 3, 1),
    ],
    ids=str,
)
def test_an_operator_is_told_the_tiles_of_its_mask(tile, head_dim, named, programs, stages):
    """Two kinds of tiles have as many mask words."""
    mask = build_block_mask(masks.causal(), 256, 256, tile)
    q = torch.zeros(1, 1, 256, head_dim, dtype=HALF)
    config = list(BlockConfig(*named, num_stages=stages, hopper=programs))
    with pytest.raises(ValueError, match="mask words a tile, heads of"):
        torch.ops.stof.attention_block(
            q, q, q, *mask.hopper_tensors, None, None, 1.0, 0.0, 0, [], config, False
        )


def test_calls_by_hand_keep_the_tiles_of_the_grid():
    mask = build_block_mask(masks.sliding_window(45), 2048, 2048, 64)
    config = tuple(BlockConfig(num_stages=1, hopper=2))
    assert with_shifted_tiles(mask, config, 192) == config != with_shifted_tiles(mask, config, 128)


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.compile_only
@pytest.mark.parametrize("head_dim", [144, 160, 192, 256])
@pytest.mark.parametrize(
    ("dtype", "whole", "has_part"),
    [("fp16", False, True), ("bf16", True, True), ("bf16", False, False)],
)
def test_compiles(head_dim, dtype, whole, has_part):
    """Whole: with planes, groups, a log-sum-exp and long rows in pieces. Of 256 dims a thread then
    puts some numbers of a unit away while it is in the loop over tiles."""
    stages = 1 if head_dim > 160 else 2
    most = 32 if head_dim == 256 and whole else 0
    compiled_alone(head_dim, 2, stages, dtype, whole, has_part, most_spilled=most)


# -- results --------------------------------------------------------------------------------------


def on_hopper():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [*short_rules(), "causal"])
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("group", "dtype", "pieces"), [(1, HALF, 1), (3, BRAIN, 1), (1, HALF, 3)])
@pytest.mark.parametrize("programs", [0, 1, 2])
def test_gpu(rule, head_dim, group, dtype, pieces, programs):
    """Programs of 0: two consumers that share their keys."""
    device = on_hopper()
    tile = 64 if programs else SHARED[:2]
    if not programs and (pieces > 1 or head_dim <= 192):
        pytest.skip("not in this form")
    batch, heads, q_len, k_len = 2, 3, 330, 400
    spec = {"causal": masks.causal(), **short_rules()}[rule]
    mask = build_block_mask(spec, q_len, k_len, tile, batch=batch, heads=heads, device=device)
    heavy = 2 if pieces > 1 else mask.heavy_rows
    arrays = mask.hopper_tensors

    def attend(q, k, v, return_lse):
        stages = 2 if programs == 2 and head_dim <= 160 else 1
        form = (programs, stages) if programs else (1, SHARED.num_stages)
        numbers = head_dim**-0.5, *form, heavy, pieces, mask.uneven, return_lse
        return attention_hopper_forward(q, k, v, arrays, *numbers)

    shape = batch, heads, q_len, k_len, head_dim
    check_on_gpu(attend, mask, shape, heads // group, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("rule", ["longformer", "planes"])
def test_gpu_sparse_attention_takes_it_and_trains(head_dim, rule, fresh_dynamo):
    """Gradients are the portable kernel's, behind tiles of 64 x 64 in fragments."""
    from stof_compile import sparse_attention

    device, length, heads = on_hopper(), 1500, 12
    spec = masks.longformer(window=45, global_tokens=45)
    if rule == "planes":
        keep = torch.rand(1, heads, length, length, device=device) < 0.3
        keep[:, :, 64:128, :320] = False
        spec = masks.from_tensor(keep)
    leaves = torch.randn(3, 8, heads, length, head_dim, device=device, dtype=BRAIN).unbind()
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    planes = 8 * heads
    assert configs(head_dim, BRAIN, HOPPER, q_len=length, planes=planes, plain=True)[0].hopper
    mask = build_block_mask(spec, length, length, 64, batch=8, heads=heads, device=device)
    keep = mask.to_dense()[:1]
    check_training(
        lambda q, k, v: sparse_attention(q, k, v, spec, scale=0.125), leaves, keep, (slice(1),)
    )
