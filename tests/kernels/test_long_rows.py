"""Long rows as several programs: which are cut, and that their pieces make the same result."""

import pytest
import torch
from attention_cases import CASES, Case, check, check_training
from close import assert_close, assert_close_lse
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks, sparse_attention
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.long_rows import MOST_PIECES, PIECE_KEYS, row_pieces

SPLIT_CASES = {
    "global rows": Case(rule="longformer", band=True),
    "global rows, bitmap": Case(rule="longformer"),
    "causal longformer": Case(rule="causal longformer", band=True),
    **{
        name: CASES[name]
        for name in (
            "random planes", "padding", "bias", "-inf bias", "lowest bias", "softcap",
            "odd head dims", "head dims of two products", "groups and planes", "decode", "packed",
            "half",
        )
    },
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize(("loops", "heavy_rows", "pieces"), [(3, 1, 2), (4, 2, 3), (5, 99, 12)])
@pytest.mark.parametrize("case", SPLIT_CASES.values(), ids=SPLIT_CASES)
def test_block_in_pieces(case, loops, heavy_rows, pieces):
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    fast = int(heavy_rows == 2)
    config = BlockConfig(*case.block, 4, 2, loops, fast, heavy_rows=heavy_rows, pieces=pieces)
    check(attention_block_forward, config, case)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", ["global rows", "packed", "groups and planes"])
def test_block_in_as_many_pieces_as_there_may_be(case):
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = SPLIT_CASES[case]
    config = BlockConfig(*case.block, 4, 2, 5, 0, heavy_rows=99, pieces=MOST_PIECES)
    check(attention_block_forward, config, case)


# -- which are cut --------------------------------------------------------------------------------


def pieces_of(spec, length, heads=12, *, queued=True):
    mask = build_block_mask(spec, length, length, 64)
    return row_pieces(mask, heads, 3, queued=queued)


def test_rows_that_outlast_all_others_are_cut():
    spec = masks.longformer(window=64, global_tokens=64)
    assert pieces_of(spec, 2048) == 1  # not worth a second launch
    assert pieces_of(spec, 16384) == 8
    assert pieces_of(spec, 16384, heads=48) == 2
    assert pieces_of(spec, 16384, heads=12 * 16) == 1  # there is other work meanwhile
    # heavy rows of the last heads begin late
    assert pieces_of(spec, 16384, queued=False) == 32
    assert pieces_of(spec, 16384, heads=12 * 16, queued=False) == 4
    assert pieces_of(spec, 16384, heads=12 * 64, queued=False) == 1


def test_an_empty_batch_has_no_rows_to_cut():
    assert pieces_of(masks.longformer(window=64, global_tokens=64), 16384, heads=0) == 1


def test_rows_of_even_masks_are_left_whole():
    assert pieces_of(masks.sliding_window(64), 8192, heads=1) == 1
    assert pieces_of(masks.causal(), 8192, heads=1) == 1
    assert pieces_of(masks.dense(), 8192, heads=1) == 1


def test_sums_over_very_many_keys_are_cut_whatever_the_balance():
    """By what tensor cores lose, not by time."""
    spec = masks.longformer(window=64, global_tokens=64)
    assert pieces_of(spec, 262144, heads=4096) == 2
    assert pieces_of(spec, 131072, heads=4096) == 1


def test_their_pieces_do_not_take_more_memory_than_the_result_four_times():
    keep = torch.zeros(1, 1, 8192, 8192, dtype=torch.bool)
    keep[..., :64] = True
    keep[:, :, ::192] = True  # a third of the tile rows see everything
    mask = build_block_mask(masks.from_tensor(keep), 8192, 8192, 64)
    assert mask.heavy_rows == 43
    assert row_pieces(mask, 1, 3, queued=False) == 4
    assert row_pieces(mask, 1, 3, queued=True) == 5  # 43 * 5 rows of 128


def test_a_piece_has_so_many_keys_at_least():
    assert pieces_of(masks.longformer(64, 64), 4160, heads=1) == 4160 // PIECE_KEYS


def test_configs_follow_the_mask():
    from stof_compile.kernels.attention_blockwise import BlockConfig

    mask = build_block_mask(masks.longformer(64, 60), 16384, 16384, 64)
    computed = BlockConfig(*honest_config(mask, BlockConfig(loops=7), 12))
    assert mask.is_band and computed.loops == 3  # pieces are cut from lists of tiles
    assert computed.heavy_rows == mask.heavy_rows == 1 and computed.pieces == 32
    hopper = BlockConfig(*honest_config(mask, BlockConfig(hopper=2), 12))
    assert hopper.heavy_rows == 1 and hopper.pieces == 6
    crowded = BlockConfig(*honest_config(mask, BlockConfig(loops=7), 12 * 64))
    assert crowded.loops == 7 and crowded.heavy_rows == 0 and crowded.pieces == 1


@pytest.mark.interpreter
def test_what_cannot_be_cut_is_refused():
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = SPLIT_CASES["global rows"]
    for how in ({"loops": 6}, {"heavy_first": 0}):
        config = BlockConfig(*case.block, 4, 2, heavy_rows=1, pieces=2)._replace(**how)
        with pytest.raises(ValueError, match="lists"):
            check(attention_block_forward, config, case)


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, "gfx942"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.float16), (96, torch.bfloat16), (256, torch.float16), (64, torch.float32)],
)
def test_compiles_in_pieces_without_spills(target, head_dim, dtype):
    from compiling import assert_fits, compile_block, offered_on

    config = offered_on(target, head_dim, dtype)[0]
    for loops in (3, 5) if head_dim <= 64 else (3,):  # the launcher takes no other branches
        how = config._replace(loops=loops)
        assert_fits(compile_block(target, head_dim, dtype, how, SPLIT=True)[1], target)


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, "gfx942"])
@pytest.mark.parametrize(("value_dim", "width"), [(64, 64), (80, 96), (192, 192), (256, 256)])
def test_merging_compiles_without_spills(target, value_dim, width):
    from compiling import compile_kernel, needs
    from stof_compile.kernels.merge_kernel import merge_rows_kernel

    constants = {
        "VALUE_DIM": value_dim, "WIDTH": width, "BLOCK_E": 1 << (value_dim - 1).bit_length(),
        "BLOCK_M": 64, "STEP": 16, "RETURN_LSE": True, "SINGLE_PLANE": False,
    }  # fmt: skip
    compiled = compile_kernel(merge_rows_kernel, target, "fp16", constants, 4, 3)
    assert needs(compiled, target).spill_bytes == 0


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{}, {"loops": 5, "heads_fast": 1}, {"hopper": 1}, {"hopper": 2}])
@pytest.mark.parametrize(
    ("rule", "head_dim", "group", "dtype", "pieces", "heavy_rows"),
    [
        ("longformer", 64, 1, torch.float16, 4, 2),
        ("longformer", 96, 4, torch.bfloat16, 3, 1),
        ("planes", 128, 1, torch.bfloat16, 64, 99),
        ("planes", 40, 2, torch.float16, 2, 3),
    ],
)
def test_gpu(rule, head_dim, group, dtype, pieces, heavy_rows, form):
    from stof_compile.kernels.attention_blockwise import BlockConfig

    if form.get("hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    batch, heads, length, device = 2, 4, 1000, torch.device("cuda")
    spec = masks.longformer(window=50, global_tokens=70)
    if rule == "planes":
        keep = torch.rand(batch, heads, length, length) < 0.2
        keep[:, :, 64:200] = False  # rows without keys, a tile row among them
        keep[:, :, 256:320, 64:800] = True
        spec = masks.from_tensor(keep)
    mask = build_block_mask(spec, length, length, 64, batch=batch, heads=heads, device=device)
    how = BlockConfig(num_stages=2, heavy_rows=heavy_rows, pieces=pieces)._replace(**form)
    arrays = mask_arrays(mask, how).values()
    for number in range(4):  # the third launch of the Hopper kernel is a repeated one
        return_lse = number % 2 == 0
        q = torch.randn(batch, length, heads, head_dim, device=device, dtype=dtype).transpose(1, 2)
        k, v = torch.randn(2, batch, heads // group, length, head_dim, device=device, dtype=dtype)
        expected, expected_lse = attention_reference(
            q.double(), k.double(), v.double(), mask.to_dense(), None, None, 0.1, 0.0, True
        )
        poison = torch.full((4 * q.numel(),), float("nan"), device=device)
        del poison
        out, lse = torch.ops.stof.attention_block(
            q, k, v, *arrays, None, None, 0.1, 0.0, 0, [], list(how), return_lse
        )
        assert_close(out, expected, dtype)
        if return_lse:
            assert_close_lse(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "inductor", "stof"])
def test_gpu_long_global_rows(way, fresh_dynamo):
    """As users have them: one sequence, few heads, tokens that see all; gradients too."""
    device, rule = torch.device("cuda"), masks.longformer(window=64, global_tokens=64)
    length = 8192
    leaves = torch.randn(3, 1, 2, length, 64, device=device, dtype=torch.bfloat16).unbind()
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    mask = build_block_mask(rule, length, length, 64, device=device)
    assert row_pieces(mask, 2, 3, queued=True) > 1

    def attend(q, k, v):
        return sparse_attention(q, k, v, rule)

    if way != "eager":
        options = {"attention": "block", "strict": True} if way == "stof" else None
        attend = torch.compile(attend, backend=way, options=options)
    check_training(attend, leaves, mask.to_dense(), (slice(None), slice(1)))
