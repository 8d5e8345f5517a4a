"""The Hopper kernel of one tile row at a time on the CPU: units, lists, ring, slots and the queue,
with its partitions in any order, against the reference."""

import numpy as np
import pytest
import torch

from stof_compile import masks
from stof_compile.masks.block_mask import build_block_mask

pytest.importorskip("triton.experimental.gluon")

import hopper_attention
from close import assert_close
from gluon_threads import run_kernel
from gluon_values import value
from hopper_attention import check, launches, operands, short_rules
from stof_compile.kernels import (
    hopper_kernel,
    hopper_loads,
    hopper_short,
    hopper_transfers,
    hopper_units,
)
from stof_compile.kernels.reference import attention_reference

MODULES = hopper_kernel, hopper_loads, hopper_short, hopper_transfers, hopper_units


# -- registers ------------------------------------------------------------------------------------


def weighed_and_both_scaled(s, offset, total, acc, acc_tail, mult, dtype):
    p, own, total, alpha = hopper_attention.weighed_rows(s, offset, total, mult, dtype)
    return p, own, total, value(acc * alpha[:, :1]), value(acc_tail * alpha[:, :1])


INSTEAD = {
    **hopper_attention.INSTEAD,
    "weighed_and_both_scaled": weighed_and_both_scaled,
    "spread": lambda own, width, layout: own[:, :1],
}


# -- a call ---------------------------------------------------------------------------------------


@pytest.fixture
def attend(monkeypatch):
    """``attend(seed, workers, q, k, v, mask, **how)``: attention_hopper_forward on the CPU, long
    rows put together by ``merged``."""

    def call(
        seed, workers, q, k, v, mask, programs=4, stages=2, pieces=1, return_lse=True,
        heavy_rows=None, shifted=False,
    ):  # fmt: skip
        heavy_rows = mask.heavy_rows if heavy_rows is None else heavy_rows
        parts = []

        def launch(kernel, grid, arguments, constants, options):
            if kernel is not hopper_kernel.attention_hopper_kernel:
                return  # merges what came in pieces
            out, lse = arguments[3].base, arguments[13]
            parts.extend(arguments[-2:] if constants["SPLIT"] else ())
            for tensor in (out, *([lse] if return_lse else []), *parts):
                tensor.fill_(torch.nan)  # and whatever is not NaN was written before
            given = arguments, constants, seed
            run_kernel(monkeypatch, kernel, MODULES, INSTEAD, workers, *given)

        numbers = programs, stages, heavy_rows, pieces, mask.uneven, return_lse, shifted
        with launches(monkeypatch, launch, workers, seed):
            found = hopper_attention.hopper_attention(q, k, v, mask, *numbers)
        if parts:
            merged(*found, *parts, mask)
        return found

    return call


def merged(out, lse, values, stats, mask):
    """What ``merge_rows_kernel`` makes of the pieces, in fp64, into rows that nobody wrote."""
    batch, heads, q_len, head_dim = out.shape
    plane_map, order = mask.tensors[0], mask.tensors[6].view(mask.planes, mask.rows)
    for number in range(batch * heads):
        b, h = divmod(number, heads)
        plane = int(plane_map.expand(batch, heads)[b, h])
        for slot in range(values.shape[1]):
            first = int(order[plane, slot]) * 64
            rows = slice(first, min(first + 64, q_len))
            count = rows.stop - first
            average = values[number, slot, :, :count, :head_dim].double()
            top, total = stats[number, slot, :, :, :count].double().unbind(1)
            assert not average.isnan().any() and not top.isnan().any()
            log_sums = top + total.log()
            whole = log_sums.logsumexp(0)
            share = (log_sums - whole.nan_to_num(neginf=0)).exp()
            assert out[b, h, rows].isnan().all(), "a row in pieces is written by the merge only"
            out[b, h, rows] = (share[..., None] * average).sum(0).to(out.dtype)
            if lse.numel():
                lse[b, h, rows] = whole.float()


def rules():
    draw = torch.Generator().manual_seed(3)
    keep = torch.rand(2, 3, 330, 400, generator=draw) < 0.3
    keep[:, 1] = False  # a head without keys
    keep[:, :, 192:256, 64:192] = True  # full tiles
    keep[:, 0, 64:128, :200] = False  # a tile row of part tiles only
    return {
        "causal": masks.causal(),
        "dense": masks.dense(),
        "sliding": masks.sliding_window(40),
        "longformer": masks.longformer(window=40, global_tokens=20),
        "bigbird": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
        "tiles only": masks.block_diagonal(64),
        "planes": masks.from_tensor(keep),
    }


@pytest.mark.parametrize("rule", rules())
@pytest.mark.parametrize(
    ("head_dim", "programs", "stages", "group"),
    [
        (40, 4, 2, 1),
        (64, 3, 3, 3),
        (64, 1, 1, 1),
        (80, 2, 3, 1),
        (128, 3, 1, 1),
        (152, 2, 2, 1),
        (192, 2, 1, 1),
        (256, 2, 1, 3),
    ],
    ids=str,
)
def test_results(attend, rule, head_dim, programs, stages, group):
    q, k, v = operands(2, 3, 330, 400, head_dim, group)
    mask = build_block_mask(rules()[rule], 330, 400, 64, batch=2, heads=3)
    check(attend, q, k, v, mask, programs=programs, stages=stages)


@pytest.mark.parametrize("pieces", [2, 3, 7])
@pytest.mark.parametrize("rule", ["longformer", "bigbird", "planes", "dense"])
@pytest.mark.parametrize("heavy_rows", [1, 3, 99])
def test_rows_in_pieces(attend, rule, pieces, heavy_rows):
    q, k, v = operands(2, 3, 330, 400, 64)
    mask = build_block_mask(rules()[rule], 330, 400, 64, batch=2, heads=3)
    check(attend, q, k, v, mask, pieces=pieces, heavy_rows=heavy_rows, return_lse=pieces != 7)


@pytest.mark.parametrize("rule", short_rules())
@pytest.mark.parametrize(
    ("head_dim", "programs", "stages", "group"),
    [
        (40, 4, 2, 1),
        (64, 3, 3, 3),
        (64, 1, 1, 1),
        (80, 2, 3, 1),
        (128, 3, 1, 1),
        (128, 2, 2, 1),
    ],
    ids=str,
)
def test_shifted_tiles(attend, rule, head_dim, programs, stages, group):
    q, k, v = operands(2, 3, 330, 400, head_dim, group)
    mask = build_block_mask(short_rules()[rule], 330, 400, 64, batch=2, heads=3)
    assert (mask.shifted_share < 1) == (rule != "nothing to shift")
    check(attend, q, k, v, mask, programs=programs, stages=stages, shifted=True)


@pytest.mark.parametrize("pieces", [2, 3, 7])
@pytest.mark.parametrize("rule", ["longformer", "bigbird", "planes", "one short tile"])
@pytest.mark.parametrize("heavy_rows", [1, 3, 99])
def test_shifted_tiles_of_rows_in_pieces(attend, rule, pieces, heavy_rows):
    """With as many pieces as tiles the short one is all of a piece."""
    q, k, v = operands(2, 3, 330, 400, 64)
    mask = build_block_mask(short_rules()[rule], 330, 400, 64, batch=2, heads=3)
    check(
        attend, q, k, v, mask, pieces=pieces, heavy_rows=heavy_rows, return_lse=pieces != 7,
        shifted=True,
    )  # fmt: skip


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_no_piece_reaches_into_tiles_that_are_dropped(attend, pieces):
    """A short tile that is all of a piece would: 64 keys of it are loaded."""
    keep = torch.zeros(1, 1, 512, 400, dtype=torch.bool)
    keep[..., :64, 16:30] = keep[..., :64, 200:260] = keep[..., 64:, 330:340] = True
    mask = build_block_mask(masks.from_tensor(keep), 512, 400, 64)
    assert mask.heavy_rows == 1 and mask.shifted_share < 1
    assert int(mask.shifted_tensors[2][0]) >= 0, "a heavy row has no short tile"
    q, k, v = operands(1, 1, 512, 400, 64)
    dropped = torch.zeros(400, dtype=torch.bool)
    dropped[64:192] = True
    broken = [t.masked_fill(dropped[:, None], torch.nan) for t in (k, v)]
    out, _ = attend(0, 3, q, *broken, mask, pieces=pieces, shifted=True)
    expected = attention_reference(q.double(), k.double(), v.double(), keep, None, None, 0.125)
    assert_close(out, expected, torch.float16)


@pytest.mark.parametrize("workers", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_and_any_number_of_workers(attend, seed, workers):
    """40: more than there are units, so that some are asked for in vain only."""
    draw = np.random.default_rng(seed)
    q, k, v = operands(1, 4, int(draw.integers(1, 400)), int(draw.integers(1, 400)), 64)
    rule = list(rules())[int(draw.integers(0, 6))]
    mask = build_block_mask(rules()[rule], q.shape[2], k.shape[2], 64, batch=1, heads=4)
    more = {"heavy_rows": int(draw.integers(0, 3)), "pieces": int(draw.integers(1, 4))}
    more["shifted"] = bool(draw.integers(0, 2))
    check(attend, q, k, v, mask, seed, workers, **more)
