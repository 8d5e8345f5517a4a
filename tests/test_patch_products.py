"""Convolutions over patches become matrix products; every other convolution stays.

Products are written on CUDA only: here the CPU is declared to be such a device.
"""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from pass_backend import PassBackend
from torch import nn

from stof_compile import explain, patch_products
from stof_compile.capture import read_capture
from stof_compile.node_ops import operation
from stof_compile.normalize import normalize
from stof_compile.patch_products import patches_as_products

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, fresh_dynamo):
    monkeypatch.setattr(patch_products, "DEVICES", frozenset({"cpu"}))


def tensor(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, W, B = tensor(2, 3, 8, 12), tensor(10, 3, 4, 6, seed=1) / 8, tensor(10, seed=2)


def result_of(fn, *args, inductor=False, dynamic=False, close=True):
    """The backend, after checking values and strides of the results against the plain call."""
    backend = PassBackend(lambda gm, facts: patches_as_products(gm), inductor)
    with torch.no_grad():
        wanted = fn(*(a.clone() for a in args))
        found = torch.compile(fn, backend=backend, dynamic=dynamic)(*(a.clone() for a in args))
    for one, other in zip(listed(found), listed(wanted), strict=True):
        if close:
            assert_close(one, other.double(), one.dtype, scale=2.0)
        assert one.stride() == other.stride()
    return backend


def listed(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def conv(x, w, b, **given):
    return F.conv2d(x, w, b, **({"stride": (4, 6)} | given))


def after(rows):
    """What a model does with patches: no stride of theirs is seen behind it."""
    return F.layer_norm(rows, rows.shape[-1:])


def rows_of(x, w, b):
    return conv(x, w, b).flatten(2).transpose(1, 2)


def run(x, w, b):
    return after(rows_of(x, w, b))


REWRITTEN = {
    "flatten": lambda x, w, b: conv(x, w, b).flatten(2).transpose(1, 2),
    "flatten-two": lambda x, w, b: torch.flatten(conv(x, w, b), 2, 3).transpose(-1, -2),
    "reshape": lambda x, w, b: conv(x, w, b).reshape(x.shape[0], 10, 4).permute(0, 2, 1),
    "view": lambda x, w, b: conv(x, w, b).view(x.shape[0], 10, -1).swapaxes(2, 1),
    "mT": lambda x, w, b: conv(x, w, b).flatten(-2).mT,
    "no-bias": lambda x, w, b: conv(x, w, None).flatten(2).transpose(1, 2),
    "valid": lambda x, w, b: conv(x, w, b, padding="valid").flatten(2).transpose(1, 2),
    "one-number": lambda x, w, b: (
        conv(x[..., :8], w[..., :4].contiguous(), b, stride=4, padding=0, dilation=1, groups=1)
        .flatten(2)
        .transpose(1, 2)
    ),
    "operator": lambda x, w, b: (
        torch.ops.aten.convolution(x, w, b, [4, 6], [0, 0], [1, 1], False, [0, 0], 1)
        .flatten(2)
        .transpose(1, 2)
    ),
    "one-row": lambda x, w, b: conv(x[:, :, :4], w, b).flatten(2).transpose(1, 2),
    "rows-of-pixels": lambda x, w, b: (
        conv(x[:, :1], w[:, :1, :1].contiguous(), b, stride=(1, 6)).flatten(2).transpose(1, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name, dtype):
    fn = REWRITTEN[name]
    given = [t.to(dtype) for t in (X, W, B)]
    backend = result_of(lambda *args: after(fn(*args)), *given)
    assert backend.count == 1
    done = [operation(node) for node in backend.gm.graph.nodes]
    assert "linear" in done and not {"conv2d", "convolution"} & set(done)


def test_a_module_and_inductor():
    layer = nn.Conv2d(3, 10, 4, stride=4).to(BF16)

    def fn(x):
        rows = layer(x).flatten(2).transpose(1, 2)
        return after(rows), rows.mean(1) * 2, rows.amax(-1)

    assert result_of(fn, X).count == 1
    torch._dynamo.reset()
    assert result_of(fn, X, inductor=True).count == 1


def test_images_in_other_layouts():
    last = X.contiguous(memory_format=torch.channels_last)
    for x in (last, X.transpose(0, 1)[:, :1].expand(3, 3, 8, 12), tensor(2, 3, 8, 24)[..., ::2]):
        torch._dynamo.reset()
        backend = PassBackend(lambda gm, facts: patches_as_products(gm))
        with torch.no_grad():
            found = torch.compile(run, backend=backend, dynamic=False)(x, W, B)
        assert_close(found, run(x, W, B).double(), BF16, scale=2.0)
        assert backend.count == 1


KEPT = {
    "padding": lambda x, w, b: conv(x, w, b, padding=(4, 6)).flatten(2).transpose(1, 2),
    "same": lambda x, w, b: F.conv2d(x, w, b, padding="same").flatten(2).transpose(1, 2),
    "overlap": lambda x, w, b: conv(x, w, b, stride=(2, 6)).flatten(2).transpose(1, 2),
    "gaps": lambda x, w, b: conv(x, w, b, stride=(4, 7)).flatten(2).transpose(1, 2),
    "dilation": lambda x, w, b: conv(x, w, b, dilation=(2, 1)).flatten(2).transpose(1, 2),
    "groups": lambda x, w, b: conv(x[:, :2], w[:, :1], b, groups=2).flatten(2).transpose(1, 2),
    "remainder": lambda x, w, b: conv(x[..., :11], w, b).flatten(2).transpose(1, 2),
    "one-image": lambda x, w, b: conv(x[0], w, b).flatten(1).transpose(0, 1),
    "pixels": lambda x, w, b: (
        conv(x, w[..., :1, :1].contiguous(), b, stride=1).flatten(2).transpose(1, 2)
    ),
    "transposed": lambda x, w, b: (
        F.conv_transpose2d(x, w.transpose(0, 1).contiguous(), b, stride=(4, 6))
        .flatten(2)
        .transpose(1, 2)
    ),
    "transposed-operator": lambda x, w, b: (
        torch.ops.aten.convolution(
            x, w.transpose(0, 1).contiguous(), b, [4, 6], [0, 0], [1, 1], True, [0, 0], 1
        )
        .flatten(2)
        .transpose(1, 2)
    ),
    "other-order": lambda x, w, b: conv(x, w, b).flatten(2).permute(1, 2, 0),
    "not-transposed": lambda x, w, b: conv(x, w, b).flatten(2),
    "other-flattening": lambda x, w, b: conv(x, w, b).flatten(1, 2).transpose(1, 2),
    "weight-in-another-layout": lambda x, w, b: rows_of(
        x, w.contiguous(memory_format=torch.channels_last), b
    ),
    "single-precision": lambda x, w, b: rows_of(x.float(), w.float(), b.float()),
    "cast-behind": lambda x, w, b: conv(x, w, b).float().flatten(2).transpose(1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    fn = KEPT[name]
    assert result_of(lambda *args: after(fn(*args)), X, W, B).count == 0


READ_ELSEWHERE = {
    "convolution": lambda c, f, r: (after(r), c.sum()),
    "flattening": lambda c, f, r: (after(r), f.sum()),
    "writes-to-the-flattening": lambda c, f, r: (f.add_(1), after(r))[1],
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_kept_where_something_else_reads_it(name):
    def fn(x, w, b):
        images = conv(x, w, b)
        flat = images.flatten(2)
        return READ_ELSEWHERE[name](images, flat, flat.transpose(1, 2))

    assert result_of(fn, X, W, B).count == 0


STRIDES_SEEN = {
    "returned": lambda r: r,
    "view-returned": lambda r: r[:, 1:],
    "sum-returned": lambda r: (r + 1).relu(),
    "written-and-returned": lambda r: r.mul_(2),
    "as-strided": lambda r: after(r.as_strided((2, 4, 10), (40, 10, 1))),
    "as-strided-of-a-sum": lambda r: after((r + 1).as_strided((2, 4, 10), (40, 10, 1))),
    "a-view-that-needs-them": lambda r: r.transpose(1, 2).view(2, 40) * 2,
    "unknown-operation": lambda r: after(torch.fft.fft(r.float()).real),
}


@pytest.mark.parametrize("name", STRIDES_SEEN)
def test_kept_where_strides_are_seen(name):
    assert result_of(lambda x, w, b: STRIDES_SEEN[name](rows_of(x, w, b)), X, W, B).count == 0


def test_kept_where_it_is_transposed_in_place():
    counts = []

    def backend(gm, inputs):  # what this operation returned cannot be asked a second time
        normalize(gm, read_capture(gm, inputs))
        counts.append(patches_as_products(gm))
        return gm.forward

    def fn(x, w, b):
        return rows_of(x, w, b).transpose_(1, 2).sum(1)

    with torch.no_grad():
        found = torch.compile(fn, backend=backend, dynamic=False)(X, W, B)
    assert_close(found, fn(X, W, B).double(), BF16)
    assert counts == [0]


@torch.library.custom_op("stof_test::row_stride", mutates_args=())
def row_stride(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((1,), x.stride(1))


@row_stride.register_fake
def _(x):
    return x.new_empty((1,))


def test_kept_where_an_operator_of_the_user_reads_it():
    def fn(x, w, b):
        rows = rows_of(x, w, b)
        return row_stride(rows), row_stride(rows + 1), after(rows)

    assert result_of(fn, X, W, B).count == 0


def test_kept_on_another_device_and_dtypes_that_differ(monkeypatch):
    def under_autocast(x, w, b):
        with torch.autocast("cpu", BF16):
            return after(rows_of(x, w, b).float())

    assert result_of(under_autocast, X.float(), W.float(), B.float()).count == 0
    torch._dynamo.reset()
    monkeypatch.setattr(patch_products, "DEVICES", frozenset({"cuda"}))
    assert result_of(run, X, W, B).count == 0


def test_autocast_to_the_dtype_at_hand():
    def fn(x, w, b):
        with torch.autocast("cpu", BF16):
            rows = rows_of(x, w, b)
        return rows.sum(1)

    assert result_of(fn, X, W, B).count == 1


@pytest.mark.parametrize("inductor", [False, True])
def test_writes(inductor):
    def fn(x, w, b):
        images = conv(x, w, b)
        x.zero_()
        w.mul_(2)
        b.add_(1)
        rows = images.flatten(2).transpose(1, 2)
        rows[:, 0] = 0.0  # memory of the result alone
        rows.mul_(2)
        return after(rows), x.sum(), rows.sum(-1)

    assert result_of(fn, X, W, B, inductor=inductor).count == 1


@pytest.mark.parametrize(
    "copied",
    [
        lambda r: r.contiguous(), lambda r: r.reshape(8, 10), lambda r: r.flatten(1),
        lambda r: r.flatten(0, 1),
    ],
    ids=["contiguous", "reshape", "flatten", "rows"],
)  # fmt: skip
def test_what_was_a_copy_is_no_view_afterwards(copied):
    """Of rows that are transposed these are copies, of the product they would be the rows."""

    def one(x, w, b):
        rows = rows_of(x, w, b)
        other = copied(rows)
        other.mul_(other.sigmoid() * 3)
        return after(rows), other.sum(-1)

    def both(x, w, b):
        rows = rows_of(x, w, b)
        other = copied(rows)
        rows.mul_(3)
        return after(rows), other.sum(-1)

    def part(x, w, b):
        rows = rows_of(x, w, b)
        other = copied(rows)
        other[:1] = 0
        return after(rows), other.sum(-1)

    for fn in (one, both, part):
        assert result_of(fn, X, W, B).count == 0


def test_a_border_of_gradients_in_between():
    def fn(x, w, b):
        images = conv(x, w, b)
        with torch.no_grad():
            rows = images.flatten(2).transpose(1, 2)
        return after(rows)

    backend = PassBackend(lambda gm, facts: patches_as_products(gm))
    weight = W.clone().requires_grad_()
    found = torch.compile(fn, backend=backend, dynamic=False)(X, weight, B)
    assert found.requires_grad == fn(X, weight, B).requires_grad
    assert backend.count == 0


def test_symbolic_sizes():
    backend = PassBackend(lambda gm, facts: patches_as_products(gm))
    compiled = torch.compile(run, backend=backend)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = tensor(batch, 3, 8, 12)
            torch._dynamo.mark_dynamic(x, 0)
            assert_close(compiled(x, W, B), run(x, W, B).double(), BF16, scale=2.0)
            assert backend.count == 1
    torch._dynamo.reset()
    assert result_of(run, X, W, B, dynamic=True).count == 0  # the height is symbolic as well


def test_gradients():
    def grads(run, dtype):
        held = [t.to(dtype, copy=True).requires_grad_() for t in (X, W, B)]
        (run(*held) * tensor(2, 4, 10, seed=5)).sum().backward()
        return [t.grad for t in held]

    backend = PassBackend(lambda gm, facts: patches_as_products(gm))
    found = grads(torch.compile(run, backend=backend, dynamic=False), BF16)
    assert backend.count == 1
    for one, exact in zip(found, grads(run, torch.float64), strict=True):
        assert_close(one, exact, BF16, scale=4.0)


def vit():
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return ViTModel(config).eval().to(BF16), tensor(2, 3, 32, 32)


@pytest.mark.parametrize("inductor", [False, True])
def test_vit_of_transformers(inductor):
    model, images = vit()
    backend = PassBackend(lambda gm, facts: patches_as_products(gm), inductor)
    with torch.no_grad():
        wanted = deepcopy(model).double()(images.double()).last_hidden_state
        found = torch.compile(model, backend=backend, dynamic=False)(images).last_hidden_state
    assert backend.count == 1
    assert_close(found, wanted, BF16, scale=8.0)


def test_in_the_backend(tmp_path):
    model, images = vit()
    options = {"tune_budget_s": 0, "cache_dir": str(tmp_path)}
    compiled = torch.compile(model, backend="stof", dynamic=False, options=options)
    with torch.no_grad():
        found = compiled(images).last_hidden_state
        assert_close(found, model(images).last_hidden_state.double(), BF16, scale=8.0)
    notes = [note for graph in explain(compiled).graphs for note in graph.notes]
    assert "patch embeddings computed as products: 1" in notes


def test_notes_tell_how_many():
    from stof_compile.dump import Record
    from stof_compile.fusion_result import FusionResult
    from stof_compile.record_fusion import notes_without_fusion, record_fusion

    record, result = Record(), FusionResult(patches=1)
    assert result.changed and not FusionResult().changed
    record_fusion(result, record)
    assert record.notes == ["patch embeddings computed as products: 1"]
    assert notes_without_fusion(record.notes) == []
