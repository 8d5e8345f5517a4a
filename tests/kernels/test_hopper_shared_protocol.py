"""The Hopper kernel of consumers that share their keys on the CPU: loads, lists, kinds, rings and
slots, with its partitions in any order, against the reference."""

import numpy as np
import pytest
import torch

from stof_compile import masks
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.hopper_arrays import HOPPER_TILES

pytest.importorskip("triton.experimental.gluon")

import hopper_attention
from gluon_threads import run_kernel
from gluon_values import OnGpu, value
from hopper_attention import check, launches, operands, sides_of_programs
from stof_compile.kernels import (
    attention_hopper,
    hopper_forms,
    hopper_shared_kernel,
    hopper_shared_loads,
    hopper_units,
)
from stof_compile.kernels.bound_launch import Descriptor

# -- registers ------------------------------------------------------------------------------------


def weighed_and_wide_scaled(s, offset, total, acc, mult, dtype):
    p, own, total, alpha = hopper_attention.weighed(s, offset, total, mult)
    return value(p), own, total, value(acc * alpha[:, :1])


INSTEAD = {
    **hopper_attention.INSTEAD,
    "weighed_and_wide_scaled": weighed_and_wide_scaled,
}
MODULES = hopper_shared_kernel, hopper_shared_loads, hopper_units
TILE = (192, 64)
TILES = {72: TILE, 104: TILE, 128: TILE, **dict.fromkeys((40, 64, 200, 256), (128, 64))}


# -- a call ---------------------------------------------------------------------------------------


@pytest.fixture
def attend(monkeypatch):
    """``attend(seed, workers, q, k, v, mask, **how)``: attention_hopper_forward on the CPU."""
    launched = []

    def call(seed, workers, q, k, v, mask, heavy_rows=None, return_lse=True, pieces=1):
        heavy_rows = mask.heavy_rows if heavy_rows is None else heavy_rows

        def launch(kernel, programs, arguments, constants, options):
            assert options["maxnreg"] == form.registers
            assert options["num_warps"] == 4
            out, lse = arguments[3].base, arguments[5]
            for tensor in (out, lse) if return_lse else (out,):
                tensor.fill_(torch.nan)  # and whatever is not NaN was written before
            given = arguments, constants, seed
            machine = run_kernel(monkeypatch, kernel, MODULES, INSTEAD, programs, *given)
            launched.append((machine, constants))

        form = hopper_forms.shared_form(mask.block_q, q.shape[-1])
        numbers = form.programs, form.key_tiles, heavy_rows, pieces, mask.uneven, return_lse
        with launches(monkeypatch, launch, workers, seed):
            return hopper_attention.hopper_attention(q, k, v, mask, *numbers)

    call.launched = launched
    return call


def rules():
    draw = torch.Generator().manual_seed(3)
    blocks = torch.rand(2, 3, 8, 5, generator=draw) < 0.4
    blocks[:, 1] = False  # a head without keys
    planes = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :450, :300]
    planes = planes & (torch.rand(planes.shape, generator=draw) < 0.8) | blocks[..., :1, :1]
    return {
        "causal": masks.causal(),
        "dense": masks.dense(),
        "sliding": masks.sliding_window(40),
        "bigbird": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
        "tiles only": masks.from_tensor(torch.ones(1, 1, 384, 256, dtype=torch.bool)),
        "planes": masks.from_tensor(planes),
    }


@pytest.mark.parametrize("rule", rules())
@pytest.mark.parametrize(
    ("head_dim", "group"), [(40, 1), (64, 3), (72, 3), (104, 1), (200, 1), (256, 3)], ids=str
)
def test_results(rule, head_dim, group, attend):
    lengths = (384, 256) if rule == "tiles only" else (450, 300)
    q, k, v = operands(2, 3, *lengths, head_dim, group)
    mask = build_block_mask(rules()[rule], *lengths, TILES[head_dim], batch=2, heads=3)
    check(attend, q, k, v, mask)
    ((machine, constants),) = attend.launched
    assert machine.programs == (6 if head_dim <= 64 else 3)
    assert constants["HAS_PART"] == mask.has_part == (rule != "tiles only")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_any_order_and_any_lists(seed, head_dim, attend):
    """Tiles of some consumers, of all and of none, so that some run ahead of the others; more units
    than workers, and fewer."""
    draw = np.random.default_rng(seed)
    q_len, k_len = int(draw.integers(1, 900)), int(draw.integers(1, 900))
    tiles = torch.from_numpy(draw.random((1, 2, 15, 15)) < draw.choice([0.1, 0.3, 0.8]))
    tiles[:, :, int(draw.integers(15))] = False
    keep = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :q_len, :k_len]
    if draw.random() < 0.5:
        keep = keep & torch.from_numpy(draw.random(keep.shape) < 0.9)
    tile = TILES[head_dim]
    mask = build_block_mask(masks.from_tensor(keep), q_len, k_len, tile, batch=1, heads=2)
    check(
        attend, *operands(1, 2, q_len, k_len, head_dim), mask, seed, int(draw.integers(1, 5)),
        heavy_rows=int(draw.integers(0, 4)), return_lse=bool(draw.integers(2)),
    )  # fmt: skip


def test_keys_and_values_come_once_for_all_rows(attend):
    """From the last column on, whether a tile is full or not."""
    mask = build_block_mask(masks.causal(), 384, 384, TILE)
    check(attend, *operands(1, 1, 384, 384, 128), mask, workers=1)
    ((machine, _),) = attend.launched
    below = [(0, 0, row, 0) for row in range(320, -1, -64) for _ in "kv"]
    queries = [(0, 0, row, 0) for row in range(0, 384, 64)]
    tiles = [at for at in machine.loaded if len(at) == 4]
    assert tiles == [*queries[3:], *below, *queries[:3], *below[6:]]
    words = [at for at in machine.loaded if len(at) == 2]
    assert [at for _, at in words] == [256, 128, 0] * 2  # of the consumer on the diagonal


def test_numbers_of_many_different_tiles(attend):
    draw = torch.Generator().manual_seed(4)
    keep = torch.rand(1, 7, 576, 832, generator=draw) < 0.5
    keep[:, :, :64, 64:] = False  # nothing of most tiles for the first consumer
    mask = build_block_mask(masks.from_tensor(keep), 576, 832, TILE, batch=1, heads=7)
    assert mask.bitmap.shape[0] > 256
    check(attend, *operands(1, 7, 576, 832, 72), mask, workers=4, return_lse=False)


@pytest.mark.parametrize("side", [0, 1])
def test_heavy_rows_come_first_and_are_not_cut(attend, side):
    """Of a side of the L2 cache; the first unit is that of the worker's number."""
    seed = next(seed for seed in range(64) if sides_of_programs(seed)[0] == side)
    mask = build_block_mask(masks.longformer(20, 30), 570, 570, TILE, batch=1, heads=4)
    given = operands(1, 4, 570, 570, 128)
    check(attend, *given, mask, seed=seed, workers=1, heavy_rows=1, pieces=3)
    ((machine, constants),) = attend.launched
    queries = dict.fromkeys(
        (at[1], at[2] // 192)
        for at, source in zip(machine.loaded, machine.sources, strict=True)
        if source == machine.sources[0]
    )
    first = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    second = [(2, 0), (3, 0), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert list(queries) == (first[:1] + second + first[1:] if side else first + second)
    assert "SPLIT" not in constants


@pytest.mark.parametrize("tile", HOPPER_TILES, ids=str)
def test_a_launch_again_has_the_arguments_of_the_first(tile, monkeypatch):
    first, again = [], []

    class Again:
        here = True

        def __call__(self, *arguments):
            again.append(len(arguments))

    def launch(kernel, programs, arguments, constants, options):
        first.append(sum(isinstance(a, (torch.Tensor, Descriptor)) for a in arguments))
        return Again()

    monkeypatch.setattr(attention_hopper, "_known", {})
    mask = build_block_mask(masks.causal(), 200, 200, tile)
    wide = tile == TILES[256]
    q, k, v = operands(1, 1, 200, 200, 256 if wide else 128)
    with launches(monkeypatch, launch, 2):
        for _ in range(2):
            numbers = 1, 4 if tile == TILE else 2, 0, 1, False, False
            hopper_attention.hopper_attention(q, k, v, mask, *numbers)
    assert again == first


def test_what_the_launcher_refuses_on_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def refused(message, length=300, programs=1, stages=4, head_dim=128):
        q, k, v = operands(1, 1, 300, 300, head_dim)
        mask = build_block_mask(masks.causal(), length, 300, TILE)
        with pytest.raises(ValueError, match=message):
            attention_hopper.attention_hopper_forward(
                q.as_subclass(OnGpu), k, v, list(mask.hopper_tensors), 0.125, programs, stages,
                0, 1, False, False,
            )  # fmt: skip

    refused(r"tiles of 192x64 programs must be one of \[1\], not 2", programs=2)
    refused(r"tiles of 192x64 stages must be one of \(4,\), not 2", stages=2)
    refused("tiles of 192x64 heads have 65 to 128 dims, not 64", head_dim=64)
    refused("cover 2 tile rows of 192", length=900)
