"""Storage: words and tiles, equal planes and tiles once, statistics, caching, the 16 x 16 build."""

import math
from dataclasses import dataclass

import pytest
import torch

from stof_compile import masks
from stof_compile.errors import StofMaskError
from stof_compile.masks import bitmap, on_host, random_tiles
from stof_compile.masks.evaluate import TileEvaluator
from stof_compile.masks.tiles import Grid


@pytest.mark.parametrize("density", [0.01, 0.5, 1])
@pytest.mark.parametrize("size", [(1, 5), (100, 77), (200, 65), (128, 128)], ids=str)
@pytest.mark.parametrize("block", [(64, 64), (16, 16), (64, 32)], ids=str)
def test_round_trip_of_any_mask(density, size, block):
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(2, 3, *size, generator=generator) < density
    spec = masks.from_tensor(dense)
    mask = masks.build_block_mask(spec, *size, block, batch=2, heads=3)
    assert torch.equal(mask.to_dense(), dense)
    assert mask.density == pytest.approx(distinct_density(dense), abs=1e-9)
    # the same mask evaluated element by element, at an offset, gives the same tiles
    other = masks.build_block_mask(spec & masks.dense(), *size, block, q_offset=7, batch=2, heads=3)
    assert all(torch.equal(a, b) for a, b in zip(mask.tensors, other.tensors, strict=True))


def distinct_density(dense):
    return dense.flatten(0, 1).unique(dim=0).double().mean().item()


def test_word_order_and_bit_order():
    tile = torch.zeros(1, 16, 24, dtype=torch.bool)
    tile[0, 9, 18] = True  # row of words 1, column of words 2; bit (1, 2)
    words = bitmap.pack(tile)
    assert words.shape == (1, 6)
    assert words[0].nonzero().item() == 2 * 2 + 1 and words[0, 5].item() == 1 << (1 * 8 + 2)
    tile[0, 7, 7] = True  # bit 63 is the sign
    assert bitmap.pack(tile)[0, 0].item() == -(2**63)
    assert torch.equal(bitmap.unpack(bitmap.pack(tile), 16, 24), tile)
    assert bitmap.popcount(bitmap.pack(tile)).item() == 2


def test_unique_rows_survive_a_hash_that_collides(monkeypatch):
    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]])
    first, inverse = bitmap.unique_rows(rows)
    assert first.tolist() == [0, 1, 3] and inverse.tolist() == [0, 1, 0, 2]
    monkeypatch.setattr(bitmap, "hash_rows", lambda rows: torch.zeros_like(rows[:, 0]))
    assert [t.tolist() for t in bitmap.unique_rows(rows)] == [first.tolist(), inverse.tolist()]


def test_equal_planes_and_tiles_are_stored_once():
    lower = torch.ones(96, 96, dtype=torch.bool).tril()
    dense = torch.stack([lower, ~lower, lower, lower])[None].expand(2, 4, 96, 96)
    mask = masks.build_block_mask(masks.from_tensor(dense.clone()), 96, 96, 32, batch=2, heads=4)
    assert mask.planes == 2 and mask.bitmap.shape[0] == 2
    assert mask.plane_map.tolist() == [[0, 1, 0, 0]] * 2
    assert (mask.part_tiles, mask.full_tiles, mask.empty_tiles) == (6, 6, 6)
    assert torch.equal(mask.to_dense(), dense)


def test_statistics():
    mask = masks.build_block_mask(masks.causal(), 100, 100, 32)
    assert mask.max_row_tiles == 4 and mask.has_part and mask.has_full and not mask.has_empty_rows
    assert mask.row_order.tolist() == [3, 2, 1, 0]
    facts = mask.statistics()
    assert facts["density"] == pytest.approx(0.505) and facts["band"][:2] == [-(2**30), 0]
    assert facts["full_tiles"] + facts["part_tiles"] + facts["empty_tiles"] == 16
    assert mask.nbytes == sum(t.numel() * t.element_size() for t in mask.tensors)
    nothing = masks.build_block_mask(~masks.dense(), 100, 100, 32)
    assert nothing.has_empty_rows and nothing.density == 0 and not nothing.has_part


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 10), (10, 0), (0, 0)])
def test_no_elements(q_len, k_len):
    for spec in (
        masks.causal(),
        masks.bigbird(3, 3, 0.1),
        masks.from_tensor(torch.ones(q_len, k_len).bool()),
    ):
        mask = masks.build_block_mask(spec, q_len, k_len)
        assert mask.to_dense().shape == (1, 1, q_len, k_len) and mask.density == 0
        assert mask.statistics()["part_tiles"] == 0


def test_no_batch_rows():
    mask = masks.build_block_mask(masks.rule(lambda b, h, q, k: q >= k + b), 20, 20, batch=0)
    assert mask.planes == 1


def test_ragged_tiles_are_never_full_and_keep_the_band_honest():
    dense = masks.build_block_mask(masks.dense(), 100, 100, 64)
    assert (dense.full_tiles, dense.part_tiles) == (1, 3) and dense.band is not None
    # random tiles at the ragged edge are part tiles that the band form does not describe
    random = masks.build_block_mask(masks.bigbird(8, 8, 1.0), 1000, 1000, 64)
    assert random.band is None
    assert masks.build_block_mask(masks.bigbird(8, 8, 1.0), 1024, 1024, 64).band is not None


def test_tile_rows_of_the_paper_selector():
    """Equation 1 reads the last row pointer of a 16 x 16 build."""
    for length, window, row_wise in (
        (1024, 15, False),
        (2048, 16, True),
        (8192, 32, True),
        (4096, 32, False),
    ):
        count = math.ceil(length / 16)
        mask = masks.build_block_mask(masks.sliding_window(window), length, length, 16)
        threshold = int(mask.row_ptr[count]) / count**2 - 1.2 / math.log2(count) ** 2
        assert (threshold < 0) == row_wise
    mask = masks.build_block_mask(masks.sliding_window(16, causal=True), 1024, 1024, 16)
    assert int(mask.row_ptr[-1]) / 64**2 - 1.2 / 36 < 0


def test_cache_ignores_sizes_the_rule_ignores():
    spec = masks.sliding_window(11)
    first = masks.cached_block_mask(spec, 77, 77, 16, batch=2, heads=4)
    assert masks.cached_block_mask(masks.sliding_window(11), 77, 77, (16, 16), batch=3) is first
    assert masks.cached_block_mask(spec, 78, 78, 16) is not first


def test_equality_and_moving():
    mask = masks.build_block_mask(masks.longformer(9, 9), 70, 70, 16)
    assert mask == masks.build_block_mask(masks.longformer(9, 9), 70, 70, 16)
    assert mask != masks.build_block_mask(masks.longformer(9, 8), 70, 70, 16)
    assert mask.to("cpu") is mask and mask.to("meta").device.type == "meta"
    assert hash(mask) == hash(masks.build_block_mask(masks.longformer(9, 9), 70, 70, 16))


def test_long_masks_stay_small():
    mask = masks.build_block_mask(masks.sliding_window(362), 131_072, 131_072)
    assert mask.nbytes < 300_000 and mask.bitmap.shape[0] == 4


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    for length in (100, 2000):
        path = masks.build_block_mask(masks.bigbird(9, 9, 0.1), length, length).plot(
            tmp_path / "new" / f"{length}.png"
        )
        assert path.read_bytes().startswith(b"\x89PNG")


def test_compiled_strips_equal_eager_ones():
    table = torch.arange(300) // 37
    spec = masks.rule(lambda b, h, q, k: (q >= k) & (table[q] == table[k]) | (h == k))
    heads = torch.arange(2)
    evaluator = TileEvaluator(spec, Grid(300, 280, 32, 16, 0, heads * 0, heads))
    compiled = evaluator.compiled(16)
    assert compiled is not None
    row, col = torch.arange(15), torch.arange(15).flip(0)
    for got, expected in zip(compiled(row, col), evaluator.evaluate(row, col), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec",
    [
        masks.bigbird(64, 32, 0.2, max_len=2000, heads=3),
        masks.strided(33),
        masks.document(torch.arange(1000) // 77),
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [64, (128, 32), 16], ids=str)
def test_gpu_builds_the_same(spec, block, monkeypatch):
    monkeypatch.setattr(on_host, "MOST_ELEMENTS", -1)
    monkeypatch.setattr(random_tiles, "_TILES_ON_HOST", -1)
    host = masks.build_block_mask(spec, 1000, 1000, block, heads=3)
    device = masks.build_block_mask(spec, 1000, 1000, block, heads=3, device="cuda")
    assert host == device and host.band == device.band


def test_band_of_a_ragged_tile_that_only_evaluation_finds_full():
    """The causal part is masked by an absent random tile: all that exists of the tile is kept."""
    spec = ~(masks.causal() & masks.random_blocks(0.3, block=32))
    mask = masks.build_block_mask(spec, 1, 1, 16)
    assert mask.to_dense().all()
    assert mask.band is None


@pytest.mark.parametrize("spec", [masks.bigbird(64, 32, 0.2), masks.sliding_window(9)], ids=str)
def test_a_small_plain_rule_is_evaluated_on_the_cpu(spec):
    """For every device: nothing can be evaluated on this one."""
    host = masks.build_block_mask(spec, 1000, 1000, 64)
    made = masks.build_block_mask(spec, 1000, 1000, 64, device="meta")
    assert made.device.type == "meta" and made.band == host.band
    assert made.statistics() == host.statistics() and made.is_band == host.is_band
    assert [t.shape for t in made.tensors] == [t.shape for t in host.tensors]
    assert made.heavy_rows == host.heavy_rows and made.tile_map == host.tile_map
    assert made.fragments.device.type == "meta" and made.fragments.shape == host.fragments.shape
    assert made == host


def test_code_and_tensors_stay_on_their_device():
    assert masks.bigbird(64, 32, 0.2).is_plain and (~masks.causal() | masks.dense()).is_plain
    assert not (masks.causal() & masks.document(torch.arange(99) // 7)).is_plain
    assert not (masks.causal() & masks.rule(lambda b, h, q, k: (q * k) % 3 == 0)).is_plain

    @dataclass(frozen=True, eq=False)
    class OfAUser(masks.MaskSpec):
        rule = "of a user"

    assert not OfAUser().is_plain


def test_slow_rules_are_not_evaluated_on_the_cpu():
    def on_cpu(spec, size, block=64):
        return on_host.bound_for_host(spec, size, size, 0, (size // block) ** 2, (block, block))

    assert on_cpu(masks.bigbird(64, 64, 0.1), 4096) is not None
    assert on_cpu(masks.bigbird(64, 64, 0.1, random_block=16), 4096) is None
    assert on_cpu(masks.sliding_window(64), 8192) is None


def test_a_mask_that_a_captured_graph_would_have_to_wait_for_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    spec = masks.sliding_window(13)
    with pytest.raises(StofMaskError, match=r"mask of .* 76 keys: not there yet"):
        masks.cached_block_mask(spec, 76, 76, 16, device="cuda:0")
    there = masks.build_block_mask(spec, 76, 76, 16)
    key_ptr, _ = there.key_lists
    monkeypatch.setattr(masks.BlockMask, "device", torch.device("cuda:0"))
    assert there.key_lists[0] is key_ptr
    with pytest.raises(StofMaskError, match=r"packed columns of .* 76 keys: not there"):
        _ = there.packed
