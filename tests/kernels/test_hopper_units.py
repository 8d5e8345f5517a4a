"""Units of work of the Hopper attention kernels: their order, and workers with many of them, whose
slots and stages are used again."""

from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks
from stof_compile.attention.call import mask_arrays
from stof_compile.masks.block_mask import build_block_mask

HALF, HOPPER = torch.float16, (9, 0)


@pytest.fixture
def places(monkeypatch):
    """``places(batch, heads, rows, heavy_rows, pieces, last_heads)``: (batch times heads, slot) of
    every unit, as the kernel's own function has it."""
    pytest.importorskip("triton.experimental.gluon")
    from stof_compile.kernels import hopper_units

    monkeypatch.setattr(hopper_units, "gl", SimpleNamespace(maximum=max))

    def call(batch, heads, rows, heavy_rows=0, pieces=1, last_heads=1):
        planes = batch * heads
        numbers = planes, heads, rows, heavy_rows, heavy_rows * pieces * planes, last_heads
        found = []
        for number in range(planes * (rows + heavy_rows * (pieces - 1))):
            b, h, slot = hopper_units.unit_place.fn(number, *numbers)
            assert 0 <= b < batch and 0 <= h < heads
            found.append((b * heads + h, slot))
        return found

    return call


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 3, 4])
@pytest.mark.parametrize("last_heads", [1, 2, 6])
@pytest.mark.parametrize("heavy_rows", [0, 1, 3, 7])
def test_every_row_is_a_unit_once(heavy_rows, last_heads, pieces, places):
    found = places(2, 3, 7, heavy_rows, pieces, last_heads)
    heavy, light = found[: 6 * heavy_rows * pieces], found[6 * heavy_rows * pieces :]
    # the heaviest rows of all heads first, each in its pieces
    assert heavy == [(bh, slot) for slot in range(heavy_rows * pieces) for bh in range(6)]
    # then head by head, but for the last ones, which go row by row
    whole = [(bh, slot) for bh in range(6 - last_heads) for slot in range(heavy_rows, 7)]
    mixed = [(bh, slot) for slot in range(heavy_rows, 7) for bh in range(6 - last_heads, 6)]
    assert light == whole + mixed


def test_one_row_and_one_head(places):
    assert places(1, 1, 1) == [(0, 0)]
    assert places(1, 2, 1, 1, 1, 2) == [(0, 0), (1, 0)]


# -- results --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    ("head_dim", "programs", "stages", "keys"),
    [
        (64, 4, 2, 64), (96, 3, 2, 64), (96, 2, 3, 64), (104, 3, 1, 64), (128, 2, 2, 64),
        (128, 3, 1, 64), (64, 1, 2, 128), (104, 1, 2, 128), (128, 1, 2, 128),
    ],
)  # fmt: skip
def test_gpu_workers_take_many_units(head_dim, programs, stages, keys, pieces):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    device = torch.device("cuda")
    batch, heads, length, checked = 8, 32, 1100, [0, 7]
    keep = torch.rand(1, 1, length, length, device=device) < 0.1
    keep[..., 320:390, :] = False  # a tile row without keys
    keep[..., 512:576, 128:] = False  # one of two tiles
    keep[..., 640:704, 320:384] = True
    mask = build_block_mask(
        masks.from_tensor(keep.cpu()), length, length, (64, keys), device=device
    )
    config = BlockConfig(
        block_k=keys, num_stages=stages, hopper=programs, heavy_rows=2, pieces=pieces
    )
    arrays = mask_arrays(mask, config).values()
    q, k, v = torch.randn(3, batch, heads, length, head_dim, device=device, dtype=HALF)
    expected, expected_lse = attention_reference(
        *(x[checked].double() for x in (q, k, v)), keep, None, None, head_dim**-0.5, 0.0, True
    )
    for _ in range(3):
        shape = batch, length, heads, head_dim
        poison = torch.full(shape, float("nan"), device=device, dtype=HALF)
        del poison
        out, lse = torch.ops.stof.attention_block(
            q, k, v, *arrays, None, None, head_dim**-0.5, 0.0, 0, [], list(config), True
        )
        assert_close(out[checked], expected, HALF)
        assert out.isfinite().all()
        finite = expected_lse.isfinite()
        assert torch.equal(lse[checked].isfinite(), finite)
        close = {"rtol": 0, "atol": 5e-3}
        torch.testing.assert_close(lse[checked][finite].double(), expected_lse[finite], **close)
