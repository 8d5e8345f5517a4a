"""Attention on e4m3 operands on a GPU, against fp64 on the same operands."""

from functools import partial

import pytest
import torch
from attention_cases import FP8_LSE_ERROR
from close import assert_close
from stof_compile.kernels.reference import attention_reference, rounded_to_e4m3
from torch.nn import functional as F

from stof_compile import explain, masks, sparse_attention
from stof_compile.attention.call import honest_config
from stof_compile.masks import build_block_mask, cached_block_mask
from stof_compile.ops_fp8 import attend_rounded, round_operands

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of capability 8.9 or newer")
    torch.manual_seed(0)


def operands(batch, heads, group, q_len, k_len, head_dim, dtype, value_dim=None):
    draw = partial(torch.randn, device="cuda", dtype=dtype)
    q = draw(batch, q_len, heads, head_dim).transpose(1, 2)  # strided, as in models
    k = draw(batch, heads // group, k_len, head_dim)
    return q, k, draw(batch, heads // group, k_len, value_dim or head_dim)


def expected(q, k, v, keep, key_keep=None, bias=None, scale=None, softcap=0.0):
    wide = [rounded_to_e4m3(x) for x in (q, k, v)]
    bias = None if bias is None else bias.double()
    return attention_reference(*wide, keep, key_keep, bias, scale, softcap, True)


def close(out, lse, wanted, wanted_lse):
    assert_close(out, wanted, E4M3)
    finite = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse[finite] - wanted_lse[finite]).abs().max() <= FP8_LSE_ERROR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize("way", ["eager", "inductor"])
def test_rounding(dtype, keys_last, way, fresh_dynamo):
    """NaN for what is not finite: the GPU's own conversion would make 448 of infinity."""
    x = torch.randn(2, 3, 333, 72, device="cuda", dtype=dtype) * 30
    x[0, 1, 3, 4], x[1, 2, 0, 0], x[1, 0, 5, 5] = INF, NAN, -INF
    made = partial(torch.ops.stof.fp8_heads, keys_last=keys_last)
    values, scale = (made if way == "eager" else torch.compile(lambda x: made(x)))(x)
    assert values.is_contiguous()
    wide, scale = x.cpu().float(), scale.cpu()
    wanted_scale = torch.where(wide.isfinite(), wide.abs(), 0.0).amax((2, 3)) / 448
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    found = values.cpu().float()
    if keys_last:
        assert (found[:, :, 72:] == 1).all() and not found[:, :, :72, 333:].any()
        found = found[:, :, :72, :333].transpose(2, 3)
    else:
        assert not found[..., 72:].any()
        found = found[..., :72]
    assert torch.equal(found.isnan(), ~wide.isfinite())
    # a quotient that is off in its last bits may fall to the other side of a half
    quotient = wide / scale[:, :, None, None]
    near = [(quotient * side).to(E4M3).float() for side in (1 - 2**-20, 1, 1 + 2**-20)]
    assert torch.where(wide.isfinite(), torch.stack(near) == found, True).any(0).all()


RULES = {
    "causal": masks.causal(),
    "sliding": masks.sliding_window(45),
    "longformer": masks.longformer(window=50, global_tokens=70),
    "bigbird": masks.bigbird(45, 45, 0.1),
    "heads": masks.per_head([masks.causal(), masks.sliding_window(9)] * 2),
    "dense": masks.dense(),
}


PROBLEMS = [
    *((rule, head_dim, torch.float16) for rule in RULES for head_dim in (64, 128)),
    ("bigbird", 80, torch.bfloat16),
    ("longformer", 40, torch.bfloat16),
]


@pytest.mark.parametrize(("rule", "head_dim", "dtype"), PROBLEMS)
def test_every_tile_and_loop(rule, head_dim, dtype):
    """Of a ragged length with groups, as honest as selection makes them."""
    from stof_compile.kernels.attention_blockwise import configs

    device, length = torch.device("cuda"), 610
    q, k, v = operands(2, 4, 2, length, length, head_dim, dtype)
    rounded, wanted, fitting = round_operands(q, k, v), None, {}
    for kind in ({}, {"is_band": True}, {"q_len": 128, "planes": 8}):
        facts = {"narrow": True, **kind}
        for config in configs(head_dim, E4M3, torch.cuda.get_device_capability(), **facts):
            mask = cached_block_mask(
                RULES[rule], length, length, config[:2], batch=2, heads=4, device=device
            )
            honest = honest_config(mask, config, 8)
            fitting.setdefault((*honest[:3], honest[4]), (honest, mask))  # of any depth
    for honest, mask in fitting.values():
        wanted = wanted or expected(q, k, v, mask.to_dense())
        band = [] if mask.band is None else mask.band.as_ints()
        out, lse = attend_rounded(
            *rounded, *mask.tensors, None, None, head_dim**-0.5, 0.0, 0, band, list(honest), True,
            dtype,
        )  # fmt: skip
        assert out.dtype == dtype
        close(out, lse, *wanted)


@pytest.mark.parametrize("lengths", [(1, 300), (33, 257), (257, 33), (640, 640)], ids=str)
@pytest.mark.parametrize("how", ["plain", "padding", "bias", "softcap", "all"])
def test_the_function(lengths, how):
    q, k, v = operands(2, 4, 2, *lengths, 64, torch.bfloat16, value_dim=48)
    given = {}
    if how in ("padding", "all"):
        ends = torch.tensor([lengths[1] - 7, lengths[1] // 2], device="cuda")
        given["key_keep"] = torch.arange(lengths[1], device="cuda") < ends[:, None]
    if how in ("bias", "all"):
        given["bias"] = torch.randn(1, 4, *lengths, device="cuda")
    if how in ("softcap", "all"):
        given["softcap"] = 3.0
    rule = masks.causal(lower_right=True) & masks.sliding_window(240)
    out, lse = sparse_attention(q, k, v, rule, **given, enable_gqa=True, return_lse=True, fp8=True)
    keep = build_block_mask(rule, *lengths, 64, device="cuda").to_dense()
    close(out, lse, *expected(q, k, v, keep, **given))
    alone = sparse_attention(q, k, v, rule, **given, enable_gqa=True, fp8=True)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("heavy_rows", [1, 3])
def test_in_pieces(heavy_rows):
    from stof_compile.kernels.attention_blockwise import BlockConfig

    q, k, v = operands(2, 4, 1, 1000, 1000, 64, torch.float16)
    mask = build_block_mask(RULES["longformer"], 1000, 1000, 64, device="cuda")
    for loops in (3, 5):
        config = BlockConfig(num_stages=2, loops=loops, heavy_rows=heavy_rows, pieces=4)
        out, lse = attend_rounded(
            *round_operands(q, k, v), *mask.tensors, None, None, 0.125, 0.0, 0, [], list(config),
            True, q.dtype,
        )  # fmt: skip
        close(out, lse, *expected(q, k, v, mask.to_dense()))


def test_long_sums_keep_their_precision():
    """Tensor cores add e4m3 products in fewer bits than fp32: not beyond a tile here."""
    q, k, v = operands(1, 1, 1, 64, 65536, 64, torch.float16)
    v = v + 2  # a truncated sum would come out too small
    out = sparse_attention(q, k, v, masks.dense(), fp8=True)
    wanted, _ = expected(q, k, v, None)
    assert ((out.double() / wanted).mean() - 1).abs() < 1e-3
    ones = sparse_attention(q, k, torch.ones_like(v), masks.dense(), fp8=True)
    assert (ones - 1).abs().max() <= 2**-10


def test_error_against_the_operands_before_they_are_rounded():
    q, k, v = operands(2, 8, 1, 1024, 1024, 64, torch.bfloat16)
    out = sparse_attention(q, k, v, RULES["bigbird"], fp8=True)
    keep = build_block_mask(RULES["bigbird"], 1024, 1024, 64, device="cuda").to_dense()
    exact = attention_reference(q.double(), k.double(), v.double(), keep)
    error = (out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.02 < error < 0.065


def test_nan_spoils_what_reads_it():
    q, k, v = operands(1, 2, 1, 300, 300, 64, torch.float16)
    q[0, 0, 5, 3], k[0, 1, 250, 2] = NAN, INF
    out = sparse_attention(q, k, v, masks.causal(), fp8=True)
    assert out[0, 0].isnan().any(1).nonzero().flatten().tolist() == [5]
    assert out[0, 1].isnan().any(1).nonzero().flatten().tolist() == list(range(250, 300))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("budget", [0, 30.0])
def test_compiled(mode, budget, tmp_path, fresh_dynamo):
    """A projection, SDPA: rounded inside the graph, the rest as it was; choices come back."""
    torch.manual_seed(0)
    rule = masks.sliding_window(64)
    layer = torch.nn.Linear(256, 3 * 256, device="cuda", dtype=torch.bfloat16)

    def model(x):
        q, k, v = layer(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v), q, k, v

    options = {
        "mask": rule, "fp8": True, "strict": True, "tune_budget_s": budget, "mode": mode,
        "cache_dir": str(tmp_path),
    }  # fmt: skip
    x = torch.randn(2, 500, 256, device="cuda", dtype=torch.bfloat16)
    keep = build_block_mask(rule, 500, 500, 64, device="cuda").to_dense()
    sources = []
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            fast = torch.compile(model, backend="stof", options=options)
            for _ in range(3):
                out, *given = (t.clone() for t in fast(x))
                assert_close(out, expected(*given, keep)[0], E4M3)
            (site,) = explain(fast).sites
            assert site.choice.kernel == "block" and " in fp8" in site.notes[0]
            sources.append(site.choice.source)
    assert sources == (["measured", "store"] if budget else ["table", "table"])


@pytest.mark.parametrize("backend", ["inductor", "stof"])
def test_the_function_in_a_compiled_graph(backend, fresh_dynamo):
    q, k, v = operands(2, 4, 1, 300, 300, 64, torch.float16)
    fast = torch.compile(
        lambda q, k, v: sparse_attention(q * 1, k, v, masks.causal(), fp8=True), backend=backend
    )
    keep = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    with torch.no_grad():
        assert_close(fast(q, k, v), expected(q, k, v, keep)[0], E4M3)


def test_training_keeps_its_kernel(fresh_dynamo):
    q, k, v = (x.requires_grad_() for x in operands(1, 2, 1, 128, 128, 64, torch.bfloat16))
    options = {"mask": masks.causal(), "fp8": True, "tune_budget_s": 0}
    fast = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="stof", options=options
    )
    fast(q, k, v).sum().backward()
    (site,) = explain(fast).sites
    assert any("fp8 is not used: gradients" in note for note in site.notes)
    assert q.grad is not None
