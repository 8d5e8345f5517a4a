"""Projections with rotary embeddings on a GPU: results, and use in compiled code."""

import pytest
from linear_recipes import SMALL
from norm_recipes import BRAIN, HALF, SINGLE
from rope_recipes import rope_recipe
from stof_compile.templates.triton_rope_linear import TritonRopeLinear
from template_checks import check_compiled, check_template

import stof_compile.ops_rope_linear  # noqa: F401
from stof_compile.device import device_facts

pytestmark = pytest.mark.gpu

TEMPLATE = TritonRopeLinear()
LLAMA = {"heads": (32, 8), "kept": 8, "dim": 64, "k": 2048}
LARGE = {"heads": (16, 4), "kept": 4, "dim": 128, "k": 2048}

REAL = {
    "few": ((1, 128), HALF, LLAMA),
    "few, bf16, bias": ((1, 128), BRAIN, LLAMA | {"bias": True}),
    "few, exact": ((1, 128), SINGLE, LLAMA),
    "ragged": ((1, 1000), HALF, LLAMA),
    "ragged, a table each": ((2, 500), BRAIN, LLAMA | {"period": 1000}),
    "many": ((4, 1024), HALF, LLAMA),
    "many, bf16": ((4, 1024), BRAIN, LARGE),
    "decode": ((8, 1), HALF, LLAMA | {"period": 8}),
    "one row": ((1, 1), BRAIN, LARGE),
    "[K, N]": ((1, 1000), HALF, LARGE | {"kn": True, "bias": True}),
    "[K, N], exact": ((2, 500), SINGLE, LARGE | {"kn": True}),
    "Q alone": ((2, 257), HALF, {"heads": (8,), "kept": 0, "dim": 256, "k": 1024}),
    "heads of 32": ((2, 257), BRAIN, {"heads": (8, 8), "kept": 8, "dim": 32, "k": 256}),
}


def device():
    return device_facts("cuda")


@pytest.mark.parametrize("case", REAL)
def test_gpu_first_config(case):
    rows, dtype, form = REAL[case]
    recipe, operands = rope_recipe(rows, dtype=dtype, **form)
    assert TEMPLATE.refusal(recipe, device()) is None
    config = TEMPLATE.first(recipe, device())
    check_template(TEMPLATE, recipe, operands, config, scale=2.0)


@pytest.mark.parametrize("rows", [(1, 128), (1, 1000), (4, 1024)], ids=str)
@pytest.mark.parametrize("form", [LLAMA, LARGE], ids=["64", "128"])
def test_gpu_other_configs(rows, form):
    """Every ninth config of the space: split, persistent and described ones are among them."""
    recipe, operands = rope_recipe(rows, dtype=HALF, bias=True, **form)
    for config in TEMPLATE.space(recipe, device()).configs()[::9]:
        check_template(TEMPLATE, recipe, operands, config, scale=2.0)


@pytest.mark.parametrize(
    "change",
    [{"persistent": 1}, {"persistent": 1, "tma": 1}, {"tma": 1, "split_k": 4}, {"split_k": 8}],
    ids=str,
)
@pytest.mark.parametrize("kn", [False, True])
def test_gpu_every_way_to_run(change, kn):
    base = {"block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
    recipe, operands = rope_recipe((2, 333), (5, 2), 2, 64, 776, dtype=BRAIN, kn=kn)
    check_template(TEMPLATE, recipe, operands, SMALL | base | change, scale=2.0)


@pytest.mark.parametrize(
    "change", [{}, {"split_k": 4}, {"persistent": 1, "tma": 1}], ids=["plain", "split", "tma"]
)
def test_gpu_under_inductor_and_in_a_cuda_graph(change, fresh_dynamo):
    recipe, operands = rope_recipe((4, 128), dtype=HALF, **LLAMA)
    base = {"block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
    check_compiled(TEMPLATE, recipe, operands, SMALL | base | change, scale=2.0)
