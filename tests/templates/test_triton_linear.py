"""The linear template: what it accepts and offers, its results, and what it compiles to."""

from dataclasses import replace

import pytest
import torch
from close import assert_close
from linear_recipes import Writer, check_template, linear_recipe
from norm_recipes import BRAIN, HALF, SINGLE, compiled_and_captured, machine
from stof_compile.templates.gemm_tiles import Product, Tile, ranked_tiles, shared_bytes
from stof_compile.templates.triton_linear import DIMENSIONS, TritonLinear

import stof_compile.ops_linear  # noqa: F401
from stof_compile.fusion.recipe import ACTIVATIONS

TEMPLATE = TritonLinear()
HOPPER = machine(90)
SMALL = {
    "block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 2, "num_stages": 2, "group_m": 2,
    "split_k": 1, "persistent": 0, "tma": 0,
}  # fmt: skip


# -- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["", "input", "add"])
@pytest.mark.parametrize("activation", ["", "gelu"])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_every_epilogue_is_read(bias, activation, factor, residual, swapped):
    recipe, _ = linear_recipe(
        (2, 3), 8, 16, SINGLE, bias, activation, factor, residual, swapped=swapped,
        regrouped=activation == "", device="cpu",
    )  # fmt: skip
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    x, weight, *others, name, config = call.args
    assert (x.operand, weight.operand) == (0, 1)
    numbers = iter(range(2, 9))
    expected = [next(numbers) if bias else None]
    times = next(numbers) if factor else None
    expected += [next(numbers) if residual else None, times]
    assert [None if o is None else o.operand for o in others] == expected
    assert name == activation and len(config) == len(DIMENSIONS)
    assert call.shape == recipe.result.shape


def test_the_order_of_bias_and_residual_does_not_matter_without_activation():
    w = Writer(SINGLE, "cpu")
    value = w.linear(w.operand(6, 16), 8, 16)
    value = w.step("add", value, w.operand(6, 8))
    w.step("add", w.operand(8), value)
    recipe, _ = w.done()
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    assert (call.args[2].operand, call.args[3].operand) == (3, 2)


def refused(recipe, device=HOPPER):
    reason = TEMPLATE.refusal(recipe, device)
    assert reason is not None and not TEMPLATE.accepts(recipe, device)
    return reason


def ending(*steps, n=8, k=16, rows=6, dtype=SINGLE):
    """A product and steps, each (kind, shapes of further operands, attributes)."""
    w = Writer(dtype, "cpu")
    value = w.linear(w.operand(rows, k), n, k)
    for kind, shapes, attrs in steps:
        value = w.step(kind, value, *(w.operand(*shape) for shape in shapes), **attrs)
    return w.done()[0]


def test_refusals_name_the_reason():
    plain = ending()
    assert TEMPLATE.refusal(plain, HOPPER) is None
    assert "CUDA" in refused(plain, machine(90, kind="cpu", runtime="cpu"))
    assert "CUDA" in refused(plain, machine(90, runtime="rocm 7.0"))
    assert "capability" in refused(plain, replace(HOPPER, capability=(7, 5)))
    on_cpu = replace(plain, operands=tuple(replace(o, device="cpu") for o in plain.operands))
    assert "cpu" in refused(on_cpu)
    assert "float64" in refused(ending(dtype=torch.float64))
    assert "float16" in refused(ending(("cast", [], {"to": HALF})))
    relu, gelu = ("activation", [], {"name": "relu"}), ("activation", [], {"name": "gelu"})
    assert "behind" in refused(ending(relu, gelu))
    assert "behind" in refused(ending(("add", [(6, 8)], {}), relu))
    assert "no place" in refused(ending(("add", [(6, 8)], {}), ("add", [(6, 8)], {})))
    assert "no place" in refused(ending(("add", [(6, 8)], {}), ("mul", [(6, 8)], {})))
    assert "number" in refused(ending(("mul", [], {"number": 2.0, "number_first": False})))
    assert "vector" in refused(ending(relu, ("add", [(8,)], {})))
    assert "vector" in refused(ending(("mul", [(8,)], {})))
    assert "neither" in refused(ending(("add", [(6, 1)], {})))
    assert "'sub'" in refused(ending(("sub", [(6, 8)], {})))
    assert "empty" in refused(ending(rows=0))

    w = Writer(SINGLE, "cpu")
    w.step("activation", w.operand(6, 8), name="relu")
    assert "starts with" in refused(w.done()[0])
    w = Writer(SINGLE, "cpu")
    value = w.linear(w.operand(6, 16), 8, 16)
    w.step("mul", value, value)
    assert "straight" in refused(w.done()[0])
    w = Writer(SINGLE, "cpu")
    w.linear(w.linear(w.operand(6, 16), 8, 16), 4, 8)
    assert "two products" in refused(w.done()[0])
    strided = replace(plain.operands[1], stride=(32, 2))
    assert "strides" in refused(replace(plain, operands=(plain.operands[0], strided)))


# -- what is offered ------------------------------------------------------------------------------

SHAPES = {
    "BERT 128": (128, 768, 768),
    "BERT 128 up": (128, 3072, 768),
    "BERT 128 down": (128, 768, 3072),
    "BERT 4096": (4096, 768, 768),
    "BERT 4096 down": (4096, 768, 3072),
    "BERT 32768 up": (32768, 3072, 768),
    "one row": (1, 4096, 4096),
    "ragged": (1000, 300, 72),
}


def sized(m, n, k, dtype=HALF):
    w = Writer(dtype, "cpu")
    with torch.device("meta"):
        x, weight = torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    w.operands += [x, weight]
    w.step("linear", ("o", 0), ("o", 1))
    return w.done()[0]


@pytest.mark.parametrize("target", [80, 86, 89, 90, 100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_the_space_is_a_few_dozen_configs_that_fit(target, shape, dtype):
    m, n, k = SHAPES[shape]
    device = machine(target)
    recipe = sized(m, n, k, dtype)
    space = TEMPLATE.space(recipe, device)
    configs = space.configs()
    assert 10 <= len(configs) <= 60
    assert TEMPLATE.first(recipe, device) in configs
    assert len({tuple(config.items()) for config in configs}) == len(configs)
    product = Product(m, n, k, dtype)
    for config in configs:
        assert tuple(config) == DIMENSIONS
        assert shared_bytes(Tile(**config), product, device) <= device.shared_memory_bytes
        assert target >= 90 or not config["tma"]
        assert not (config["split_k"] > 1 and config["persistent"])


def test_few_rows_still_fill_the_device():
    for shape in ("BERT 128", "BERT 128 up", "BERT 128 down"):
        m, n, k = SHAPES[shape]
        best = ranked_tiles(Product(m, n, k, HALF), HOPPER)[0]
        assert -(-m // best.block_m) * -(-n // best.block_n) * best.split_k >= 64


def test_many_rows_take_large_tiles():
    best = ranked_tiles(Product(32768, 3072, 768, HALF), HOPPER)[0]
    assert best.block_m * best.block_n >= 128 * 128 and best.persistent and best.tma


def test_a_config_outside_of_the_space_is_refused_with_a_reason():
    space = TEMPLATE.space(sized(128, 768, 768), HOPPER)
    tall = SMALL | {"block_m": 256, "num_warps": 8}
    assert "larger than" in space.refusal(tall)
    deep = SMALL | {"block_m": 128, "block_n": 128, "block_k": 128, "num_stages": 6}
    assert "shared memory" in space.refusal(deep)
    assert "faster" in space.refusal(SMALL)


# -- results in the interpreter -------------------------------------------------------------------
# bf16 is left out: the interpreter multiplies bf16 tiles as integers. The GPU tests cover it.

CASES = {
    "plain": ({"bias": "", "activation": ""}, {}),
    "bias, GELU": ({}, {"block_n": 32}),
    "four dimensions": ({"rows": (2, 3, 5)}, {}),
    "one row": ({"rows": ()}, {}),
    "strided rows": ({"strided": True, "residual": True}, {"block_k": 32}),
    "[K, N] weight": ({"kn": True, "residual": True}, {"block_n": 32, "block_k": 32}),
    "all of it": ({"factor": True, "residual": True, "rows": (257,)}, {"block_m": 32}),
    "even": ({"rows": (64,), "n": 64, "k": 64, "residual": True}, {"block_m": 32, "block_n": 32}),
    "pieces": ({"n": 140, "residual": True}, {"block_m": 128, "block_n": 128}),
    "split": ({"residual": True, "factor": True}, {"split_k": 3}),
    "split, ragged parts": ({"k": 200, "activation": "relu"}, {"split_k": 7}),
    "more parts than steps": ({"k": 24}, {"split_k": 8}),
    "split, [K, N]": ({"kn": True}, {"split_k": 2, "block_n": 32}),
    "persistent": ({"rows": (257,), "residual": True}, {"persistent": 1}),
    "persistent pieces": ({"rows": (257,), "n": 200}, {"persistent": 1, "block_m": 128,
                          "block_n": 128, "block_k": 32}),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_interpreter(case, dtype):
    form, config = CASES[case]
    recipe, operands = linear_recipe(dtype=dtype, **form)
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    check_template(TEMPLATE, recipe, operands, SMALL | config)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_interpreter_activations(activation, dtype):
    recipe, operands = linear_recipe((40,), activation=activation, dtype=dtype)
    check_template(TEMPLATE, recipe, operands, SMALL)
    # small values, where a careless tanh loses all its digits; large ones, whose rounding it shows
    for size, scale in ((1e-3, 1.0), (30.0, 4.0)):
        scaled = [t * size if i != 1 else t for i, t in enumerate(operands)]
        check_template(TEMPLATE, recipe, scaled, SMALL, scale)


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_interpreter_keeps_nan_and_infinities(activation):
    recipe, operands = linear_recipe((6,), 40, 16, SINGLE, activation=activation, residual=True)
    operands[2][:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    operands[0][1, 3] = float("nan")
    operands[3][2, 7] = float("inf")
    check_template(TEMPLATE, recipe, operands, SMALL)
    check_template(TEMPLATE, recipe, operands, SMALL | {"split_k": 1, "persistent": 1})


@pytest.mark.interpreter
def test_interpreter_empty_and_columns():
    x, weight = torch.randn(0, 16), torch.randn(8, 16)
    config = list(SMALL.values())
    out = torch.ops.stof.fused_linear(x, weight, None, None, None, "", config)
    assert out.shape == (0, 8)
    columns = torch.randn(16, 12).t()  # no unit stride along K: copied
    out = torch.ops.stof.fused_linear(columns, weight, None, None, None, "", config)
    assert_close(out, columns.double() @ weight.double().t())
    vector = torch.ops.stof.fused_linear(columns[0], weight, None, None, None, "relu", config)
    assert vector.shape == (8,)
    merged = torch.randn(3, 4, 16).transpose(0, 1)  # leading dimensions cannot be merged
    out = torch.ops.stof.fused_linear(merged, weight, None, None, None, "", config)
    assert out.is_contiguous()
    assert_close(out, merged.double() @ weight.double().t())


@pytest.mark.interpreter
def test_interpreter_wrong_arguments_are_named():
    x, weight, config = torch.randn(4, 16), torch.randn(8, 16), list(SMALL.values())

    def call(x=x, weight=weight, bias=None, residual=None, name="", config=config):
        return torch.ops.stof.fused_linear(x, weight, bias, residual, None, name, config)

    for reason, wrong in {
        "weight must be": {"weight": torch.randn(8, 17)},
        "unit stride": {"weight": torch.randn(8, 32)[:, ::2]},
        "x's dtype": {"bias": torch.randn(8).half()},
        "bias must be": {"bias": torch.randn(9)},
        "as many rows": {"residual": torch.randn(5, 8)},
        "activation must be": {"name": "swish"},
        "power of two": {"config": [24, *config[1:]]},
        "split_k must": {"config": [*config[:6], 99, 0, 0]},
        "fp16, bf16": {"x": x.double()},
    }.items():
        with pytest.raises(ValueError, match=reason):
            call(**wrong)


@pytest.mark.interpreter
def test_interpreter_passes_opcheck():
    x, weight, bias = torch.randn(2, 6, 16), torch.randn(8, 16), torch.randn(8)
    arguments = (x, weight, bias, torch.randn(2, 6, 8), None, "gelu", list(SMALL.values()))
    # no AOT test: an interpreted kernel cannot be traced
    found = torch.library.opcheck(
        torch.ops.stof.fused_linear.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(found.values()) == {"SUCCESS"}


def test_a_cpu_tensor_is_refused_outside_of_the_interpreter():
    import os

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter runs on the CPU")
    with pytest.raises(ValueError, match="on a GPU"):
        torch.ops.stof.fused_linear(
            torch.randn(2, 16), torch.randn(8, 16), None, None, None, "", list(SMALL.values())
        )


def test_schema_is_the_documented_one():
    wanted = (
        "stof::fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
        "Tensor? factor, str activation, SymInt[] config) -> Tensor"
    )
    assert str(torch.ops.stof.fused_linear.default._schema) == wanted


# -- what it compiles to --------------------------------------------------------------------------


def recorded(m, n, k, dtype, config, *, activation="gelu", residual=False, factor=False, kn=False):
    from linear_compiling import record
    from stof_compile.kernels import linear

    with torch._subclasses.FakeTensorMode():
        x, bias = torch.empty(m, k, dtype=dtype, device="cuda"), None
        weight = torch.empty(k, n, dtype=dtype, device="cuda").t() if kn else None
        weight = torch.empty(n, k, dtype=dtype, device="cuda") if weight is None else weight
        bias = torch.empty(n, dtype=dtype, device="cuda")
        full = torch.empty(m, n, dtype=dtype, device="cuda")
        return record(
            linear, "fused_linear_forward", x, weight, bias, full if residual else None,
            full if factor else None, activation, list(config.values()),
        )  # fmt: skip


def assert_compiles(target, m, n, k, dtype, config, **form):
    from linear_compiling import launch_needs

    found = launch_needs(recorded(m, n, k, dtype, config, **form), target)
    assert found.shared_bytes <= machine(target).shared_memory_bytes
    assert found.spill_bytes == 0, f"{config}: {found.spill_bytes} bytes spilled"
    estimated = shared_bytes(Tile(**config), Product(m, n, k, dtype), machine(target))
    assert found.shared_bytes <= estimated, "the space is pruned by too low an estimate"
    return found


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100])
@pytest.mark.parametrize("shape", ["BERT 128", "BERT 128 down", "BERT 4096"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32"])
def test_first_config_compiles(target, shape, dtype):
    m, n, k = SHAPES[shape]
    config = TEMPLATE.first(sized(m, n, k, dtype), machine(target))
    assert_compiles(target, m, n, k, dtype, config, residual=True)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    "form", [{}, {"kn": True}, {"residual": True, "factor": True}], ids=["bias", "kn", "full"]
)
@pytest.mark.parametrize("m", [4096, 1000])
def test_persistent_tiles_of_hopper(form, m):
    config = SMALL | {
        "block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3,
        "group_m": 8, "persistent": 1, "tma": 1,
    }  # fmt: skip
    found = assert_compiles(90, m, 3072, 768, BRAIN, config, **form)
    assert found.registers <= 255


@pytest.mark.compile_only
def test_loads_and_products_of_hopper_overlap():
    from linear_compiling import compile_launch

    config = TEMPLATE.first(sized(32768, 3072, 768), HOPPER)
    text = compile_launch(recorded(32768, 3072, 768, HALF, config), 90).asm["ttgir"]
    assert "async_tma_copy_global_to_local" in text
    assert "warp_group_dot_wait" in text and "pendings = 1" in text
    assert text.count("scf.for") == 1, "tiles and steps are not one loop"


@pytest.mark.compile_only
@pytest.mark.parametrize("change", [{}, {"split_k": 4}, {"persistent": 1}, {"tma": 1}], ids=str)
def test_torch_sees_that_only_the_results_are_written(change):
    """A tensor taken for written would be cloned at every call of a compiled graph."""
    from linear_compiling import written_tensors

    config = SMALL | {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4} | change
    launch = recorded(100, 768, 768, HALF, config, residual=True, factor=True)
    extra = {"parts", "flags"} if "split_k" in change else set()
    assert written_tensors(launch) == {"out"} | extra


# -- on the GPU -----------------------------------------------------------------------------------

FORMS = {
    "GELU": {}, "residual": {"activation": "", "residual": True}, "kn": {"kn": True},
    "all": {"activation": "silu", "factor": True, "residual": True, "bias": "add"},
}  # fmt: skip
REAL = {
    "few": ((128,), 768, 768, HALF, "all"),
    "few up": ((1, 128), 3072, 768, BRAIN, "GELU"),
    "few down": ((128,), 768, 3072, HALF, "residual"),
    "few exact": ((128,), 768, 768, SINGLE, "GELU"),
    "ragged": ((1000,), 768, 768, HALF, "kn"),
    "many": ((8, 512), 3072, 768, HALF, "GELU"),
    "many down": ((8, 512), 768, 3072, BRAIN, "residual"),
    "odd": ((33,), 300, 72, BRAIN, "all"),
    "one": ((1,), 768, 768, HALF, "residual"),
}  # fmt: skip


def device():
    from stof_compile.device import device_facts

    return device_facts("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL)
def test_gpu_first_config(case):
    rows, n, k, dtype, form = REAL[case]
    recipe, operands = linear_recipe(rows, n, k, dtype, **FORMS[form])
    assert TEMPLATE.refusal(recipe, device()) is None
    check_template(TEMPLATE, recipe, operands, TEMPLATE.first(recipe, device()))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 768, 3072), (1000, 768, 768), (4096, 3072, 768)], ids=str)
def test_gpu_other_configs(shape):
    """Every twelfth config of the space: split, persistent and described ones are among them."""
    recipe, operands = linear_recipe(shape[:1], *shape[1:], HALF, residual=True)
    for config in TEMPLATE.space(recipe, device()).configs()[::12]:
        check_template(TEMPLATE, recipe, operands, config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [{"persistent": 1}, {"persistent": 1, "tma": 1}, {"tma": 1, "split_k": 4}, {"split_k": 12}],
    ids=str,
)
@pytest.mark.parametrize(("shape", "kn"), [((1000, 776, 768), False), ((257, 136, 72), True)])
def test_gpu_every_way_to_run(change, shape, kn):
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    recipe, operands = linear_recipe(shape[:1], *shape[1:], BRAIN, residual=True, kn=kn)
    check_template(TEMPLATE, recipe, operands, SMALL | base | change)


@pytest.mark.gpu
def test_gpu_parts_are_added_in_one_order_whatever_the_memory_held():
    recipe, operands = linear_recipe((128,), 768, 3072, HALF, residual=True)
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 4}
    call = TEMPLATE.build(recipe, SMALL | base | {"split_k": 8})
    first = call.run(operands)
    for seed in range(200):
        noise = torch.randint(-(2**62), 2**62, (1 << 17,), device="cuda")  # recycled as flags
        del noise
        assert torch.equal(call.run(operands), first), f"run {seed} differs"


@pytest.mark.gpu
def test_gpu_concurrent_streams():
    recipe, operands = linear_recipe((128,), 768, 3072, HALF, residual=True)
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 4}
    call = TEMPLATE.build(recipe, SMALL | base | {"split_k": 8})
    wanted = call.run(operands)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call.run(operands))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change", [{}, {"split_k": 4}, {"persistent": 1, "tma": 1}], ids=["plain", "split", "tma"]
)
def test_gpu_under_inductor_and_in_a_cuda_graph(change, fresh_dynamo):
    recipe, operands = linear_recipe((4, 128), 768, 768, HALF, residual=True)
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    call = TEMPLATE.build(recipe, SMALL | base | change)
    reference = TEMPLATE.reference(recipe, operands, torch.float64)

    def run(*given):
        return call.run(given)

    for out in compiled_and_captured(run, *operands):
        assert_close(out, reference)
