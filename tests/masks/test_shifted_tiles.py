"""Tiles that begin where the keys of their rows do: what is in them, and where they lie."""

import pytest
import torch

from stof_compile import masks
from stof_compile.errors import StofMaskError
from stof_compile.masks import bitmap, shifted_tiles
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.fragments import from_fragments, to_fragments
from stof_compile.masks.shifted_tiles import shifted_arrays, tile_share


def scattered(density, shape=(2, 3, 330, 500), seed=0):
    draw = torch.Generator().manual_seed(seed)
    keep = torch.rand(shape, generator=draw) < density
    keep[:, 1] = False  # a plane without keys
    if shape[2] > 200:
        keep[0, 0, 64:128, 192:320] = True  # full tiles between part ones
    return masks.from_tensor(keep)


RULES = {
    "causal": (masks.causal(), 512, 512),
    "window of 22": (masks.sliding_window(22), 512, 512),
    "window of 45": (masks.sliding_window(45), 2048, 2048),
    "window of 64": (masks.sliding_window(64), 2048, 2048),
    "causal window": (masks.sliding_window(100, causal=True), 700, 700),
    "longformer": (masks.longformer(45, 45), 2048, 2048),
    "bigbird": (masks.bigbird(22, 22, 0.1), 1024, 1024),
    "documents": (masks.from_cu_seqlens([0, 70, 75, 300, 301, 302, 777, 1000]), 1000, 1000),
    "dilated": (masks.dilated(5, 7) | masks.sliding_window(3), 700, 700),
    "more keys": (masks.sliding_window(37), 300, 1003),
    "fewer keys": (masks.sliding_window(30), 1000, 301),
    "dense": (masks.dense(), 300, 300),
    "tiles only": (masks.block_diagonal(64), 512, 512),
    "nothing": (masks.from_tensor(torch.zeros(100, 100, dtype=torch.bool)), 100, 100),
    "itself": (masks.sliding_window(0), 130, 130),
    **{f"scattered {d}": (scattered(d), 330, 500) for d in (2e-4, 1e-3, 5e-3, 0.03, 0.3)},
}


def taken_apart(mask, arrays):
    """(kept elements of all rows of tiles [rows, 64, keys], tiles computed, in half ones)."""
    _, row_ptr, full_start, col_idx, bitmap_id, fragments, _ = arrays
    tiles = bitmap.unpack(from_fragments(fragments, 64), 64, 64).int()
    count = mask.planes * mask.rows
    found = torch.zeros(count, 64, 64 * (mask.cols + 1), dtype=torch.int32)
    touched = torch.zeros(count, mask.cols + 2, dtype=torch.bool)
    touched[mask.row_of_tile(), mask.col_idx.long()] = True
    halves = 0
    for row in range(count):
        start, middle, stop = (int(t) for t in (row_ptr[row], full_start[row], row_ptr[row + 1]))
        short = middle < 0
        middle = -1 - middle if short else middle
        assert start <= middle <= stop and (not short or start < middle)
        for at in range(start, stop):
            begin, width = 8 * int(col_idx[at]), 32 if short and at == start else 64
            assert begin >= 0
            assert touched[row, begin // 64] and touched[row, (begin + width - 1) // 64]
            tile = tiles[bitmap_id[at]] if at < middle else torch.ones(64, 64, dtype=torch.int32)
            assert not tile[:, width:].any()
            found[row, :, begin : begin + 64] += tile
            halves += width // 32
        parts = col_idx[start + short : middle]
        assert (parts.diff() > 0).all(), "in the order of their columns"
    return found, halves


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("chunk", [None, 64])
def test_the_same_elements_once_and_in_no_tile_that_is_dropped(name, chunk, monkeypatch):
    if chunk is not None:  # rows are looked at in several goes
        monkeypatch.setattr(shifted_tiles, "_CHUNK", chunk)
    spec, q_len, k_len = RULES[name]
    mask = build_block_mask(spec, q_len, k_len, 64, batch=2, heads=3)
    found, halves = taken_apart(mask, shifted_arrays(mask))
    plain = (*mask.tensors[:3], 8 * mask.col_idx, *mask.tensors[4:5], to_fragments(mask.bitmap), 0)
    expected, all_halves = taken_apart(mask, plain)
    assert torch.equal(found, expected)
    assert int(found.max()) <= 1
    share = tile_share(mask)
    if all_halves:
        assert share == pytest.approx(halves / all_halves)
    assert share == mask.shifted_share <= 1


def test_shares():
    def share(spec, length):
        return round(build_block_mask(spec, length, length, 64).shifted_share, 3)

    assert share(masks.sliding_window(45), 2048) == 0.84
    assert share(masks.longformer(45, 45), 2048) == 0.906
    assert share(masks.sliding_window(22), 512) == 0.682
    assert share(masks.sliding_window(64), 4096) == share(masks.dense(), 512) == 1.0


def test_contents_of_equal_tiles_are_kept_once():
    mask = build_block_mask(masks.sliding_window(45), 65536, 65536, 64)
    arrays = shifted_arrays(mask)
    assert arrays[5].shape[0] == 6
    assert all(t.dtype == torch.int32 for t in arrays)
    assert arrays[0] is mask.plane_map and arrays[6] is mask.row_order


def test_rows_with_very_many_part_tiles_stay(monkeypatch):
    spec = masks.sliding_window(45)
    assert build_block_mask(spec, 2048, 2048, 64).shifted_share < 1
    monkeypatch.setattr(shifted_tiles, "_MOST_PARTS", 2)
    after = build_block_mask(spec, 2048, 2048, 64)
    assert after.shifted_share == 1.0
    assert torch.equal(after.shifted_tensors[3], 8 * after.col_idx)


def test_tiles_of_another_size_are_refused():
    mask = build_block_mask(masks.sliding_window(45), 512, 512, (64, 128))
    assert mask.shifted_share == 1.0
    with pytest.raises(StofMaskError, match="shifted tiles are 64 x 64, not 64 x 128"):
        _ = mask.shifted_tensors


def test_made_once_and_outside_of_inference_mode():
    with torch.inference_mode():
        mask = build_block_mask(masks.sliding_window(45), 512, 512, 64)
        arrays = mask.shifted_tensors
    assert arrays is mask.shifted_tensors and not any(t.is_inference() for t in arrays)
