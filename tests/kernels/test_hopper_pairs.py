"""The Hopper kernel of two tile rows at a time: which problems get it, what it compiles to, and
gradients through it on the GPU."""

import re

import pytest
import torch
from attention_cases import check_training
from stof_compile.kernels.attention_blockwise import BlockConfig, configs
from stof_compile.kernels.attention_hopper import attention_hopper_forward
from stof_compile.kernels.hopper_forms import PAIR_CONSUMER, PAIR_REGISTERS, hopper_forms
from stof_compile.kernels.limits import shared_memory_limit

from stof_compile import masks
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.attention.decision_table import plausible_configs
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.masks import bitmap
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.fragments import from_fragments, to_fragments
from stof_compile.masks.long_rows import row_pieces

pytest.importorskip("triton.experimental.gluon")

HALF, BRAIN = torch.float16, torch.bfloat16
HOPPER, TILE = (9, 0), (64, 128)
BIG = {"q_len": 2048, "planes": 192, "plain": True}
PAIRS = BlockConfig(*TILE, 4, 2, hopper=1)


# -- choice ---------------------------------------------------------------------------------------


def in_pairs(found):
    return [config for config in found if config.hopper and config.block_k == 128]


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("head_dim", [104, 120, 128])
def test_offered_first_where_it_is_said_to_suit(head_dim, dtype):
    found = configs(head_dim, dtype, HOPPER, **BIG, pairs=True)
    assert found[0] == PAIRS and in_pairs(found) == [PAIRS]
    assert found[1:] == configs(head_dim, dtype, HOPPER, **BIG)  # the others stay
    first = (64, 128, 1, 2)
    assert hopper_forms(head_dim, pairs=True) == [first, *hopper_forms(head_dim)]


@pytest.mark.parametrize(
    "facts",
    [
        {"head_dim": 64},
        {"head_dim": 96},
        {"pairs": False},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"plain": False},
        {"dtype": torch.float32},
        {"value_dim": 64},
        {"q_len": 128, "planes": 12},
    ],
    ids=str,
)
def test_not_offered_elsewhere(facts):
    asked = {"head_dim": 128, "dtype": HALF, "capability": HOPPER, "pairs": True, **BIG}
    assert not in_pairs(configs(**asked | facts))


@pytest.fixture
def worth_timing(monkeypatch):
    """``worth_timing(rule, head_dim, length)``: configs of the block-wise kernel on Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)

    def call(spec, head_dim=128, length=2048, **facts):
        strides = (length * 12 * head_dim, head_dim, 12 * head_dim, 1)
        meta = TensorMeta((8, 12, length, head_dim), strides, HALF)
        asked = AttentionProblem(meta, meta, meta, spec, 0, torch.device("cpu"), 0.125, **facts)
        return [BlockConfig(*config) for config in plausible_configs(asked, "block")]

    return call


@pytest.mark.parametrize("rule", [masks.causal(), masks.dense()], ids=["causal", "dense"])
def test_timed_first_under_masks_that_fill_wide_tiles(rule, worth_timing):
    for head_dim in (104, 128):
        found = worth_timing(rule, head_dim)
        uneven = build_block_mask(rule, 2048, 2048, TILE).uneven
        assert in_pairs(found) == [found[0]] == [PAIRS._replace(heads_fast=int(uneven))]
    assert not in_pairs(worth_timing(rule, 96))
    assert not in_pairs(worth_timing(rule, padding=True))
    # the few registers that a log-sum-exp takes are missing
    assert not in_pairs(worth_timing(rule, training=True))


def test_not_timed_under_masks_that_leave_wide_tiles_empty(worth_timing):
    assert not in_pairs(worth_timing(masks.sliding_window(22)))
    assert not in_pairs(worth_timing(masks.bigbird(22, 22, 0.1)))
    # of four tile rows of a triangle, 12 tiles of 128 keys in place of 10 of 64
    assert not in_pairs(worth_timing(masks.causal(), length=256))


def test_configs_follow_the_mask():
    longformer = build_block_mask(masks.longformer(64, 60), 16384, 16384, TILE)
    assert row_pieces(longformer, 12, 1, queued=True) > 1
    config = BlockConfig(*honest_config(longformer, PAIRS._replace(pieces=7, heads_fast=1), 12))
    assert config == PAIRS._replace(heavy_rows=longformer.heavy_rows, loops=3)
    assert config.heavy_rows == 1 and config.pieces == 1 and config.heads_fast == 0
    for rule in (masks.causal(), masks.dense(), masks.sliding_window(64)):
        for tile in ((64, 64), TILE):
            mask = build_block_mask(rule, 2048, 2048, tile)
            config = PAIRS._replace(block_k=tile[1], hopper=2 if tile[1] == 64 else 1)
            found = BlockConfig(*honest_config(mask, config, 12))
            assert found.heads_fast == int(mask.uneven)


# -- mask -----------------------------------------------------------------------------------------


def test_fragments_of_wide_tiles_are_those_of_their_halves():
    generator = torch.Generator().manual_seed(12)
    tiles = torch.rand(23, *TILE, generator=generator) < 0.4
    words = bitmap.pack(tiles)
    fragments = to_fragments(words)
    assert fragments.shape == (23, 256) and fragments.dtype == torch.int32
    assert torch.equal(from_fragments(fragments, 64), words)
    place, bit = torch.meshgrid(torch.arange(256), torch.arange(32), indexing="ij")
    half, thread = place // 128, place % 128
    row = 16 * (thread // 32) + 8 * (bit // 16) + thread // 4 % 8
    column = 64 * half + 8 * (bit // 2 % 8) + 2 * (thread % 4) + bit % 2
    kept = (fragments[:, :, None] >> torch.arange(32) & 1).bool()
    assert torch.equal(kept, tiles[:, row, column])
    for half in range(2):
        narrow = to_fragments(bitmap.pack(tiles[:, :, 64 * half : 64 * half + 64]))
        assert torch.equal(fragments[:, 128 * half : 128 * half + 128], narrow)
    assert to_fragments(words[:0]).shape == (0, 256)
    assert from_fragments(fragments[:0], 64).shape == words[:0].shape


def test_arrays_of_wide_tiles():
    mask = build_block_mask(masks.causal(), 700, 700, TILE)
    arrays = mask_arrays(mask, PAIRS)
    assert arrays["bitmap"] is mask.fragments and mask.fragments.shape[1] == 256
    assert torch.equal(from_fragments(mask.fragments, 64), mask.bitmap)
    dense = build_block_mask(masks.dense(), 128, 256, TILE)
    assert not dense.has_part and dense.fragments.shape == (0, 256)


def test_the_cpu_is_refused():
    mask = build_block_mask(masks.causal(), 128, 128, TILE)
    q = torch.zeros(1, 2, 128, 128, dtype=HALF)
    with pytest.raises(ValueError, match="runs on a GPU, not on cpu"):
        attention_hopper_forward(
            q, q, q, list(mask.hopper_tensors), 1.0, 1, 2, 0, 1, False, False
        )  # fmt: skip


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.compile_only
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("width", "stages", "features"),
    [
        (64, 2, {"all": True}),
        (64, 4, {"all": True}),  # those of 64 only by hand
        (128, 2, {}),
        (128, 2, {"HAS_PART": False}),
        (128, 2, {"all": True}),
    ],
    ids=str,
)
def test_compiles(width, stages, features, dtype):
    from compiling import assembler_report, compile_gluon, needs
    from stof_compile.kernels.hopper_pair_kernel import attention_hopper_pair_kernel
    from triton.experimental.gluon import language as gl

    everything = "all" in features
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    descriptors = {
        f"{name}_desc": f"tensordesc<{dtype}[1, 1, {rows}, {width}],{layout!r}>"
        for name, rows in {"q": 64, "k": 128, "v": 128, "o": 64}.items()
    }
    words = gl.NVMMASharedLayout(0, 32, rank=2)
    descriptors["word_desc"] = f"tensordesc<i32[1, 128],{words!r}>"
    constants = {
        "MULT": 0.18,
        "BLOCK_D": width,
        "STAGES": stages,
        "GROUP": 4 if everything else 1,
        "SINGLE_PLANE": not everything,
        "HAS_PART": features.get("HAS_PART", True),
        "RETURN_LSE": everything,
        "REGISTERS": PAIR_CONSUMER,
    }
    compiled = compile_gluon(
        attention_hopper_pair_kernel, 90, descriptors, constants, maxnreg=PAIR_REGISTERS
    )
    found = needs(compiled, 90)
    # with a log-sum-exp Triton 3.9 stores what a unit begins and ends with, once: no loop reads it
    assert found.spill_bytes <= (16 if everything and width == 128 else 0)
    assert found.registers <= PAIR_REGISTERS  # 384 threads: 64,512 of 65,536
    assert found.shared_bytes <= shared_memory_limit(HOPPER)
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in text and "cp.async.bulk.tensor" in text
    assert re.search(rf"setmaxnreg\.inc\.sync\.aligned\.u32\s+{PAIR_CONSUMER};", text)
    said = assembler_report(compiled, 90)
    assert "C75" not in said and "serialized" not in said  # products that wait for each other


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("computed", [True, False], ids=["band", "bitmap"])
def test_gpu_trains(computed):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    device, length = torch.device("cuda"), 1100
    leaves = torch.randn(3, 2, 8, length, 128, device=device, dtype=BRAIN).unbind()
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    mask = build_block_mask(masks.causal(), length, length, TILE, device=device)
    config = list(honest_config(mask, PAIRS, 16))
    arrays = mask_arrays(mask, config).values()
    band = list(mask.band.as_ints()) if computed else []

    def attend(q, k, v):
        out, _ = torch.ops.stof.attention_block(
            q, k, v, *arrays, None, None, 0.125, 0.0, 0, band, config, True, *mask.key_lists
        )
        return out

    check_training(attend, leaves, mask.to_dense(), (slice(None),))


def test_the_operator_takes_calls_of_code_compiled_before():
    """torch keeps compiled code on disk, and with it calls that know nothing of the last ones."""
    schema = torch.ops.stof.attention_hopper.default._schema.arguments
    names = [argument.name for argument in schema]
    assert names[13:] == ["heavy_rows", "pieces", "return_lse", "uneven", "shifted"]
    assert schema[-1].default_value is schema[-2].default_value is False
    mask = build_block_mask(masks.causal(), 128, 128, 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 128, 64, dtype=torch.float16, device="cuda")
        for rest in ((True,), (True, True), (True, True, True)):
            out, lse = torch.ops.stof.attention_hopper(
                q, q, q, *mask.hopper_tensors, 0.125, 4, 2, 0, 1, *rest
            )
            assert out.shape == q.shape and lse.numel() == 256


def test_the_operator_hands_its_arguments_on(monkeypatch):
    from stof_compile.kernels import attention_hopper

    from stof_compile import ops_hopper_attention

    def keep(*given):
        return given[4:]

    monkeypatch.setattr(attention_hopper, "attention_hopper_forward", keep)
    run = ops_hopper_attention._attention_hopper
    tensors = [torch.zeros(1)] * 10
    given = *tensors, 0.5, 4, 2, 7, 1
    assert run(*given, False, True, True) == (0.5, 4, 2, 7, 1, True, False, True)
    assert run(*given, True, True) == (0.5, 4, 2, 7, 1, True, True, False)
    assert run(*given, True) == (0.5, 4, 2, 7, 1, False, True, False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            BlockConfig(block_k=128, num_stages=2, hopper=2),
            r"64x128 programs must be one of \[1\], not 2",
        ),
        (BlockConfig(block_k=128, hopper=1), r"64x128 stages must be one of \(2,\), not 3"),
        (BlockConfig(num_stages=2, hopper=5), r"\[1, 2, 3, 4\], not 5"),
        (BlockConfig(block_k=32, hopper=2), "tiles are one of 64x64, .*, not 64x32"),
    ],
    ids=str,
)
def test_a_form_that_is_not_there_is_refused_when_bound(config, message, monkeypatch):
    from stof_compile.attention.call import bind_kernel
    from stof_compile.errors import StofUnsupportedError

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    meta = TensorMeta((1, 2, 128, 128), (32768, 16384, 128, 1), torch.float16)
    device = torch.device("cuda")
    problem = AttentionProblem(meta, meta, meta, masks.causal(), 0, device, 0.125)
    with pytest.raises(StofUnsupportedError, match=message):
        bind_kernel(problem, "block", tuple(config))
