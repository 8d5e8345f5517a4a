"""The Hopper kernel of two tile rows at a time on the CPU: loads, lists, barriers and turns, with
its partitions in any order, against the reference."""

import numpy as np
import pytest
import torch

from stof_compile import masks
from stof_compile.masks.block_mask import build_block_mask

pytest.importorskip("triton.experimental.gluon")

import hopper_attention
from gluon_threads import run_kernel
from gluon_values import OnGpu, value
from hopper_attention import check, launches, operands
from stof_compile.kernels import (
    attention_hopper,
    hopper_pair_kernel,
    hopper_pair_loads,
    hopper_units,
)

# -- registers ------------------------------------------------------------------------------------


def weighed_halves(left, right, offset, total, mult, dtype):
    p, *told = hopper_attention.weighed(np.concatenate([left, right], 1), offset, total, mult)
    return value(p[:, :64]), value(p[:, 64:]), *told


INSTEAD = {
    **hopper_attention.INSTEAD,
    "weighed_halves": weighed_halves,
    "column_halves": lambda s: (s[:, :64], s[:, 64:]),
}
MODULES = hopper_pair_kernel, hopper_pair_loads, hopper_units


# -- a call ---------------------------------------------------------------------------------------


@pytest.fixture
def attend(monkeypatch):
    """``attend(seed, workers, q, k, v, mask, **how)``: attention_hopper_forward on the CPU."""
    launched = []

    def call(seed, workers, q, k, v, mask, stages=2, heavy_rows=0, uneven=False, return_lse=True):
        def launch(kernel, programs, arguments, constants, options):
            out, lse = arguments[3].base, arguments[5]
            for tensor in (out, lse) if return_lse else (out,):
                tensor.fill_(torch.nan)  # and whatever is not NaN was written before
            given = arguments, constants, seed
            machine = run_kernel(monkeypatch, kernel, MODULES, INSTEAD, programs, *given)
            launched.append((machine, constants))

        numbers = 1, stages, heavy_rows, 1, uneven, return_lse
        with launches(monkeypatch, launch, workers, seed):
            return hopper_attention.hopper_attention(q, k, v, mask, *numbers)

    call.launched = launched
    return call


def rules():
    draw = torch.Generator().manual_seed(3)
    blocks = torch.rand(2, 3, 6, 4, generator=draw) < 0.4
    blocks[:, 1] = False  # a head without keys
    planes = blocks.repeat_interleave(64, 2).repeat_interleave(128, 3)[..., :330, :400]
    planes = planes & (torch.rand(planes.shape, generator=draw) < 0.8) | blocks[..., :1, :1]
    return {
        "causal": masks.causal(),
        "dense": masks.dense(),
        "sliding": masks.sliding_window(40),
        "bigbird": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
        "tiles only": masks.block_diagonal(128),
        "planes": masks.from_tensor(planes),
    }


@pytest.mark.parametrize("rule", rules())
@pytest.mark.parametrize(
    ("head_dim", "stages", "group"), [(40, 4, 1), (64, 2, 3), (104, 2, 1)], ids=str
)
def test_results(rule, head_dim, stages, group, attend):
    q, k, v = operands(2, 3, 330, 400, head_dim, group)
    mask = build_block_mask(rules()[rule], 330, 400, (64, 128), batch=2, heads=3)
    check(attend, q, k, v, mask, stages=stages, uneven=mask.uneven, heavy_rows=mask.heavy_rows)
    ((machine, constants),) = attend.launched
    assert machine.programs == 3
    assert constants["STAGES"] == (4 if head_dim == 40 else 2)
    assert constants["HAS_PART"] == mask.has_part


@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_any_lists(seed, attend):
    """Tiles of one row, of the other, of both and of none; more units than workers, and fewer."""
    draw = np.random.default_rng(seed)
    q_len, k_len = int(draw.integers(1, 600)), int(draw.integers(1, 900))
    tiles = torch.from_numpy(draw.random((1, 2, 10, 8)) < draw.choice([0.2, 0.5, 0.9]))
    tiles[:, :, int(draw.integers(10))] = False
    keep = tiles.repeat_interleave(64, 2).repeat_interleave(128, 3)[..., :q_len, :k_len]
    if draw.random() < 0.5:
        keep = keep & torch.from_numpy(draw.random(keep.shape) < 0.9)
    mask = build_block_mask(masks.from_tensor(keep), q_len, k_len, (64, 128), batch=2, heads=2)
    check(
        attend, *operands(2, 2, q_len, k_len, 64), mask, seed, int(draw.integers(1, 9)),
        stages=int(draw.choice([2, 4])), heavy_rows=int(draw.integers(0, 4)),
        uneven=bool(draw.integers(2)), return_lse=bool(draw.integers(2)),
    )  # fmt: skip


def test_keys_and_values_come_once_for_both_rows(attend):
    """Queries, keys and values of 5 tile rows and 4 tile columns; the lone row comes first."""
    mask = build_block_mask(masks.dense(), 320, 512, (64, 128))
    check(attend, *operands(1, 1, 320, 512, 64), mask, workers=1)
    ((machine, _),) = attend.launched
    tiles = [(0, 0, row, 0) for row in (0, 128, 256, 384) for _ in "kv"]
    queries = [[(0, 0, row, 0), (0, 0, row + 64, 0)] for row in (256, 0, 128)]
    assert machine.loaded == [*queries[0], *tiles, *queries[1], *tiles, *queries[2], *tiles]


@pytest.mark.parametrize("seed", range(4))
def test_the_groups_ask_for_scores_in_turns(seed, attend):
    mask = build_block_mask(masks.dense(), 512, 640, (64, 128))
    check(attend, *operands(1, 3, 512, 640, 64), mask, seed, workers=2)
    ((machine, _),) = attend.launched
    for program in range(2):
        asked = [one.number for one in machine.scores if one.program == program]
        assert len(asked) % 10 == 0 and asked == [0, 1] * (len(asked) // 2)


def test_what_the_launcher_refuses_on_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    wide = build_block_mask(masks.causal(), 128, 128, (64, 128))
    q, k, v = operands(1, 1, 128, 128, 128)

    def refused(message, mask=wide, programs=1, stages=2, scale=0.125, arrays=None, k=k):
        with pytest.raises(ValueError, match=message):
            attention_hopper.attention_hopper_forward(
                q.as_subclass(OnGpu), k, v, arrays or list(mask.hopper_tensors), scale, programs,
                stages, 0, 1, False, False,
            )  # fmt: skip

    refused(r"tiles of 64x128 programs must be one of \[1\], not 2", programs=2)
    narrow = build_block_mask(masks.causal(), 128, 128, 64)
    refused(r"tiles of 64x64 programs must be one of \[1, 2, 3, 4\], not 5", narrow, 5)
    refused("stages must be at least 1, not 0", stages=0)
    refused("positive scale", scale=-0.125)
    refused("bitmap must be torch.int32", arrays=list(wide.tensors))
    refused("agree", k=k[..., :32])
    long = build_block_mask(masks.causal(), 192, 128, (64, 128))
    refused("row", long)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    refused("needs a Hopper GPU")
