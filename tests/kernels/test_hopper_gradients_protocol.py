"""The Hopper kernels of the gradient on the CPU: loads, lists, barriers, slots and what one leaves
for the other, with their partitions in any order, against the reference."""

from collections import Counter

import numpy as np
import pytest
import torch
from close import assert_close
from hopper_gradients import BRAIN, HALF, hopper_gradients, launches, operands, wanted_gradients

from stof_compile import masks
from stof_compile.masks.block_mask import build_block_mask

pytest.importorskip("triton.experimental.gluon")

from gluon_threads import run_kernel
from gluon_values import OnGpu, kept_scores, value
from gradient_checks import TWO_PRODUCTS
from stof_compile.kernels import (
    hopper_gradient_loads,
    hopper_key_gradient,
    hopper_query_gradient,
    hopper_units,
)

MODULES = hopper_gradient_loads, hopper_query_gradient, hopper_key_gradient, hopper_units


def begun(of_rows, layout):
    return value(np.broadcast_to(of_rows.load(layout), (64, 64)).copy())


INSTEAD = {  # the assembly has tests of its own (test_weights_code.py)
    "kept_scores": kept_scores,
    "_begun": begun,
    **dict.fromkeys(("fragment_layout", "without"), lambda *arguments: None),
}


@pytest.fixture
def gradients(monkeypatch):
    """``gradients(seed, workers, *operands, mask, **more)``: both kernels on the CPU.

    ``machines`` of it is what ran last, by the name of the kernel's function.
    """

    def call(seed, workers, *given, **changes):
        call.machines = machines = {}

        def launch(kernel, programs, arguments, constants, options):
            named = dict(zip(kernel.arg_names, arguments, strict=False))
            if "stats" in named:
                named["stats"].fill_(torch.nan)
            for name in {"dq_desc", "dk_desc", "dv_desc"} & named.keys():
                named[name].base.fill_(torch.nan)  # and whatever is not NaN was written before
            assert programs > 0 and named["queue"].numel() == 2
            machines[kernel.fn.__name__] = run_kernel(
                monkeypatch, kernel, MODULES, INSTEAD, workers, arguments, constants, seed
            )

        with launches(monkeypatch, launch, seed=seed):
            found = hopper_gradients(*given, **changes)
        assert len(machines) == 2
        return found

    return call


def check(gradients, q, k, v, grad_out, mask, grad_lse=None, seed=0, workers=3, **changes):
    found = gradients(seed, workers, q, k, v, grad_out, mask, grad_lse, **changes)
    seen = mask.to_dense().any(-1).expand(q.shape[:3])
    if grad_lse is not None:
        grad_lse = grad_lse.where(seen, 0.0)
    wanted = wanted_gradients(q, k, v, grad_out, mask, grad_lse, changes.get("scale", 0.125))
    for a, b, operand in zip(found, wanted, (q, k, v), strict=True):
        assert a.dtype == operand.dtype and a.is_contiguous()
        assert_close(a, b, HALF, TWO_PRODUCTS)
    assert (found[0][~seen] == 0).all()


def some_planes(batch, heads, q_len, k_len):
    """Of every head its own, with rows, columns and a head without keys, and full tiles."""
    draw = torch.Generator().manual_seed(3)
    tiles = torch.rand(batch, heads, -(-q_len // 64), -(-k_len // 64), generator=draw) < 0.5
    tiles[:, 1] = False
    tiles[:, 2:, 1:2] = False
    tiles[:, :, :, 2:3] = False
    keep = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :q_len, :k_len]
    part = torch.rand(keep.shape, generator=draw) < 0.7
    part[:, :, :70] = True
    part[:, :, 140:150] = False  # rows of a tile that has others
    return masks.from_tensor(keep & part)


def rules(q_len, k_len):
    return {
        "causal": masks.causal(),
        "dense": masks.dense(),
        "sliding": masks.sliding_window(40),
        "bigbird": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
        "tiles only": masks.block_diagonal(128),
        "planes": some_planes(2, 3, q_len, k_len),
    }


@pytest.mark.parametrize("of_lse", [False, True], ids=["", "grad_lse"])
@pytest.mark.parametrize("rule", rules(64, 64))
@pytest.mark.parametrize(("head_dim", "group"), [(40, 1), (64, 3), (72, 3), (128, 1)], ids=str)
def test_results(rule, head_dim, group, of_lse, gradients):
    lengths = (320, 384) if rule in ("dense", "tiles only") else (330, 400)
    mask = build_block_mask(rules(*lengths)[rule], *lengths, 64, batch=2, heads=3)
    group = 1 if mask.planes > 1 else group
    given = operands(2, 3, *lengths, head_dim, group)
    grad_lse = torch.randn(2, 3, lengths[0]) if of_lse else None
    assert mask.has_part == (rule not in ("dense", "tiles only"))
    check(gradients, *given, mask, grad_lse)


@pytest.mark.parametrize("seed", range(16))
def test_any_order_and_any_lists(seed, gradients):
    """Rows and columns of many tiles, of few and of none; more units than workers, and fewer."""
    draw = np.random.default_rng(seed)
    q_len, k_len = int(draw.integers(1, 500)), int(draw.integers(1, 600))
    group, planes = [(1, 1), (1, 2), (2, 1)][int(draw.integers(3))]
    tiles = torch.from_numpy(draw.random((1, planes, 8, 10)) < draw.choice([0.2, 0.5, 0.9]))
    tiles[:, :, int(draw.integers(8))] = False
    tiles[:, :, :, int(draw.integers(10))] = False
    keep = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :q_len, :k_len]
    if draw.random() < 0.6:
        keep = keep & torch.from_numpy(draw.random(keep.shape) < 0.9)
    mask = build_block_mask(masks.from_tensor(keep), q_len, k_len, 64, batch=2, heads=2)
    given = operands(2, 2, q_len, k_len, int(draw.choice([40, 56, 64, 80, 128])), group)
    grad_lse = torch.randn(2, 2, q_len) if draw.random() < 0.5 else None
    check(gradients, *given, mask, grad_lse, seed, int(draw.integers(1, 9)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("workers", range(1, 9))
def test_workers(workers, head_dim, gradients):
    """5 rows of 4 heads and 4 columns of 2: more units than slots."""
    mask = build_block_mask(masks.causal(), 290, 250, 64)
    check(gradients, *operands(1, 4, 290, 250, head_dim, 2), mask, None, workers, workers)


def test_a_gradient_of_the_log_sum_exp_of_rows_without_keys_is_not_looked_at(gradients):
    """NaN where a user's own code subtracts infinities."""
    mask = build_block_mask(some_planes(1, 3, 200, 130), 200, 130, 64, heads=3)
    grad_lse = torch.randn(1, 3, 200).where(mask.to_dense().any(-1), torch.nan)
    assert grad_lse.isnan().any(-1).all() and not grad_lse.isnan()[:, 0].all()
    check(gradients, *operands(1, 3, 200, 130, 64), mask, grad_lse)


def test_other_strides_and_scale(gradients):
    """What TMA cannot address is copied: odd strides and addresses, and the gradient of a sum."""
    draw = torch.Generator().manual_seed(1)
    packed = torch.randn(3, 1, 2, 130, 69, generator=draw).to(HALF)
    q, k, v = packed[..., 1:65]
    mask = build_block_mask(masks.causal(), 130, 130, 64)
    grad_out = torch.ones(1, dtype=HALF).expand(q.shape)
    grad_lse = torch.randn(130, 2, 1, generator=draw).permute(2, 1, 0)
    check(gradients, q, k, v, grad_out, mask, grad_lse, scale=0.3)
    of_models = torch.randn(2, 1, 130, 2, 64, generator=draw).to(HALF).transpose(2, 3)
    check(gradients, of_models[0], k, of_models[1], of_models[0], mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_tile_comes_as_often_as_it_is_needed(head_dim, gradients):
    """4 tile rows and 3 tile columns of one head, by one worker."""
    mask = build_block_mask(masks.dense(), 256, 192, 64)
    check(gradients, *operands(1, 1, 256, 192, head_dim), mask, workers=1)
    rows, cols = ([(0, 0, 64 * i, 0) for i in range(n)] for n in (4, 3))
    query, key = (Counter(zip(m.sources, m.loaded, strict=True)) for m in _both(gradients))
    own, met = ("q_desc", "grad_desc", "out_desc"), ("k_desc", "v_desc")
    assert query == Counter(
        {(name, at): 1 for name in own for at in rows}
        | {(name, at): 4 for name in met for at in cols}
    )
    stats = {("stat_desc", (row, 0)): 3 for row in range(4)}
    assert key == Counter(
        {(name, at): 1 for name in met for at in cols}
        | {(name, at): 3 for name in ("q_desc", "grad_desc") for at in rows}
        | stats
    )


def test_words_come_with_part_tiles_only(gradients):
    """3 part tiles, all of one bitmap, and 3 full ones."""
    mask = build_block_mask(masks.causal(), 192, 192, 64)
    check(gradients, *operands(1, 2, 192, 192, 64), mask, workers=2)
    for machine in _both(gradients):
        tiles = zip(machine.sources, machine.loaded, strict=True)
        assert [at for name, at in tiles if name == "word_desc"] == [(0, 0)] * 6


def _both(gradients):
    query, key = ("attention_hopper_query_kernel", "attention_hopper_key_kernel")
    return gradients.machines[query], gradients.machines[key]


def test_without_queries_or_keys_nothing_is_launched(monkeypatch):
    def launch(*arguments):
        raise AssertionError("launched")

    with launches(monkeypatch, launch):
        for batch, q_len, k_len in ((0, 70, 70), (1, 0, 70), (1, 70, 0)):
            mask = build_block_mask(masks.dense(), max(q_len, 1), max(k_len, 1), 64)
            q, k, v, grad_out = operands(batch, 2, q_len, k_len, 64)
            found = _directly(q, k, v, grad_out, mask)
            assert [t.shape for t in found] == [q.shape, k.shape, v.shape]
            assert all((t == 0).all() for t in found)


def _directly(q, k, v, grad_out, mask):
    rows = -(-q.shape[2] // 64)
    arrays = [mask.plane_map, mask.row_ptr[: rows + 1], mask.full_start[:rows], *mask.tensors[3:6]]
    from stof_compile.kernels.attention_hopper_backward import attention_hopper_backward

    return attention_hopper_backward(
        grad_out, None, q.as_subclass(OnGpu), k, v, q, q[..., 0].float(),
        [*arrays, mask.row_order[:rows]], *mask.key_lists, mask.gradient_fragments, 0.125,
    )  # fmt: skip


# -- refusals -------------------------------------------------------------------------------------


def test_what_the_launcher_refuses(monkeypatch):
    q, k, v, grad_out = operands(1, 2, 130, 130, 64)
    mask = build_block_mask(masks.causal(), 130, 130, 64)
    of_heads = build_block_mask(some_planes(1, 2, 130, 130), 130, 130, 64, heads=2)

    def refused(message, capability=(9, 0), **changes):
        given = {"q": q, "k": k, "v": v, "grad_out": grad_out, "mask": mask} | changes
        with (
            launches(monkeypatch, lambda *launch: pytest.fail("launched"), capability),
            pytest.raises(ValueError, match=message),
        ):
            hopper_gradients(**given)

    for head_dim in (32, 68, 136):
        names = "q", "k", "v", "grad_out"
        other = dict(zip(names, operands(1, 2, 130, 130, head_dim), strict=True))
        refused(f"head dims of 40 to 128 in steps of 8, not {head_dim}", **other)
    refused("share their mask", k=k[:, :1], v=v[:, :1], mask=of_heads)
    single = {"q": q.float(), "k": k.float(), "v": v.float(), "grad_out": grad_out.float()}
    refused("fp16 and bf16, not torch.float32", **single)
    refused("grad_out must be torch.float16", grad_out=grad_out.to(BRAIN))
    refused(r"grad_out must be .*\(1, 2, 130, 64\)", grad_out=grad_out[:, :, :129])
    refused("out must be", out=grad_out[..., :32])
    refused("dtype of q", k=k.to(BRAIN))
    refused("agree", k=k[..., :32], out=q, lse=q[..., 0].float())
    refused("bitmap must be torch.int32", fragments=mask.bitmap[None])
    longer = build_block_mask(masks.causal(), 200, 130, 64)
    refused("must cover 3 tile rows", mask_arrays=list(longer.tensors))
    for capability in ((8, 0), (10, 0)):
        refused("needs a Hopper GPU", capability)


def test_tensors_of_the_cpu_are_refused():
    from stof_compile.kernels.attention_hopper_backward import attention_hopper_backward

    q, k, v, grad_out = operands(1, 2, 70, 70, 64)
    mask = build_block_mask(masks.causal(), 70, 70, 64)
    rest = mask.tensors, *mask.key_lists, mask.gradient_fragments
    with pytest.raises(ValueError, match="run on a GPU, not on cpu"):
        attention_hopper_backward(grad_out, None, q, k, v, q, q[..., 0].float(), *rest, 0.125)
