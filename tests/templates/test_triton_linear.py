"""The linear template: what it accepts and offers, and the schema of its operator."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from linear_recipes import SHAPES, SMALL, Writer, linear_recipe, on_gpu, sized
from norm_recipes import HALF, INTERPRETED, SINGLE, machine
from stof_compile.kernels import limits
from stof_compile.kernels.linear_problem import pays, precision_of
from stof_compile.templates.gemm_estimate import Product, Tile, estimate_us, shared_bytes, unfit
from stof_compile.templates.gemm_tiles import ranked_tiles
from stof_compile.templates.triton_linear import DIMENSIONS, TritonLinear
from template_checks import HOPPER, refusal_of

import stof_compile.ops_linear  # noqa: F401

TEMPLATE = TritonLinear()
refused = partial(refusal_of, TEMPLATE)


# -- what is accepted ------------------------------------------------------------------------------


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


# -- what is offered -------------------------------------------------------------------------------


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


# -- the operator ----------------------------------------------------------------------------------


def test_a_cpu_tensor_is_refused_outside_of_the_interpreter():
    if INTERPRETED:
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


# -- exact fp32 -----------------------------------------------------------------------------------


def exact_tiles(target, m=32768, n=2304, k=768):
    return ranked_tiles(Product(m, n, k, SINGLE), machine(target))


def test_exact_fp32_is_three_products_of_tf32_on_cuda_only(monkeypatch):
    single, half = torch.empty(1), torch.empty(1, dtype=HALF)
    assert precision_of(single) == "tf32x3"
    assert precision_of(half) == "ieee"
    with monkeypatch.context() as patch:
        patch.setattr(limits, "tf32_allowed", lambda: True)
        assert precision_of(single) == "tf32"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert precision_of(single) == "ieee"


@pytest.mark.parametrize("target", [80, 86, 89, 90, 100])
def test_launcher_and_tiles_agree_where_three_products_pay(monkeypatch, target):
    device, capability = machine(target), divmod(target, 10)
    assert pays(capability) == (target not in (86, 89))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with torch._subclasses.FakeTensorMode():
        found = precision_of(torch.empty(1, device="cuda"))
    assert found == ("tf32x3" if pays(capability) else "ieee")
    deep = any(t.block_k == 64 for t in exact_tiles(target))  # only of three products
    assert deep == pays(capability) and device.capability == capability


def test_exact_fp32_tiles_of_hopper_are_those_that_were_fast():
    tiles = exact_tiles(90)
    kinds = {(t.block_m, t.block_n, t.block_k, t.num_warps) for t in tiles}
    assert {(128, 64, 32, 4), (64, 64, 32, 4), (64, 128, 32, 4)} <= kinds
    # eight warps over few rows are left out: caution, see docs/fusion.md
    for target in (80, 90, 100):
        assert all(t.num_warps == 4 or t.block_m > 64 for t in exact_tiles(target, 128, 768, 768))


def test_the_ordinary_units_keep_their_tiles():
    amd = replace(machine(90), arch="gfx942", runtime="rocm 6.4", capability=(9, 4))
    tiles = ranked_tiles(Product(32768, 2304, 768, SINGLE), amd)
    assert tiles and all(t.block_k <= 32 for t in tiles)


def test_an_estimate_of_exact_fp32_is_near_what_was_measured():
    """us on an H200, which says little of other GPUs."""
    for shape, measured in (((4096, 3072, 768), 247), ((32768, 2304, 768), 1385)):
        best = exact_tiles(90, *shape)[0]
        estimate = estimate_us(best, Product(*shape, SINGLE), machine(90))
        assert 0.7 * measured < estimate < 1.4 * measured


def test_estimates_of_exact_fp32_are_those_that_compiling_found():
    """Bytes of shared memory of sm_90, Triton 3.6 and 3.9; tiles that spill are refused."""
    product, device = Product(4096, 768, 768, SINGLE), machine(90)
    tile = Tile(64, 128, 32, 4, 2)
    assert shared_bytes(tile, product, device) == 57344 + 64
    assert shared_bytes(replace(tile, persistent=1), product, device) == 57344 + 32768 + 256
    assert unfit(Tile(64, 64, 64, 4, 2), product, device) is None
    assert "spill" in unfit(Tile(128, 64, 64, 4, 2), product, device)
    assert "spill" in unfit(Tile(64, 128, 32, 4, 2), product, machine(80))
    kinds = {(t.block_m, t.block_n, t.block_k) for t in ranked_tiles(product, device)}
    assert (64, 64, 64) in kinds


# -- weights by columns ----------------------------------------------------------------------------


def by_columns(m, n, k, dtype=SINGLE):
    w = Writer(dtype, "cpu")
    w.linear(w.operand(m, k), n, k, kn=True)
    return on_gpu(w.done()[0])


def copies(configs):
    return sum(config["depth_first"] for config in configs) / len(configs)


def test_exact_fp32_on_hopper_copies_weights_by_columns_of_many_rows():
    """us on an H200, [K, N] as it is: 376, 308, 344; by depth 223, 202, 267, and 15 to 19 the copy
    by PyTorch; 128 rows 23 and 16."""
    for shape in ((4096, 3072, 768), (4096, 2304, 768), (4096, 768, 3072)):
        recipe = by_columns(*shape)
        assert TEMPLATE.first(recipe, HOPPER)["depth_first"] == 1
        assert 0.5 < copies(TEMPLATE.space(recipe, HOPPER).configs()) < 1  # both are measured
        plain = Product(*shape, SINGLE)
        behind, as_it_is = (
            min(
                estimate_us(tile, replace(plain, kn=True), HOPPER)
                for tile in ranked_tiles(replace(plain, kn=True), HOPPER)
                if tile.depth_first == copied
            )
            for copied in (1, 0)
        )
        by_depth = estimate_us(ranked_tiles(plain, HOPPER)[0], plain, HOPPER)
        assert by_depth + 2 < behind < 1.2 * by_depth < 1.3 * by_depth < as_it_is
    for rows in (1, 16, 128):
        assert TEMPLATE.first(by_columns(rows, 3072, 768), HOPPER)["depth_first"] == 0


COPIES = (768, 768, 7.4), (2304, 768, 15.0), (3072, 768, 18.9), (768, 3072, 19.0)
"""Columns, depth and us on an H200 (docs/fusion.md#fp32)."""


def test_a_copy_takes_as_long_as_it_was_measured():
    """It depends on the weight alone."""
    for rows, (n, k, us) in itertools.product((512, 4096), COPIES):
        product = Product(rows, n, k, SINGLE, kn=True)
        tile = next(tile for tile in ranked_tiles(product, HOPPER) if tile.depth_first)
        by_depth = estimate_us(replace(tile, depth_first=0), replace(product, kn=False), HOPPER)
        assert estimate_us(tile, product, HOPPER) - by_depth == pytest.approx(us, rel=0.05)


@pytest.mark.parametrize(
    "shape", [(384, 768, 3072), (640, 768, 3072), (1024, 1024, 4096), (4096, 3072, 768)], ids=str
)
def test_both_forms_of_a_weight_by_columns_are_offered(shape):
    """Where they are close and where one is far ahead: the search tries the other early."""
    configs = TEMPLATE.space(by_columns(*shape), HOPPER).configs()
    forms = [config["depth_first"] for config in configs]
    assert set(forms[:4]) == {0, 1}
    assert min(forms.count(0), forms.count(1)) >= 8


def test_a_copy_must_pay():
    """Where the copy costs more than a product by depth gains the weight is read as it is."""
    for shape in ((256, 3072, 768), (384, 768, 3072), (512, 3072, 768)):
        assert TEMPLATE.first(by_columns(*shape), HOPPER)["depth_first"] == 0
    product = Product(4096, 768, 768, SINGLE, kn=True)
    low = Tile(32, 32, 32, 4, 2, depth_first=1)  # no product of warp groups, which turn weights
    assert "gains nothing" in unfit(low, product, HOPPER)


@pytest.mark.parametrize("kn", [False, True], ids=["linear", "matmul"])
@pytest.mark.parametrize("turned", [False, True], ids=["as written", "a view"])
def test_how_a_weight_lies_decides_and_not_how_it_is_written(kn, turned):
    w = Writer(SINGLE, "cpu")
    x = w.operand(4096, 768)
    shape = (768, 3072) if kn != turned else (3072, 768)
    weight = torch.empty(shape, device="meta")
    w.operands.append(weight.t() if turned else weight)
    w.step("linear", x, ("o", 1), **({"weight_kn": True} if kn else {}))
    recipe = on_gpu(w.done()[0])
    assert recipe.result.shape == (4096, 3072)
    configs = TEMPLATE.space(recipe, HOPPER).configs()
    assert TEMPLATE.first(recipe, HOPPER)["depth_first"] == (kn != turned)
    assert bool(copies(configs)) == (kn != turned)


def test_no_other_weight_is_copied():
    shape = 4096, 768, 768
    assert not copies(TEMPLATE.space(sized(*shape, SINGLE), HOPPER).configs())
    assert not copies(TEMPLATE.space(by_columns(*shape, dtype=HALF), HOPPER).configs())
    for target in (80, 86, 89, 100):
        assert not copies(TEMPLATE.space(by_columns(*shape), machine(target)).configs())
    tile = replace(ranked_tiles(Product(*shape, SINGLE), HOPPER)[0], depth_first=1)
    assert "gains nothing" in unfit(tile, Product(*shape, SINGLE), HOPPER)
    assert unfit(tile, Product(*shape, SINGLE, kn=True), HOPPER) is None


def test_exact_fp32_that_may_be_tf32_is_not_copied(monkeypatch):
    monkeypatch.setattr(Product, "exact_fp32", False)  # what torch.backends.cuda.matmul says
    assert not copies(TEMPLATE.space(by_columns(4096, 768, 768), HOPPER).configs())
