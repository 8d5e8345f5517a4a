"""The Hopper kernel: which problems get it, what it compiles to, and its results on the GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_cases import check_training
from close import assert_close
from hopper_attention import check_on_gpu, compiled_alone
from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward, configs
from stof_compile.kernels.attention_hopper import attention_hopper_forward, hopper_refusal
from stof_compile.kernels.bound_launch import Repeat
from stof_compile.kernels.hopper_forms import (
    shared_form,
    without_spills,
)
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.config_fields import HEAVY_ROWS, STAGES, hopper_programs
from stof_compile.config_fields import HOPPER as PROGRAMS
from stof_compile.errors import StofMaskError, StofUnsupportedError
from stof_compile.masks import bitmap
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.fragments import from_fragments, to_fragments

pytest.importorskip("triton.experimental.gluon")

HALF, BRAIN = torch.float16, torch.bfloat16
HOPPER = (9, 0)
BIG = {"q_len": 2048, "planes": 192, "plain": True}


# -- choice ---------------------------------------------------------------------------------------


def offered(head_dim=64, dtype=HALF, capability=HOPPER, **facts):
    found = configs(head_dim, dtype, capability, **{**BIG, **facts})
    return [config for config in found if config.hopper]


@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_offered_first_where_there_are_many_rows(head_dim, dtype):
    assert configs(head_dim, dtype, HOPPER, **BIG)[0].hopper
    assert not configs(head_dim, dtype, HOPPER, **{**BIG, "q_len": 256})[0].hopper


@pytest.mark.parametrize(
    "facts",
    [
        {"plain": False},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"dtype": torch.float32},
        {"head_dim": 32},
        {"head_dim": 264},
        {"head_dim": 68},
        {"value_dim": 128},
        {"q_len": 128, "planes": 12},
        {"q_len": None},
    ],
    ids=str,
)
def test_not_offered_where_it_cannot_run_or_cannot_win(facts):
    assert not offered(**facts)


def test_refusal_names_the_reason():
    assert "Hopper" in hopper_refusal(64, 64, HALF, (8, 0), 4096, plain=True)
    assert "padding" in hopper_refusal(64, 64, HALF, HOPPER, 4096, plain=False)
    assert hopper_refusal(64, 64, HALF, HOPPER, 4096, plain=True) is None


def test_a_choice_made_elsewhere_is_refused():
    """A plan, or the first rank of a job on mixed GPUs, may name a kernel this GPU has not."""
    from stof_compile.attention.call import bind_kernel
    from stof_compile.attention.problem import AttentionProblem, TensorMeta

    meta = TensorMeta((1, 2, 128, 64), (16384, 8192, 64, 1), HALF)
    problem = AttentionProblem(meta, meta, meta, masks.causal(), 0, torch.device("cpu"), 0.125)
    with pytest.raises(StofUnsupportedError, match="Hopper"):
        bind_kernel(problem, "block", tuple(BlockConfig(hopper=3)))
    assert replace(problem, scale=-0.125).key != problem.key


def test_operator_refuses_what_the_kernel_would_ignore():
    mask = build_block_mask(masks.causal(), 64, 64, 64)
    q = torch.zeros(1, 1, 64, 64, dtype=HALF)
    for change in ({"bias": q}, {"softcap": 5.0}, {"keep": torch.ones(1, 64, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="no padding, bias or softcap"):
            torch.ops.stof.attention_block(
                q, q, q, *mask.hopper_tensors, change.get("keep"), change.get("bias"), 1.0,
                change.get("softcap", 0.0), 0, [], list(BlockConfig(hopper=3)), False,
            )  # fmt: skip


def test_masks_made_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        mask = build_block_mask(masks.causal(), 128, 128, 64)
        fragments = mask.fragments
    assert not any(t.is_inference() for t in (*mask.tensors, fragments))


@pytest.mark.parametrize("head_dim", [1, 64, 96, 136, 256])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_every_problem_has_a_config(head_dim, capability, dtype):
    for q_len in (None, 1, 8, 64, 128, 2048):
        for planes in (None, 1, 12, 192):
            assert configs(head_dim, dtype, capability, q_len=q_len, planes=planes)


def test_operator_reads_the_right_fields():
    config = BlockConfig(num_stages=5, hopper=2, heavy_rows=7)
    assert (config[STAGES], config[PROGRAMS], config[HEAVY_ROWS]) == (5, 2, 7)
    assert hopper_programs(config) == 2 and hopper_programs(BlockConfig()[:9]) == 0
    with pytest.raises(ValueError, match="hopper"):
        q = torch.zeros(1, 1, 64, 64, dtype=HALF)
        attention_block_forward(q, q, q, [], None, None, 1.0, 0.0, 0, [], list(config), False)


# -- mask -----------------------------------------------------------------------------------------


def test_fragments_keep_the_scores_a_thread_holds():
    generator = torch.Generator().manual_seed(11)
    tiles = torch.rand(37, 64, 64, generator=generator) < 0.4
    words = bitmap.pack(tiles)
    fragments = to_fragments(words)
    assert torch.equal(from_fragments(fragments, 64), words)
    thread, bit = torch.meshgrid(torch.arange(128), torch.arange(32), indexing="ij")
    row = 16 * (thread // 32) + 8 * (bit // 16) + thread // 4 % 8
    column = 8 * (bit // 2 % 8) + 2 * (thread % 4) + bit % 2
    assert torch.equal(
        (fragments[:, :, None] >> torch.arange(32) & 1).bool(), tiles[:, row, column]
    )
    assert to_fragments(words[:0]).shape == (0, 128)


def test_mask_arrays_and_heavy_rows_follow_the_config():
    mask = build_block_mask(
        masks.bigbird(window=16, global_tokens=16, random_fill=0.1), 1024, 1024, 64
    )
    portable, hopper = BlockConfig(), BlockConfig(hopper=3)
    assert mask_arrays(mask, portable)["bitmap"] is mask.bitmap
    assert mask_arrays(mask, hopper)["bitmap"] is mask.fragments
    assert honest_config(mask, hopper, 8)[HEAVY_ROWS] == mask.heavy_rows == 1
    assert honest_config(mask, portable, 8)[HEAVY_ROWS] == 0
    even = build_block_mask(masks.dense(), 1024, 1024, 64)
    assert even.heavy_rows == 0
    with pytest.raises(StofMaskError, match="64 x 64"):
        _ = build_block_mask(masks.dense(), 256, 256, 32).fragments


def test_arguments_are_checked():
    mask = build_block_mask(masks.causal(), 128, 128, 64)
    arrays = list(mask_arrays(mask, BlockConfig(hopper=3)).values())
    q = torch.zeros(1, 2, 128, 64, dtype=HALF)
    for change, message in (
        ({"q": q.float()}, "dtype of q"),
        ({"q": q[..., :32]}, "agree"),
        ({"mask": list(mask.tensors)}, "bitmap must be torch.int32"),
        ({"q": torch.zeros(1, 2, 65 * 64, 64, dtype=HALF)}, "cover 65"),
        ({"mask": [arrays[0].repeat(2, 3), *arrays[1:]]}, "plane_map"),
        ({"mask": [*arrays[:3], arrays[3].long(), *arrays[4:]]}, "col_idx"),
        ({}, "runs on a GPU"),
    ):
        call = {"q": q, "k": q, "v": q, "mask": arrays, "scale": 1.0} | change
        with pytest.raises(ValueError, match=message):
            attention_hopper_forward(
                **call, programs=3, stages=3, heavy_rows=0, pieces=1, uneven=False,
                return_lse=False,
            )  # fmt: skip


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("dtype", "features"),
    [
        *product(["fp16", "bf16"], [{}, {"HAS_PART": False}, {"all": True}]),
        ("fp16", {"SHIFTED": True}),
        ("bf16", {"SHIFTED": True, "all": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_compiles_without_spills(head_dim, features, dtype):
    everything, shifted = "all" in features, "SHIFTED" in features
    has_part = features.get("HAS_PART", True)
    for config in offered(head_dim):
        form = without_spills(config.hopper, config.num_stages, everything, everything)
        compiled_alone(head_dim, *form, dtype, everything, has_part, shifted)


# -- results --------------------------------------------------------------------------------------


def rules():
    generator = torch.Generator().manual_seed(3)
    keep = torch.rand(2, 4, 330, 330, generator=generator) < 0.3
    keep[:, :, 64:140] = False  # rows without keys, a tile row among them
    keep[:, :, 192:256, 64:192] = True  # full tiles
    return {
        "causal": masks.causal(),
        "sliding": masks.sliding_window(33),
        "bigbird": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
        "dense": masks.dense(),
        "tiles only": masks.block_diagonal(64),
        "planes": masks.from_tensor(keep),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("rule", rules())
@pytest.mark.parametrize("head_dim", [40, 64, 72, 88, 96, 104, 128])
@pytest.mark.parametrize(("group", "dtype"), [(1, HALF), (4, BRAIN)])
@pytest.mark.parametrize(
    ("programs", "stages", "keys"),
    [
        (1, 2, 64), (2, 2, 64), (2, 3, 64), (3, 1, 64), (3, 2, 64), (4, 2, 64), (1, 2, 128),
        (1, 0, 64),
    ],
)  # fmt: skip
def test_gpu(rule, head_dim, group, dtype, programs, stages, keys, monkeypatch):
    """Stages of 0: two or three consumers that share their keys."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    if (head_dim > 96 and (programs, stages) in ((2, 3), (3, 2))) or (
        head_dim > 64 and programs == 4
    ):
        pytest.skip("its tiles do not fit the memory so many times")
    batch, heads, length = 2, 4, 330
    device = torch.device("cuda")
    spec = rules()[rule]
    tile = (64, keys)
    if stages == 0:
        form = shared_form(128 if head_dim <= 64 else 192, head_dim)
        tile, programs, stages = (form.rows, keys), form.programs, form.key_tiles
    mask = build_block_mask(spec, length, length, tile, batch=batch, heads=heads, device=device)
    config = BlockConfig(*tile, num_stages=stages, hopper=programs)
    config = honest_config(mask, config, batch * heads)
    arrays = mask_arrays(mask, config).values()
    repeated = []
    again = Repeat.__call__
    monkeypatch.setattr(
        Repeat, "__call__", lambda self, *tensors: repeated.append(1) or again(self, *tensors)
    )

    def attend(q, k, v, return_lse):
        return torch.ops.stof.attention_block(
            q, k, v, *arrays, None, None, head_dim**-0.5, 0.0, 0, [], config, return_lse
        )

    shape = batch, heads, length, length, head_dim
    check_on_gpu(attend, mask, shape, heads // group, dtype)
    assert len(repeated) >= 2


@pytest.mark.gpu
def test_gpu_copies_what_tma_cannot_address_and_takes_other_lengths():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    device, dim = torch.device("cuda"), 64
    storage = torch.randn(3, 1, 2, 200, dim + 4, device=device, dtype=HALF)
    q, k, v = storage[..., 1 : dim + 1]  # odd strides and addresses
    q = q[:, :, :70]
    mask = build_block_mask(masks.causal(lower_right=True), 70, 200, 64, device=device)
    config = honest_config(mask, BlockConfig(hopper=3), 8)
    out, lse = torch.ops.stof.attention_block(
        q, k.expand(1, 2, 200, dim), v, *mask_arrays(mask, config).values(),
        None, None, 0.2, 0.0, 0, [], config, False,
    )  # fmt: skip
    expected = attention_reference(
        q.double(), k.double(), v.double(), mask.to_dense(), None, None, 0.2
    )
    assert_close(out, expected, HALF)
    assert lse.numel() == 0


@pytest.mark.gpu
def test_gpu_replays_in_a_cuda_graph():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    device = torch.device("cuda")
    q, k, v = torch.randn(3, 2, 4, 512, 64, device=device, dtype=HALF)
    mask = build_block_mask(
        masks.bigbird(window=24, global_tokens=17, random_fill=0.2), 512, 512, 64, device=device
    )
    config = honest_config(mask, BlockConfig(hopper=3), 8)
    arrays = list(mask_arrays(mask, config).values())

    def attend():
        return torch.ops.stof.attention_block(
            q, k, v, *arrays, None, None, 0.125, 0.0, 0, [], config, False
        )[0]

    attend()
    attend()  # what is captured is a repeated launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for _ in range(3):
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
        graph.replay()
        expected = attention_reference(
            q.double(), k.double(), v.double(), mask.to_dense(), None, None, 0.125
        )
        assert_close(out, expected, HALF)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "inductor", "stof"])
def test_gpu_sparse_attention_takes_it_and_trains(way, fresh_dynamo):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    from stof_compile import sparse_attention

    device, rule = torch.device("cuda"), masks.longformer(40, 20)
    leaves = torch.randn(3, 8, 12, 1500, 64, device=device, dtype=BRAIN).unbind()
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    assert configs(64, BRAIN, HOPPER, q_len=1500, planes=96, plain=True)[0].hopper

    def attend(q, k, v):
        return sparse_attention(q, k, v, rule)

    if way != "eager":
        options = {"attention": "block", "strict": True} if way == "stof" else None
        attend = torch.compile(attend, backend=way, options=options)
    keep = build_block_mask(rule, 1500, 1500, 64, device=device).to_dense()
    check_training(attend, leaves, keep, (slice(1),))
