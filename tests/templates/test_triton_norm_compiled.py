"""The norm template: what its configs compile to for GPUs that are not here."""

import os

import pytest

pytest.importorskip("triton")

from compile_targets import on_each_gpu
from norm_compiling import assert_fits, needed_by, written_by
from norm_recipes import HALF, NAMES, SINGLE, machine, norm_recipe
from stof_compile.kernels.norm_kernel import norm_rows_kernel
from stof_compile.templates.triton_norm import TritonNorm

pytestmark = pytest.mark.compile_only

TEMPLATE = TritonNorm()
SIZES = [(128, 768), (4096, 768), (1000, 3072), (33, 16384)]


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


@pytest.mark.parametrize(("target", "size"), on_each_gpu(SIZES, (33, 16384)), ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
def test_offered_configs_stay_in_registers(target, size, dtype):
    rows, n = size
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


@pytest.mark.parametrize("target", [80, 90])
def test_partial_sums_and_ragged_rows(target):
    for n, partials in ((768, 6), (1000, 16), (4096, 2)):
        types, constants = kernel_arguments(n, {"rows": 2}, rows=33, PARTIALS=partials, RMS=True)
        types["x"] = "*fp32"
        assert_fits(needed_by(norm_rows_kernel, target, types, constants, 4)[1], target)


def test_only_the_result_is_written():
    for partials in (1, 3):
        arguments = kernel_arguments(72, {"rows": 4}, rows=33, PARTIALS=partials)
        assert written_by(norm_rows_kernel, *arguments) == {"out"}
