"""The form of the Hopper kernel that ``sparse_attention`` by hand takes."""

import pytest
import torch
from close import assert_close
from stof_compile.kernels.attention_blockwise import BlockConfig, configs
from stof_compile.kernels.reference import attention_reference

import stof_compile
from stof_compile import masks
from stof_compile.attention import suited_tiles
from stof_compile.attention.suited_tiles import scores_share, suited
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.long_rows import row_pieces

pytest.importorskip("triton.experimental.gluon")

HALF, HOPPER = torch.float16, (9, 0)
WINDOW, BIGBIRD = masks.sliding_window(128), masks.bigbird(64, 64, 0.1)


def first(head_dim):
    return tuple(configs(head_dim, HALF, HOPPER, q_len=4096, planes=192, plain=True)[0])


def chosen(spec, head_dim, length=4096, config=None, planes=192):
    """(tile, programs, shifted) of the call, after the second time asked."""
    mask = build_block_mask(spec, length, length, 64)
    built = []

    def other(tile):
        built.append(tile)
        return build_block_mask(spec, length, length, tile)

    config = first(head_dim) if config is None else config
    for _ in range(2):
        found, how = suited(mask, config, head_dim, planes, other)
    how = BlockConfig(*how)
    assert (found.block_q, found.block_k) == how[:2]
    assert len(built) == (found is not mask), "built once, and only what is taken"
    return how[:2], how.hopper, how.shifted


@pytest.mark.parametrize(
    ("spec", "head_dim", "expected"),
    [
        (masks.causal(), 64, ((128, 64), 2, 0)),
        (masks.causal(), 80, ((64, 64), 3, 0)),
        (masks.causal(), 128, ((64, 128), 1, 0)),
        (masks.causal(), 256, ((128, 64), 1, 0)),
        (masks.sliding_window(64), 64, ((64, 64), 4, 0)),
        (WINDOW, 64, ((128, 64), 2, 0)),
        (WINDOW, 128, ((192, 64), 1, 0)),
        (WINDOW, 160, ((64, 64), 2, 0)),
        (WINDOW, 256, ((128, 64), 1, 0)),
        (masks.sliding_window(64), 128, ((192, 64), 1, 0)),
        (masks.document([n // 900 for n in range(4096)]), 128, ((192, 64), 1, 0)),
        (BIGBIRD, 128, ((64, 64), 3, 0)),
        (BIGBIRD, 256, ((128, 64), 1, 0)),
        (masks.sliding_window(45), 64, ((64, 64), 4, 1)),
        (masks.longformer(256, 64), 64, ((64, 64), 4, 0)),
        (masks.longformer(256, 64), 256, ((128, 64), 1, 0)),
        (masks.block_diagonal(64), 256, ((64, 64), 2, 0)),
    ],
    ids=str,
)
def test_larger_tiles_where_they_hold_little_more(spec, head_dim, expected):
    assert chosen(spec, head_dim) == expected


@pytest.mark.parametrize("head_dim", [128, 256])
def test_rows_that_would_have_to_be_cut_keep_the_grid(head_dim):
    longformer = masks.longformer(64, 64)
    larger = ((192 if head_dim == 128 else 128, 64), 1, 0)
    assert chosen(longformer, head_dim, planes=192) == larger
    mask = build_block_mask(longformer, 4096, 4096, 64)
    found, config = suited(
        mask, first(head_dim), head_dim, 12,
        lambda tile: build_block_mask(longformer, 4096, 4096, tile),
    )  # fmt: skip
    assert found is mask and config[:2] == (64, 64)


def test_as_they_are_elsewhere():
    portable = tuple(BlockConfig())
    assert chosen(masks.causal(), 64, config=portable) == ((64, 64), 0, 0)
    nothing = build_block_mask(masks.dense(), 0, 0, 64)
    assert suited(nothing, first(64), 64, 192, None) == (nothing, first(64))


@pytest.mark.parametrize("tile", [(64, 128), (128, 64), (192, 64)])
def test_the_share_is_that_of_the_tiles(tile):
    draw = torch.Generator().manual_seed(1)
    keep = torch.rand(2, 3, 11, 7, generator=draw) < 0.3
    keep[0, 0] = False
    planes = masks.from_tensor(keep.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :410])
    for spec, shape in ((planes, (704, 410)), (BIGBIRD, (1000, 700)), (masks.causal(), (700, 700))):
        facts = {"batch": 2, "heads": 3}
        mask = build_block_mask(spec, *shape, 64, **facts)
        larger = build_block_mask(spec, *shape, tile, **facts)
        most = larger.col_idx.numel() * tile[0] * tile[1]
        assert scores_share(mask, tile) == most / (mask.col_idx.numel() * 64 * 64)


def test_a_capture_keeps_what_is_there(monkeypatch):
    mask = build_block_mask(masks.causal(), 2048, 2048, 64)
    other = build_block_mask(masks.causal(), 2048, 2048, (128, 64))
    with monkeypatch.context() as patch:
        patch.setattr(type(mask), "device", torch.device("cuda"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert suited(mask, first(64), 64, 192, None) == (mask, first(64))
    assert suited(mask, first(64), 64, 192, lambda tile: other)[0] is other
    monkeypatch.setattr(type(mask), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert suited(mask, first(64), 64, 192, None)[0] is other


def test_too_many_different_tiles_keep_the_grid(monkeypatch):
    monkeypatch.setattr(suited_tiles, "kinds_refusal", lambda different: "too many")
    mask = build_block_mask(masks.causal(), 2048, 2048, 64)
    found, _ = suited(
        mask, first(256), 256, 192, lambda tile: build_block_mask(masks.causal(), 2048, 2048, tile)
    )
    assert found is mask


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rule", ["window", "causal and documents", "longformer"])
def test_gpu_by_hand(head_dim, rule, monkeypatch):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    length, device = 2000, torch.device("cuda")
    spec = {
        "window": masks.sliding_window(200),
        "causal and documents": masks.causal() & masks.document([0] * 900 + [1] * 1100),
        "longformer": masks.longformer(130, 130),
    }[rule]
    seen = []
    monkeypatch.setattr(
        suited_tiles, "_retiled", lambda *given, keep=suited_tiles._retiled: seen.append(
            found := keep(*given)
        ) or found,
    )  # fmt: skip
    keep = build_block_mask(spec, length, length, 64, device=device).to_dense()
    for _ in range(3):  # launched, launched again, and repeated
        q, k, v = torch.randn(3, 8, 12, length, head_dim, device=device, dtype=HALF).unbind()
        with torch.no_grad():
            out = stof_compile.sparse_attention(q, k, v, spec)
        part = [t[:1].double() for t in (q, k, v)]
        expected = attention_reference(*part, keep, None, None, head_dim**-0.5)
        assert_close(out[:1], expected, HALF)
    assert head_dim == 64 or any(found is not None for found in seen)
    q.requires_grad_()
    out = stof_compile.sparse_attention(q, k, v, spec)  # behind the tiles of the grid
    out.sum().backward()
    assert_close(out[:1], expected, HALF)


@pytest.mark.gpu
def test_gpu_by_hand_in_a_cuda_graph():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    device, spec = torch.device("cuda"), masks.sliding_window(201)
    q, k, v = torch.randn(3, 6, 12, 2048, 256, device=device, dtype=HALF)
    mask = build_block_mask(spec, 2048, 2048, 64, device=device)
    assert row_pieces(mask, 72, 2, queued=True) == 1
    assert configs(256, HALF, HOPPER, q_len=2048, planes=72, plain=True)[0].hopper
    with torch.no_grad():
        for _ in range(2):
            stof_compile.sparse_attention(q, k, v, spec)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = stof_compile.sparse_attention(q, k, v, spec)
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
        graph.replay()
    keep = mask.to_dense()
    expected = attention_reference(q.double(), k.double(), v.double(), keep, None, None, 0.0625)
    assert_close(out, expected, HALF)
