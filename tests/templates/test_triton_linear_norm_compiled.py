"""The product-and-norm template: what its configs compile to for GPUs that are not here."""

import os

import pytest

pytest.importorskip("triton")

from linear_norm_recipes import config, one_of_each_tile
from norm_compiling import assert_fits, needed_by, written_by
from norm_recipes import BRAIN, HALF, MACHINES, NAMES, SINGLE, machine
from stof_compile.kernels import linear_norm_kernel as kernels
from stof_compile.templates.linear_norm_configs import (
    FORMS,
    ProductSize,
    offered_configs,
    row_tiles,
)
from template_checks import HOPPER

pytestmark = pytest.mark.compile_only


def arguments_of(chosen, rows, n, k, dtype=HALF, kn=False, precision="ieee"):
    """(kernel, argument types, constants) of a config's product."""
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


@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("n", [256, 512, 1000])
def test_whole_rows_of_other_widths_fit(target, n):
    offered = offered_configs(ProductSize(32768, n, 1024, 2), machine(target))
    full = [c for c in offered if c["form"] == "full_row"]
    assert full
    full.sort(key=lambda c: c["block_m"] / c["num_warps"])
    compile_all(target, full[-1:], 32768, n, 1024, BRAIN, kn=n == 512)


@pytest.mark.parametrize("target", [80, 90])
def test_exact_fp32_fits(target):
    for size in ((128, 768, 768), (4096, 256, 256)):
        offered = one_of_each_tile(offered_configs(ProductSize(*size, 4), machine(target)))
        if not os.environ.get("STOF_FULL_COMPILE"):
            offered = offered[-3:] if target == 90 else offered[-1:]
        compile_all(target, offered, *size, SINGLE, kn=False)


@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("target", [80, 90])
def test_ragged_sizes_fit(target, kn):
    offered = distinct(offered_configs(ProductSize(33, 1000, 72, 2), machine(target)))
    most = 3 if target == 90 or os.environ.get("STOF_FULL_COMPILE") else 1
    compile_all(target, offered[:most], 33, 1000, 72, HALF, kn)
    whole = config("full_row", 16, block_k=32, num_warps=8)
    compile_all(target, [whole], 33, 1000, 72, HALF, kn)


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


@pytest.mark.parametrize("form", FORMS)
def test_only_the_results_are_written(form):
    kernel, types, constants = arguments_of(config(form), 33, 72, 72)
    written = written_by(kernel, types, constants)
    assert written == {"out" if form == "full_row" else "partials"}
