"""The gathering kernel: how columns are packed, what it computes, what its operator promises.

The kernel runs in Triton's interpreter, against the reference in fp64; a GPU runs it compiled.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_cases import CASES, Case, check, check_training, gather, stored_mask
from close import assert_close

from stof_compile import masks
from stof_compile.attention import select
from stof_compile.attention.call import _bind_sparse
from stof_compile.attention.decision_table import packs_well
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.masks.bitmap import unpack
from stof_compile.ops import attention_rule


def scattered(length, every=7):
    """Columns that all queries see, far from each other, and the query's own."""
    columns = torch.arange(length) % every == 3
    keep = columns[None, :] | torch.eye(length, dtype=torch.bool)
    keep[min(2, length - 1)] = False
    return masks.from_tensor(keep)


# -- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("block", [(16, 16), (16, 64), (64, 32)])
def test_packed_columns_hold_the_mask(case, block):
    mask = stored_mask(replace(case, block=block))
    packed = mask.packed
    dense = torch.zeros(mask.planes, mask.rows * block[0], mask.cols * block[1], dtype=torch.bool)
    content = unpack(packed.pack_bitmap, *block)
    for number in range(mask.planes * mask.rows):
        plane, row = divmod(number, mask.rows)
        lines = slice(row * block[0], (row + 1) * block[0])
        for t in range(packed.pack_ptr[number], packed.pack_ptr[number + 1]):
            columns = packed.pack_columns[t].long()
            assert columns.max() < case.k_len
            tile = content[packed.pack_id[t]]
            seen = tile.any(0)
            assert columns[seen].unique().numel() == seen.sum()
            dense[plane, lines, columns[seen]] |= tile[:, seen]
        for t in range(mask.full_start[number], mask.row_ptr[number + 1]):
            at = int(mask.col_idx[t]) * block[1]
            dense[plane, lines, at : at + block[1]] = True
    found = dense[mask.plane_map.long()][..., : case.q_len, : case.k_len]
    assert torch.equal(found, mask.to_dense())
    assert mask.packed_tiles == packed.pack_id.numel() + mask.full_tiles


def test_scattered_columns_take_the_tiles_they_fill():
    mask = masks.build_block_mask(scattered(512, 32), 512, 512, 64)
    assert mask.col_idx.numel() == 64
    # 16 columns that all see, and the 62 others of the row's own
    assert mask.packed_tiles == 8 * 2
    assert mask.packed.pack_columns[0].diff().ge(0).sum() >= 62


def test_packing_in_chunks_is_the_same(monkeypatch):
    from stof_compile.masks import packed_columns

    def build():
        return masks.build_block_mask(scattered(300, 3), 300, 300, 16)

    whole = build().packed
    monkeypatch.setattr(packed_columns, "_CHUNK", 7)
    assert all(torch.equal(a, b) for a, b in zip(build().packed, whole, strict=True))


@pytest.mark.parametrize("lengths", [(0, 64), (64, 0), (33, 40)])
def test_nothing_to_pack(lengths):
    mask = masks.build_block_mask(masks.from_tensor(torch.zeros(lengths, dtype=torch.bool)),
                                  *lengths, 16)  # fmt: skip
    assert mask.packed_tiles == 0 and mask.packed.pack_columns.shape == (0, 16)
    assert mask.packed.pack_ptr.tolist() == [0] * (mask.rows + 1)


# -- kernel ---------------------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gather(case):
    from stof_compile.kernels.attention_gather import GatherConfig

    check(partial(gather, stored_mask(case).packed), GatherConfig(*case.block, 4, 2), case)


@pytest.mark.interpreter
@pytest.mark.parametrize("block", [(16, 64), (64, 32)])
def test_gather_tiles(block):
    from stof_compile.kernels.attention_gather import GatherConfig

    case = replace(CASES["padding"], bias="-inf", softcap=2.0, block=block, q_len=70, k_len=150)
    check(partial(gather, stored_mask(case).packed), GatherConfig(*block, 4, 2, heads_fast=1), case)


@pytest.mark.interpreter
def test_a_key_that_only_other_rows_see_spoils_nothing():
    """What fills a packed tile up is read, and may be no key of another row."""
    from stof_compile.kernels.attention_gather import GatherConfig, attention_gather_forward

    keep = torch.zeros(32, 40, dtype=torch.bool)
    keep[:16, 0], keep[16:, 21] = True, True
    mask = masks.build_block_mask(masks.from_tensor(keep), 32, 40, 16)
    q, k, v = torch.randn(3, 1, 1, 40, 16)
    v[..., 0, :] = float("nan")
    out, _ = attention_gather_forward(
        q[:, :, :32], k, v, mask.tensors, mask.packed, None, None, 1.0, 0.0,
        GatherConfig(16, 16), False,
    )  # fmt: skip
    assert out[0, 0, :16].isnan().all()
    torch.testing.assert_close(out[0, 0, 16:], v[0, 0, 21].expand(16, 16))


@pytest.mark.interpreter
def test_foreign_columns_are_refused():
    from stof_compile.kernels.attention_gather import GatherConfig, attention_gather_forward

    case = Case()
    mask = stored_mask(case)
    q, k, v = torch.randn(3, 1, 2, 57, 16)
    other = stored_mask(replace(case, block=(16, 32))).packed
    with pytest.raises(ValueError, match="packed columns must be those of the mask"):
        attention_gather_forward(
            q[:, :, :33], k, v, mask.tensors, other, None, None, 1.0, 0.0, GatherConfig(16, 16),
            False,
        )  # fmt: skip


# -- operator -------------------------------------------------------------------------------------


def attend(mask, config, lists=None):
    lists = (None, None) if lists is None else lists

    def call(q, k, v):
        return torch.ops.stof.attention_gather(
            q, k, v, *mask.tensors, None, None, 0.125, 0.0, 0, [], list(config),
            lists[0] is not None, *lists, *mask.packed,
        )[0]  # fmt: skip

    return call


@pytest.mark.interpreter
def test_gradients_are_those_of_the_mask():
    from stof_compile.kernels.attention_gather import GatherConfig

    mask = masks.build_block_mask(scattered(50), 50, 50, 16)
    leaves = [torch.randn(2, 2, 50, 16).requires_grad_() for _ in range(3)]
    check_training(attend(mask, GatherConfig(16, 16)), leaves, mask.to_dense(), slice(None))


def problem(spec, length, **facts):
    shape, strides = (1, 2, length, 16), (2 * length * 16, 16, 32, 1)
    meta = TensorMeta(shape, strides, torch.float32)
    return AttentionProblem(meta, meta, meta, spec, 0, torch.device("cpu"), 0.125, **facts)


@pytest.mark.interpreter
@pytest.mark.parametrize("facts", [{}, {"training": True}, {"padding": True}], ids=str)
def test_a_call_of_a_model(facts):
    from stof_compile.kernels.attention_gather import GatherConfig

    spec = scattered(50)
    bound = _bind_sparse(problem(spec, 50, **facts), "gather", tuple(GatherConfig(16, 16)))
    assert len(bound.buffers) == (13 if "training" in facts else 11)
    keep = masks.build_block_mask(spec, 50, 50, 16).to_dense()
    key_keep = torch.arange(50)[None] < 44 if "padding" in facts else None
    if key_keep is not None:
        keep = keep & key_keep

    def call(q, k, v):
        return bound.run(q, k, v, key_keep, None, bound.buffers)

    leaves = [torch.randn(1, 2, 50, 16).requires_grad_() for _ in range(3)]
    check_training(call, leaves, keep, slice(None))


def test_gathering_is_timed_where_columns_are_scattered():
    def worth(spec, config=(64, 64)):
        return packs_well(problem(spec, 512), config)

    assert worth(scattered(512, 16))
    assert not worth(scattered(512, 2))  # half of the columns, and the row's own
    bands = (masks.causal(), masks.sliding_window(22), masks.dense())
    assert not any(worth(spec) for spec in (*bands, masks.bigbird(64, 64, 0.1)))
    # on an H200 faster than the block-wise kernel's floor, and twice as slow as that kernel
    assert packs_well(problem(masks.fixed(128, 1), 2048), (64, 64))
    bigbird = masks.bigbird(22, 22, 0.1)
    assert not any(worth(bigbird, (rows, 64)) for rows in (16, 32, 64, 128))
    # each row's own keys: few columns of low tiles, most of tall ones
    keep = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) < 0.015
    assert worth(masks.from_tensor(keep), (16, 64)) and not worth(masks.from_tensor(keep))


@pytest.mark.interpreter
def test_the_benchmark_sweeps_it(bench_path):
    import sweep
    from cases import Cell

    cell = Cell(1, 96, "fixed", 32, 1, heads=2, head_dim=16, dtype="float32")
    mask = masks.build_block_mask(masks.fixed(32, 1), 96, 96, (16, 16))
    axes = {"block_q": ["16"], "block_k": ["16"]}
    listed = sweep.trials(cell, "gather", axes, torch.device("cpu"))
    (trial,) = (t for t in listed if sweep.fits(t, "gather", mask))
    leaves = [torch.randn(1, 2, 96, 16).requires_grad_() for _ in range(3)]
    attend = sweep.bind("gather", trial, mask, 0.125, 2)
    check_training(attend, leaves, mask.to_dense(), slice(None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_on_a_gpu(head_dim, dtype):
    """Forward and gradients of every config that is offered, ragged lengths, several streams of
    columns."""
    from stof_compile.kernels.attention_gather import configs

    capability = torch.cuda.get_device_capability()
    length, heads = 1000, 4
    for config in configs(head_dim, dtype, capability):
        mask = masks.build_block_mask(
            scattered(length, 23), length, length, config[:2], device="cuda"
        )
        leaves = [
            torch.randn(2, length, heads, head_dim, device="cuda", dtype=dtype)
            .transpose(1, 2)
            .requires_grad_()
            for _ in range(3)
        ]
        keep = mask.to_dense()
        lists = mask.key_lists if config.block_q >= 16 else None
        check_training(attend(mask, config, lists), leaves, keep, (slice(0, 1), slice(1, 3)))


@pytest.mark.gpu
def test_a_rule_whose_lengths_come_with_the_call():
    spec = masks.fixed(64, 1)
    q, k, v = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.float16)
    out, _ = attention_rule(
        q, k, v, list(spec.tensors()), spec.to_json(), None, None, None, 0.125, 0.0, 0, "gather",
        False,
    )  # fmt: skip
    keep = masks.build_block_mask(spec, 300, 300, 64, device="cuda").to_dense()
    wide = [t.double() for t in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=keep, scale=0.125)
    assert_close(out, wanted, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_it_is_forced_and_measured_on_a_gpu(training):
    from stof_compile.kernels.attention_gather import configs

    import stof_compile
    from stof_compile.attention.trial import measure_candidate
    from stof_compile.budget import Budget
    from stof_compile.options import StofOptions

    spec = scattered(2048, 64)
    leaves = [
        torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.float16, requires_grad=training)
        for _ in range(3)
    ]
    keep = masks.build_block_mask(spec, 2048, 2048, 64, device="cuda").to_dense()
    with stof_compile.attention_kernel("gather"):
        out = stof_compile.sparse_attention(*leaves, spec)
    wide = [t.detach().double() for t in leaves]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=keep)
    empty = ~keep.any(-1, keepdim=True)
    assert_close(out, wanted.masked_fill(empty, 0), torch.float16)
    meta = TensorMeta(tuple(leaves[0].shape), leaves[0].stride(), torch.float16)
    asked = AttentionProblem(
        meta, meta, meta, spec, 0, torch.device("cuda"), 0.125, training=training
    )
    generator = torch.Generator("cuda").manual_seed(0)
    for config in configs(64, torch.float16, torch.cuda.get_device_capability()):
        found = measure_candidate(asked, "gather", tuple(config), generator)
        assert found.status == "measured", found
    plan = select.choose(asked, StofOptions(), None, Budget(60))
    tried = [c for c in plan.candidates if c.kernel == "gather"]
    assert bool(tried) != training  # gradients of it are there by name only


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases_on_a_gpu(case):
    from sanitize_case import on_gpu
    from stof_compile.kernels.attention_gather import GatherConfig

    block = (32, 32) if case.dtype == torch.float32 else (64, 64)
    case = replace(case, block=block)
    packed = tuple(stored_mask(case).packed)
    check(partial(on_gpu(gather), packed), GatherConfig(*block, 4, 2), case)


# -- compiled -------------------------------------------------------------------------------------


def compiled(target, head_dim, dtype, config, **changes):
    from compiling import NAMES, attention_constants, compile_kernel
    from stof_compile.kernels.gather_kernel import attention_gather_kernel
    from stof_compile.kernels.limits import PRECISIONS

    constants = attention_constants(head_dim, *config[:2], EVEN_Q=True) | changes
    constants["PRECISION"] = PRECISIONS[config.tf32]
    names = attention_gather_kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    return compile_kernel(
        attention_gather_kernel, target, NAMES[dtype], constants, config.num_warps,
        config.num_stages,
    )  # fmt: skip


def offered(target, head_dim, dtype):
    from compiling import offered_on
    from stof_compile.kernels import attention_gather

    return offered_on(target, head_dim, dtype, attention_gather)


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, "gfx942"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (64, torch.float32)]
)
def test_offered_configs_fit(target, head_dim, dtype):
    """All of them at head dim 64 in half precision, else the first."""
    from compiling import assert_fits, needs

    configs = offered(target, head_dim, dtype)
    for config in configs if dtype == torch.float16 else configs[:1]:
        found = compiled(target, head_dim, dtype, config)
        assert_fits(needs(found, target), target)


@pytest.mark.compile_only
def test_gathered_keys_are_loaded_ahead():
    from compiling import needs

    found = compiled(90, 64, torch.float16, offered(90, 64, torch.float16)[0])
    text = found.asm["ttgir"]
    assert "async_copy_global_to_local" in text and "warp_group_dot" in text
    assert needs(found, 90).registers <= 128  # four programs share a multiprocessor
