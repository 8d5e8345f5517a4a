"""The pointwise template: what it accepts, the code it generates, and its results."""

import json
from dataclasses import replace

import pytest
import torch
from close import assert_close
from norm_recipes import (
    BRAIN,
    DEVICE,
    HALF,
    INTERPRETED,
    MACHINES,
    NAMES,
    SINGLE,
    Recording,
    assert_fits,
    compiled_and_captured,
    machine,
    needed_by,
    random,
    rows_apart,
    written_by,
)
from stof_compile.templates.triton_pointwise import POWERS, TritonPointwise, program_of

import stof_compile.ops_pointwise  # noqa: F401
from stof_compile.fusion.recipe import ACTIVATIONS, BINARY, UNARY

TEMPLATE = TritonPointwise()
HOPPER = machine(90)
SMALL = {"block": 256, "num_warps": 2}
POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")


def run(recipe, operands, config=None):
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, config or TEMPLATE.first(recipe, HOPPER))
    return call.run(operands)


def check(rec, config=SMALL, scale=2.0):
    recipe, operands = rec.recipe(), list(rec.operands)
    out = run(recipe, operands, config)
    assert out.is_contiguous() and out.dtype == recipe.result.dtype
    assert_close(out, TEMPLATE.reference(recipe, operands, torch.float64), scale=scale)
    return out


def gelu_residual(rows=(33,), n=72, dtype=HALF, device=DEVICE):
    """gelu(x + bias) * gate + 0.5 x: a DAG that reads x twice."""
    given = [
        random(*rows, n, dtype=dtype, device=device),
        random(n, dtype=dtype, device=device),
        random(*rows, n, dtype=dtype, device=device, seed=3),
    ]
    rec = Recording(*given)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("activation", ("v", 0), name="gelu")
    rec.add("mul", ("v", 1), ("o", 2))
    rec.add("mul", ("o", 0), number=0.5, number_first=True)
    rec.add("add", ("v", 2), ("v", 3))
    return rec


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that nothing was written to is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# -- what is accepted -----------------------------------------------------------------------------


def refused(rec, device=HOPPER):
    reason = TEMPLATE.refusal(rec.recipe(), device)
    assert reason is not None
    return reason


def one_step(kind, *operands, **attrs):
    rec = Recording(*operands)
    rec.add(kind, *(("o", i) for i in range(len(operands))), **attrs)
    return rec


def test_refusals_name_the_reason():
    x, w = (random(*s, dtype=SINGLE, device="cpu") for s in ((4, 6, 8), (8, 8)))
    fine = one_step("neg", x)
    assert TEMPLATE.refusal(fine.recipe(), HOPPER) is None
    assert "CUDA" in refused(fine, machine(90, kind="cpu", runtime="cpu"))
    assert "'linear'" in refused(one_step("linear", x, w))
    assert "'softmax'" in refused(one_step("softmax", x))
    assert "'reshape'" in refused(one_step("reshape", x, shape=(24, 8)))
    assert "exponent" in refused(one_step("pow", x, number=2.5, number_first=False))
    assert "exponent" in refused(one_step("pow", x.abs(), number=2.0, number_first=True))
    assert "exponent" in refused(one_step("pow", x.abs(), x))
    assert "not contiguous" in refused(one_step("neg", x.transpose(0, 1)))
    assert "broadcast inside" in refused(one_step("add", x, x[:, :1].contiguous()))
    assert "float64" in refused(one_step("neg", x.double()))
    assert "empty" in refused(one_step("neg", x[:0]))
    recipe = one_step("add", x, x[0]).recipe()
    elsewhere = (recipe.operands[0], replace(recipe.operands[1], device="meta"))
    assert "others are not" in TEMPLATE.refusal(replace(recipe, operands=elsewhere), HOPPER)


def test_all_steps_of_recipes_are_known():
    x = random(4, 8, dtype=SINGLE, device="cpu")
    for kind in UNARY:
        assert TEMPLATE.refusal(one_step(kind, x).recipe(), HOPPER) is None
    for name in ACTIVATIONS:
        assert TEMPLATE.refusal(one_step("activation", x, name=name).recipe(), HOPPER) is None
    for kind in set(BINARY) - {"pow"}:
        assert TEMPLATE.refusal(one_step(kind, x, x).recipe(), HOPPER) is None
    from stof_compile.kernels import pointwise_program as program

    assert set(program.UNARY) == set(UNARY) and set(program.ACTIVATIONS) == set(ACTIVATIONS)
    assert set(program.BINARY) == set(BINARY) - {"pow"} and set(program.POWERS) == set(POWERS)


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("rows", [1, 33, 128, 4096, 32768])
@pytest.mark.parametrize("n", [8, 768, 3072])
def test_spaces_are_small_and_hold_the_first(target, rows, n):
    recipe = gelu_residual((rows,), n, device="meta").recipe()
    device = machine(target)
    configs = TEMPLATE.space(recipe, device).configs()
    assert 1 <= len(configs) <= 30
    assert TEMPLATE.first(recipe, device) in configs


# -- results --------------------------------------------------------------------------------------

INTERPRETER = pytest.mark.interpreter


@INTERPRETER
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("rows", [(), (1,), (33,), (2, 3, 4), (257,)], ids=str)
def test_a_dag(rows, dtype):
    rec = gelu_residual(rows, dtype=dtype)
    out = check(rec)
    assert out.shape == (*rows, 72)
    if rows == (33,):
        check(rec, None)


def values(dtype=SINGLE, positive=False):
    """From tiny to large on both sides, with what is special."""
    x = torch.cat([torch.logspace(-6, 1.2, 120), torch.linspace(0, 3, 61)[1:]])
    x = x if positive else torch.cat([x, -x, torch.zeros(1)])
    special = torch.tensor([float("nan"), float("inf"), *([] if positive else [-float("inf")])])
    return torch.cat([x, special]).to(DEVICE, dtype)


@INTERPRETER
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


@INTERPRETER
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype):
    check(one_step("activation", values(dtype), name=name))


@INTERPRETER
def test_tanh_keeps_its_digits_near_zero():
    x = torch.logspace(-8, 1, 2000, device=DEVICE)
    out = run(one_step("activation", x, name="tanh").recipe(), [x], SMALL)
    wanted = x.double().tanh()
    assert float(((out - wanted) / wanted).abs().max()) < 5e-7


@INTERPRETER
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


@INTERPRETER
@pytest.mark.parametrize("number", POWERS)
def test_powers(number):
    x = values(positive=True)
    x = x[(x > 1e-2) & (x < 20) | x.isnan()]
    check(one_step("pow", x, number=number, number_first=False))


@INTERPRETER
def test_a_relu_keeps_nan_and_neg_the_sign_of_zero():
    x = torch.tensor([float("nan"), 0.0, -1.0, 2.0], device=DEVICE)
    out = run(one_step("activation", x, name="relu").recipe(), [x], SMALL)
    assert out[0].isnan() and out[1:].tolist() == [0.0, 0.0, 2.0]
    out = run(one_step("neg", x).recipe(), [x], SMALL)
    assert torch.signbit(out[1])


@INTERPRETER
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


@INTERPRETER
def test_mixed_dtypes_and_the_result_of_the_recipe():
    stream, branch = random(5, 72, dtype=SINGLE), random(5, 72)
    assert check(one_step("add", branch, stream)).dtype == SINGLE
    rec = Recording(stream, branch)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("cast", ("v", 0), to=BRAIN)
    assert check(rec).dtype == BRAIN


@INTERPRETER
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


@INTERPRETER
def test_two_operands_spread_to_the_result():
    rec = one_step("add", random(4, 1), random(1, 6))
    assert check(rec).shape == (4, 6)


@INTERPRETER
def test_operands_in_other_memory_are_copied():
    x, program = random(6, 5, 8), json.dumps({"dtype": "float16", "steps": [["neg", ["x0"], {}]]})
    for given in (x.transpose(0, 1), rows_apart(x), x[:, :1].expand(6, 5, 8), x[:, ::2]):
        out = torch.ops.stof.fused_pointwise([given], program, given.shape, [256, 1])
        assert out.is_contiguous() and torch.equal(out, -given)
    added = json.dumps({"dtype": "float16", "steps": [["add", ["x0", "x1"], {}]]})
    out = torch.ops.stof.fused_pointwise([x, x[:, :1]], added, x.shape, [256, 1])
    assert torch.equal(out, x + x[:, :1])


@INTERPRETER
def test_nothing_to_do():
    program = json.dumps({"dtype": "float32", "steps": [["neg", ["x0"], {}]]})
    out = torch.ops.stof.fused_pointwise([torch.empty(0, 4)], program, [0, 4], [256, 1])
    assert out.shape == (0, 4)


@INTERPRETER
def test_opcheck():
    rec = gelu_residual()
    arguments = (list(rec.operands), program_of(rec.recipe()), [33, 72], [256, 1])
    operator = torch.ops.stof.fused_pointwise.default
    tests = ("test_schema", "test_faketensor")  # an interpreted kernel cannot be traced
    found = torch.library.opcheck(operator, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


# -- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "no dtype and steps"),
        ('{"dtype": "float16"}', "no dtype and steps"),
        ('{"dtype": "int8", "steps": [["neg", ["x0"], {}]]}', "dtype must be one of"),
        ('{"dtype": "float16", "steps": []}', "there must be a step"),
        ('{"dtype": "float16", "steps": [["neg", ["x1"], {}]]}', "may read x0 to x0"),
        ('{"dtype": "float16", "steps": [["neg", ["v0"], {}]]}', "may read"),
        ('{"dtype": "float16", "steps": [["neg", ["x0 + exit()"], {}]]}', "may read"),
        ('{"dtype": "float16", "steps": [["__import__", ["x0"], {}]]}', "step must be one of"),
        ('{"dtype": "float16", "steps": [["neg", ["x0", "x0"], {}]]}', "reads 1 values"),
        ('{"dtype": "float16", "steps": [["add", ["x0"], {}]]}', "reads 2 values"),
        ('{"dtype": "float16", "steps": [["activation", ["x0"], {"name": "elu"}]]}', "must be one"),
        ('{"dtype": "float16", "steps": [["cast", ["x0"], {"dtype": "int8"}]]}', "a cast goes to"),
        ('{"dtype": "float16", "steps": [["pow", ["x0"], {"number": 2.5}]]}', "pow must be one of"),
        ('{"dtype": "float16", "steps": [["maximum", ["x0"], {"number": 2}]]}', "a number stands"),
    ],
)
def test_programs_are_checked_before_they_become_code(text, message):
    from stof_compile.kernels.pointwise_program import read_program

    with pytest.raises(ValueError, match=message):
        read_program(text, 1)


@INTERPRETER
def test_wrong_arguments_are_refused():
    x, program = random(4, 8), json.dumps({"dtype": "float16", "steps": [["neg", ["x0"], {}]]})
    op = torch.ops.stof.fused_pointwise
    with pytest.raises(ValueError, match="broadcast"):
        op([x], program, [4, 9], [256, 1])
    with pytest.raises(ValueError, match="block must be a power of two"):
        op([x], program, [4, 8], [100, 1])
    with pytest.raises(ValueError, match="float64"):
        op([x.double()], program, [4, 8], [256, 1])


def test_it_says_that_it_needs_a_gpu():
    if INTERPRETED:
        pytest.skip("the interpreter runs it on the CPU")
    program = json.dumps({"dtype": "float32", "steps": [["neg", ["x0"], {}]]})
    with pytest.raises(ValueError, match="GPU"):
        torch.ops.stof.fused_pointwise([torch.randn(4)], program, [4], [128, 1])


def test_schema_is_the_documented_one():
    assert str(torch.ops.stof.fused_pointwise.default._schema) == (
        "stof::fused_pointwise(Tensor[] operands, str program, SymInt[] shape, SymInt[] config) "
        "-> Tensor"
    )


def test_torch_keys_its_caches_on_the_generated_source():
    """What AOTAutograd's cache reads of an operator's kernels, and that equal sources share one."""
    if INTERPRETED:
        pytest.skip("interpreted kernels have no source")
    from stof_compile.kernels import pointwise
    from torch._inductor.codegen.wrapper import (
        user_defined_triton_kernel_transitive_closure_source_code as source_code,
    )

    from stof_compile.launchers import load_launcher

    load_launcher("stof::fused_pointwise", "pointwise", "pointwise_forward")
    (kernel, _) = torch._library.triton.get_triton_kernels_for_op("stof::fused_pointwise")
    text = source_code(kernel)
    for kind in ("tl.erf", "tl.sqrt_rn", "COUNT3", "INNER2", "tl.bfloat16"):
        assert kind in text
    assert pointwise.kernel_of(
        "import triton\n\n\n@triton.jit\ndef pointwise_kernel(x):\n    pass\n"
    )
    source = "import triton\n\n\n@triton.jit\ndef pointwise_kernel(y):\n    return\n"
    assert pointwise.kernel_of(source) is pointwise.kernel_of(source)


# -- code -----------------------------------------------------------------------------------------


def generated(recipe, even=True, wide=False):
    from stof_compile.kernels import pointwise as made

    shape = recipe.result.shape
    accesses = [made.access_of(operand.shape, shape) for operand in recipe.operands]
    program = made.read_program(program_of(recipe), len(recipe.operands))
    kernel = made.kernel_of(made.source_of(program, accesses, even, wide))
    types = {f"x{i}": f"*{NAMES[o.dtype]}" for i, o in enumerate(recipe.operands)}
    sizes = {f"COUNT{i}": a.size for i, a in enumerate(accesses) if a.kind in ("tail", "middle")}
    sizes |= {f"INNER{i}": a.inner for i, a in enumerate(accesses) if a.kind in ("head", "middle")}
    return kernel, types | {"out": f"*{NAMES[recipe.result.dtype]}"}, sizes


@pytest.mark.compile_only
@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
def test_offered_configs_stay_in_registers(target, dtype):
    recipe = gelu_residual((4096,), 3072, dtype, device="meta").recipe()
    kernel, types, sizes = generated(recipe)
    configs = TEMPLATE.space(recipe, machine(target)).configs()
    for config in configs[-3:] if target == 90 else configs[-1:]:
        constants = sizes | {"BLOCK": config["block"]}
        compiled, found = needed_by(kernel, target, types, constants, config["num_warps"])
        assert_fits(found, target)
        if config["block"] >= 256 * config["num_warps"] or dtype == SINGLE:
            assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 90])
def test_every_step_compiles(target):
    from stof_compile.kernels import pointwise as made

    types = dict.fromkeys(("x0", "x1", "x2", "x3", "x4", "out"), "*fp16")
    sizes = {"COUNT1": 768, "INNER2": 768, "COUNT3": 12, "INNER3": 64, "BLOCK": 1024}
    for kernel in made.KERNELS:
        assert_fits(needed_by(kernel, target, types, sizes, 4)[1], target)


@pytest.mark.compile_only
def test_only_the_result_is_written(monkeypatch):
    recipe = gelu_residual(device="meta").recipe()
    for even, wide in ((True, False), (False, True)):
        kernel, types, sizes = generated(recipe, even, wide)
        assert written_by(kernel, types, sizes | {"BLOCK": 256}, monkeypatch) == {"out"}


# -- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("rows", [128, 1000, 4096])
@pytest.mark.parametrize("n", [768, 3072, 1001])
def test_gpu_model_sizes(rows, n, dtype):
    check(gelu_residual((rows,), n, dtype, "cuda"), None)


@pytest.mark.gpu
def test_gpu_every_config():
    rec = gelu_residual((4096,), 768, device="cuda")
    recipe, operands = rec.recipe(), list(rec.operands)
    wanted = TEMPLATE.reference(recipe, operands, torch.float64)
    for config in TEMPLATE.space(recipe, HOPPER).configs():
        assert_close(run(recipe, operands, config), wanted, scale=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
def test_gpu_steps(dtype):
    for name in ACTIVATIONS:
        check(one_step("activation", values(dtype), name=name))
    for kind in set(UNARY) - set(POSITIVE) - {"exp", "exp2", "square", "sin", "cos"}:
        check(one_step(kind, values(dtype)))
    x = random(33, 72, dtype=dtype)
    for kind in ("exp", "exp2", "square", "sin", "cos"):
        check(one_step(kind, x))
    for kind in POSITIVE:
        check(one_step(kind, 0.1 + x.abs()))
    for kind in sorted(set(BINARY) - {"pow"}):
        check(one_step(kind, x, 1 + x[0].abs()))
        check(one_step(kind, x, 1 + x[:, :1].abs().contiguous()))


@pytest.mark.gpu
def test_gpu_indices_beyond_32_bits():
    x = torch.ones(2**31 + 4096, dtype=HALF, device="cuda")
    x[-1] = 3
    program = json.dumps({"dtype": "float16", "steps": [["square", ["x0"], {}]]})
    out = torch.ops.stof.fused_pointwise([x], program, x.shape, [1024, 4])
    assert out[-1] == 9 and bool((out[2**31 - 8 : -1] == 1).all()) and out[0] == 1


@pytest.mark.gpu
def test_gpu_under_inductor_and_in_a_cuda_graph(fresh_dynamo):
    torch.use_deterministic_algorithms(False)
    rec = gelu_residual((1000,), 768, device="cuda")
    recipe, operands = rec.recipe(), list(rec.operands)
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    wanted = TEMPLATE.reference(recipe, operands, torch.float64)
    with torch.no_grad():
        for out in compiled_and_captured(lambda *given: call.run(given), *operands):
            assert_close(out, wanted, scale=2)
