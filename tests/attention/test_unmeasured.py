"""Attention that nothing was measured for: by hand on a GPU, and what the decision table says."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from stof_compile.kernels import limits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from stof_compile import attention_kernel, masks, sparse_attention
from stof_compile.attention import decision_table, functional, unmeasured
from stof_compile.attention.decision_table import decide, plausible_configs
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.recorded import is_recorded
from stof_compile.config_fields import hopper_programs
from stof_compile.errors import StofMaskError, StofUnsupportedError
from stof_compile.masks import BlockMask, build_block_mask, dense_tensor

HALF, SINGLE = torch.float16, torch.float32
CUDA = torch.device("cuda", 0)


def problem(rule, head_dim=128, length=256, dtype=HALF, **kwargs):
    strides = (12 * length * head_dim, head_dim, 12 * head_dim, 1)
    meta = TensorMeta((16, 12, length, head_dim), strides, dtype)
    return AttentionProblem(meta, meta, meta, rule, 0, CUDA, head_dim**-0.5, **kwargs)


@pytest.fixture
def table_on_hopper(monkeypatch):
    """The decision table for a Hopper GPU; masks stay on the CPU."""
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def on_cpu(self, block):
        return build_block_mask(self.spec, self.q_len, self.k_len, block)

    monkeypatch.setattr(AttentionProblem, "block_mask", on_cpu)
    monkeypatch.setattr(decision_table, "_cudnn_serves", lambda problem: False)


@pytest.mark.parametrize(
    ("rule", "facts", "kernel"),
    [
        (masks.causal(), {}, "sdpa"),
        (masks.causal(), {"head_dim": 64}, "sdpa"),  # too few rows for the Hopper kernel
        (masks.causal(), {"head_dim": 64, "length": 1024}, "block"),
        (masks.causal(), {"padding": True}, "block"),
        (masks.causal(lower_right=True), {}, "block"),
        (masks.sliding_window(120), {}, "block"),
        (masks.sliding_window(120), {"dtype": SINGLE}, "block"),
        (masks.sliding_window(120), {"dtype": SINGLE, "head_dim": 136}, "sdpa"),
        (masks.sliding_window(4), {"dtype": SINGLE, "head_dim": 64, "length": 1024}, "block"),
        (masks.sliding_window(4), {"dtype": torch.float64, "head_dim": 64}, "sdpa"),
        (masks.sliding_window(120), {"dtype": SINGLE, "softcap": 2.0}, "block"),
    ],
    ids=str,
)
def test_table(table_on_hopper, rule, facts, kernel):
    assert decide(problem(rule, **facts))[0] == kernel


def test_table_takes_the_sparse_kernel_where_sdpa_would_need_too_much(table_on_hopper):
    rule = masks.sliding_window(3000)
    facts = {"dtype": SINGLE, "length": 4096, "head_dim": 256}
    assert decide(problem(rule, **facts))[0] == "sdpa"
    long = replace(problem(rule, **facts), q_offset=0)
    assert unmeasured.MOST_DENSE == 2**28
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unmeasured, "MOST_DENSE", 4096 * 4096 - 1)
        assert decide(long)[0] == "block"


def test_table_leaves_to_sdpa_what_it_has_a_fused_kernel_for(table_on_hopper):
    plain = problem(masks.causal(), length=512)
    shape = plain.q.shape
    turned = TensorMeta(shape, (shape[1] * 128 * 512, 128 * 512, 1, 512), HALF)
    shared = TensorMeta((16, 4, 512, 128), (4 * 512 * 128, 512 * 128, 128, 1), HALF)
    assert decide(plain)[0] == decide(replace(plain, k=shared, v=shared))[0] == "sdpa"
    for name in "qkv":
        assert decide(replace(plain, **{name: turned}))[0] == "block"
    window = problem(masks.sliding_window(400), 256, 512, SINGLE)
    single = TensorMeta((16, 4, 512, 256), (4 * 512 * 256, 512 * 256, 256, 1), SINGLE)
    assert decide(window)[0] == "sdpa"
    assert decide(replace(window, k=single, v=single))[0] == "block"


def test_table_refuses_a_softcap_that_no_kernel_has(table_on_hopper):
    with pytest.raises(StofUnsupportedError, match="softcap"):
        decide(problem(masks.sliding_window(4), dtype=torch.float64, softcap=2.0))


def test_table_looks_at_the_values_too(table_on_hopper):
    narrow = problem(masks.sliding_window(4), 64, 1024, SINGLE)
    wide = replace(narrow, v=problem(masks.causal(), 512, 1024, SINGLE).v)
    assert decide(narrow)[0] == "block"
    assert decide(wide)[0] == "sdpa" and "no sparse kernel" in decide(wide)[2]


# -- by hand --------------------------------------------------------------------------------------


@pytest.fixture
def route(monkeypatch):
    """``route(rule, ...)``: what an eager call on a Hopper GPU runs; nothing does here."""
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(functional, "is_recorded", lambda *operands: False)
    taken = []

    def on_cpu(spec, q, k, tile):
        return build_block_mask(spec, q.shape[2], k.shape[2], tile)

    def sdpa(q, k, v, attn_mask=None, is_causal=False, **how):
        taken.append("causal" if is_causal else "dense" if attn_mask is None else "masked")
        return q.new_empty((*q.shape[:3], v.shape[3]))

    def sparse(q, k, v, mask, key_keep, bias, scale, softcap, q_offset, band, config, lse):
        taken.append("hopper" if hopper_programs(config) else "block")
        return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(0)

    monkeypatch.setattr(functional, "_block_mask", on_cpu)
    monkeypatch.setattr(functional.F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(functional, "attend_without_gradient", sparse)

    def ask(
        rule, head_dim=64, dtype=HALF, heads=(4, 4), lengths=(300, 300), value_dim=None,
        strided="", batch=2, force=None, **how,
    ):  # fmt: skip
        taken.clear()
        with FakeTensorMode():
            make = partial(torch.empty, device="cuda:0", dtype=dtype)
            q = make(batch, heads[0], lengths[0], head_dim)
            k = make(batch, heads[1], lengths[1], head_dim)
            v = make(batch, heads[1], lengths[1], value_dim or head_dim)
            turned = make(batch, heads[0], head_dim, lengths[0]).transpose(2, 3)
        operands = [
            turned if name in strided else t for name, t in zip("qkv", (q, k, v), strict=True)
        ]
        with attention_kernel(force) if force else nullcontext():
            sparse_attention(*operands, rule, enable_gqa=heads[0] != heads[1], **how)
        (one,) = taken
        return one

    return ask


DOUBLE = torch.float64
WIDE, NARROW_WINDOW = masks.sliding_window(200), masks.sliding_window(5)


@pytest.mark.parametrize(
    ("rule", "facts", "taken"),
    [
        (None, {}, "dense"),
        (masks.dense(), {}, "dense"),
        (masks.dense(), {"softcap": 2.0}, "block"),
        (masks.causal(), {}, "causal"),
        (masks.causal(), {"dtype": SINGLE}, "block"),
        (masks.causal(), {"dtype": SINGLE, "head_dim": 96}, "block"),
        (masks.causal(), {"dtype": SINGLE, "head_dim": 104}, "causal"),
        (masks.causal(), {"head_dim": 128}, "causal"),
        (masks.causal(), {"lengths": (100, 300)}, "causal"),
        (masks.causal(), {"heads": (4, 2)}, "causal"),
        (masks.causal(), {"batch": 256, "lengths": (128, 128)}, "hopper"),
        # no fused kernel of SDPA takes these
        (masks.causal(), {"heads": (4, 2), "dtype": SINGLE}, "block"),
        (masks.causal(), {"heads": (4, 2), "lengths": (100, 300)}, "block"),
        *((masks.causal(), {"strided": name}, "block") for name in "qkv"),
        (masks.causal(), {"value_dim": 32}, "block"),
        (masks.causal(), {"head_dim": 60}, "block"),
        # these need more than a mask
        (masks.causal(), {"scale": -1.0}, "block"),
        (masks.causal(), {"key_keep": torch.ones(2, 300, dtype=torch.bool)}, "block"),
        (masks.causal(), {"bias": torch.ones(1, 1, 1, 300)}, "block"),
        (masks.causal(), {"softcap": 2.0}, "block"),
        (masks.causal(), {"return_lse": True}, "block"),
        (masks.causal(lower_right=True), {}, "block"),
        # the dtype and the head dim decide
        (WIDE, {}, "block"),
        (WIDE, {"head_dim": 128}, "block"),
        (WIDE, {"dtype": SINGLE}, "block"),
        (WIDE, {"dtype": SINGLE, "head_dim": 128}, "block"),
        (WIDE, {"dtype": SINGLE, "head_dim": 136}, "masked"),
        (WIDE, {"dtype": SINGLE, "head_dim": 256, "return_lse": True}, "block"),
        (WIDE, {"dtype": SINGLE, "head_dim": 256, "heads": (4, 2)}, "block"),
        (WIDE, {"dtype": SINGLE, "head_dim": 256, "softcap": 2.0}, "block"),
        (masks.sliding_window(70), {"dtype": SINGLE, "head_dim": 256}, "block"),
        # no sparse kernel takes these
        (NARROW_WINDOW, {"dtype": DOUBLE}, "masked"),
        (NARROW_WINDOW, {"head_dim": 320}, "masked"),
        (NARROW_WINDOW, {"value_dim": 320}, "masked"),
        (NARROW_WINDOW, {"dtype": SINGLE, "head_dim": 512}, "masked"),
        (masks.causal(), {"dtype": DOUBLE}, "causal"),
        (masks.causal(), {"head_dim": 321}, "causal"),
        (masks.causal(), {"dtype": DOUBLE, "strided": "q"}, "causal"),
        # asked for
        (None, {"force": "block"}, "block"),
        (masks.dense(), {"force": "block"}, "block"),
        (masks.causal(), {"force": "block"}, "block"),
        (masks.causal(), {"force": "sdpa", "strided": "q"}, "causal"),
        (NARROW_WINDOW, {"force": "sdpa"}, "masked"),
    ],
    ids=str,
)
def test_route(route, rule, facts, taken):
    assert route(rule, **facts) == taken


@pytest.mark.parametrize("more", [{"return_lse": True}, {"softcap": 2.0}], ids=str)
def test_what_no_kernel_takes_is_refused_in_words(route, more):
    for facts in ({"dtype": DOUBLE}, {"head_dim": 320}):
        with pytest.raises(StofUnsupportedError, match="no sparse kernel on CUDA takes"):
            route(NARROW_WINDOW, **facts, **more)


def test_a_mask_too_large_for_sdpa_stays_with_the_kernel(route, monkeypatch):
    monkeypatch.setattr(unmeasured, "MOST_DENSE", 300 * 300 - 1)
    assert route(WIDE, head_dim=256, dtype=SINGLE) == "block"
    assert route(WIDE, dtype=DOUBLE) == "masked"


def test_what_is_recorded_goes_to_the_operator_with_a_gradient(route, monkeypatch):
    met, asked = [], []

    def operator(q, k, v, *rest):
        met.append(len(rest))
        return q, q

    monkeypatch.setitem(functional.SPARSE_OPERATORS, "block", operator)
    monkeypatch.setattr(functional, "is_recorded", lambda *operands: not asked.append(operands))
    bias = torch.ones(1, 1, 1, 300)
    with pytest.raises(ValueError, match="not enough values"):  # nothing else is asked
        route(WIDE, lengths=(200, 300), bias=bias)
    assert met == [15]
    ((q, k, v, last),) = asked
    assert q.shape[2] == 200 and k.shape[2] == v.shape[2] == 300 and k is not v and last is bias


def test_calls_that_are_trained_stay_with_the_kernels(route, monkeypatch):
    monkeypatch.setattr(functional, "wants_kernel_gradients", lambda *operands: True)
    monkeypatch.setattr(functional, "gradient_fragments", lambda *facts: None)
    assert route(masks.causal(), head_dim=128) == "block"
    assert route(masks.causal(), head_dim=320) == "causal"  # where there is one
    # and where it serves better
    assert route(masks.causal(), head_dim=128, dtype=SINGLE) == "causal"
    assert route(WIDE, head_dim=128, dtype=SINGLE) == "masked"
    assert route(WIDE, dtype=SINGLE) == "masked"
    assert route(masks.causal(), dtype=SINGLE) == "block"
    assert route(NARROW_WINDOW, head_dim=128, dtype=SINGLE) == "block"
    assert route(masks.sliding_window(70), head_dim=256, dtype=SINGLE) == "masked"


def test_amd_gpus_multiply_fp32_by_the_ordinary_units(route, monkeypatch):
    monkeypatch.setattr(limits, "exact_products", lambda width=0: "ieee")
    assert route(masks.causal(), dtype=SINGLE) == "causal"
    assert route(WIDE, dtype=SINGLE) == "masked"
    assert route(NARROW_WINDOW, dtype=SINGLE) == "block"
    assert route(WIDE, head_dim=128) == "block"


def test_table_offers_a_form_where_tiles_of_another_size_are_whole(table_on_hopper):
    """Tiles of 64 x 64 are all part, those of 16 x 32 all full: no form keeps what it promises."""
    asked = problem(masks.block_diagonal(32), 128, 1024, SINGLE)
    found = plausible_configs(asked, "block")
    assert found and {config[4] for config in found} == {3}


def test_key_tells_how_fp32_is_multiplied(table_on_hopper):
    asked = problem(masks.sliding_window(4), 64, 256, SINGLE)
    with pytest.MonkeyPatch.context() as patch:
        keys = {replace(asked, allow_tf32=tf32).key for tf32 in (False, True)}
        patch.setattr(torch.version, "hip", "6.4")
        keys |= {replace(asked, allow_tf32=tf32).key for tf32 in (False, True)}
    assert len(keys) == 4


def test_causal_masks_stay_with_tf32(route, monkeypatch):
    monkeypatch.setattr(limits, "tf32_allowed", lambda: True)
    assert route(masks.causal(), head_dim=128, dtype=SINGLE) == "block"
    assert route(WIDE, head_dim=256, dtype=SINGLE) == "block"
    assert route(masks.causal()) == "causal"


def test_a_dense_mask_is_kept_up_to_a_size(monkeypatch):
    made = []
    real = BlockMask.to_dense
    monkeypatch.setattr(BlockMask, "to_dense", lambda self: made.append(1) or real(self))
    mask = build_block_mask(WIDE, 300, 300, 64)
    first, second = dense_tensor.dense_mask(mask), dense_tensor.dense_mask(mask)
    assert first is second and len(made) == 1
    monkeypatch.setattr(dense_tensor, "MOST_KEPT", 300 * 300 - 1)
    assert torch.equal(dense_tensor.dense_mask(mask), first) and len(made) == 2


def test_a_large_dense_mask_is_not_made_in_a_capture(route, monkeypatch):
    monkeypatch.setattr(dense_tensor, "MOST_KEPT", 300 * 300 - 1)
    assert route(WIDE, dtype=DOUBLE) == "masked"
    monkeypatch.setattr(BlockMask, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mask = build_block_mask(WIDE, 300, 300, 64)
    with pytest.raises(StofMaskError, match="attention_kernel"):
        dense_tensor.dense_mask(mask)


def test_equal_planes_count_as_what_they_become():
    mask = build_block_mask(masks.causal(), 100, 100, 64, batch=3, heads=2)
    assert dense_tensor.dense_bytes(mask) == mask.to_dense().numel()
    keep = torch.ones(3, 2, 100, 100, dtype=torch.bool)
    mask = build_block_mask(masks.from_tensor(keep), 100, 100, 64, batch=3, heads=2)
    assert mask.planes == 1 and dense_tensor.dense_bytes(mask) == mask.to_dense().numel() == 60000


def test_what_records_a_call():
    x = torch.ones(2)
    assert not is_recorded(x, None)
    assert is_recorded(x, torch.ones(2, requires_grad=True))
    with torch.no_grad():
        assert not is_recorded(torch.ones(2, requires_grad=True))
    seen = []

    def ask(x):
        seen.append(is_recorded(x))
        return x + 1

    for trace in (
        torch.vmap(ask),
        torch.func.grad(lambda x: torch.vmap(ask)(x).sum()),
        make_fx(ask),
        make_fx(ask, pre_dispatch=True),
        make_fx(ask, tracing_mode="fake"),
        lambda x: torch.jit.trace(ask, (x,), check_trace=False),
    ):
        trace(x)
    assert len(seen) >= 6 and all(seen)
