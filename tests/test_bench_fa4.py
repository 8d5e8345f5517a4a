"""FlashAttention 4 as a peer, by a function of ours in its place, and cells without a mask."""

import pytest
import torch
from close import assert_close
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("bench_path")

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def flash(q, k, v, causal=False, window_size=(None, None)):
    """What it documents: [batch, seq, heads, head_dim], a pair, and keys on either side."""
    rows, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    keep = (rows >= keys) if causal else torch.ones(len(rows), len(keys), dtype=torch.bool)
    left, right = window_size
    if left is not None:
        keep = keep & (rows - keys <= left)
    if right is not None:
        keep = keep & (keys - rows <= right)
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*tensors, attn_mask=keep).transpose(1, 2), None


def cell_of(mask, dtype="float16", window=3):
    from cases import Cell

    return Cell(2, 40, mask, window, 0, heads=3, head_dim=16, dtype=dtype)


def names(mask):
    from peers import attention_variants

    return {(v.peer, v.name) for v in attention_variants(cell_of(mask), GPU)}


def test_it_is_offered_for_the_masks_it_has():
    for mask in ("causal", "dense", "sliding"):
        assert ("fa4", "function") in names(mask) and ("flex_flash", "fa4") in names(mask)
    for mask in ("longformer", "bigbird", "random"):
        assert not any(peer == "fa4" for peer, _ in names(mask))


def test_plain_calls_of_libraries_are_offered_where_there_is_no_other_mask():
    for mask in ("causal", "dense"):
        wanted = {("cudnn", mask), (f"sdpa_{mask}", "flash"), ("stof_block", "option")}
        assert wanted <= names(mask)
    assert not {"cudnn", "sdpa_causal", "sdpa_dense", "stof_block"} & {
        p for p, _ in names("sliding")
    }


@pytest.mark.parametrize("mask", ["causal", "dense", "sliding"])
def test_it_computes_the_cell(monkeypatch, mask):
    import oracle
    import peers
    from cases import dense_mask, make_inputs

    monkeypatch.setattr(peers, "load_fa4", lambda: flash)
    cell = cell_of(mask)
    keep = dense_mask(cell, CPU)
    (variant,) = peers.chosen_variants(cell, GPU, ["fa4"])
    attend = variant.build(peers.Setup(cell, CPU, keep, None))
    inputs = make_inputs(cell, CPU, torch.Generator().manual_seed(1))
    expected = oracle.answers(cell, inputs, keep, None)
    assert_close(attend(*inputs).flatten(0, 1).double(), expected, torch.float16)


@pytest.mark.parametrize("peer", ["fa4", "flex_flash"])
def test_why_it_is_missing(monkeypatch, peer):
    import peers

    def built(dtype):
        cell = cell_of("causal", dtype)
        (variant,) = peers.chosen_variants(cell, GPU, [peer])
        return variant.build(peers.Setup(cell, CPU, None, None))

    monkeypatch.setattr(peers, "load_fa4", lambda: None)
    with pytest.raises(peers.PeerMissingError, match="not installed"):
        built("float16")
    monkeypatch.setattr(peers, "load_fa4", lambda: flash)
    with pytest.raises(peers.PeerMissingError, match="FA4 has no float32"):
        built("float32")


def test_it_may_be_the_ceiling(monkeypatch):
    import roofline

    def named(library):
        return lambda *tensors: library

    seconds = {"CUDNN_ATTENTION": 2.0, "FLASH_ATTENTION": 4.0, "FA4": 1.0}
    run = roofline._dense_kernels()
    assert list(run) == list(seconds)
    q = torch.randn(1, 2, 8, 16)
    monkeypatch.setattr(roofline, "load_fa4", lambda: flash)
    assert_close(run["FA4"](q, q, q), scaled_dot_product_attention(q, q, q).double())
    monkeypatch.setattr(roofline, "_dense_kernels", lambda: {name: named(name) for name in seconds})
    monkeypatch.setattr(roofline, "_seconds", lambda call, device, repeats: seconds[call()])
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.zeros(1))
    rate, source = roofline._dense_attention("another", CPU, 80)
    assert source == "FA4" and rate == 4 * 32 * 12288**2 * 80 / 1e12


@pytest.mark.parametrize("fails", [lambda: None, lambda: 1 / 0], ids=["missing", "broken"])
def test_a_ceiling_does_without_it(monkeypatch, fails):
    """Also where its import ends in something else than an ImportError."""
    import roofline

    monkeypatch.setattr(roofline, "load_fa4", fails)
    monkeypatch.setattr(roofline, "_seconds", lambda call, *rest: call() and 1.0)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.zeros(1))
    with_sdpa = {"CUDNN_ATTENTION": lambda *tensors: True, "FA4": roofline._dense_kernels()["FA4"]}
    monkeypatch.setattr(roofline, "_dense_kernels", lambda: with_sdpa)
    rate, source = roofline._dense_attention("another", CPU, 80)
    assert source == "CUDNN_ATTENTION" and rate > 0


def test_a_cell_without_a_mask_has_all_elements():
    from cases import GRIDS, dense_mask, densities

    cell = cell_of("dense", window=0)
    keep = dense_mask(cell, CPU)
    assert bool(keep.all()) and densities(cell, keep, CPU) == (1, 1)
    assert {c.mask for c in GRIDS["dense"]} == {"dense", "causal"}
    assert not {c.name for c in GRIDS["dense"]} & {
        c.name for g in ("table2", "long") for c in GRIDS[g]
    }


def test_the_row_has_bursts_of_its_own(monkeypatch, tmp_path):
    import attention
    import timing
    from results import read_rows

    from stof_compile.measure import Timing

    monkeypatch.setattr(timing, "burst_time", lambda *a: Timing(7.0, 6.0, 8.0, 5, "bursts"))
    cell, paths = cell_of("dense", "float32", window=0), (tmp_path / "rows.csv", tmp_path)
    attention.run_cell(cell, CPU, attention.Paths(*paths), 1, only=["sdpa_mask"])
    (row,) = read_rows(paths[0])
    assert [row[f"burst_{name}us"] for name in ("", "p20_", "p80_")] == ["7", "6", "8"]
    assert row["median_us"] != "7"
