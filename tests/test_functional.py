"""sparse_attention and attention_kernel: eager, compiled by any backend, gradients."""

import threading

import pytest
import torch
import torch.nn.functional as F
from stof_compile.kernels import limits
from stof_compile.kernels.reference import attention_reference
from torch.utils.checkpoint import checkpoint

from stof_compile import attention_kernel, masks, sparse_attention
from stof_compile.attention import functional
from stof_compile.attention.functional import current_override
from stof_compile.attention.unmeasured import default_kernel, sdpa_takes_causal
from stof_compile.errors import StofMaskError
from stof_compile.masks import MaskSpec
from tests.close import assert_close
from tests.functional_operands import WINDOW, operands

BACKENDS = ["eager", "aot_eager", "inductor"]


def reference(spec: MaskSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    block_mask = masks.build_block_mask(
        spec, q.shape[2], k.shape[2], 32, batch=q.shape[0], heads=q.shape[1]
    )
    out = attention_reference(q.double(), k.double(), v.double(), block_mask.to_dense())
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lengths", [(257, 257), (33, 257), (257, 33)], ids=str)
def test_eager(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = operands(*lengths, dtype)
    for spec in (WINDOW, masks.dense(), masks.causal(lower_right=True), ~masks.dense()):
        assert_close(
            sparse_attention(q, k, v, spec, enable_gqa=True), reference(spec, q, k, v), dtype
        )


def test_forms_of_a_mask() -> None:
    q, k, v = operands()
    keep = torch.rand(70, 70) < 0.3
    expected = reference(masks.from_tensor(keep), q, k, v)
    assert_close(sparse_attention(q, k, v, keep, enable_gqa=True), expected)
    assert_close(
        sparse_attention(q, k, v, lambda b, h, i, j: keep[i, j], enable_gqa=True), expected
    )
    assert_close(sparse_attention(q, k, v, enable_gqa=True), reference(masks.dense(), q, k, v))


def test_padding_bias_and_lse() -> None:
    q, k, v = operands()
    key_keep, bias = torch.arange(70)[None] < 50, torch.randn(4, 1, 70)
    out, lse = sparse_attention(
        q,
        k,
        v,
        WINDOW,
        key_keep=key_keep,
        bias=bias,
        scale=0.5,
        softcap=4.0,
        enable_gqa=True,
        return_lse=True,
    )
    keep = masks.build_block_mask(WINDOW, 70, 70, 32).to_dense()
    wide = [t.double() for t in (q, k, v)]
    expected, expected_lse = attention_reference(
        *wide, keep, key_keep, bias.double(), 0.5, 4.0, True
    )
    assert_close(out, expected)
    assert_close(lse, expected_lse)


def test_gradients() -> None:
    leaves = [t.requires_grad_() for t in operands()]
    keep = masks.build_block_mask(WINDOW, 70, 70, 32).to_dense()
    out = sparse_attention(*leaves, WINDOW, enable_gqa=True)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = F.scaled_dot_product_attention(*wide, attn_mask=keep, enable_gqa=True)
    weight = torch.randn(out.shape)
    grads = torch.autograd.grad((out * weight).sum(), leaves)
    for got, wanted in zip(
        grads, torch.autograd.grad((expected * weight).sum(), wide), strict=True
    ):
        assert_close(got, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_a_checkpoint(reentrant: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sparse_attention(q * 1.5, k, v, WINDOW, enable_gqa=True)

    plain, kept = ([t.requires_grad_() for t in operands()] for _ in range(2))
    attend(*plain).square().sum().backward()
    checkpoint(attend, *kept, use_reentrant=reentrant).square().sum().backward()
    for wanted, got in zip(plain, kept, strict=True):
        assert wanted.grad is not None and got.grad is not None
        assert torch.equal(got.grad, wanted.grad)


# -- compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_rules_from_outside(backend: str, fresh_dynamo: None) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: MaskSpec) -> torch.Tensor:
        return sparse_attention(q, k, v, spec, enable_gqa=True) + 1

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    specs = [
        masks.bigbird(5, 2, 0.1, random_block=16),
        masks.bigbird(
            9, 2, 0.4, random_block=16
        ),  # changed numbers, which Dynamo then makes symbolic
        WINDOW,
        masks.document(torch.arange(70) // 30),
        masks.rule(lambda b, h, i, j: (i >= j) & (h == 1)),
    ]
    for spec in specs if backend == "eager" else specs[:2]:
        q, k, v = operands()
        assert_close(compiled(q, k, v, spec) - 1, reference(spec, q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_rules_from_inside(backend: str, fresh_dynamo: None) -> None:
    width = 11

    def made_here(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sparse_attention(
            q, k, v, masks.sliding_window(width) & masks.causal(), enable_gqa=True
        )

    def mask_mod(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sparse_attention(
            q, k, v, lambda b, h, i, j: (i >= j) & (i - j <= width), enable_gqa=True
        )

    expected = reference(masks.sliding_window(width) & masks.causal(), *operands())
    for function in (made_here, mask_mod):
        assert_close(
            torch.compile(function, backend=backend, fullgraph=True)(*operands()), expected
        )


def test_compiled_gradients_and_lse(fresh_dynamo: None) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = sparse_attention(q, k, v, WINDOW, enable_gqa=True, return_lse=True)
        return out.square().sum() + lse.sum()

    eager, compiled = ([t.requires_grad_() for t in operands()] for _ in range(2))
    attend(*eager).backward()
    torch.compile(attend, backend="aot_eager", fullgraph=True)(*compiled).backward()
    for wanted, got in zip(eager, compiled, strict=True):
        assert wanted.grad is not None and got.grad is not None
        assert_close(got.grad, wanted.grad.double())


def test_compiled_tensor_mask_is_sdpa(fresh_dynamo: None) -> None:
    keep = torch.rand(70, 70) < 0.3
    compiled = torch.compile(
        lambda q, k, v: sparse_attention(q, k, v, keep, enable_gqa=True),
        backend="aot_eager",
        fullgraph=True,
    )
    assert_close(compiled(*operands()), reference(masks.from_tensor(keep), *operands()))


def test_compiled_lengths_may_change(fresh_dynamo: None) -> None:
    compiled = torch.compile(
        lambda q, k, v: sparse_attention(q, k, v, WINDOW, enable_gqa=True),
        backend="aot_eager",
        fullgraph=True,
    )
    for length in (40, 57, 90):
        assert_close(
            compiled(*operands(length, length)), reference(WINDOW, *operands(length, length))
        )


# -- choosing and refusing ---------------------------------------------------------------------


def test_attention_kernel_nests_and_is_local_to_a_thread() -> None:
    seen: list[str | None] = []
    with attention_kernel("gather"):
        with attention_kernel("sdpa"):
            assert current_override() == "sdpa"
            thread = threading.Thread(target=lambda: seen.append(current_override()))
            thread.start()
            thread.join()
        assert current_override() == "gather"
    assert current_override() is None
    assert seen == [None]


@pytest.mark.parametrize("kernel", ["gather", "sdpa"])
def test_forced_kernel(kernel: str) -> None:
    with attention_kernel(kernel):
        assert_close(
            sparse_attention(*operands(), WINDOW, enable_gqa=True), reference(WINDOW, *operands())
        )


def test_default_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.float16
    assert default_kernel("cpu", 0.1, 100) == "gather"
    assert default_kernel("cpu", 0.5, 100) == "gather"
    assert default_kernel("cpu", 0.5, 100, dtype=torch.bfloat16) == "sdpa"
    assert default_kernel("cpu", 0.5, 100, dtype=torch.bfloat16, return_lse=True) == "gather"
    assert default_kernel("cuda", 0.1, 100) == "block"
    assert default_kernel("cuda", 1.0, 100, head_dim=128) == "block"
    assert default_kernel("cuda", 0.8, 100, head_dim=256) == "block"
    assert default_kernel("cuda", 0.9, 100, head_dim=136) == "sdpa"
    assert default_kernel("cuda", 0.9, 100, head_dim=136, grouped=True) == "block"
    assert default_kernel("cuda", 0.9, 100, head_dim=136, dense_bytes=2**28 + 1) == "block"
    assert default_kernel("cuda", 0.9, 100, head_dim=136, return_lse=True) == "block"
    monkeypatch.setattr(limits, "tf32_allowed", lambda: True)
    assert default_kernel("cuda", 1.0, 100, head_dim=256) == "block"
    assert default_kernel("cuda", 1.0, 100, dtype=half) == "block"
    assert default_kernel("cuda", 0.0, 100, dtype=torch.float64, return_lse=True) == "sdpa"
    assert default_kernel("cuda", 0.0, 100, dtype=half, head_dim=257) == "sdpa"
    assert default_kernel("cuda", 0.1, 1) == "row"
    assert default_kernel("cuda", 0.9, 1, dtype=half) == "sdpa"
    assert default_kernel("cpu", 0.9, 100) == "sdpa"
    assert default_kernel("cpu", 0.9, 100, softcap=2.0) == "gather"


def test_causal_masks_are_left_to_sdpa_where_it_has_a_fused_kernel() -> None:
    def left(q=(2, 8, 100, 64), k=(2, 8, 100, 64), value_dim=64, dtype=torch.float16, **how):
        return sdpa_takes_causal(
            q, k, value_dim, dtype, **{"unit_strides": True, "on_hopper": False} | how
        )

    wide = (2, 8, 100, 128)
    assert left(wide, wide, 128, dtype=torch.float32) and not left(dtype=torch.float32)
    assert left() and not left(on_hopper=True)
    assert left(wide, wide, 128, on_hopper=True)
    assert not left(unit_strides=False)
    assert not left(value_dim=32)
    odd = (2, 8, 100, 60)
    assert not left(odd, odd, 60)
    groups = (2, 2, 100, 64)
    assert left(k=groups) and not left(k=groups, dtype=torch.float32)
    assert left(k=(2, 8, 50, 64)) and not left(k=(2, 2, 50, 64))


@pytest.mark.parametrize(
    ("batch", "q_len", "head_dim", "left"),
    [
        (32, 512, 72, False), (32, 512, 96, False), (32, 512, 104, True),
        (8, 2048, 128, False), (8, 2047, 128, True), (8, 2048, 136, True), (8, 2048, 256, True),
        (4, 4096, 128, False), (4, 4096, 64, False),
        (1, 2048, 80, True),  # too few units for the Hopper kernels to come first
    ],
)  # fmt: skip
def test_causal_masks_that_hopper_kernels_take(batch, q_len, head_dim, left) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from stof_compile.kernels.attention_blockwise import configs

    size = batch, 12, q_len, head_dim
    how = {"q_len": q_len, "planes": 12 * batch, "plain": True}
    on_hopper = configs(head_dim, torch.float16, (9, 0), **how)[0].hopper > 0
    how = {"unit_strides": True, "on_hopper": on_hopper}
    assert sdpa_takes_causal(size, size, head_dim, torch.float16, **how) == left


class SaysCuda(torch.Tensor):
    """On the CPU, but says otherwise."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("spec", "forced", "head_dim", "left"),
    [
        (masks.causal(), None, 16, True),
        (masks.causal(), None, 12, False),  # SDPA has no fused kernel and would hold all scores
        (masks.causal(), "block", 16, False),
        (masks.sliding_window(5), None, 16, False),
    ],
)
def test_causal_masks_that_a_capture_has_no_tiles_of(
    monkeypatch, spec, forced, head_dim, left
) -> None:
    """SDPA needs none; other masks, and a kernel that was asked for, do."""
    from stof_compile.kernels.attention_blockwise import BlockConfig

    def missing(*given):
        raise StofMaskError("not there yet")

    called = []
    monkeypatch.setattr(functional, "_block_mask", missing)
    on_hopper = tuple(BlockConfig(64, 64, 4, 2, hopper=4))
    monkeypatch.setattr(functional, "_first_config", lambda *given: on_hopper)
    monkeypatch.setattr(functional, "_sdpa", lambda q, *more, is_causal: called.append(is_causal))
    q, k, v = (x.as_subclass(SaysCuda) for x in torch.randn(3, 1, 2, 24, head_dim).half().unbind())
    call = q, k, v, spec, None, None, 0.25, 0.0, False, forced
    if left:
        functional._attend(*call)
        assert called == [True]
    else:
        with pytest.raises(StofMaskError, match="not there yet"):
            functional._attend(*call)


@pytest.mark.parametrize("kernel", ["gather", "flex"])
def test_gradient_of_a_mask_of_full_tiles_only(kernel):
    q, k, v = torch.randn(3, 1, 2, 256, 16, requires_grad=True).unbind()
    rule = masks.block_diagonal(64)
    with attention_kernel(kernel):
        out = sparse_attention(q, k, v, rule)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    block = torch.arange(256) // 64
    keep = block[:, None] == block[None, :]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (24,)])
def test_a_bias_of_fewer_dimensions_without_a_mask(shape):
    q, k, v = torch.randn(3, 2, 2, 24, 16).unbind()
    bias = torch.randn(shape)
    expected = torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v
    torch.testing.assert_close(sparse_attention(q, k, v, bias=bias), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [None, "eager", "stof"])
def test_three_dimensions_of_a_mask_are_batch_and_lengths(backend, fresh_dynamo):
    """SDPA reads them as heads and lengths."""
    q, k, v = (x[:, :2] for x in operands())
    keep = torch.rand(2, 70, 70) < 0.3

    def attend(q, k, v):
        return sparse_attention(q, k, v, keep)

    run = attend if backend is None else torch.compile(attend, backend=backend)
    assert_close(run(q, k, v), reference(masks.from_tensor(keep), q, k, v))


def test_no_softcap_has_two_names():
    q, k, v = operands()
    plain = sparse_attention(q, k, v, WINDOW, enable_gqa=True)
    assert torch.equal(plain, sparse_attention(q, k, v, WINDOW, softcap=None, enable_gqa=True))


@pytest.mark.parametrize("backend", [None, "aot_eager", "stof"])
def test_autocast_casts_the_operands_as_for_sdpa(backend, fresh_dynamo):
    q, k = torch.randn(2, 1, 2, 40, 16).unbind()
    v = torch.randn(1, 2, 40, 16, dtype=torch.bfloat16)  # as behind a rotation in float32

    def attend(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return sparse_attention(q, k, v, WINDOW)

    options = {"tune_budget_s": 0} if backend == "stof" else None
    run = torch.compile(attend, backend=backend, options=options) if backend else attend
    found = run(q, k, v)
    half = [x.bfloat16() for x in (q, k, v)]
    assert found.dtype == torch.bfloat16
    assert_close(found, reference(WINDOW, *half), torch.bfloat16)
    wide = attend(q.double(), k.double(), v.double())
    assert wide.dtype == torch.float64


@pytest.mark.parametrize("bias", [None, torch.randn(70, 70)], ids=["", "bias"])
def test_a_backward_pass_inside_autocast_rounds_no_more_than_outside(bias):
    def gradients(open_):
        leaves = [x.requires_grad_() for x in operands(dtype=torch.bfloat16)]
        with torch.autocast("cpu", torch.bfloat16, enabled=open_):
            out = sparse_attention(*leaves, WINDOW, bias=bias, enable_gqa=True)
            return torch.autograd.grad(out.float().square().sum(), leaves)

    for inside, outside in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(inside, outside)
