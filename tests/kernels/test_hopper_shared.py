"""The Hopper kernel of consumers that share their keys: which problems get it, its view of a mask
and what it compiles to."""

import re

import pytest
import torch
from attention_cases import check_training
from hopper_attention import signals_unguarded
from stof_compile.kernels import hopper_forms
from stof_compile.kernels.attention_blockwise import BlockConfig, configs
from stof_compile.kernels.limits import shared_memory_limit

from stof_compile import masks
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.attention.decision_table import plausible_configs
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.errors import StofMaskError, StofUnsupportedError
from stof_compile.masks import bitmap, hopper_arrays
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.fragments import from_fragments, to_fragments

pytest.importorskip("triton.experimental.gluon")

HALF, BRAIN = torch.float16, torch.bfloat16
HOPPER = (9, 0)
BIG = {"q_len": 2048, "planes": 192, "plain": True}
SHARED = BlockConfig(192, 64, 4, 4, hopper=1)
TWO = BlockConfig(128, 64, 4, 4, hopper=2)  # of them; heads of up to 64 dims


# -- choice ---------------------------------------------------------------------------------------


def sharing(found):
    return [config for config in found if config.hopper and config.block_q > 64]


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("head_dim", [40, 64, 104, 128])
def test_offered_first_but_for_two_rows_at_a_time(head_dim, dtype):
    others = configs(head_dim, dtype, HOPPER, **BIG)
    form = SHARED if head_dim > 64 else TWO
    assert configs(head_dim, dtype, HOPPER, **BIG, shared=True) == [form, *others]
    if head_dim <= 64:
        return
    both = configs(head_dim, dtype, HOPPER, **BIG, shared=True, pairs=True)
    assert both[0].block_k == 128 and both[1:] == [SHARED, *others]


@pytest.mark.parametrize(
    "facts",
    [
        {"head_dim": 80},
        {"head_dim": 96},
        {"shared": False},
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
    asked = {"head_dim": 128, "dtype": HALF, "capability": HOPPER, "shared": True, **BIG}
    assert not sharing(configs(**asked | facts))


@pytest.fixture
def worth_timing(monkeypatch):
    """``worth_timing(rule, head_dim, length)``: forms of rows that share keys on Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)

    def call(spec, head_dim=128, length=2048, batch=8, **facts):
        found = listed(spec, head_dim, length, batch, **facts)
        return [config._replace(heads_fast=0, heavy_rows=0) for config in sharing(found)]

    return call


def listed(spec, head_dim, length, batch, **facts):
    strides = (length * 12 * head_dim, head_dim, 12 * head_dim, 1)
    meta = TensorMeta((batch, 12, length, head_dim), strides, HALF)
    asked = AttentionProblem(meta, meta, meta, spec, 0, torch.device("cpu"), 0.125, **facts)
    return [BlockConfig(*config) for config in plausible_configs(asked, "block")]


def test_timed_where_rows_share_most_of_their_keys(worth_timing):
    for rule in (masks.causal(), masks.dense()):
        assert worth_timing(rule) == worth_timing(rule, 104) == [SHARED]
        assert worth_timing(rule, 64) == worth_timing(rule, 40) == [TWO]
        assert not worth_timing(rule, 96) and not worth_timing(rule, 192)
        assert [config[:2] for config in worth_timing(rule, 256)] == [(128, 64)]
        assert not worth_timing(rule, padding=True) and not worth_timing(rule, training=True)
        assert not worth_timing(rule, 100) and not worth_timing(rule, fp8=True)
    for rule in (masks.sliding_window(65), masks.longformer(128, 128)):
        assert worth_timing(rule, length=16384) == [SHARED]  # 1.4 and 1.33 times the scores
    for rule in (masks.sliding_window(64), masks.bigbird(128, 128, 0.05)):
        assert worth_timing(rule) == [SHARED]  # 1.66 and 1.48 times
    assert not worth_timing(masks.bigbird(45, 45, 0.1))  # 1.98 times
    assert not worth_timing(masks.sliding_window(64), 64)  # 1.33 times
    assert worth_timing(masks.bigbird(64, 64, 0.1), 256, 4096)  # 1.64 times


def test_not_timed_where_long_rows_have_to_be_cut(worth_timing):
    longformer = masks.longformer(64, 64)
    assert worth_timing(longformer, length=4096) == [SHARED]
    assert not worth_timing(longformer, length=4096, batch=1)
    assert not worth_timing(longformer, 256, length=4096, batch=1)


def test_which_form_is_listed_first(worth_timing):
    documents = masks.document([n // 900 for n in range(4096)])
    for spec, tile in ((masks.causal(), (64, 128)), (documents, (192, 64))):
        found = listed(spec, 128, 4096, 8)
        assert {(64, 128), (192, 64)} == {config[:2] for config in found[:2]}
        assert found[0][:2] == tile


def test_no_mask_is_built_where_the_kernel_cannot_be_offered(worth_timing, monkeypatch):
    tiles = []
    built = AttentionProblem.block_mask
    monkeypatch.setattr(
        AttentionProblem, "block_mask", lambda self, tile: tiles.append(tile) or built(self, tile)
    )
    worth_timing(masks.causal(), 100)
    worth_timing(masks.causal(), fp8=True)
    worth_timing(masks.causal(), length=64)
    assert tiles and (192, 64) not in tiles and (64, 128) not in tiles
    monkeypatch.setattr(hopper_arrays, "KIND_BITS", 1)
    assert not worth_timing(masks.causal())


def test_configs_follow_the_mask():
    longformer = build_block_mask(masks.longformer(64, 60), 16384, 16384, (192, 64))
    config = BlockConfig(*honest_config(longformer, SHARED._replace(pieces=7, heads_fast=1), 12))
    assert config == SHARED._replace(heavy_rows=longformer.heavy_rows, loops=3)
    assert config.heavy_rows == 1 and config.pieces == 1 and config.heads_fast == 0
    causal = build_block_mask(masks.causal(), 2048, 2048, (192, 64))
    assert BlockConfig(*honest_config(causal, SHARED, 12)).heads_fast == 1


def bound(config, monkeypatch, **facts):
    from stof_compile.attention.call import bind_kernel

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
    meta = TensorMeta((1, 2, 512, 128), (131072, 65536, 128, 1), HALF)
    device = torch.device("cuda")
    problem = AttentionProblem(meta, meta, meta, masks.causal(), 0, device, 0.125, **facts)
    return bind_kernel(problem, "block", tuple(config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SHARED._replace(hopper=2), r"192x64 programs must be one of \[1\], not 2"),
        (SHARED._replace(num_stages=2), r"192x64 stages must be one of \(4,\), not 2"),
        (SHARED._replace(block_q=256), "one of 64x64, 64x128, 128x64, 192x64, not 256x64"),
    ],
    ids=str,
)
def test_a_form_that_is_not_there_is_refused_when_bound(config, message, monkeypatch):
    with pytest.raises(StofUnsupportedError, match=message):
        bound(config, monkeypatch)


def test_what_it_cannot_do_is_refused_when_bound(monkeypatch):
    with pytest.raises(StofUnsupportedError, match="calls without gradients"):
        bound(SHARED, monkeypatch, training=True)
    on_cpu = build_block_mask(masks.causal(), 512, 512, (192, 64))
    monkeypatch.setattr(AttentionProblem, "block_mask", lambda self, tile: on_cpu)
    monkeypatch.setattr(hopper_arrays, "KIND_BITS", 2)
    with pytest.raises(StofUnsupportedError, match="up to 4 different part tiles, not 6"):
        bound(SHARED, monkeypatch)
    monkeypatch.setattr(hopper_arrays, "KIND_BITS", 3)
    assert bound(SHARED, monkeypatch).buffers


def test_a_stored_choice_of_it_is_followed():
    from stof_compile.attention.select import _impossible
    from stof_compile.plan import AttentionPlan

    def said(config):
        return _impossible(AttentionPlan("block", tuple(config), "measured", ""), "cuda")

    assert said(SHARED) == said(BlockConfig(64, 128, 4, 2, hopper=1)) == said(BlockConfig()) == ""
    assert not _impossible(AttentionPlan("block", list(SHARED), "measured", ""), "cuda")
    assert "two edges of a tile, powers of two, and" in said(SHARED._replace(hopper=0))
    assert said(BlockConfig(128, 64, 4, 2, hopper=1)) == ""
    known = "a Hopper tile of 64 x 64, 64 x 128, 192 x 64, 128 x 64, and"
    for wrong in ({"block_k": 128}, {"block_q": 256}, {"num_stages": -1}):
        assert known in said(SHARED._replace(**wrong))
    assert "none of block" in said((64,))
    row = _impossible(AttentionPlan("row", (192, 64, 4), "measured", ""), "cuda")
    assert "none of row, which has two edges of a tile, powers of two, and" in row


# -- mask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 192, 256])
@pytest.mark.parametrize("keys", [64, 128])
def test_fragments_of_tall_tiles_are_those_of_their_parts(rows, keys):
    generator = torch.Generator().manual_seed(12)
    tiles = torch.rand(23, rows, keys, generator=generator) < 0.4
    words = bitmap.pack(tiles)
    fragments = to_fragments(words, rows)
    assert fragments.shape == (23, rows * keys // 32) and fragments.dtype == torch.int32
    assert torch.equal(from_fragments(fragments, rows), words)
    parts = fragments.unflatten(1, (rows // 64, keys // 64, 128))
    for i in range(rows // 64):
        for j in range(keys // 64):
            part = tiles[:, 64 * i : 64 * i + 64, 64 * j : 64 * j + 64]
            assert torch.equal(parts[:, i, j], to_fragments(bitmap.pack(part)))
    assert to_fragments(words[:0], rows).shape == (0, rows * keys // 32)
    assert from_fragments(fragments[:0], rows).shape == words[:0].shape


@pytest.mark.parametrize("form", [SHARED, TWO], ids=str)
def test_numbers_say_what_a_tile_is_to_each_consumer(form):
    draw = torch.Generator().manual_seed(4)
    blocks = torch.rand(1, 1, 14, 9, generator=draw).repeat_interleave(64, 2)
    blocks = blocks.repeat_interleave(64, 3)[..., :850, :550]
    keep = (blocks < 0.3) | ((blocks < 0.6) & (torch.rand(blocks.shape, generator=draw) < 0.5))
    tile = form[:2]
    mask = build_block_mask(masks.from_tensor(keep), 850, 550, tile)
    arrays = mask_arrays(mask, form)
    assert arrays["bitmap"] is mask.fragments and mask.hopper_tensors is mask.hopper_tensors
    numbers = arrays["bitmap_id"]
    assert torch.equal(hopper_arrays.numbers_alone(numbers), mask.bitmap_id)
    dense = torch.zeros(-(-850 // tile[0]) * tile[0], 576, dtype=torch.bool)
    dense[:850, :550] = keep[0, 0]
    seen = set()
    for number, column, row, part in zip(
        numbers, mask.col_idx, mask.row_of_tile(), mask.is_part(), strict=True
    ):
        if not part:
            continue
        for i in range(tile[0] // 64):
            top, left = int(row) * tile[0] + 64 * i, int(column) * 64
            own = dense[top : top + 64, left : left + 64]
            kind = int(number) >> 24 + 2 * i & 3
            assert kind == (1 if own.all() else 0 if own.any() else 2)
            seen.add(kind)
    assert seen == {0, 1, 2}


def test_numbers_without_part_tiles_and_too_many_of_them(monkeypatch):
    dense = build_block_mask(masks.dense(), 384, 256, (192, 64))
    assert not dense.has_part and dense.fragments.shape == (0, 384)
    assert dense.hopper_tensors[4] is dense.bitmap_id
    monkeypatch.setattr(hopper_arrays, "KIND_BITS", 1)
    with pytest.raises(StofMaskError, match="up to 2 different part tiles, not 3"):
        _ = build_block_mask(masks.causal(), 384, 384, (192, 64)).hopper_tensors


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("features", "dtype"),
    [({}, "fp16"), ({"HAS_PART": False}, "bf16"), ({"all": True}, "fp16"), ({"all": True}, "bf16")],
    ids=str,
)
@pytest.mark.parametrize("form", hopper_forms.SHARED, ids=str)
def test_compiles_without_spills(features, dtype, form):
    from compiling import assembler_report, compile_gluon, needs
    from stof_compile.kernels.hopper_shared_kernel import attention_hopper_shared_kernel
    from triton.experimental.gluon import language as gl

    everything = "all" in features
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    width, threads = form.dims[1], 2 * form.rows
    operand = f"tensordesc<{dtype}[1, 1, 64, {width}],{layout!r}>"
    descriptors = {f"{name}_desc": operand for name in "qkvo"}
    words = gl.NVMMASharedLayout(0, 32, rank=2)
    descriptors["word_desc"] = f"tensordesc<i32[1, 128],{words!r}>"
    constants = {
        "MULT": 0.18,
        "BLOCK_D": width,
        **form.constants(),
        "GROUP": 4 if everything else 1,
        "SINGLE_PLANE": not everything,
        "HAS_PART": features.get("HAS_PART", True),
        "RETURN_LSE": everything,
        "CONSUMER": form.consumer,
        "PRODUCER": form.producer,
    }
    start = form.registers
    compiled = compile_gluon(
        attention_hopper_shared_kernel, 90, descriptors, constants, maxnreg=start
    )
    found = needs(compiled, 90)
    assert found.spill_bytes == 0
    assert found.registers * (threads + 128) * form.programs <= 65536
    assert threads * form.consumer + 128 * form.producer <= (threads + 128) * start
    assert (found.shared_bytes + 1024) * form.programs <= 228 * 1024
    assert found.shared_bytes <= shared_memory_limit(HOPPER)
    text = compiled.asm["ptx"]
    assert not signals_unguarded(text)
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text
    assert re.search(rf"setmaxnreg\.inc\.sync\.aligned\.u32\s+{form.consumer};", text)
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
    mask = build_block_mask(masks.causal(), length, length, SHARED[:2], device=device)
    config = list(honest_config(mask, SHARED, 16))
    arrays = mask_arrays(mask, config).values()
    band = list(mask.band.as_ints()) if computed else []

    def attend(q, k, v):
        out, _ = torch.ops.stof.attention_block(
            q, k, v, *arrays, None, None, 0.125, 0.0, 0, band, config, True, *mask.key_lists
        )
        return out

    check_training(attend, leaves, mask.to_dense(), (slice(None),))
