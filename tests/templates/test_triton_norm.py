"""The norm template: what it accepts, what it compiles to, and its results against the recipe."""

import os

import pytest
import torch
from close import assert_close
from norm_recipes import (
    BRAIN,
    DEVICE,
    HALF,
    INTERPRETED,
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
from stof_compile.templates.triton_norm import TritonNorm

import stof_compile.ops_norm  # noqa: F401

TEMPLATE = TritonNorm()
HOPPER = machine(90)


def norm_recipe(
    rows=(33,), n=72, dtype=HALF, norm="layer_norm", bias=False, residual=False, affine=True,
    swapped=False, norm_dtype=None, strided=False, device=DEVICE,
):  # fmt: skip
    """([x + bias] + residual) -> norm, and its operands; ``swapped`` puts the value second."""
    x = random(*rows, n, dtype=dtype, device=device)
    operands = [rows_apart(x) if strided else x]
    rec = Recording(*operands)
    last = ("o", 0)

    def operand(tensor):
        operands.append(tensor)
        rec.operands = operands
        return ("o", len(operands) - 1)

    def add(last, number):
        pair = (number, last) if swapped else (last, number)
        return ("v", rec.add("add", *pair))

    if bias:
        last = add(last, operand(random(n, dtype=dtype, device=device)))
    if residual:
        last = add(last, operand(random(*rows, n, dtype=dtype, device=device, seed=5)))
    read = [last]
    has_bias = affine and norm == "layer_norm"
    if affine:
        read.append(operand(1 + 0.2 * random(n, dtype=norm_dtype or dtype, device=device, seed=6)))
    if has_bias:
        read.append(operand(random(n, dtype=norm_dtype or dtype, device=device, seed=7)))
    rec.add(norm, *read, eps=1e-5, width=n, has_weight=affine, has_bias=has_bias)
    return rec.recipe(), operands


def run(recipe, operands, config=None):
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, config or TEMPLATE.first(recipe, HOPPER))
    return call.run(operands)


def check(recipe, operands, config=None, scale=1.0):
    out = run(recipe, operands, config)
    assert out.is_contiguous() and out.dtype == recipe.result.dtype
    assert_close(out, TEMPLATE.reference(recipe, operands, torch.float64), scale=scale)
    return out


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that nothing was written to is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# -- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("swapped", [False, True])
def test_adds_in_front_of_a_norm_are_accepted(bias, residual, norm, swapped):
    recipe, _ = norm_recipe(
        norm=norm, bias=bias, residual=residual, swapped=swapped, device="cpu", dtype=SINGLE
    )
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    assert (call.args[1] is not None, call.args[2] is not None) == (bias, residual)
    assert call.shape == recipe.result.shape


def test_casts_around_the_norm_are_accepted():
    """As autocast writes it: fp16 rows, an fp32 norm, fp16 again."""
    x, weight = random(4, 8, device="cpu"), random(8, dtype=SINGLE, device="cpu")
    rec = Recording(x, weight)
    rec.add("cast", ("o", 0), to=SINGLE)
    rec.add("layer_norm", ("v", 0), ("o", 1), eps=1e-5, width=8, has_weight=True, has_bias=False)
    rec.add("cast", ("v", 1), to=HALF)
    assert TEMPLATE.refusal(rec.recipe(), HOPPER) is None


def refused(recipe, device=HOPPER):
    reason = TEMPLATE.refusal(recipe, device)
    assert reason is not None
    assert not TEMPLATE.accepts(recipe, device)
    return reason


def test_refusals_name_the_reason():
    plain, _ = norm_recipe(device="cpu", dtype=SINGLE)
    assert "CUDA" in refused(plain, machine(90, kind="cpu", runtime="cpu"))
    assert "CUDA" in refused(plain, machine(90, runtime="rocm 7.0"))
    assert "float64" in refused(norm_recipe(device="cpu", dtype=torch.float64)[0])
    assert "16384" in refused(norm_recipe((2,), 16400, SINGLE, device="cpu")[0])

    x = random(4, 6, 8, dtype=SINGLE, device="cpu")

    def norm(rec, last, width=8):
        rec.add("layer_norm", last, eps=1e-5, width=width, has_weight=False, has_bias=False)
        return rec.recipe()

    rec = Recording(x)
    rec.add("activation", ("o", 0), name="relu")
    assert "activation" in refused(norm(rec, ("v", 0)))
    rec = Recording(x)
    rec.add("add", ("o", 0), number=1.0, number_first=False)
    assert "number" in refused(norm(rec, ("v", 0)))
    rec = Recording(x, random(6, 1, dtype=SINGLE, device="cpu"))
    rec.add("add", ("o", 0), ("o", 1))
    assert "neither" in refused(norm(rec, ("v", 0)))
    rec = Recording(x, x[0])
    rec.add("add", ("o", 0), ("o", 1))
    assert "neither" in refused(norm(rec, ("v", 0)))
    rec = Recording(x)
    norm(rec, ("o", 0))
    rec.add("activation", ("v", 0), name="relu")
    assert "behind" in refused(rec.recipe())
    rec = Recording(x, x, x)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("add", ("v", 0), ("o", 2))
    assert "at most two" in refused(norm(rec, ("v", 1)))
    rec = Recording(x)
    rec.add("cast", ("o", 0), to=HALF)
    assert "rounds" in refused(norm(rec, ("v", 0)))
    assert "copied" in refused(norm(Recording(x.transpose(0, 1)), ("o", 0)))
    rec = Recording(x, x)
    rec.add("add", ("o", 0), ("o", 1))
    assert "no norm" in refused(rec.recipe())


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("rows", [1, 33, 128, 4096, 32768])
@pytest.mark.parametrize("n", [8, 72, 768, 1024, 8192, 16384])
def test_spaces_are_small_and_hold_the_first(target, rows, n):
    with torch.device("meta"):
        recipe, _ = norm_recipe((rows,), n, residual=True, device="meta")
    device = machine(target)
    configs = TEMPLATE.space(recipe, device).configs()
    assert 1 <= len(configs) <= 30
    assert TEMPLATE.first(recipe, device) in configs
    if rows <= 128:
        assert all(config["rows"] == 1 for config in configs)


# -- results --------------------------------------------------------------------------------------

INTERPRETER = pytest.mark.interpreter
CONFIGS = [{"rows": r, "num_warps": 4} for r in (1, 2, 8)]


@INTERPRETER
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("n", [72, 257, 64])
def test_norm_with_all_that_is_added(n, norm, dtype, config):
    check(*norm_recipe((33,), n, dtype, norm, bias=True, residual=True), config)


@INTERPRETER
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_subsets(bias, residual, affine, swapped):
    check(*norm_recipe(bias=bias, residual=residual, affine=affine, swapped=swapped))


@INTERPRETER
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (2, 3, 4), (257,)], ids=str)
def test_ranks(rows):
    out = check(*norm_recipe(rows, residual=bool(rows)), {"rows": 2, "num_warps": 4})
    assert out.shape == (*rows, 72)


@INTERPRETER
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_weights_of_another_dtype(dtype):
    """A norm's fp32 parameters beside half rows give fp32 in torch: a cast brings it back."""
    _, operands = norm_recipe(dtype=dtype, affine=False, residual=True)
    out = torch.ops.stof.fused_norm(
        operands[0], None, operands[1], random(72, dtype=SINGLE), None, "rms_norm", 1e-5, [1, 1]
    )
    h = operands[0].double() + operands[1].double()
    wanted = torch.nn.functional.rms_norm(h, (72,), random(72, dtype=SINGLE).double(), 1e-5)
    assert out.dtype == dtype
    assert_close(out, wanted)


@INTERPRETER
def test_an_fp32_stream_with_a_half_branch_keeps_its_dtype():
    stream, branch = random(5, 72, dtype=SINGLE), random(5, 72)
    rec = Recording(branch, stream)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("rms_norm", ("v", 0), eps=1e-6, width=72, has_weight=False, has_bias=False)
    assert check(rec.recipe(), [branch, stream]).dtype == SINGLE


@INTERPRETER
def test_rows_apart_and_other_memory_orders():
    recipe, operands = norm_recipe((4, 9), residual=True, strided=True)
    assert not operands[0].is_contiguous()
    check(recipe, operands)
    x = random(4, 9, 72).transpose(0, 1)  # its rows have no single stride: the operator copies
    out = torch.ops.stof.fused_norm(x, None, x, None, None, "layer_norm", 1e-5, [4, 2])
    assert out.is_contiguous()
    assert_close(out, torch.nn.functional.layer_norm(2 * x.double(), (72,)))
    x = random(72, 9).t()
    out = torch.ops.stof.fused_norm(x, None, None, None, None, "layer_norm", 1e-5, [1, 2])
    assert_close(out, torch.nn.functional.layer_norm(x.double(), (72,)))


@INTERPRETER
def test_large_offsets_do_not_cancel():
    """Two passes: rows of mean 1,000 and deviation 1 keep their digits."""
    x = 1000 + random(7, 257, dtype=SINGLE)
    out = torch.ops.stof.fused_norm(x, None, None, None, None, "layer_norm", 1e-5, [1, 4])
    assert_close(out, torch.nn.functional.layer_norm(x.double(), (257,)), scale=20)


@INTERPRETER
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_nan_and_infinity_stay_in_their_rows(norm):
    x = random(9, 72, dtype=SINGLE)
    x[2, 3], x[5, 71], x[7] = float("nan"), float("inf"), 0.0
    rec = Recording(x)
    rec.add(norm, ("o", 0), eps=1e-5, width=72, has_weight=False, has_bias=False)
    out = check(rec.recipe(), [x], {"rows": 4, "num_warps": 2})
    assert out[7].eq(0).all()


@INTERPRETER
@pytest.mark.parametrize("shape", [(0, 72), (2, 0, 72), (3, 0)])
def test_nothing_to_do(shape):
    out = torch.ops.stof.fused_norm(
        torch.empty(shape), None, torch.empty(shape), None, None, "layer_norm", 1e-5, [1, 4]
    )
    assert out.shape == shape


@INTERPRETER
def test_opcheck():
    x, weight = random(5, 72), random(72)
    arguments = (x, None, x, weight, weight, "layer_norm", 1e-5, [2, 4])
    tests = ("test_schema", "test_faketensor")  # an interpreted kernel cannot be traced
    found = torch.library.opcheck(torch.ops.stof.fused_norm.default, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


@INTERPRETER
def test_wrong_arguments_are_refused():
    x = random(5, 72)
    op = torch.ops.stof.fused_norm
    with pytest.raises(ValueError, match="norm must be one of"):
        op(x, None, None, None, None, "batch_norm", 1e-5, [1, 4])
    with pytest.raises(ValueError, match="bias must have 72 elements"):
        op(x, x, None, None, None, "layer_norm", 1e-5, [1, 4])
    with pytest.raises(ValueError, match=r"residual must be \[..., 72\] with 5 rows"):
        op(x, None, x[:4], None, None, "layer_norm", 1e-5, [1, 4])
    with pytest.raises(ValueError, match="rows must be a power of two"):
        op(x, None, None, None, None, "layer_norm", 1e-5, [3, 4])
    with pytest.raises(ValueError, match="float64"):
        op(x.double(), None, None, None, None, "layer_norm", 1e-5, [1, 4])


def test_it_says_that_it_needs_a_gpu():
    if INTERPRETED:
        pytest.skip("the interpreter runs it on the CPU")
    with pytest.raises(ValueError, match="GPU"):
        torch.ops.stof.fused_norm(
            torch.randn(5, 72), None, None, None, None, "rms_norm", 1e-5, [1, 4]
        )


def test_schema_is_the_documented_one():
    assert str(torch.ops.stof.fused_norm.default._schema) == (
        "stof::fused_norm(Tensor x, Tensor? bias, Tensor? residual, Tensor? norm_weight, "
        "Tensor? norm_bias, str norm, float eps, SymInt[] config) -> Tensor"
    )


# -- code -----------------------------------------------------------------------------------------


def kernel_arguments(n, config, dtype=HALF, rows=4096, **changes):
    types = dict.fromkeys(
        ("x", "bias", "residual", "norm_weight", "norm_bias", "out"), f"*{NAMES[dtype]}"
    )
    constants = {
        "STRIDE_X": n, "STRIDE_R": n, "PARTIALS": 1, "N": n, "EPS": 1e-5, "RMS": False,
        "HAS_BIAS": True, "HAS_RESIDUAL": True, "HAS_WEIGHT": True, "HAS_NORM_BIAS": True,
        "ROWS": config["rows"], "BLOCK_N": 1 << (n - 1).bit_length(),
        "EVEN_ROWS": rows % config["rows"] == 0, **changes,
    }  # fmt: skip
    return types, constants


def offered(rows, n, dtype, target):
    recipe, _ = norm_recipe((rows,), n, dtype, bias=True, residual=True, device="meta")
    return TEMPLATE.space(recipe, machine(target)).configs()


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100])
@pytest.mark.parametrize(("rows", "n"), [(128, 768), (4096, 768), (1000, 3072), (33, 16384)])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
def test_offered_configs_stay_in_registers(target, rows, n, dtype):
    from stof_compile.kernels.norm_kernel import norm_rows_kernel

    configs = offered(rows, n, dtype, target)
    if not os.environ.get("STOF_FULL_COMPILE"):  # the fullest registers, to save time
        configs = sorted(configs, key=lambda c: c["rows"] / c["num_warps"])
        configs = configs[-3:] if target == 90 else configs[-1:]
    for config in configs:
        types, constants = kernel_arguments(n, config, dtype, rows)
        compiled, found = needed_by(norm_rows_kernel, target, types, constants, config["num_warps"])
        assert_fits(found, target)
        per_thread = config["rows"] * n // (32 * config["num_warps"])
        if n % 8 == 0 and dtype == HALF and per_thread >= 8:
            loads = compiled.asm["ptx"]
            assert "ld.global.v4.b32" in loads and "st.global.v4.b32" in loads


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 90])
def test_partial_sums_and_ragged_rows(target):
    from stof_compile.kernels.norm_kernel import norm_rows_kernel

    for n, partials in ((768, 6), (1000, 16), (4096, 2)):
        types, constants = kernel_arguments(n, {"rows": 2}, rows=33, PARTIALS=partials, RMS=True)
        types["x"] = "*fp32"
        assert_fits(needed_by(norm_rows_kernel, target, types, constants, 4)[1], target)


@pytest.mark.compile_only
def test_only_the_result_is_written(monkeypatch):
    from stof_compile.kernels.norm_kernel import norm_rows_kernel

    for partials in (1, 3):
        arguments = kernel_arguments(72, {"rows": 4}, rows=33, PARTIALS=partials)
        assert written_by(norm_rows_kernel, *arguments, monkeypatch) == {"out"}


# -- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("rows", [128, 1000, 4096])
@pytest.mark.parametrize(
    ("n", "norm"),
    [(768, "layer_norm"), (3072, "rms_norm"), (1000, "layer_norm"), (16384, "layer_norm")],
)
def test_gpu_model_sizes(rows, n, norm, dtype):
    recipe, operands = norm_recipe((rows,), n, dtype, norm, bias=True, residual=True, device="cuda")
    assert_close(run(recipe, operands), TEMPLATE.reference(recipe, operands, torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [128, 1001, 4099])
def test_gpu_every_config(rows):
    recipe, operands = norm_recipe((rows,), 768, bias=True, residual=True, device="cuda")
    wanted = TEMPLATE.reference(recipe, operands, torch.float64)
    for config in TEMPLATE.space(recipe, HOPPER).configs():
        assert_close(run(recipe, operands, config), wanted)


@pytest.mark.gpu
def test_gpu_results_repeat():
    recipe, operands = norm_recipe((4096,), 768, residual=True, device="cuda")
    assert torch.equal(run(recipe, operands), run(recipe, operands))


@pytest.mark.gpu
def test_gpu_offsets_beyond_32_bits():
    x = torch.ones(270_000, 8192, dtype=HALF, device="cuda")  # 2.2e9 elements, 4.4 GB
    x[:, ::2] = 0
    out = torch.ops.stof.fused_norm(x, None, None, None, None, "layer_norm", 0.0, [1, 8])
    assert bool((out[-1, 1::2] == 1).all()) and bool((out[-1, ::2] == -1).all())


@pytest.mark.gpu
def test_gpu_under_inductor_and_in_a_cuda_graph(fresh_dynamo):
    torch.use_deterministic_algorithms(False)
    recipe, operands = norm_recipe((1000,), 768, bias=True, residual=True, device="cuda")
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    wanted = TEMPLATE.reference(recipe, operands, torch.float64)
    with torch.no_grad():
        for out in compiled_and_captured(lambda *given: call.run(given), *operands):
            assert_close(out, wanted)
