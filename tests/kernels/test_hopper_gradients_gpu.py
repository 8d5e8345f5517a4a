"""Gradients of attention on a Hopper GPU, through the operators and ``sparse_attention``, against
the reference in fp64."""

import pytest
import torch
from gradient_checks import (
    BRAIN,
    HALF,
    assert_same_gradients,
    check_replays,
    expected_gradients,
    operands,
    rules,
    stored_mask,
)
from stof_compile.kernels.reference import attention_reference
from template_checks import poisoned_memory

import stof_compile.ops  # noqa: F401  # registers the operators
from stof_compile import masks, sparse_attention
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.attention.functional import attention_kernel
from stof_compile.masks import build_block_mask

pytest.importorskip("triton.experimental.gluon")

from stof_compile.kernels import attention_backward, attention_hopper_backward
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.bound_launch import Repeat

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": HALF, "bf16": BRAIN}
SHAPES = {"8x512": (8, 512), "1x4096": (1, 4096), "ragged": (2, 1001)}
FORWARD = {"portable": BlockConfig(num_stages=3), "hopper": BlockConfig(num_stages=2, hopper=3)}


@pytest.fixture(autouse=True)
def _a_hopper_gpu():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def hopper(only_kernels, monkeypatch):
    """The reference; fails where other kernels give gradients, or at the end where none did."""
    asked = []
    real = attention_hopper_backward.attention_hopper_backward

    def ask(*arguments):
        asked.append(1)
        return real(*arguments)

    def refuse(*arguments, **options):
        raise AssertionError("the portable kernels were used")

    monkeypatch.setattr(attention_hopper_backward, "attention_hopper_backward", ask)
    monkeypatch.setattr(attention_backward, "attention_backward_blockwise", refuse)
    yield only_kernels
    assert asked, "the Hopper kernels were not used"


@pytest.fixture
def repeated(monkeypatch):
    """One entry for each launch that was known."""
    found = []
    again = Repeat.__call__
    monkeypatch.setattr(
        Repeat, "__call__", lambda self, *tensors: found.append(1) or again(self, *tensors)
    )
    return found


def attend(q, k, v, mask, forward="hopper", band=True):
    """Result and log-sum-exp of stof::attention_block, which has its gradients by fragments."""
    config = honest_config(mask, FORWARD[forward], q.shape[0] * q.shape[1])
    arrays = mask_arrays(mask, config).values()
    numbers = list(mask.band.as_ints()) if band and mask.band is not None else []
    return torch.ops.stof.attention_block(
        q, k, v, *arrays, None, None, q.shape[3] ** -0.5, 0.0, mask.q_offset, numbers,
        list(config), True, *mask.key_lists, None, mask.gradient_fragments,
    )  # fmt: skip


def gradients(q, k, v, grad, mask, **how):
    """Gradients of q, k and v, in poisoned memory."""
    with poisoned_memory():
        out, lse = attend(q, k, v, mask, **how)
        assert lse.requires_grad
        return torch.autograd.grad(out, (q, k, v), grad)


def check(real, q, k, v, grad, mask, **how):
    found = gradients(q, k, v, grad, mask, **how)
    assert_same_gradients(found, expected_gradients(real, q, k, v, grad, mask), q.dtype)
    assert all(a.is_contiguous() and a.dtype == q.dtype for a in found)
    return found


def other_operands(batch, heads, q_len, k_len, dtype, group=1, head_dim=64):
    """q, k, v and the gradient of the output, of other lengths."""
    torch.manual_seed(3)
    q, grad = torch.randn(2, batch, heads, q_len, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch, heads // group, k_len, head_dim, device="cuda", dtype=dtype)
    return [*(t.requires_grad_() for t in (q, k, v)), grad]


def planes(batch, heads, q_len, k_len):
    """Of every head its own, with rows, columns and a head without keys, and full tiles."""
    draw = torch.Generator().manual_seed(3)
    keep = torch.rand(batch, heads, q_len, k_len, generator=draw) < 0.3
    keep[:, :, 64:140] = False  # rows without keys, a tile row among them
    keep[:, :, :, 256:330] = False  # and keys that no row sees
    keep[:, :, 192:256, 64:192] = True
    keep[:, 1] = False
    return masks.from_tensor(keep)


# -- the operator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rule", [*rules(), "dense"])
def test_bert_shapes(hopper, rule, shape, dtype):
    q, k, v, grad = operands(*shape, dtype)
    mask = stored_mask(masks.dense() if rule == "dense" else rules()[rule], q, k)
    check(hopper, q, k, v, grad, mask)


@pytest.mark.parametrize("band", [True, False], ids=["band", "bitmap"])
@pytest.mark.parametrize("forward", FORWARD)
@pytest.mark.parametrize("head_dim", [40, 48, 56, 64, 72, 80, 96, 104, 128])
def test_head_dims_behind_either_kernel(hopper, head_dim, forward, band):
    q, k, v, grad = operands(2, 330, HALF, heads=4, head_dim=head_dim)
    mask = stored_mask(rules()["longformer"], q, k)
    check(hopper, q, k, v, grad, mask, forward=forward, band=band)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [2, 4, 12])
@pytest.mark.parametrize("rule", ["causal", "bigbird", "documents"])
def test_groups(hopper, rule, group, head_dim):
    q, k, v, grad = operands(2, 700, BRAIN, head_dim=head_dim, group=group)
    check(hopper, q, k, v, grad, stored_mask(rules()[rule], q, k))


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_planes_rows_and_columns_without_keys(hopper, dtype, head_dim):
    q, k, v, grad = other_operands(2, 4, 330, 400, dtype, head_dim=head_dim)
    mask = stored_mask(planes(2, 4, 330, 400), q, k)
    dq, dk, dv = check(hopper, q, k, v, grad, mask)
    assert (dq[:, :, 64:140] == 0).all() and (dq[:, 1] == 0).all()
    for gradient in (dk, dv):
        assert (gradient[:, :, 256:330] == 0).all() and (gradient[:, 1] == 0).all()


@pytest.mark.parametrize(
    "lengths", [(1, 700), (700, 20), (33, 257), (257, 33), (64, 128), (500, 1300)], ids=str
)
@pytest.mark.parametrize("group", [1, 4])
def test_lengths(hopper, lengths, group):
    q, k, v, grad = other_operands(2, 4, *lengths, HALF, group)
    for rule in (masks.causal(lower_right=True), masks.sliding_window(50), masks.dense()):
        check(hopper, q, k, v, grad, stored_mask(rule, q, k))


@pytest.mark.parametrize("both", [True, False], ids=["both", "lse only"])
@pytest.mark.parametrize("rule", ["causal", "planes"])
def test_gradient_of_the_log_sum_exp(hopper, rule, both):
    """NaN in rows without keys, where a user's code subtracts infinities."""
    q, k, v, grad = other_operands(2, 4, 330, 400, BRAIN)
    mask = stored_mask(planes(2, 4, 330, 400) if rule == "planes" else masks.causal(), q, k)
    with poisoned_memory():
        out, lse = attend(q, k, v, mask)
        seen = lse.detach().isfinite()
        of_lse = torch.randn_like(lse).where(seen, torch.nan)
        results, upstream = ((out, lse), (grad, of_lse)) if both else ((lse,), (of_lse,))
        found = torch.autograd.grad(results, (q, k, v), upstream, materialize_grads=True)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted_out, wanted_lse = attention_reference(
        *wide, mask.to_dense(), None, None, 0.125, 0.0, True
    )
    loss = (wanted_lse[seen] * of_lse[seen].double()).sum()
    if both:
        loss = loss + (wanted_out * grad.double()).sum()
    wanted = torch.autograd.grad(loss, wide, materialize_grads=True)
    assert_same_gradients(found, wanted, BRAIN)


def test_a_gradient_with_strides_of_zero(hopper):
    q, k, v, grad = operands(2, 330, HALF, heads=4)
    mask = stored_mask(rules()["longformer"], q, k)
    for _ in range(3):
        out, _ = attend(q, k, v, mask)
        found = torch.autograd.grad(out.sum(), (q, k, v))
        ones = torch.ones_like(grad)
        assert_same_gradients(found, expected_gradients(hopper, q, k, v, ones, mask), HALF)


def test_no_batch(only_kernels):
    q, k, v, grad = other_operands(0, 4, 130, 200, HALF)
    mask = build_block_mask(masks.causal(), 130, 200, 64, device="cuda")
    found = gradients(q, k, v, grad, mask)
    assert [t.shape for t in found] == [q.shape, k.shape, v.shape]


# -- launches -------------------------------------------------------------------------------------


def test_every_run_gives_the_same_bits(hopper):
    q, k, v, grad = operands(2, 1024, BRAIN, group=4)
    mask = stored_mask(rules()["bigbird"], q, k)
    first = gradients(q, k, v, grad, mask)
    for _ in range(5):
        again = gradients(q, k, v, grad, mask)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_runs_without_part_tiles_give_the_same_bits(hopper, head_dim):
    """Loads are the fastest there: values once came over a result that was still being read."""
    q, k, v, grad = operands(1, 2048, HALF, head_dim=head_dim)
    mask = stored_mask(masks.dense(), q, k)
    first = check(hopper, q, k, v, grad, mask)
    out, _ = attend(q, k, v, mask)
    for _ in range(300):
        again = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("rule", ["bigbird", "dense"])
@pytest.mark.parametrize("of_lse", [False, True], ids=["", "grad_lse"])
def test_known_launches_take_other_tensors(hopper, repeated, rule, of_lse):
    """Of the same layout; those of another one, or another mask, are not taken for known."""
    spec = masks.dense() if rule == "dense" else rules()[rule]
    for number in range(12):
        length = 448 if number % 2 else 384
        q, k, v, grad = operands(2, length, HALF, heads=4)
        if number in (6, 7):  # other strides
            q, grad = (t.detach().contiguous() for t in (q, grad))
        if number in (8, 9):  # addresses that TMA cannot take
            held = torch.empty(q.numel() + 4, device="cuda", dtype=HALF)[4:].view(q.shape)
            q = held.copy_(q.detach())
        q.requires_grad_()
        with torch.no_grad():
            for t in (q, k, v, grad):
                t.mul_(1 + 0.1 * number)
        mask = stored_mask(spec, q, k)
        before = len(repeated)
        with poisoned_memory():
            out, lse = attend(q, k, v, mask, forward="portable")
            results = (out, lse) if of_lse else (out,)
            upstream = (grad, torch.randn_like(lse)) if of_lse else (grad,)
            found = torch.autograd.grad(results, (q, k, v), upstream)
        assert len(repeated) - before in (0, 2)
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        wanted = attention_reference(*wide, mask.to_dense(), None, None, 0.125, 0.0, True)
        wanted = wanted if of_lse else wanted[:1]
        expected = torch.autograd.grad(wanted, wide, [t.double() for t in upstream])
        assert_same_gradients(found, expected, HALF)
    assert len(repeated) >= 2


def test_replays_in_a_cuda_graph(hopper):
    q, k, v, grad = operands(1, 512, HALF)
    mask = stored_mask(rules()["longformer"], q, k)

    def both():
        out, _ = attend(q, k, v, mask)
        return torch.autograd.grad(out, (q, k, v), grad)

    for _ in range(2):  # what is captured is a known launch
        both()
    check_replays(both, hopper, (q, k, v, grad), mask)


def test_on_two_streams_at_once(hopper):
    """Each stream has a queue, and each call statistics of its own."""
    cases = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        q, k, v, grad = operands(2, 900, BRAIN)
        mask = stored_mask(rules()["bigbird"], q, k)
        _ = mask.gradient_fragments, mask.key_lists
        cases.append((stream, q, k, v, grad, mask))
    torch.cuda.synchronize()
    found = []
    for _ in range(4):
        for stream, *given in cases:
            with torch.cuda.stream(stream):
                out, _ = attend(*given[:3], given[4])
                found.append(torch.autograd.grad(out, given[:3], given[3]))
    torch.cuda.synchronize()
    for number, one in enumerate(found):
        _, *given = cases[number % 2]
        assert_same_gradients(one, expected_gradients(hopper, *given), BRAIN)


# -- compilers, and the function ------------------------------------------------------------------


@pytest.mark.parametrize("forward", FORWARD)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_operator_under_inductor(hopper, mode, forward):
    q, k, v, grad = operands(2, 300, HALF, heads=4)
    mask = stored_mask(rules()["longformer"], q, k)
    config = list(honest_config(mask, FORWARD[forward], 8))
    arrays, lists = list(mask_arrays(mask, config).values()), mask.key_lists
    fragments = mask.gradient_fragments

    def attention(q, k, v):
        out, _ = torch.ops.stof.attention_block(
            q * 1.0, k, v, *arrays, None, None, 0.125, 0.0, 0, [], config, True, *lists, None,
            fragments,
        )  # fmt: skip
        return out * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    wanted = [2.0 * t for t in expected_gradients(hopper, q, k, v, grad, mask)]
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(q, k, v), (q, k, v), grad)
        assert_same_gradients(found, wanted, HALF)


WAYS = {"eager": None, "inductor": {}, "reduce-overhead": {"mode": "reduce-overhead"}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group", [1, 4])
def test_the_function_takes_them(hopper, way, group, fresh_dynamo):
    q, k, v, grad = operands(2, 1011, BRAIN, group=group)
    rule = rules()["longformer"]

    def function(q, k, v):
        return sparse_attention(q, k, v, rule, enable_gqa=group > 1)

    if WAYS[way] is not None:
        function = torch.compile(function, fullgraph=True, **WAYS[way])
    wanted = expected_gradients(hopper, q, k, v, grad, stored_mask(rule, q, k))
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(function(q, k, v), (q, k, v), grad)
        assert_same_gradients(found, wanted, BRAIN)


@pytest.fixture
def portable(only_kernels, monkeypatch):
    """The reference; fails where the Hopper kernels give gradients, or none of the kernels does."""
    asked = []
    real = attention_backward.attention_backward_blockwise

    def refuse(*arguments):
        raise AssertionError("the Hopper kernels were used")

    def ask(*arguments, **options):
        asked.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(attention_hopper_backward, "attention_hopper_backward", refuse)
    monkeypatch.setattr(attention_backward, "attention_backward_blockwise", ask)
    yield only_kernels
    assert asked, "no kernel was used"


@pytest.mark.parametrize(
    "facts",
    [{"head_dim": 32}, {"head_dim": 144}, {"dtype": torch.float32}, {"bias": True}],
    ids=str,
)
def test_what_they_do_not_take_goes_to_the_portable_kernels(portable, facts):
    dtype = facts.get("dtype", HALF)
    q, k, v, grad = operands(2, 1011, dtype, head_dim=facts.get("head_dim", 64))
    bias = torch.zeros(1, 1, 1, 1011, device="cuda", dtype=dtype) if "bias" in facts else None
    rule = rules()["longformer"]
    out = sparse_attention(q, k, v, rule, bias=bias)
    found = torch.autograd.grad(out, (q, k, v), grad)
    wanted = expected_gradients(portable, q, k, v, grad, stored_mask(rule, q, k))
    assert_same_gradients(found, wanted, dtype)


def test_grouped_heads_with_masks_of_their_own_go_to_the_portable_kernels(portable):
    q, k, v, grad = other_operands(2, 12, 1011, 1000, HALF, group=2)
    spec = planes(2, 12, 1011, 1000)
    with attention_kernel("block"):
        out = sparse_attention(q, k, v, spec, enable_gqa=True)
    found = torch.autograd.grad(out, (q, k, v), grad)
    wanted = expected_gradients(portable, q, k, v, grad, stored_mask(spec, q, k))
    assert_same_gradients(found, wanted, HALF)
