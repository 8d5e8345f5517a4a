"""The gated template: what it accepts and offers, its results, and what it compiles to."""

from dataclasses import replace

import pytest
import torch
from close import assert_close
from compile_targets import on_each_gpu
from linear_recipes import Writer, check_template
from norm_recipes import BRAIN, DEVICE, HALF, SINGLE, compiled_and_captured, machine
from stof_compile.templates.gemm_estimate import Product, Tile, shared_bytes
from stof_compile.templates.triton_gated_linear import DIMENSIONS, TritonGatedLinear

import stof_compile.ops_linear  # noqa: F401

TEMPLATE = TritonGatedLinear()
HOPPER = machine(90)
SMALL = {
    "block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 2, "num_stages": 2, "group_m": 2,
    "persistent": 0, "tma": 0,
}  # fmt: skip


def gated_recipe(
    rows=(33,), n=40, k=72, dtype=HALF, activation="silu", bias="", kn=False, up_first=False,
    swapped=False, strided=False, device=DEVICE,
):  # fmt: skip
    """A gate and an up product, joined.

    Args:
        bias: "" for none, "input" for the third input of the products, "add" for steps.
        up_first: the up product stands before the gate.
        swapped: the gate is the second side of the last step.
    """
    w = Writer(dtype, device)
    x = w.operand(*rows, k, strided=strided)

    def product():
        value = w.linear(x, n, k, kn=kn, bias=bias == "input")
        return w.step("add", value, w.operand(n)) if bias == "add" else value

    up = product() if up_first else None
    gate = product()
    if activation:
        gate = w.step("activation", gate, name=activation)
    up = product() if up is None else up
    w.step("mul", *((up, gate) if swapped else (gate, up)))
    return w.done()


# -- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["", "input", "add"])
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_every_order_is_read(bias, up_first, swapped):
    recipe, _ = gated_recipe(
        (2, 3), 8, 16, SINGLE, bias=bias, up_first=up_first, swapped=swapped, device="cpu"
    )
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    x, gate, up, gate_bias, up_bias, activation, config = call.args
    early, late = (1, 3) if bias else (1, 2)
    assert x.operand == 0
    assert (gate.operand, up.operand) == ((late, early) if up_first else (early, late))
    held = [None if b is None else b.operand for b in (gate_bias, up_bias)]
    assert held == ([gate.operand + 1, up.operand + 1] if bias else [None, None])
    assert activation == "silu" and len(config) == len(DIMENSIONS)


def refused(recipe, device=HOPPER):
    reason = TEMPLATE.refusal(recipe, device)
    assert reason is not None and not TEMPLATE.accepts(recipe, device)
    return reason


def test_refusals_name_the_reason():
    plain, _ = gated_recipe((6,), 8, 16, SINGLE, device="cpu")
    assert "CUDA" in refused(plain, machine(90, runtime="rocm 7.0"))
    on_cpu = replace(plain, operands=tuple(replace(o, device="cpu") for o in plain.operands))
    assert "cpu" in refused(on_cpu)

    def two(act_up="", other_x=False, other_n=8, last="mul"):
        w = Writer(SINGLE, "cpu")
        x = w.operand(6, 16)
        gate = w.step("activation", w.linear(x, 8, 16), name="silu")
        up = w.linear(w.operand(6, 16) if other_x else x, other_n, 16)
        if act_up:
            up = w.step("activation", up, name=act_up)
        w.step(last, gate, up)
        return w.done()[0]

    assert TEMPLATE.refusal(two(), HOPPER) is None
    assert "ends with 'add'" in refused(two(last="add"))
    assert "both branches have" in refused(two(act_up="relu"))
    assert "different inputs" in refused(two(other_x=True))
    assert "columns" in refused(two(other_n=1))
    w = Writer(SINGLE, "cpu")
    value = w.linear(w.operand(6, 16), 8, 16)
    w.step("mul", value, w.step("activation", value, name="sigmoid"))
    assert "share" in refused(w.done()[0])
    w = Writer(SINGLE, "cpu")
    value = w.linear(w.operand(6, 16), 8, 16)
    w.step("mul", value, w.operand(6, 8))
    assert "an operand" in refused(w.done()[0])
    w = Writer(SINGLE, "cpu")
    x = w.operand(6, 16)
    gate = w.step("add", w.linear(x, 8, 16), w.operand(6, 8))
    w.step("mul", gate, w.linear(x, 8, 16))
    assert "beside its bias" in refused(w.done()[0])


# -- what is offered ------------------------------------------------------------------------------


def sized(m, n, k, dtype=HALF):
    w = Writer(dtype, "cpu")
    with torch.device("meta"):
        w.operands += [torch.empty(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n, k))]
    gate = w.step("activation", w.step("linear", ("o", 0), ("o", 1)), name="silu")
    w.step("mul", gate, w.step("linear", ("o", 0), ("o", 2)))
    return w.done()[0]


@pytest.mark.parametrize("target", [80, 86, 89, 90, 100])
@pytest.mark.parametrize("shape", [(128, 8192, 2048), (32768, 8192, 2048), (1, 64, 64)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_the_space_is_a_few_dozen_configs_that_fit(target, shape, dtype):
    device, recipe = machine(target), sized(*shape, dtype)
    configs = TEMPLATE.space(recipe, device).configs()
    assert 5 <= len(configs) <= 60
    assert TEMPLATE.first(recipe, device) in configs
    for config in configs:
        assert tuple(config) == DIMENSIONS
        used = shared_bytes(Tile(**config), Product(*shape, dtype, sums=2), device)
        assert used <= device.shared_memory_bytes
        assert target >= 90 or not config["tma"]


# -- results in the interpreter -------------------------------------------------------------------

CASES = {
    "plain": ({}, {}),
    "no activation": ({"activation": ""}, {"block_n": 32}),
    "biases": ({"bias": "input", "activation": "gelu", "rows": (2, 3, 5)}, {"block_k": 32}),
    "[K, N] weights": ({"kn": True, "bias": "add"}, {"block_n": 32}),
    "strided, up first": ({"strided": True, "up_first": True}, {}),
    "even": ({"rows": (64,), "n": 64, "k": 64}, {"block_m": 32, "block_n": 32}),
    "persistent": ({"rows": (257,)}, {"persistent": 1}),
    "pieces": ({"rows": (130,), "n": 140, "bias": "input"}, {"persistent": 1, "block_m": 128,
               "block_n": 64, "block_k": 32}),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_interpreter(case, dtype):
    form, config = CASES[case]
    recipe, operands = gated_recipe(dtype=dtype, **form)
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    check_template(TEMPLATE, recipe, operands, SMALL | config)


@pytest.mark.interpreter
def test_interpreter_mixed_layouts_empty_rows_and_wrong_arguments():
    x, gate, up = torch.randn(5, 24), torch.randn(24, 16).t(), torch.randn(16, 24)
    config = list(SMALL.values())
    out = torch.ops.stof.fused_gated_linear(x, gate, up, None, None, "relu", config)
    wide = x.double()
    assert_close(out, (wide @ gate.double().t()).relu() * (wide @ up.double().t()))
    empty = torch.ops.stof.fused_gated_linear(x[:0], gate, up, None, None, "relu", config)
    assert empty.shape == (0, 16)
    with pytest.raises(ValueError, match="like gate"):
        torch.ops.stof.fused_gated_linear(x, gate, up[:8], None, None, "relu", config)
    with pytest.raises(ValueError, match="up_bias must be"):
        torch.ops.stof.fused_gated_linear(x, gate, up, None, torch.randn(8), "relu", config)


@pytest.mark.interpreter
def test_interpreter_passes_opcheck():
    arguments = (
        torch.randn(2, 6, 16), torch.randn(8, 16), torch.randn(8, 16), torch.randn(8), None, "silu",
        list(SMALL.values()),
    )  # fmt: skip
    operator = torch.ops.stof.fused_gated_linear.default
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(operator, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


# -- what it compiles to --------------------------------------------------------------------------


def recorded(m, n, k, dtype, config, *, bias=False, kn=False):
    from linear_compiling import record
    from stof_compile.kernels import gated_linear

    with torch._subclasses.FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(m, k, dtype=dtype)
        weights = [
            torch.empty(k, n, dtype=dtype).t() if kn else torch.empty(n, k, dtype=dtype)
            for _ in range(2)
        ]
        vector = torch.empty(n, dtype=dtype) if bias else None
        return record(
            gated_linear, "fused_gated_linear_forward", x, *weights, vector, vector, "silu",
            list(config.values()),
        )  # fmt: skip


def assert_compiles(target, m, n, k, dtype, config, **form):
    from linear_compiling import launch_needs

    found = launch_needs(recorded(m, n, k, dtype, config, **form), target)
    assert found.shared_bytes <= machine(target).shared_memory_bytes
    assert found.spill_bytes == 0, f"{config}: {found.spill_bytes} bytes spilled"
    estimated = shared_bytes(Tile(**config), Product(m, n, k, dtype, sums=2), machine(target))
    assert found.shared_bytes <= estimated, "the space is pruned by too low an estimate"


@pytest.mark.compile_only
@pytest.mark.parametrize(("target", "m"), on_each_gpu([128, 32768], 32768))
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32"])
def test_first_config_compiles(target, m, dtype):
    config = TEMPLATE.first(sized(m, 8192, 2048, dtype), machine(target))
    assert_compiles(target, m, 8192, 2048, dtype, config, bias=True)


@pytest.mark.compile_only
def test_exact_fp32_is_three_products_of_tf32():
    config = TEMPLATE.first(sized(128, 512, 256, SINGLE), machine(90))
    assert recorded(128, 512, 256, SINGLE, config).arguments["PRECISION"] == "tf32x3"


@pytest.mark.compile_only
@pytest.mark.parametrize("m", [4096, 1000])
def test_persistent_tiles_of_hopper(m):
    config = SMALL | {
        "block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 4,
        "group_m": 8, "persistent": 1, "tma": 1,
    }  # fmt: skip
    assert_compiles(90, m, 8192, 2048, BRAIN, config, kn=m == 1000)


@pytest.mark.compile_only
@pytest.mark.parametrize("change", [{}, {"persistent": 1, "tma": 1}], ids=str)
def test_torch_sees_that_only_the_result_is_written(change):
    from linear_compiling import written_tensors

    config = SMALL | {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4} | change
    assert written_tensors(recorded(100, 512, 256, HALF, config, bias=True)) == {"out"}


# -- on the GPU -----------------------------------------------------------------------------------


def device():
    from stof_compile.device import device_facts

    return device_facts("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "dtype", "kn"),
    [((128,), HALF, True), ((1000,), BRAIN, False), ((4, 1024), HALF, False), ((1,), SINGLE, True)],
    ids=str,
)
def test_gpu_first_config(rows, dtype, kn):
    recipe, operands = gated_recipe(rows, 3072, 768, dtype, bias="input", kn=kn)
    assert TEMPLATE.refusal(recipe, device()) is None
    check_template(TEMPLATE, recipe, operands, TEMPLATE.first(recipe, device()), scale=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(128,), (4096,)], ids=str)
def test_gpu_other_configs(rows):
    """Every twelfth config of the space."""
    recipe, operands = gated_recipe(rows, 3000, 768, HALF, bias="add")
    for config in TEMPLATE.space(recipe, device()).configs()[::12]:
        check_template(TEMPLATE, recipe, operands, config, scale=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{}, {"persistent": 1, "tma": 1}], ids=["plain", "tma"])
def test_gpu_under_inductor_and_in_a_cuda_graph(change, fresh_dynamo):
    recipe, operands = gated_recipe((4, 128), 1024, 512, HALF)
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    call = TEMPLATE.build(recipe, SMALL | base | change)
    reference = TEMPLATE.reference(recipe, operands, torch.float64)

    def run(*given):
        return call.run(given)

    for out in compiled_and_captured(run, *operands):
        assert_close(out, reference, scale=2.0)
