"""The product-and-norm template: what it accepts, what it compiles to, its results.

bf16 products are left to the GPU tests: Triton's interpreter multiplies bf16 tiles as integers.
"""

import os
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
from stof_compile.templates.linear_norm_configs import (
    DIMS,
    FORMS,
    ProductSize,
    offered_configs,
    row_tiles,
)
from stof_compile.templates.triton_linear_norm import TritonLinearNorm

import stof_compile.ops_norm  # noqa: F401

TEMPLATE = TritonLinearNorm()
HOPPER = machine(90)


def linear_norm_recipe(
    rows=(33,), n=72, k=72, dtype=HALF, norm="layer_norm", bias="", residual="", affine=True,
    kn=False, strided=False, device=DEVICE,
):  # fmt: skip
    """x @ w -> [+ bias] -> [+ residual] -> norm, and its operands.

    bias: "" | "inside" the linear | "added" behind it; residual: "" | "first" | "second" side.
    """
    x = random(*rows, k, dtype=dtype, device=device)
    weight = random(*((k, n) if kn else (n, k)), dtype=dtype, device=device, seed=3) * k**-0.5
    operands = [rows_apart(x) if strided else x, weight]
    rec = Recording()
    rec.operands = operands

    def operand(*shape, seed, scale=1.0, dtype=dtype):
        operands.append(scale * random(*shape, dtype=dtype, device=device, seed=seed))
        return ("o", len(operands) - 1)

    read = [("o", 0), ("o", 1)]
    if bias == "inside":
        read.append(operand(n, seed=4))
    last = ("v", rec.add("linear", *read, **({"weight_kn": True} if kn else {})))
    if bias == "added":
        last = ("v", rec.add("add", last, operand(n, seed=4)))
    if residual:
        pair = [last, operand(*rows, n, seed=5)]
        last = ("v", rec.add("add", *(pair if residual == "second" else reversed(pair))))
    read = [last]
    has_bias = affine and norm == "layer_norm"
    if affine:
        read.append(operand(n, seed=6))
    if has_bias:
        read.append(operand(n, seed=7))
    rec.add(norm, *read, eps=1e-5, width=n, has_weight=affine, has_bias=has_bias)
    return rec.recipe(), operands


def config(form="split_k", block_m=32, block_n=32, block_k=32, split_k=1, **changes):
    values = dict.fromkeys(DIMS, 1) | {"num_warps": 4, "num_stages": 2, "norm_warps": 4}
    values |= {"form": form, "block_m": block_m, "block_n": block_n, "block_k": block_k}
    return values | {"split_k": split_k} | changes


def run(recipe, operands, chosen=None):
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, chosen or TEMPLATE.first(recipe, HOPPER))
    return call.run(operands)


def check(recipe, operands, chosen=None, scale=2.0):
    out = run(recipe, operands, chosen)
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


@pytest.mark.parametrize("bias", ["", "inside", "added"])
@pytest.mark.parametrize("residual", ["", "first", "second"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("kn", [False, True])
def test_a_linear_with_adds_and_a_norm_is_accepted(bias, residual, norm, kn):
    recipe, _ = linear_norm_recipe(
        norm=norm, bias=bias, residual=residual, kn=kn, device="cpu", dtype=SINGLE
    )
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    assert (call.args[2] is not None, call.args[3] is not None) == (bool(bias), bool(residual))
    assert len(call.args[-1]) == len(DIMS) + 1


def refused(recipe, device=HOPPER):
    reason = TEMPLATE.refusal(recipe, device)
    assert reason is not None
    return reason


def test_refusals_name_the_reason():
    x, w = (random(*s, dtype=SINGLE, device="cpu") for s in ((3, 5, 8), (16, 8)))
    full, vector = (random(*s, dtype=SINGLE, device="cpu") for s in ((3, 5, 16), (16,)))

    def built(*steps, operands=(x, w, full, vector), width=16):
        rec = Recording(*operands)
        rec.add("linear", ("o", 0), ("o", 1))
        for kind, *inputs in steps:
            rec.add(kind, *inputs)
        last = ("v", len(rec.steps) - 1)
        rec.add("layer_norm", last, eps=1e-5, width=width, has_weight=False, has_bias=False)
        return rec.recipe()

    plain = built()
    assert TEMPLATE.refusal(plain, HOPPER) is None
    assert "CUDA" in refused(plain, machine(90, kind="cpu", runtime="cpu"))
    assert "capability" in refused(plain, replace(HOPPER, capability=(7, 5), arch="sm_75"))
    assert "'neg'" in refused(built(("neg", ("v", 0))))
    two = (("add", ("v", 0), ("o", 2)), ("add", ("v", 1), ("o", 2)))
    assert "one is taken" in refused(built(*two))
    two = (("add", ("v", 0), ("o", 3)), ("add", ("v", 1), ("o", 3)))
    assert "one is taken" in refused(built(*two))
    wider = random(2, 3, 5, 16, dtype=SINGLE, device="cpu")
    assert "straight" in refused(built(("add", ("v", 0), ("o", 2)), operands=(x, w, wider, x)))
    assert "copied" in refused(
        built(operands=(x, random(16, 16, dtype=SINGLE, device="cpu")[:, ::2]))
    )
    rec = Recording(x, w)
    rec.add("linear", ("o", 0), ("o", 1))
    assert "no norm" in refused(rec.recipe())
    rec = Recording(full)
    rec.add("layer_norm", ("o", 0), eps=1e-5, width=16, has_weight=False, has_bias=False)
    assert "not with a linear" in refused(rec.recipe())
    half = built(operands=(x.to(HALF), w.to(HALF)))
    assert TEMPLATE.refusal(half, HOPPER) is None
    mixed = built(("add", ("v", 0), ("o", 2)), operands=(x.to(HALF), w.to(HALF), full))
    assert "not one dtype" in refused(mixed)


SIZES = [
    (1, 768, 768), (33, 1000, 72), (128, 768, 768), (128, 768, 3072), (1000, 768, 768),
    (4096, 768, 3072), (32768, 768, 768), (512, 1024, 4096), (128, 2048, 8192), (32768, 256, 256),
    (128, 16384, 16), (7, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_spaces_are_small_and_hold_the_first(target, size, itemsize):
    rows, n, k = size
    recipe, _ = linear_norm_recipe(
        (rows,), n, k, HALF if itemsize == 2 else SINGLE, bias="inside", residual="first",
        device="meta",
    )  # fmt: skip
    device = machine(target)
    configs = TEMPLATE.space(recipe, device).configs()
    assert 1 <= len(configs) <= 50
    assert TEMPLATE.first(recipe, device) in configs
    for found in configs:
        if found["form"] == "split_k":
            assert found["split_k"] <= -(-k // found["block_k"]), "a split would be empty"


def test_the_first_config_fills_the_device():
    for size in ((128, 768, 768), (128, 768, 3072)):
        first = offered_configs(ProductSize(*size, 2), HOPPER)[0]
        tiles = -(-128 // first["block_m"]) * (768 // first["block_n"])
        assert 132 <= tiles * first["split_k"] <= 264
        assert size[2] % (first["split_k"] * first["block_k"]) == 0


# -- results --------------------------------------------------------------------------------------

INTERPRETER = pytest.mark.interpreter
CONFIGS = {
    "one plane": config(),
    "three planes": config(split_k=3, norm_rows=4),
    "empty planes": config(split_k=7, block_k=64),
    "tall": config(block_m=64, block_n=16, block_k=16, split_k=2),
    "whole rows": config("full_row", 16),
    "whole rows, tall": config("full_row", 32, block_k=16),
}


@INTERPRETER
@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
@pytest.mark.parametrize(("norm", "kn"), [("layer_norm", False), ("rms_norm", True)])
@pytest.mark.parametrize(("rows", "n", "k"), [(33, 72, 72), (64, 96, 128)])
def test_every_form(chosen, dtype, norm, kn, rows, n, k):
    check(
        *linear_norm_recipe(
            (rows,), n, k, dtype, norm, bias="inside", residual="first", kn=kn
        ),
        chosen,
    )  # fmt: skip


@INTERPRETER
@pytest.mark.parametrize("n", [16, 17, 64, 100, 128, 257])
@pytest.mark.parametrize("kn", [False, True])
def test_widths_of_whole_rows(n, kn):
    left, right = row_tiles(n)
    assert left <= n <= left + right + (right == 0) * left
    for chosen in (config("full_row", 16), config(block_n=64)):
        check(*linear_norm_recipe((19,), n, 40, residual="second", kn=kn), chosen)


@INTERPRETER
@pytest.mark.parametrize("form", ["split_k", "full_row"])
@pytest.mark.parametrize("bias", ["", "inside", "added"])
@pytest.mark.parametrize("residual", ["", "first"])
@pytest.mark.parametrize("affine", [False, True])
def test_subsets(form, bias, residual, affine):
    recipe, operands = linear_norm_recipe(bias=bias, residual=residual, affine=affine)
    check(recipe, operands, config(form, 16, split_k=1 if form == "full_row" else 2))


@INTERPRETER
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (2, 3, 4), (257,)], ids=str)
@pytest.mark.parametrize("form", ["split_k", "full_row"])
def test_ranks(rows, form):
    recipe, operands = linear_norm_recipe(rows, residual="first" if rows else "", bias="inside")
    out = check(recipe, operands, config(form))
    assert out.shape == (*rows, 72)


@INTERPRETER
@pytest.mark.parametrize("form", ["split_k", "full_row"])
def test_rows_apart_and_other_memory_orders(form):
    recipe, operands = linear_norm_recipe((4, 9), residual="first", strided=True)
    assert not operands[0].is_contiguous()
    check(recipe, operands, config(form))
    numbers = [FORMS.index(form), *list(config(form).values())[1:], 0]
    x = random(4, 9, 72).transpose(0, 1)
    weight = random(40, 144)[:, ::2]
    out = torch.ops.stof.fused_linear_norm(
        x, weight, None, None, None, None, "layer_norm", 1e-5, numbers
    )
    wanted = torch.nn.functional.layer_norm(x.double() @ weight.double().t(), (40,))
    assert out.is_contiguous()
    assert_close(out, wanted, scale=2)


@INTERPRETER
@pytest.mark.parametrize("form", ["split_k", "full_row"])
def test_nan_and_infinity_stay_in_their_rows(form):
    recipe, operands = linear_norm_recipe((19,), 40, 72, SINGLE, residual="first")
    operands[0][2, 3] = float("nan")
    operands[2][5, 7] = float("inf")
    check(recipe, operands, config(form, 16, split_k=1 if form == "full_row" else 2))


@INTERPRETER
@pytest.mark.parametrize("shape", [(0, 72), (2, 0, 72)])
@pytest.mark.parametrize("form", [0, 1])
def test_nothing_to_do(shape, form):
    numbers = [form, *list(config().values())[1:]]
    out = torch.ops.stof.fused_linear_norm(
        torch.empty(shape), torch.empty(40, 72), None, None, None, None, "rms_norm", 1e-5, numbers
    )
    assert out.shape == (*shape[:-1], 40)


@INTERPRETER
def test_planes_are_added_in_one_order():
    recipe, operands = linear_norm_recipe((33,), 72, 128)
    chosen = config(split_k=4)
    assert torch.equal(run(recipe, operands, chosen), run(recipe, operands, chosen))


@INTERPRETER
def test_opcheck():
    x, weight = random(5, 72), random(40, 72)
    numbers = [0, *list(config(split_k=2).values())[1:], 0]
    arguments = (x, weight, weight[:, 0], None, None, None, "layer_norm", 1e-5, numbers)
    operator = torch.ops.stof.fused_linear_norm.default
    tests = ("test_schema", "test_faketensor")  # an interpreted kernel cannot be traced
    found = torch.library.opcheck(operator, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


@INTERPRETER
def test_wrong_arguments_are_refused():
    x, weight = random(5, 72), random(40, 72)

    def call(x=x, weight=weight, bias=None, **changes):
        chosen = config(**changes)
        numbers = [FORMS.index(chosen["form"]), *list(chosen.values())[1:]]
        torch.ops.stof.fused_linear_norm(
            x, weight, bias, None, None, None, "layer_norm", 1e-5, numbers
        )

    with pytest.raises(ValueError, match=r"weight must be \[N, 72\]"):
        call(weight=weight.t())
    with pytest.raises(ValueError, match="weight must have the dtype of x"):
        call(weight=weight.float())
    with pytest.raises(ValueError, match="bias must have 40 elements"):
        call(bias=x[0])
    with pytest.raises(ValueError, match="block_m must be a power of two"):
        call(block_m=48)
    with pytest.raises(ValueError, match="block_k must be >= 16"):
        call(block_k=8)
    with pytest.raises(ValueError, match="split_k must be at least 1"):
        call(split_k=0)
    with pytest.raises(ValueError, match="16 to 1024 columns"):
        call(weight=random(1040, 72), form="full_row")


def test_it_says_that_it_needs_a_gpu():
    if INTERPRETED:
        pytest.skip("the interpreter runs it on the CPU")
    with pytest.raises(ValueError, match="GPU"):
        torch.ops.stof.fused_linear_norm(
            torch.randn(5, 72), torch.randn(40, 72), None, None, None, None, "rms_norm", 1e-5,
            [0, *list(config().values())[1:]],
        )  # fmt: skip


def test_schema_and_config_are_the_documented_ones():
    from stof_compile.kernels import linear_norm

    assert str(torch.ops.stof.fused_linear_norm.default._schema) == (
        "stof::fused_linear_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
        "Tensor? norm_weight, Tensor? norm_bias, str norm, float eps, SymInt[] config) -> Tensor"
    )
    assert linear_norm.LinearNormConfig._fields == (*DIMS, "tf32")
    assert (FORMS[linear_norm.SPLIT_K], FORMS[linear_norm.FULL_ROW]) == ("split_k", "full_row")
    for n in range(16, 1025):
        assert linear_norm.row_tiles(n) == row_tiles(n)


# -- code -----------------------------------------------------------------------------------------


def arguments_of(chosen, rows, n, k, dtype=HALF, kn=False, precision="ieee"):
    """(kernel, argument types, constants) of a config's product."""
    from stof_compile.kernels import linear_norm_kernel as kernels

    block_m, block_k = chosen["block_m"], chosen["block_k"]
    constants = {
        "STRIDE_X": k, "STRIDE_WN": 1 if kn else k, "STRIDE_WK": n if kn else 1, "N": n, "K": k,
        "EVEN_M": rows % block_m == 0, "PRECISION": precision, "BLOCK_M": block_m,
        "BLOCK_K": block_k,
    }  # fmt: skip
    names = ("x", "weight", "bias", "residual", "norm_weight", "norm_bias", "out")
    types = dict.fromkeys(names, f"*{NAMES[dtype]}")
    if chosen["form"] == "full_row":
        left, right = row_tiles(n)
        constants |= {
            "STRIDE_R": n, "EPS": 1e-5, "RMS": False, "HAS_BIAS": True, "HAS_RESIDUAL": True,
            "HAS_WEIGHT": True, "HAS_NORM_BIAS": True, "EVEN_K": k % block_k == 0, "LEFT_N": left,
            "RIGHT_N": right,
        }  # fmt: skip
        return kernels.linear_norm_rows_kernel, types, constants
    tiles = -(-k // block_k)
    steps = -(-tiles // chosen["split_k"])
    constants |= {
        "TILES_N": -(-n // chosen["block_n"]), "STEPS": steps, "BLOCK_N": chosen["block_n"],
        "EVEN_N": n % chosen["block_n"] == 0, "EVEN_K": k == steps * block_k * chosen["split_k"],
    }  # fmt: skip
    partials = "*fp32" if chosen["split_k"] > 1 else types["x"]
    types = {"x": types["x"], "weight": types["x"], "partials": partials}
    return kernels.linear_partials_kernel, types, constants


def distinct(configs):
    """The configs that differ in more than the norm's launch."""
    kept = {}
    for found in configs:
        kept.setdefault(tuple(v for k, v in found.items() if not k.startswith("norm_")), found)
    return list(kept.values())


def one_of_each_tile(configs):
    """The deepest pipeline of each tile; the split of K changes the length of a loop only."""
    kept = {}
    for found in sorted(configs, key=lambda c: -c["num_stages"]):
        key = ("form", "block_m", "block_n", "block_k", "num_warps")
        kept.setdefault(tuple(found[name] for name in key), found)
    return list(kept.values())


def compile_all(target, configs, rows, n, k, dtype, kn):
    for chosen in configs:
        kernel, types, constants = arguments_of(chosen, rows, n, k, dtype, kn)
        _, found = needed_by(
            kernel, target, types, constants, chosen["num_warps"], chosen["num_stages"]
        )
        try:
            assert_fits(found, target)
        except AssertionError as failure:
            raise AssertionError(f"{chosen}: {found}") from failure


@pytest.mark.compile_only
@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("size", [(128, 768, 3072), (4096, 768, 768)], ids=str)
def test_offered_configs_fit(target, size):
    offered = one_of_each_tile(offered_configs(ProductSize(*size, 2), machine(target)))
    if not os.environ.get("STOF_FULL_COMPILE"):  # to save time: what holds the most of each form
        offered.sort(key=lambda c: c["block_m"] * c["block_n"] / c["num_warps"])
        full = [c for c in offered if c["form"] == "full_row"]
        most = 2 if target == 90 else 1
        offered = [*[c for c in offered if c["form"] == "split_k"][-most:], *full[-most:]]
    compile_all(target, offered, *size, HALF, kn=False)


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("n", [256, 512, 1000])
def test_whole_rows_of_other_widths_fit(target, n):
    offered = offered_configs(ProductSize(32768, n, 1024, 2), machine(target))
    full = [c for c in offered if c["form"] == "full_row"]
    assert full
    full.sort(key=lambda c: c["block_m"] / c["num_warps"])
    compile_all(target, full[-1:], 32768, n, 1024, BRAIN, kn=n == 512)


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 90])
def test_exact_fp32_fits(target):
    for size in ((128, 768, 768), (4096, 256, 256)):
        offered = one_of_each_tile(offered_configs(ProductSize(*size, 4), machine(target)))
        if not os.environ.get("STOF_FULL_COMPILE"):
            offered = offered[-3:]
        compile_all(target, offered, *size, SINGLE, kn=False)


@pytest.mark.compile_only
@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("target", [80, 90])
def test_ragged_sizes_fit(target, kn):
    offered = distinct(offered_configs(ProductSize(33, 1000, 72, 2), machine(target)))
    compile_all(target, offered[:3], 33, 1000, 72, HALF, kn)
    whole = config("full_row", 16, block_k=32, num_warps=8)
    compile_all(target, [whole], 33, 1000, 72, HALF, kn)


@pytest.mark.compile_only
def test_hopper_uses_wide_copies_and_group_products():
    for size in ((128, 768, 1536), (128, 768, 3072)):
        first = offered_configs(ProductSize(*size, 2), HOPPER)[0]
        for kn in (False, True):
            kernel, types, constants = arguments_of(first, *size, HALF, kn)
            compiled, found = needed_by(
                kernel, 90, types, constants, first["num_warps"], first["num_stages"]
            )
            text = compiled.asm["ptx"]
            assert "wgmma.mma_async" in text and "cp.async.cg.shared.global" in text
            assert "ld.global" not in text and "st.global.v4.b32" in text
            assert found.registers <= 128


@pytest.mark.compile_only
@pytest.mark.parametrize("form", FORMS)
def test_only_the_results_are_written(form, monkeypatch):
    kernel, types, constants = arguments_of(config(form), 33, 72, 72)
    written = written_by(kernel, types, constants, monkeypatch)
    assert written == {"out" if form == "full_row" else "partials"}


# -- on the GPU -----------------------------------------------------------------------------------


def wanted_by(recipe, operands):
    return TEMPLATE.reference(recipe, operands, torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=NAMES.get)
@pytest.mark.parametrize("rows", [128, 1000, 4096])
@pytest.mark.parametrize("k", [768, 3072])
def test_gpu_model_sizes(rows, k, dtype):
    """The config of the rules, and the first of whole rows."""
    recipe, operands = linear_norm_recipe(
        (rows,), 768, k, dtype, bias="inside", residual="first", device="cuda"
    )
    wanted = wanted_by(recipe, operands)
    configs = TEMPLATE.space(recipe, HOPPER).configs()
    full = [c for c in configs if c["form"] == "full_row"]
    for chosen in [TEMPLATE.first(recipe, HOPPER), *full[:1]]:
        assert_close(run(recipe, operands, chosen), wanted, scale=2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [128, 4096])
def test_gpu_every_tile(rows):
    recipe, operands = linear_norm_recipe((rows,), 512, 1536, residual="first", device="cuda")
    wanted = wanted_by(recipe, operands)
    for chosen in one_of_each_tile(TEMPLATE.space(recipe, HOPPER).configs()):
        assert_close(run(recipe, operands, chosen), wanted, scale=2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(33, 1000, 72), (257, 72, 100), (1, 768, 768)], ids=str)
@pytest.mark.parametrize(("kn", "dtype"), [(False, HALF), (True, BRAIN), (True, SINGLE)])
def test_gpu_ragged_sizes(size, kn, dtype):
    rows, n, k = size
    recipe, operands = linear_norm_recipe(
        (rows,), n, k, dtype, "rms_norm", bias="added", residual="second", kn=kn, strided=True,
        device="cuda",
    )  # fmt: skip
    wanted = wanted_by(recipe, operands)
    whole = config("full_row", 16, block_k=32, num_warps=8 if dtype != SINGLE else 16)
    for chosen in (TEMPLATE.first(recipe, HOPPER), whole):
        assert_close(run(recipe, operands, chosen), wanted, scale=2)


@pytest.mark.gpu
def test_gpu_results_repeat():
    recipe, operands = linear_norm_recipe((128,), 768, 3072, residual="first", device="cuda")
    assert torch.equal(run(recipe, operands), run(recipe, operands))


@pytest.mark.gpu
def test_gpu_fp32_is_exact_unless_tf32_is_allowed():
    recipe, operands = linear_norm_recipe((128,), 768, 768, SINGLE, device="cuda")
    wanted = wanted_by(recipe, operands)
    assert_close(run(recipe, operands), wanted, scale=2)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        error = (run(recipe, operands).double() - wanted).abs().max() / wanted.abs().max()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert 1e-6 < error < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kn", [False, True])
def test_gpu_under_inductor_and_in_a_cuda_graph(form, kn, fresh_dynamo):
    torch.use_deterministic_algorithms(False)
    recipe, operands = linear_norm_recipe(
        (1000,), 768, 768, bias="inside", residual="first", kn=kn, device="cuda"
    )
    configs = TEMPLATE.space(recipe, HOPPER).configs()
    chosen = next(c for c in configs if c["form"] == form)
    call = TEMPLATE.build(recipe, chosen)
    wanted = wanted_by(recipe, operands)
    with torch.no_grad():
        for out in compiled_and_captured(lambda *given: call.run(given), *operands):
            assert_close(out, wanted, scale=2)
