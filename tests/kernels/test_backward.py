"""The backward kernels in Triton's interpreter, against fp64 autograd of the reference.

bf16 is left out: the interpreter multiplies bf16 tiles as integers. The GPU tests cover it.
"""

from dataclasses import dataclass

import attention_cases
import pytest
import torch
from attention_cases import bias_of, rule_of
from close import assert_close
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks
from stof_compile.masks.key_lists import key_lists

pytestmark = pytest.mark.interpreter


@dataclass(frozen=True)
class Case(attention_cases.Case):
    piece: tuple[int, int] = (16, 16)
    strided: bool = False
    grad_lse: bool = False


def operands(case):
    torch.manual_seed(7)
    b, h, kv = case.batch, case.heads, case.heads // case.group
    shapes = (
        (b, h, case.q_len, case.head_dim),
        (b, kv, case.k_len, case.head_dim),
        (b, kv, case.k_len, case.value_dim),
        (b, h, case.q_len, case.value_dim),
    )
    if case.strided:  # as models have them, and a gradient with strides of its own
        found = [torch.randn(b, s, n, d + 3).transpose(1, 2)[..., :d] for b, n, s, d in shapes]
    else:
        found = [torch.randn(shape) for shape in shapes]
    return [t.to(case.dtype) for t in found]


def check(case):
    from stof_compile.kernels.attention_backward import Piece, attention_backward_blockwise

    q, k, v, grad = operands(case)
    offset = case.k_len - case.q_len if case.q_offset is None else case.q_offset
    stored = masks.build_block_mask(
        rule_of(case), case.q_len, case.k_len, case.block, q_offset=offset, batch=case.batch,
        heads=case.heads,
    )  # fmt: skip
    key_keep = None
    if case.padding:
        ends = torch.tensor([case.k_len - 7, 3])[: case.batch]
        key_keep = torch.arange(case.k_len) < ends[:, None]
    bias = bias_of(case)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    keep, added = stored.to_dense(), None
    if bias is not None:  # autograd makes NaN of a row of -inf that no mask has removed
        keep = keep & (bias != float("-inf"))
        added = bias.double().masked_fill(bias == float("-inf"), 0.0)
    wanted, wanted_lse = attention_reference(
        *wide, keep, key_keep, added, case.scale, case.softcap, True
    )
    seen = wanted_lse.isfinite()
    grad_lse = torch.randn(wanted_lse.shape) if case.grad_lse else None
    loss = (wanted * grad.double()).sum()
    if grad_lse is not None:
        loss = loss + (wanted_lse[seen] * grad_lse.double()[seen]).sum()
        grad_lse[~seen] = float("nan")
    expected = torch.autograd.grad(loss, wide)
    piece = Piece(*case.piece, 4, 2)
    found = attention_backward_blockwise(
        grad, grad_lse, q, k, v, wanted.detach().to(case.dtype), wanted_lse.detach().float(),
        stored.tensors, *stored.key_lists, key_keep, bias, case.scale, case.softcap, offset,
        list(stored.band.as_ints()) if case.band else [], *case.block, piece_sizes=(piece, piece),
    )  # fmt: skip
    for gradient, reference, operand in zip(found, expected, (q, k, v), strict=True):
        assert gradient.dtype == operand.dtype and gradient.is_contiguous()
        assert_close(gradient, reference, case.dtype)
    empty = ~seen[..., None].expand_as(found[0])
    assert (found[0][empty] == 0).all()


CASES = {
    "sliding": Case(),
    "sliding band": Case(band=True),
    "causal longformer band": Case(rule="causal longformer", band=True, block=(32, 16)),
    "longformer bitmap": Case(rule="longformer", block=(16, 32)),
    "causal, more queries than keys": Case(
        q_len=40, k_len=21, q_offset=0, rule="causal", band=True, block=(32, 32)
    ),
    "dense": Case(q_len=32, k_len=48, rule="dense"),
    "ragged dense": Case(q_len=37, k_len=41, rule="dense", block=(32, 32)),
    "random planes": Case(rule="random", batch=2, block=(32, 32), grad_lse=True),
    "random planes, whole tiles": Case(rule="random", block=(32, 32), piece=(32, 32)),
    "padding": Case(rule="random", batch=2, padding=True, grad_lse=True),
    "padding of everything": Case(rule="left half", batch=2, padding=True),
    "bias": Case(rule="random", bias="full", block=(32, 16)),
    "row bias and softcap": Case(rule="causal", band=True, bias="row", softcap=2.0),
    "-inf bias": Case(rule="causal", bias="-inf"),
    "lowest bias": Case(rule="causal", band=True, bias="lowest"),
    "softcap": Case(rule="random", softcap=1.5),
    "zero scale": Case(rule="random", scale=0.0),
    "negative scale": Case(rule="random", scale=-0.3),
    "head dim 72": Case(q_len=21, head_dim=72, value_dim=40, scale=0.1),
    "groups": Case(rule="causal", heads=4, group=4, q_len=21, k_len=37, band=True, grad_lse=True),
    "groups and planes": Case(rule="random", heads=4, group=2, q_len=33, k_len=49),
    "decode": Case(q_len=1, heads=4, group=2, rule="sliding", band=True),
    "strided": Case(q_len=33, k_len=33, batch=2, strided=True),
    "half": Case(rule="random", dtype=torch.float16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case):
    check(case)


@pytest.mark.parametrize(("heavy", "together"), [(1, 1), (1, 3), (2, 3), (2, 8)])
def test_any_order_of_the_heads(heavy, together, monkeypatch):
    from stof_compile.kernels import attention_backward

    monkeypatch.setattr(
        attention_backward, "_order", lambda slots, *_: (min(heavy, slots), together)
    )
    check(Case(rule="random", batch=2, heads=4, group=2, q_len=33, k_len=49))


def test_gradients_behind_the_forward_kernel():
    from stof_compile.kernels.attention_backward import attention_backward_blockwise
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = Case(rule="random", batch=2, heads=4, group=2, block=(32, 32))
    q, k, v, grad = operands(case)
    stored = masks.build_block_mask(rule_of(case), 33, 57, case.block, batch=2, heads=4)
    arguments = (None, None, 0.25, 0.0, 0, [])
    out, lse = attention_block_forward(
        q, k, v, stored.tensors, *arguments, list(BlockConfig(32, 32, 4, 2)), True
    )
    grad = grad[:1, :1, :1, :1].expand_as(grad)  # as the gradient of a sum
    found = attention_backward_blockwise(
        grad, None, q, k, v, out, lse, stored.tensors, *stored.key_lists, *arguments, 32, 32
    )
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = attention_reference(*wide, stored.to_dense(), scale=0.25)
    expected = torch.autograd.grad(wanted, wide, grad.double())
    for gradient, reference in zip(found, expected, strict=True):
        assert_close(gradient, reference, torch.float32)


def test_nothing_to_attend_to():
    from stof_compile.kernels.attention_backward import attention_backward_blockwise

    for batch, q_len, k_len in ((0, 5, 16), (2, 5, 0), (2, 0, 5)):
        q, k = torch.randn(batch, 2, q_len, 16), torch.randn(batch, 2, k_len, 16)
        stored = masks.build_block_mask(masks.dense(), q_len, k_len, 16)
        found = attention_backward_blockwise(
            q, None, q, k, k, q, torch.zeros(batch, 2, q_len), stored.tensors, *stored.key_lists,
            None, None, 1.0, 0.0, 0, [], 16, 16,
        )  # fmt: skip
        for gradient, operand in zip(found, (q, k, k), strict=True):
            assert torch.equal(gradient, torch.zeros_like(operand))


def test_a_wrong_gradient_is_refused():
    from stof_compile.kernels.attention_backward import attention_backward_blockwise

    q = torch.randn(1, 2, 5, 16)
    stored = masks.build_block_mask(masks.dense(), 5, 5, 16)
    with pytest.raises(ValueError, match="grad_out must be"):
        attention_backward_blockwise(
            q[..., :8], None, q, q, q, q, torch.zeros(1, 2, 5), stored.tensors, *stored.key_lists,
            None, None, 1.0, 0.0, 0, [], 16, 16,
        )  # fmt: skip


@pytest.mark.parametrize("rule", ["sliding", "random", "causal", "dense"])
def test_key_lists_are_the_lists_of_the_transposed_mask(rule):
    case = Case(rule=rule, batch=2)
    stored = masks.build_block_mask(rule_of(case), 33, 57, 16, batch=2, heads=2)
    key_ptr, key_tiles = key_lists(
        stored.row_ptr, stored.full_start, stored.col_idx, stored.bitmap_id, 3, 4
    )
    assert key_tiles.shape == (2, stored.col_idx.numel())
    for plane in range(stored.planes):
        found, lengths = set(), []
        for col in range(4):
            i = plane * 4 + col
            begin, middle, end = key_ptr[0, i], key_ptr[1, i], key_ptr[0, i + 1]
            lengths.append(int(end - begin))
            for first, last, full in ((begin, middle, False), (middle, end, True)):
                rows = key_tiles[0, first:last].tolist()
                assert rows == sorted(rows)
                numbers = key_tiles[1, first:last].tolist()
                found |= {(r, col, full, b) for r, b in zip(rows, numbers, strict=True)}
        wanted = set()
        for row in range(3):
            i = plane * 3 + row
            begin, end = stored.row_ptr[i : i + 2].tolist()
            for t in range(begin, end):
                full = t >= int(stored.full_start[i])
                wanted.add((row, int(stored.col_idx[t]), full, int(stored.bitmap_id[t])))
        assert found == wanted
        order = key_ptr[2, plane * 4 : plane * 4 + 4].tolist()
        assert sorted(order) == [0, 1, 2, 3]
        assert [lengths[c] for c in order] == sorted(lengths, reverse=True)


@pytest.mark.parametrize("name", ["attention_block", "attention_row", "attention_gather"])
def test_operators_take_the_kernels_where_lists_are_given(name, monkeypatch):
    from stof_compile.kernels import reference

    from stof_compile import ops_block

    def refuse(*arguments, **options):
        raise AssertionError("the reference formula was used")

    monkeypatch.setattr(reference, "attention_backward_reference", refuse)
    # on a GPU it would say so
    monkeypatch.setattr(ops_block, "_kernels_serve", lambda *facts: facts[-2] is not None)
    case = Case(rule="causal longformer", q_len=17, k_len=33, group=2)
    q, k, v, grad = operands(case)
    for operand in (q, k, v):
        operand.requires_grad_()
    stored = masks.build_block_mask(rule_of(case), 17, 33, 16, q_offset=16)
    out, lse = getattr(torch.ops.stof, name)(
        q, k, v, *stored.tensors, None, None, 0.25, 0.0, 16, [*stored.band.as_ints()], [16, 16],
        True, *stored.key_lists, *(stored.packed if name == "attention_gather" else ()),
    )  # fmt: skip
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted, wanted_lse = attention_reference(*wide, stored.to_dense(), scale=0.25, return_lse=True)
    for results, expected_results, grads in (
        ((out,), (wanted,), (grad,)),
        ((lse,), (wanted_lse,), (grad[..., 0],)),
        ((out, lse), (wanted, wanted_lse), (grad, grad[..., 0])),
    ):
        found = torch.autograd.grad(results, (q, k, v), grads, retain_graph=True)
        wide_grads = [g.double() for g in grads]
        expected = torch.autograd.grad(
            expected_results, wide, wide_grads, retain_graph=True, materialize_grads=True
        )
        for gradient, reference_gradient in zip(found, expected, strict=True):
            assert_close(gradient, reference_gradient, torch.float32)
