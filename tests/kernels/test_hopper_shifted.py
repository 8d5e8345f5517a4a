"""Shifted tiles of the Hopper kernel: which problems get them, and results on the GPU. What is in
them is told in ``tests/masks/test_shifted_tiles.py``, how they travel in
``test_hopper_protocol.py``."""

import pytest
import torch
from attention_cases import check_training
from close import assert_close
from hopper_attention import check_on_gpu, hopper_attention, launches, operands, short_rules
from stof_compile.kernels.attention_blockwise import BlockConfig, configs
from stof_compile.kernels.attention_hopper import attention_hopper_forward
from stof_compile.kernels.reference import attention_reference

import stof_compile
from stof_compile import masks
from stof_compile.attention.call import bind_kernel, honest_config, mask_arrays, with_shifted_tiles
from stof_compile.attention.decision_table import plausible_configs
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.config_fields import SHIFTED, has_shifted_tiles
from stof_compile.errors import StofUnsupportedError
from stof_compile.masks.block_mask import build_block_mask

pytest.importorskip("triton.experimental.gluon")

HALF, BRAIN = torch.float16, torch.bfloat16
HOPPER = (9, 0)
BIG = {"q_len": 2048, "planes": 192, "plain": True}
ONE = BlockConfig(num_stages=2, hopper=4, shifted=1)


# -- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128])
def test_offered_before_those_of_the_grid(head_dim):
    others = configs(head_dim, HALF, HOPPER, **BIG)
    found = configs(head_dim, HALF, HOPPER, **BIG, shifted=True)
    square = [config for config in others if config.hopper and config[:2] == (64, 64)]
    assert found == [config._replace(shifted=1) for config in square] + others
    assert configs(head_dim, HALF, (8, 0), **BIG, shifted=True) == configs(
        head_dim, HALF, (8, 0), **BIG
    )


@pytest.fixture
def problem(monkeypatch):
    """``problem(spec, length, **facts)``: one that a Hopper GPU has, on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: HOPPER)

    def make(spec, length=2048, **facts):
        meta = TensorMeta((8, 12, length, 64), (length * 768, 64, 768, 1), HALF)
        return AttentionProblem(meta, meta, meta, spec, 0, torch.device("cpu"), 0.125, **facts)

    return make


def test_timed_where_they_save_tiles(problem):
    def shifted(spec, length=2048, **facts):
        found = plausible_configs(problem(spec, length, **facts), "block")
        return [config for config in found if has_shifted_tiles(config)]

    for spec in (masks.sliding_window(45), masks.longformer(45, 45), masks.bigbird(45, 45, 0.1)):
        assert [BlockConfig(*config)[:4] for config in shifted(spec)] == [(64, 64, 4, 2)]
        assert not shifted(spec, training=True) and not shifted(spec, padding=True)
    for spec in (masks.causal(), masks.dense(), masks.sliding_window(64)):
        assert not shifted(spec)
    assert not shifted(masks.bigbird(64, 64, 0.1), 4096)


def test_a_config_for_another_mask_is_put_right():
    window, causal = masks.sliding_window(45), masks.causal()
    for spec, share in ((window, 0.84), (causal, 1.0)):
        mask = build_block_mask(spec, 2048, 2048, 64)
        assert round(mask.shifted_share, 2) == share
        config = honest_config(mask, ONE, 96)
        assert has_shifted_tiles(config) == (share < 1)
        arrays = mask_arrays(mask, config)
        chosen = mask.shifted_tensors if share < 1 else mask.hopper_tensors
        assert all(a is b for a, b in zip(arrays.values(), chosen, strict=True))
        assert has_shifted_tiles(with_shifted_tiles(mask, ONE._replace(shifted=0), 64)) == (
            share < 1
        )
        assert with_shifted_tiles(mask, BlockConfig(), 64) == BlockConfig()
    old = list(ONE)[:SHIFTED]  # of a store that an older version wrote
    assert not has_shifted_tiles(old) and not has_shifted_tiles(BlockConfig(shifted=1))
    assert len(honest_config(mask, old, 96)) == len(ONE)
    larger = build_block_mask(window, 2048, 2048, (64, 128))
    assert larger.shifted_share == 1.0


def test_a_capture_takes_the_grid_where_they_are_not_there_yet(monkeypatch):
    """After a warm-up with gradients, which has the grid's."""
    mask = build_block_mask(masks.sliding_window(45), 2048, 2048, 64)
    grid = ONE._replace(shifted=0)
    monkeypatch.setattr(type(mask), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert with_shifted_tiles(mask, grid, 64) == grid
    assert not {"shifted_share", "shifted_tensors"} & set(vars(mask))
    with monkeypatch.context() as patch:
        patch.setattr(type(mask), "device", torch.device("cpu"))
        assert len(mask.shifted_tensors) == 7 and mask.shifted_share < 1
    assert with_shifted_tiles(mask, grid, 64) == ONE


def test_buffers_of_both_have_names_of_their_own(problem, monkeypatch):
    monkeypatch.setattr("stof_compile.attention.call._refuse_hopper", lambda *given: None)
    asked = problem(masks.sliding_window(45))
    both = [bind_kernel(asked, "block", ONE._replace(shifted=n)).buffers for n in (0, 1)]
    assert not set(both[0]) & set(both[1])


def test_refused_where_gradients_are_wanted(problem, monkeypatch):
    from stof_compile.kernels import attention_hopper

    from stof_compile.attention import call

    monkeypatch.setattr(attention_hopper, "hopper_refusal", lambda *given, **facts: None)
    with pytest.raises(StofUnsupportedError, match="shifted tiles are for calls without gradients"):
        call._refuse_hopper(problem(masks.sliding_window(45), training=True), ONE)
    call._refuse_hopper(problem(masks.sliding_window(45)), ONE)
    mask = build_block_mask(masks.sliding_window(45), 2048, 2048, 64)
    q = torch.zeros(1, 1, 2048, 64, dtype=HALF, requires_grad=True)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q = mode.from_tensor(q)
        given = (*mask.shifted_tensors, None, None, 0.125, 0.0, 0, [])
        with pytest.raises(ValueError, match="set shifted to 0"):
            torch.ops.stof.attention_block(q, q, q, *given, list(ONE), False)


def test_tiles_of_other_sizes_are_refused(monkeypatch):
    monkeypatch.setattr("stof_compile.masks.block_mask.tile_share", lambda mask: 1.0)
    mask = build_block_mask(masks.causal(), 256, 256, (64, 128))
    monkeypatch.setattr(type(mask), "shifted_tensors", mask.hopper_tensors)
    with (
        launches(monkeypatch, None, 4),
        pytest.raises(ValueError, match="shifted tiles are 64 x 64, not 64 x 128"),
    ):
        hopper_attention(*operands(1, 1, 256, 256, 128), mask, 1, 2, 0, 1, False, False, True)


# -- results --------------------------------------------------------------------------------------


def on_hopper():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rule", short_rules())
@pytest.mark.parametrize(
    ("head_dim", "programs", "stages"),
    [
        (40, 4, 2), (64, 4, 2), (64, 1, 1), (64, 3, 3), (80, 3, 2), (80, 2, 3), (96, 3, 2),
        (96, 1, 1), (128, 2, 2), (128, 3, 1), (104, 3, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("group", "dtype", "pieces"), [(1, HALF, 1), (3, BRAIN, 1), (1, HALF, 3)])
def test_gpu(rule, head_dim, programs, stages, group, dtype, pieces):
    device = on_hopper()
    batch, heads, q_len, k_len = 2, 3, 330, 400
    spec = short_rules()[rule]
    mask = build_block_mask(spec, q_len, k_len, 64, batch=batch, heads=heads, device=device)
    heavy = 2 if pieces > 1 else mask.heavy_rows

    def attend(q, k, v, return_lse):
        numbers = head_dim**-0.5, programs, stages, heavy, pieces, mask.uneven, return_lse, True
        return attention_hopper_forward(q, k, v, mask.shifted_tensors, *numbers)

    shape = batch, heads, q_len, k_len, head_dim
    check_on_gpu(attend, mask, shape, heads // group, dtype)


@pytest.mark.gpu
def test_gpu_keys_that_no_tile_holds_may_be_anything():
    device = on_hopper()
    q, k, v = torch.randn(3, 4, 8, 1024, 64, device=device, dtype=HALF).unbind()
    spec = masks.sliding_window(10) & masks.document([0] * 500 + [1] * 524)
    mask = build_block_mask(spec, 1024, 1024, 64, device=device)
    config = honest_config(mask, ONE, 32)
    assert has_shifted_tiles(config)
    keep = mask.to_dense()
    touched = torch.zeros(16, 16, dtype=torch.bool, device=device)
    touched[mask.row_of_tile(), mask.col_idx.long()] = True
    for row in (0, 7, 8, 15):  # rows of tiles, one after another: what they do not touch is NaN
        bad = ~touched[row].repeat_interleave(64)
        k_bad, v_bad = (t.masked_fill(bad[:, None], float("nan")) for t in (k, v))
        out, _ = torch.ops.stof.attention_block(
            q, k_bad, v_bad, *mask.shifted_tensors, None, None, 0.125, 0.0, 0, [], config, False
        )
        rows = slice(64 * row, 64 * row + 64)
        expected = attention_reference(q.double(), k.double(), v.double(), keep, None, None, 0.125)[
            :, :, rows
        ]
        assert_close(out[:, :, rows], expected, HALF)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "stof"])
def test_gpu_sparse_attention_shifts_tiles_and_trains_without(way, fresh_dynamo, monkeypatch):
    from stof_compile.kernels import attention_hopper

    device, rule = on_hopper(), masks.longformer(45, 20)
    seen = []
    launch = attention_hopper.attention_hopper_forward
    monkeypatch.setattr(
        attention_hopper, "attention_hopper_forward",
        lambda *given, **named: seen.append(given[11:]) or launch(*given, **named),
    )  # fmt: skip
    leaves = torch.randn(3, 8, 12, 1500, 64, device=device, dtype=BRAIN).unbind()

    def attend(q, k, v):
        return stof_compile.sparse_attention(q, k, v, rule)

    if way != "eager":
        options = {"attention": "block", "strict": True}
        attend = torch.compile(attend, backend=way, options=options)
    keep = build_block_mask(rule, 1500, 1500, 64, device=device).to_dense()
    expected = attention_reference(*(t[:1].double() for t in leaves), keep[:1], None, None, 0.125)
    with torch.no_grad():
        assert_close(attend(*leaves)[:1], expected, BRAIN)
    assert (True,) in seen or way == "stof"  # there by measurement
    seen.clear()
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    check_training(attend, leaves, keep, (slice(1),))
    assert (True,) not in seen
