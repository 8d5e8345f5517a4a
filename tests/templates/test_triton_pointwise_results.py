"""The pointwise template: its results in the interpreter against the recipe."""

import pytest
import torch
from norm_recipes import (
    BRAIN,
    DEVICE,
    HALF,
    INTERPRETED,
    NAMES,
    SINGLE,
    Recording,
    random,
    rows_apart,
)
from pointwise_recipes import (
    POSITIVE,
    SMALL,
    check,
    gelu_residual,
    one_step,
    program,
    run,
    values,
)
from stof_compile.templates.triton_pointwise import POWERS, program_of
from template_checks import check_operator

from stof_compile.fusion.recipe import ACTIVATIONS, BINARY, UNARY

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("rows", [(), (1,), (33,), (2, 3, 4), (257,)], ids=str)
def test_a_dag(rows, dtype):
    rec = gelu_residual(rows, dtype=dtype)
    out = check(rec)
    assert out.shape == (*rows, 72)
    if rows == (33,):
        check(rec, None)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("kind", UNARY)
def test_unary_steps(kind, dtype):
    x = values(dtype, kind in POSITIVE)
    if kind in ("exp", "exp2", "square"):  # fp16 ends at 65,504
        x = x.clamp(max=8)
    if kind in ("sin", "cos"):
        x = x[x.isfinite() | x.isnan()]
    if kind in ("rsqrt", "reciprocal"):  # every result counts, not only the largest
        x = x[(x > 1e-2) | x.isnan()]
    check(one_step(kind, x))


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype):
    check(one_step("activation", values(dtype), name=name))


def test_tanh_keeps_its_digits_near_zero():
    x = torch.logspace(-8, 1, 2000, device=DEVICE)
    out = run(one_step("activation", x, name="tanh").recipe(), [x], SMALL)
    wanted = x.double().tanh()
    assert float(((out - wanted) / wanted).abs().max()) < 5e-7


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("kind", sorted(set(BINARY) - {"pow"}))
def test_binary_steps(kind, dtype):
    x = random(33, 72, dtype=dtype)
    y = 1 + random(33, 72, dtype=dtype, seed=2).abs()
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    y[1, :4] = torch.tensor([float("nan"), float("inf"), 2.0, -float("inf")])
    y[0, 3] = float("nan")
    for pair in ((x, y), (x, y[2]), (x, y[:, 4:5].contiguous()), (x, y[2, 5]), (x[0], y)):
        check(one_step(kind, *pair))
    if kind not in ("maximum", "minimum"):
        for number in (0.1, -3, 7e-3, float("inf")):
            check(one_step(kind, y, number=number, number_first=False))
            check(one_step(kind, y, number=number, number_first=True))


@pytest.mark.parametrize("number", POWERS)
def test_powers(number):
    x = values(positive=True)
    x = x[(x > 1e-2) & (x < 20) | x.isnan()]
    check(one_step("pow", x, number=number, number_first=False))


def test_a_relu_keeps_nan_and_neg_the_sign_of_zero():
    x = torch.tensor([float("nan"), 0.0, -1.0, 2.0], device=DEVICE)
    out = run(one_step("activation", x, name="relu").recipe(), [x], SMALL)
    assert out[0].isnan() and out[1:].tolist() == [0.0, 0.0, 2.0]
    out = run(one_step("neg", x).recipe(), [x], SMALL)
    assert torch.signbit(out[1])


@pytest.mark.parametrize("to", [HALF, BRAIN], ids=NAMES.get)
def test_casts_round_on_the_way(to):
    x = random(33, 72, dtype=SINGLE) * 1000
    x[0, 0] = 1e6  # more than fp16 has
    rec = Recording(x)
    rec.add("cast", ("o", 0), to=to)
    rec.add("cast", ("v", 0), to=SINGLE)
    out = run(rec.recipe(), [x], SMALL)
    assert out.dtype == SINGLE and torch.equal(out, out.to(to).float())
    if to == BRAIN and INTERPRETED:  # whose casts to bf16 cut instead of rounding
        assert bool(((out - x).abs() <= x.abs() / 128).all())
    else:
        assert torch.equal(out, x.to(to).float())


def test_mixed_dtypes_and_the_result_of_the_recipe():
    stream, branch = random(5, 72, dtype=SINGLE), random(5, 72)
    assert check(one_step("add", branch, stream)).dtype == SINGLE
    rec = Recording(stream, branch)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("cast", ("v", 0), to=BRAIN)
    assert check(rec).dtype == BRAIN


@pytest.mark.parametrize(
    ("shape", "others"),
    [
        ((2, 3, 4, 5), [(5,), (4, 5), (1, 1, 4, 5), (3, 4, 5)]),
        ((2, 3, 4, 5), [(2, 1, 1, 1), (2, 3, 1, 1), (3, 1, 1), (1, 3, 4, 1), (1,), ()]),
        ((7, 1, 6), [(7, 1, 1), (6,), (1, 6), (1, 1, 1)]),
    ],
)
def test_broadcasts(shape, others):
    for other in others:
        check(one_step("sub", random(*shape), random(*other, seed=9)))
        check(one_step("sub", random(*other, seed=9), random(*shape)))


def test_two_operands_spread_to_the_result():
    rec = one_step("add", random(4, 1), random(1, 6))
    assert check(rec).shape == (4, 6)


def test_operands_in_other_memory_are_copied():
    x, text = random(6, 5, 8), program("neg", "x0")
    for given in (x.transpose(0, 1), rows_apart(x), x[:, :1].expand(6, 5, 8), x[:, ::2]):
        out = torch.ops.stof.fused_pointwise([given], text, given.shape, [256, 1])
        assert out.is_contiguous() and torch.equal(out, -given)
    added = program("add", "x0", "x1")
    out = torch.ops.stof.fused_pointwise([x, x[:, :1]], added, x.shape, [256, 1])
    assert torch.equal(out, x + x[:, :1])


def test_nothing_to_do():
    text = program("neg", "x0", dtype="float32")
    out = torch.ops.stof.fused_pointwise([torch.empty(0, 4)], text, [0, 4], [256, 1])
    assert out.shape == (0, 4)


def test_opcheck():
    rec = gelu_residual()
    given = (list(rec.operands), program_of(rec.recipe()), [33, 72], [256, 1])
    check_operator(torch.ops.stof.fused_pointwise, *given)


def test_wrong_arguments_are_refused():
    x, text = random(4, 8), program("neg", "x0")
    op = torch.ops.stof.fused_pointwise
    with pytest.raises(ValueError, match="broadcast"):
        op([x], text, [4, 9], [256, 1])
    with pytest.raises(ValueError, match="block must be a power of two"):
        op([x], text, [4, 8], [100, 1])
    with pytest.raises(ValueError, match="float64"):
        op([x.double()], text, [4, 8], [256, 1])
