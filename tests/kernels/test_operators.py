"""The registered operators: schemas, fakes, gradients and dispatch."""

import pytest
import torch
from close import assert_close
from stof_compile.kernels.reference import attention_reference

import stof_compile.ops  # noqa: F401
from stof_compile import masks
from stof_compile.errors import StofMaskError

RULE = masks.longformer(9, 5) & masks.causal()
Q_LEN, K_LEN, OFFSET, SCALE = 40, 70, 30, 0.25


def operands(requires_grad=False):
    torch.manual_seed(0)
    shapes = ((2, 4, Q_LEN, 16), (2, 2, K_LEN, 16), (2, 2, K_LEN, 24))
    return [torch.randn(s, requires_grad=requires_grad) for s in shapes]


def stored_mask(block=(16, 32)):
    return masks.build_block_mask(RULE, Q_LEN, K_LEN, block, q_offset=OFFSET, batch=2, heads=4)


def rule_arguments(q, k, v, kernel="sdpa", positions=None, bias=None):
    return (
        q, k, v, list(RULE.tensors()), RULE.to_json(), None, bias, positions, SCALE, 0.0, OFFSET,
        kernel, False,
    )  # fmt: skip


def test_schema_is_the_documented_one():
    wanted = (
        "(Tensor q, Tensor k, Tensor v, Tensor plane_map, Tensor row_ptr, Tensor full_start, "
        "Tensor col_idx, Tensor bitmap_id, Tensor bitmap, Tensor row_order, Tensor? key_keep, "
        "Tensor? bias, float scale, float softcap, SymInt q_offset, SymInt[] band, "
        "SymInt[] config, bool return_lse, Tensor? key_ptr=None, Tensor? key_tiles=None) "
        "-> (Tensor, Tensor)"
    )
    with_bitmap = wanted.replace(
        ") ->", ", Tensor? plain_bitmap=None, Tensor? gradient_fragments=None) ->"
    )
    for name, form in (("attention_block", with_bitmap), ("attention_row", wanted)):
        schema = str(getattr(torch.ops.stof, name).default._schema)
        assert schema == f"stof::{name}{form}"
    packed = "Tensor pack_ptr, Tensor pack_columns, Tensor pack_id, Tensor pack_bitmap"
    wanted = wanted.replace("=None", "").replace(") ->", f", {packed}) ->")
    assert str(torch.ops.stof.attention_gather.default._schema) == f"stof::attention_gather{wanted}"


def test_fake_has_the_layout_of_the_next_linear():
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(2, h, s, 16) for h, s in ((4, Q_LEN), (2, K_LEN), (2, K_LEN)))
        stored = [torch.empty(1, dtype=torch.int32)] * 7
        out, lse = torch.ops.stof.attention_block(
            q, k, v, *stored, None, None, 1.0, 0.0, 0, [], [16, 16], True
        )
    assert out.shape == (2, 4, Q_LEN, 16) and out.transpose(1, 2).is_contiguous()
    assert lse.shape == (2, 4, Q_LEN) and lse.dtype == torch.float32


def test_a_triton_operator_says_that_it_needs_a_gpu():
    if _interprets():
        pytest.skip("the interpreter runs it on the CPU")
    q, k, v = operands()
    with pytest.raises(ValueError, match="GPU"):
        torch.ops.stof.attention_block(
            q, k, v, *stored_mask().tensors, None, None, SCALE, 0.0, OFFSET, [], [16, 32], False
        )


def _interprets():
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["attention_block", "attention_row", "attention_gather"])
def test_triton_operators_pass_opcheck(name):
    q, k, v = operands(requires_grad=True)
    stored = stored_mask()
    packed = (None, None, *stored.packed) if name == "attention_gather" else ()
    arguments = (
        q, k, v, *stored.tensors, None, None, SCALE, 0.0, OFFSET, [], [16, 32], True, *packed
    )  # fmt: skip
    # no AOT test: an interpreted kernel cannot be traced
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = getattr(torch.ops.stof, name).default
    assert set(torch.library.opcheck(operator, arguments, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.interpreter
def test_gradients_of_the_block_operator():
    q, k, v = operands(requires_grad=True)
    bias = torch.randn(1, 4, 1, K_LEN, requires_grad=True)
    key_keep = torch.arange(K_LEN)[None] < torch.tensor([K_LEN, 50])[:, None]
    stored = stored_mask()
    out, lse = torch.ops.stof.attention_block(
        q, k, v, *stored.tensors, key_keep, bias, SCALE, 3.0, OFFSET, [*stored.band.as_ints()],
        [16, 32], True,
    )  # fmt: skip
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    wanted, wanted_lse = attention_reference(
        *wide[:3], stored.to_dense(), key_keep, wide[3], SCALE, 3.0, True
    )
    weights = torch.randn_like(out)
    seen = wanted_lse.isfinite()
    loss = (out * weights).sum() + lse[seen].sum()
    wanted_loss = (wanted * weights).sum() + wanted_lse[seen].sum()
    for got, expected in zip(
        torch.autograd.grad(loss, (q, k, v, bias)),
        torch.autograd.grad(wanted_loss, wide),
        strict=True,
    ):
        assert_close(got, expected, torch.float32)


def test_backward_operator_passes_opcheck():
    q, k, v = operands()
    arguments = (
        torch.randn(2, 4, Q_LEN, 24), None, q, k, v, *stored_mask().tensors, None, None, SCALE,
        0.0, OFFSET, [], 16, 32, False,
    )  # fmt: skip
    results = torch.library.opcheck(torch.ops.stof.attention_backward.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_rule_operators_pass_opcheck():
    q, k, v = operands(requires_grad=True)
    for operator, arguments in (
        (torch.ops.stof.attention_rule.default, rule_arguments(q, k, v)),
        (
            torch.ops.stof.dense_mask.default,
            ([], RULE.to_json(), torch.arange(Q_LEN), K_LEN, 2, 4),
        ),
    ):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_rule_operators_stay_out_of_cuda_graphs():
    """Inductor cuts its graphs there: the mask is that of the call, not of the capture."""
    for name in ("attention_rule", "attention_rule_backward", "dense_mask_of_lengths"):
        operator = getattr(torch.ops.stof, name)
        assert torch.Tag.cudagraph_unsafe in operator.default.tags
    assert torch.Tag.cudagraph_unsafe not in torch.ops.stof.dense_mask.default.tags


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
def test_rule_on_the_cpu(kernel):
    q, k, v = operands(requires_grad=True)
    bias = torch.randn(Q_LEN, K_LEN, requires_grad=True)
    out, _ = torch.ops.stof.attention_rule(*rule_arguments(q, k, v, kernel, bias=bias))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    wanted = attention_reference(*wide[:3], stored_mask().to_dense(), None, wide[3], SCALE)
    assert_close(out, wanted, torch.float32)
    assert out.transpose(1, 2).is_contiguous()
    got = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    expected = torch.autograd.grad(wanted.square().sum(), wide)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, torch.float32)


def test_rule_at_a_position_known_on_the_device():
    q, k, v = operands()
    positions = torch.arange(Q_LEN) + 11
    spec = masks.sliding_window(9)
    out, _ = torch.ops.stof.attention_rule(
        q, k, v, [], spec.to_json(), None, None, positions, SCALE, 0.0, 0, "auto", False
    )
    distance = (torch.arange(K_LEN) - positions[:, None]).abs()
    keep = (distance <= 9) & (torch.arange(K_LEN) <= positions[-1])
    wanted = attention_reference(q.double(), k.double(), v.double(), keep, scale=SCALE)
    assert_close(out, wanted, torch.float32)


def test_dense_mask_planes():
    ids = torch.tensor([[0] * 30 + [1] * 40, [0] * 50 + [1] * 20])
    spec = masks.document(ids)
    got = torch.ops.stof.dense_mask(
        list(spec.tensors()), spec.to_json(), torch.arange(70), 70, 2, 4
    )
    assert torch.equal(got, (ids[:, :, None] == ids[:, None])[:, None])
    heads = masks.per_head([masks.causal(), masks.dense()])
    got = torch.ops.stof.dense_mask([], heads.to_json(), torch.arange(8), 8, 3, 2)
    assert torch.equal(got, torch.stack([torch.ones(8, 8).tril(), torch.ones(8, 8)])[None].bool())


def test_a_fixed_mask_refuses_another_length():
    spec = masks.from_tensor(torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(StofMaskError):
        torch.ops.stof.dense_mask(list(spec.tensors()), spec.to_json(), torch.arange(9), 9, 1, 1)
