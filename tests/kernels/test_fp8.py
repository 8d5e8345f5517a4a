"""Attention on e4m3 operands: their rounding, and the kernel against fp64 on the same operands."""

from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, Case, check
from close import assert_close
from stof_compile.kernels import rounding
from stof_compile.kernels.reference import attention_reference, rounded_to_e4m3
from stof_compile.kernels.rounding import fp8_refusal, round_heads

from stof_compile import masks
from stof_compile.ops_fp8 import attend_rounded, round_operands

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def values_of(rounded, keys_last=False):
    """The numbers that ``round_heads`` stands for, in fp64, with all that fills up."""
    values, scale = rounded
    if keys_last:
        assert (values[:, :, -rounding.ONES :].float() == 1).all()
        values = values[:, :, : -rounding.ONES].transpose(2, 3)
    return values.double() * scale.double()[:, :, None, None]


# -- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("keys_last", [False, True])
def test_rounding_is_that_of_the_reference(dtype, keys_last):
    torch.manual_seed(1)
    sizes = torch.tensor([1.0, 300.0, 1e-4])[:, None, None]
    x = (torch.randn(2, 3, 37, 24) * sizes).to(dtype).transpose(2, 3).contiguous().transpose(2, 3)
    values, scale = round_heads(x, keys_last)
    assert values.dtype == E4M3 and values.is_contiguous()
    assert scale.dtype == torch.float32 and scale.shape == (2, 3)
    assert values.shape == ((2, 3, 40, 128) if keys_last else (2, 3, 37, 32))
    wide = values_of((values, scale), keys_last)
    assert torch.equal(wide[:, :, :37, :24], rounded_to_e4m3(x))
    assert not wide[:, :, 37:].any() and not wide[..., 24:].any()


def test_the_reference_rounds_as_torch_does():
    x = torch.randn(1, 1, 500, 16) * torch.logspace(-4, 0, 500)[:, None]
    scale = float(x.abs().max()) / 448
    expected = (x / scale).to(E4M3).double() * scale
    torch.testing.assert_close(rounded_to_e4m3(x), expected, rtol=1e-6, atol=0)


def test_relative_error_of_rounding():
    x = torch.randn(2, 4, 1000, 64, dtype=torch.float16)
    error = rounded_to_e4m3(x) - x.double()
    assert error.square().mean().sqrt() / x.double().square().mean().sqrt() < 0.027
    normal = x.abs() > 2.0**-6 * x.abs().amax() / 448
    assert (error.abs() / x.abs())[normal].max() <= 2.0**-4


def test_what_is_not_finite_becomes_nan_and_leaves_the_scale_alone():
    x = torch.randn(1, 2, 5, 16)
    plain = round_heads(x, False)
    x[0, 0, 1, 2], x[0, 0, 3, 4], x[0, 1, 2, 2] = NAN, INF, -INF
    values, scale = round_heads(x, False)
    assert torch.equal(values.float().isnan(), ~x.isfinite())
    largest = torch.where(x.isfinite(), x.abs(), 0.0).amax((2, 3))
    assert torch.equal(scale, largest / 448) and plain[1].shape == scale.shape


def test_heads_of_zeros_and_of_tiny_numbers():
    zeros = torch.zeros(1, 1, 4, 16)
    values, scale = round_heads(zeros, False)
    assert scale.item() == rounding.SMALLEST_SCALE and not values.float().any()
    assert torch.equal(rounded_to_e4m3(zeros), zeros.double())
    assert (scale * scale).item() > torch.finfo(torch.float32).tiny
    tiny = torch.full((1, 1, 4, 16), 1e-30)
    assert torch.equal(values_of(round_heads(tiny, False)), rounded_to_e4m3(tiny))


def test_all_zero_heads_and_empty_operands():
    for shape in ((0, 2, 5, 16), (1, 2, 0, 16)):
        for keys_last in (False, True):
            values, scale = round_heads(torch.zeros(shape), keys_last)
            assert values.numel() == 0 and scale.shape == shape[:2]
        assert rounded_to_e4m3(torch.zeros(shape)).shape == shape


def test_operands_are_left_as_they_are():
    x = torch.randn(1, 2, 8, 16, dtype=torch.float16)
    before = x.clone()
    round_heads(x, True)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"capability": (8, 6)}, "8.9"),
        ({"dtype": torch.float32}, "fp16 and bf16"),
        ({"head_dim": 136}, "up to 128"),
        ({"value_dim": 256}, "up to 128"),
    ],
)
def test_refusals(change, reason):
    asked = {"head_dim": 64, "value_dim": 64, "dtype": torch.bfloat16, "capability": (9, 0)}
    found = fp8_refusal(**asked | change)
    assert found is None if reason is None else reason in found


# -- operators ------------------------------------------------------------------------------------


def test_rounding_operator():
    x = torch.randn(2, 3, 20, 24, dtype=torch.bfloat16)
    for keys_last in (False, True):
        arguments = (x, keys_last)
        results = torch.library.opcheck(torch.ops.stof.fp8_heads.default, arguments)
        assert set(results.values()) == {"SUCCESS"}
        with torch._subclasses.FakeTensorMode() as mode:
            fake = torch.ops.stof.fp8_heads(mode.from_tensor(x), keys_last)
        for found, real in zip(fake, torch.ops.stof.fp8_heads(x, keys_last), strict=True):
            assert (found.shape, found.stride(), found.dtype) == (
                real.shape, real.stride(), real.dtype,
            )  # fmt: skip


@pytest.mark.parametrize("block_k", [16, 256])
def test_tiles_have_no_more_keys_than_zeros_are_behind_v_for(block_k):
    q = torch.randn(1, 1, 70, 16, dtype=torch.float16)
    stored = masks.build_block_mask(masks.dense(), 70, 70, (16, block_k))
    with pytest.raises(ValueError, match="e4m3 operands has 32 to 128 keys"):
        attend_rounded(
            *round_operands(q, q, q), *stored.tensors, None, None, 0.25, 0.0, 0, [],
            [16, block_k, 4, 2], False, q.dtype,
        )  # fmt: skip


def test_the_kernel_gets_tensors_and_no_views_of_parts(monkeypatch):
    """Inductor makes a tensor of each argument, and of a view one that has nothing behind it."""
    from stof_compile.kernels import attention_blockwise

    launched = []
    monkeypatch.setattr(
        attention_blockwise, "launchable",
        lambda kernel, *_: {(6,): lambda *given, **constants: launched.append(given)},
    )  # fmt: skip
    q = torch.randn(1, 2, 140, 24, dtype=torch.float16)
    stored = masks.build_block_mask(masks.causal(), 140, 140, 64)
    rounded = round_operands(q, q, q)
    attend_rounded(
        *rounded, *stored.tensors, None, None, 0.2, 0.0, 0, [], [64, 64, 4, 2], False, q.dtype
    )
    (given,) = launched
    for values, _ in rounded:
        (seen,) = (
            t for t in given if isinstance(t, torch.Tensor) and t.data_ptr() == values.data_ptr()
        )
        assert seen.shape == values.shape and seen.stride() == values.stride()


def test_rounding_in_a_compiled_graph(fresh_dynamo):
    """Inductor sees plain operations: what it writes gives the same bits."""
    x = torch.randn(2, 3, 45, 24, dtype=torch.bfloat16)
    x[0, 1, 3, 4], x[1, 2, 0, 0] = INF, NAN

    def both(x):
        y = x * 2
        return torch.ops.stof.fp8_heads(y, False), torch.ops.stof.fp8_heads(y, True)

    for found, wanted in zip(torch.compile(both)(x), both(x), strict=True):
        assert torch.equal(found[0].float().isnan(), wanted[0].float().isnan())
        assert torch.equal(found[0].float().nan_to_num(), wanted[0].float().nan_to_num())
        assert torch.equal(found[1], wanted[1])


def test_fake_attention():
    with torch._subclasses.FakeTensorMode():
        q, k = (torch.empty(2, h, 40, 16, dtype=torch.bfloat16) for h in (4, 2))
        v = torch.empty(2, 2, 40, 24, dtype=torch.bfloat16)
        stored = [torch.empty(1, dtype=torch.int32)] * 7
        out, lse = attend_rounded(
            *round_operands(q, k, v), *stored, None, None, 1.0, 0.0, 0, [], [16, 32], True, q.dtype
        )
    assert out.shape == (2, 4, 40, 24) and out.dtype == q.dtype
    assert out.transpose(1, 2).is_contiguous()
    assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32


def test_the_hopper_kernel_is_refused():
    q = torch.randn(1, 2, 64, 64, dtype=torch.float16)
    arrays = masks.build_block_mask(masks.causal(), 64, 64, 64).tensors
    config = [64, 64, 4, 2, 3, 0, 1, 0, 0, 3, 0]
    with pytest.raises(ValueError, match="Hopper"):
        attend_rounded(
            *round_operands(q, q, q), *arrays, None, None, 1.0, 0.0, 0, [], config, False, q.dtype
        )


def launch(q, k, v, mask, key_keep, bias, scale, softcap, q_offset, band, config, return_lse):
    """``attention_block_forward`` on what the operands are rounded to."""
    from stof_compile.kernels.attention_fp8 import attention_fp8_forward

    (q, q_scale), (k, k_scale), (v, v_scale) = (
        round_heads(x, keys_last) for x, keys_last in ((q, False), (k, False), (v, True))
    )
    return attention_fp8_forward(
        q, k, v, (q_scale, k_scale, v_scale), torch.float16, mask, key_keep, bias, scale, softcap,
        q_offset, band, config, return_lse,
    )  # fmt: skip


# -- the kernel in the interpreter ----------------------------------------------------------------


@pytest.fixture
def e4m3():
    """Conversions of the interpreter as on a GPU."""
    from right_e4m3 import right_e4m3

    with right_e4m3():
        yield


FP8_CASES = {
    name: replace(case, block=(16, 32), dtype=torch.float16)
    for name, case in CASES.items()
    if max(case.head_dim, case.value_dim) <= 128 and name != "half"
}
LOOPS = {
    "one loop": {"loops": 4},
    "one loop, branch": {"loops": 5, "prefetch": 1, "heads_fast": 1},
    "pieces": {"heavy_rows": 2, "pieces": 3},
}


@pytest.mark.interpreter
@pytest.mark.parametrize("case", FP8_CASES.values(), ids=FP8_CASES)
def test_block(case, e4m3):
    from stof_compile.kernels.attention_blockwise import BlockConfig

    check(launch, BlockConfig(*case.block, 4, 2), case, fp8=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("how", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("rule", ["causal longformer", "random"])
def test_block_loops(rule, how, e4m3):
    from stof_compile.kernels.attention_blockwise import BlockConfig

    case = Case(rule=rule, band=rule != "random", block=(16, 32), dtype=torch.float16, batch=2)
    check(launch, BlockConfig(16, 32, 4, 2)._replace(**how), case, fp8=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("loops", [6, 7])
@pytest.mark.parametrize("lengths", [(33, 257), (257, 33), (64, 64)], ids=str)
def test_block_tiles_computed_from_the_band(loops, lengths, e4m3):
    from stof_compile.kernels.attention_blockwise import BlockConfig

    case = Case(
        *lengths, "causal", band=True, block=(32, 64), dtype=torch.float16, head_dim=40,
        value_dim=24, q_offset=max(0, lengths[1] - lengths[0]),
    )  # fmt: skip
    check(launch, BlockConfig(32, 64, 4, 2, loops), case, fp8=True)


@pytest.mark.interpreter
def test_heads_of_very_different_sizes(e4m3):
    """Each has its own scale; equal values have that value as their average, exactly."""
    from stof_compile.kernels.attention_blockwise import BlockConfig

    torch.manual_seed(2)
    sizes = torch.tensor([1e-3, 1.0, 50.0])[None, :, None, None]
    q, k = (torch.randn(1, 3, 70, 32) for _ in range(2))
    v = (torch.randn(1, 3, 70, 16) * sizes).half()
    q, k = (q / sizes.sqrt()).half(), (k * sizes.sqrt()).half()
    stored = masks.build_block_mask(masks.causal(), 70, 70, (16, 32))
    rest = (stored.tensors, None, None, 0.2, 0.0, 0, [], list(BlockConfig(16, 32)), False)
    out, _ = launch(q, k, v, *rest)
    wide = [rounded_to_e4m3(x) for x in (q, k, v)]
    wanted = attention_reference(*wide, stored.to_dense(), None, None, 0.2)
    for head in range(3):
        assert_close(out[:, head], wanted[:, head], E4M3)
    ones, _ = launch(q, k, torch.ones_like(v), *rest)
    assert torch.equal(ones, torch.ones_like(ones))


@pytest.mark.interpreter
def test_zeros_and_nan(e4m3):
    """Scores of zero are an average; NaN spoils the rows that read it and no others."""
    from stof_compile.kernels.attention_blockwise import BlockConfig

    q, k, v = (torch.randn(1, 2, 48, 16).half() for _ in range(3))
    stored = masks.build_block_mask(masks.causal(), 48, 48, (16, 32))
    rest = (stored.tensors, None, None, 0.25, 0.0, 0, [], list(BlockConfig(16, 32)), False)
    flat, _ = launch(torch.zeros_like(q), k, v, *rest)
    wanted = attention_reference(
        torch.zeros_like(q).double(), k.double(), rounded_to_e4m3(v), stored.to_dense()
    )
    assert_close(flat, wanted, torch.float16)  # equal weights are rounded alike
    q[0, 0, 5, 3], k[0, 1, 40, 2] = NAN, INF
    out, _ = launch(q, k, v, *rest)
    assert out[0, 0].isnan().any(1).nonzero().flatten().tolist() == [5]
    assert out[0, 1].isnan().any(1).nonzero().flatten().tolist() == list(range(40, 48))


@pytest.mark.interpreter
def test_attention_operator_passes_opcheck(e4m3):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16).half() for h, n in ((4, 40), (2, 70), (2, 70)))
    stored = masks.build_block_mask(masks.causal(), 40, 70, (16, 32), q_offset=30)
    (q, qs), (k, ks), (v, vs) = round_operands(q, k, v)
    arguments = (
        q, k, v, qs, ks, vs, *stored.tensors, None, None, 0.25, 0.0, 30, [], [16, 32], True,
        torch.float16,
    )  # fmt: skip
    # no AOT test: an interpreted kernel cannot be traced; torch's test of schemas multiplies its
    # arguments, which it cannot in e4m3
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    tests = ("test_autograd_registration", "test_faketensor")
    operator = torch.ops.stof.attention_fp8.default
    assert set(torch.library.opcheck(operator, arguments, test_utils=tests).values()) == {"SUCCESS"}
    for was, now in zip(before, arguments, strict=True):
        if isinstance(now, torch.Tensor):
            assert torch.equal(was.view(torch.uint8), now.view(torch.uint8))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": lambda v: v[..., :70]}, "contiguous"),
        ({"q": lambda q: q.float()}, "e4m3"),
        ({"q_scale": lambda s: s.double()}, "scale of q"),
        ({"k_scale": lambda s: s[:, :1]}, "scale of k"),
        ({"config": lambda c: [16, 16]}, "32 to 128 keys"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    q, k, v = (torch.randn(2, h, 70, 16).half() for h in (4, 2, 2))
    pairs = dict(zip(("q", "k", "v"), round_operands(q, k, v), strict=True))
    given = {name: pair[0] for name, pair in pairs.items()}
    given |= {f"{name}_scale": pair[1] for name, pair in pairs.items()} | {"config": [16, 32]}
    given |= {name: made(given[name]) for name, made in change.items()}
    arrays = masks.build_block_mask(masks.causal(), 70, 70, tuple(given["config"])).tensors
    config = given.pop("config")
    with pytest.raises(ValueError, match=message):
        torch.ops.stof.attention_fp8(
            *given.values(), *arrays, None, None, 0.25, 0.0, 0, [], config, False, torch.float16
        )
