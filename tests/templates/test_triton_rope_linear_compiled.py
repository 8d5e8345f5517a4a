"""Projections with rotary embeddings: what configs compile to for GPUs that are not here."""

import pytest
import torch

pytest.importorskip("triton")

from linear_compiling import compile_launch, launch_needs, record, written_tensors
from linear_recipes import SMALL
from norm_recipes import BRAIN, HALF, SINGLE, machine
from rope_recipes import sized
from stof_compile.kernels import rope_linear
from stof_compile.templates.gemm_estimate import Product, Tile, shared_bytes
from stof_compile.templates.triton_rope_linear import TritonRopeLinear

pytestmark = pytest.mark.compile_only

TEMPLATE = TritonRopeLinear()
K = 2048
LLAMA = {32: (64, 16), 64: (32, 8), 128: (16, 4), 256: (8, 4)}
"""Head dim -> heads of Q and of K (and V)."""


def recorded(m, dim, dtype, config, *, bias=False, kn=False, period=None):
    q, kv = LLAMA[dim]
    n, rotated = (q + 2 * kv) * dim, (q + kv) * dim
    with torch._subclasses.FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(m, K, dtype=dtype)
        shape = (K, n) if kn else (n, K)
        weight = torch.empty(shape, dtype=dtype)
        vector = torch.empty(n, dtype=dtype) if bias else None
        cos, sin = (torch.empty(period or m, dim, dtype=dtype) for _ in range(2))
        return record(
            rope_linear, "fused_rope_linear_forward", x, weight.t() if kn else weight, vector, cos,
            sin, dim, rotated, list(config.values()),
        )  # fmt: skip


def assert_compiles(target, m, dim, dtype, config, **form):
    found = launch_needs(recorded(m, dim, dtype, config, **form), target)
    assert found.shared_bytes <= machine(target).shared_memory_bytes
    assert found.spill_bytes == 0, f"{config}: {found.spill_bytes} bytes spilled"
    n = (LLAMA[dim][0] + 2 * LLAMA[dim][1]) * dim
    estimated = shared_bytes(Tile(**config), Product(m, n, K, dtype), machine(target))
    assert found.shared_bytes <= estimated, "the space is pruned by too low an estimate"
    return found


def space(target, m, dim, dtype):
    q, kv = LLAMA[dim]
    recipe, device = sized((m,), (q, kv), kv, dim, K, dtype), machine(target)
    return TEMPLATE.first(recipe, device), TEMPLATE.space(recipe, device).configs()


@pytest.mark.parametrize("target", [80, 86, 89, 90, 100])
@pytest.mark.parametrize("m", [128, 4096])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, HALF), (128, HALF), (64, SINGLE)], ids=["64", "128", "64 fp32"]
)
def test_first_config_compiles(target, m, dim, dtype):
    first, _ = space(target, m, dim, dtype)
    assert_compiles(target, m, dim, dtype, first, bias=True, period=64)


@pytest.mark.parametrize("target", [86, 90, 100])
@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=["bf16", "fp32"])
def test_other_head_dims_compile(target, dim, dtype):
    first, _ = space(target, 1024, dim, dtype)
    assert_compiles(target, 1000, dim, dtype, first, period=100)


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("m", [128, 4096])
def test_a_part_of_the_space_compiles(target, m):
    """Every twelfth config: split, persistent and described ones are among them."""
    for config in space(target, m, 64, HALF)[1][::12]:
        assert_compiles(target, m, 64, HALF, config)


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("m", [1, 2])
def test_numbers_that_are_one_compile(target, m):
    """Triton makes constants of M = 1 and T = 1."""
    first, _ = space(target, m, 64, HALF)
    assert_compiles(target, m, 64, HALF, first, period=1)


@pytest.mark.parametrize(
    ("m", "form"), [(4096, {}), (1000, {"kn": True, "bias": True})], ids=["plain", "kn"]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_persistent_tiles_of_hopper(m, form, dim):
    config = SMALL | {
        "block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3,
        "group_m": 8, "persistent": 1, "tma": 1,
    }  # fmt: skip
    assert_compiles(90, m, dim, BRAIN, config, **form)


def test_taking_the_halves_apart_moves_no_data():
    config = SMALL | {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8}
    text = compile_launch(recorded(4096, 64, HALF, config | {"num_stages": 3}), 90).asm["ptx"]
    assert "shfl.sync.bfly" not in text
    assert "st.global.v4" in text and "st.global.b16" not in text


@pytest.mark.parametrize("change", [{}, {"split_k": 4}, {"persistent": 1}, {"tma": 1}], ids=str)
def test_torch_sees_that_only_the_results_are_written(change):
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4}
    extra = {"parts", "flags"} if "split_k" in change else set()
    launch = recorded(100, 64, HALF, SMALL | base | change, bias=True, period=50)
    assert written_tensors(launch) == {"out"} | extra


@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("copied", [0, 1])
def test_a_weight_by_columns_is_read_by_depth_behind_a_copy(copied, kn, monkeypatch):
    # without CUDA a stand-in of a GPU's tensor has no operator that copies it
    like = {"dtype": SINGLE, "device": "cuda"}
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: torch.empty(t.shape, **like))
    config = space(90, 4096, 64, SINGLE)[0] | {"depth_first": copied}
    found = recorded(4096, 64, SINGLE, config, kn=kn).arguments
    by_columns = kn and not copied
    assert (found["WEIGHT_KN"], found["stride_w"]) == (by_columns, 3072 if by_columns else K)


def test_exact_fp32_is_three_products_of_tf32():
    config = space(90, 128, 64, SINGLE)[0]
    assert recorded(128, 64, SINGLE, config).arguments["PRECISION"] == "tf32x3"
