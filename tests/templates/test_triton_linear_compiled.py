"""The linear template: what its configs compile to for GPUs that are not here."""

import pytest
import torch

pytest.importorskip("triton")

from compile_targets import on_each_gpu
from linear_compiling import compile_launch, launch_needs, record, written_tensors
from linear_recipes import SHAPES, SMALL, sized
from norm_recipes import BRAIN, HALF, SINGLE, machine
from stof_compile.kernels import linear
from stof_compile.templates.gemm_estimate import Product, Tile, shared_bytes
from stof_compile.templates.triton_linear import TritonLinear
from template_checks import HOPPER

pytestmark = pytest.mark.compile_only

TEMPLATE = TritonLinear()


def recorded(
    m, n, k, dtype, config, *, activation="gelu", residual=False, factor=False, kn=False,
    marks=False,
):  # fmt: skip
    with torch._subclasses.FakeTensorMode():
        x, bias = torch.empty(m, k, dtype=dtype, device="cuda"), None
        weight = torch.empty(k, n, dtype=dtype, device="cuda").t() if kn else None
        weight = torch.empty(n, k, dtype=dtype, device="cuda") if weight is None else weight
        bias = torch.empty(n, dtype=dtype, device="cuda")
        full = torch.empty(m, n, dtype=dtype, device="cuda")
        return record(
            linear, "fused_linear_forward", x, weight, bias, full if residual else None,
            full if factor else None, activation, list(config.values()),
            *([torch.empty(64, dtype=torch.int32, device="cuda"), 16] if marks else []),
        )  # fmt: skip


def assert_compiles(target, m, n, k, dtype, config, **form):
    found = launch_needs(recorded(m, n, k, dtype, config, **form), target)
    assert found.shared_bytes <= machine(target).shared_memory_bytes
    assert found.spill_bytes == 0, f"{config}: {found.spill_bytes} bytes spilled"
    estimated = shared_bytes(Tile(**config), Product(m, n, k, dtype), machine(target))
    assert found.shared_bytes <= estimated, "the space is pruned by too low an estimate"
    return found


@pytest.mark.parametrize(
    ("target", "shape"), on_each_gpu(["BERT 128", "BERT 128 down", "BERT 4096"], "BERT 4096")
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32"])
def test_first_config_compiles(target, shape, dtype):
    m, n, k = SHAPES[shape]
    config = TEMPLATE.first(sized(m, n, k, dtype), machine(target))
    assert_compiles(target, m, n, k, dtype, config, residual=True)


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("shape", ["BERT 4096", "BERT 128 down"])
def test_tiles_of_exact_fp32(target, shape):
    m, n, k = SHAPES[shape]
    recipe = sized(m, n, k, SINGLE)
    for number, config in enumerate(TEMPLATE.space(recipe, machine(target)).configs()[3::16]):
        assert_compiles(target, m, n, k, SINGLE, config, residual=True, kn=number == 1)


@pytest.mark.parametrize(("target", "shape"), on_each_gpu(["BERT 128", "BERT 4096"], "BERT 128"))
def test_marks_take_no_more_and_are_written(target, shape):
    m, n, k = SHAPES[shape]
    config = TEMPLATE.first(sized(m, n, k, HALF), machine(target))
    form = {"activation": "", "residual": True}
    found = assert_compiles(target, m, n, k, HALF, config, **form, marks=True)
    plain = assert_compiles(target, m, n, k, HALF, config, **form)
    assert found.shared_bytes == plain.shared_bytes
    marking = recorded(m, n, k, HALF, config, **form, marks=True)
    assert written_tensors(marking) == written_tensors(recorded(m, n, k, HALF, config, **form)) | {
        "marks"
    }


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


def test_exact_fp32_is_three_products_of_tf32():
    config = TEMPLATE.first(sized(128, 768, 768, SINGLE), HOPPER)
    assert recorded(128, 768, 768, SINGLE, config).arguments["PRECISION"] == "tf32x3"


@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("copied", [0, 1])
def test_a_weight_by_columns_is_read_by_depth_behind_a_copy(copied, kn, monkeypatch):
    # without CUDA a stand-in of a GPU's tensor has no operator that copies it
    like = {"dtype": SINGLE, "device": "cuda"}
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: torch.empty(t.shape, **like))
    config = TEMPLATE.first(sized(4096, 768, 1536, SINGLE), HOPPER) | {"depth_first": copied}
    found = recorded(4096, 768, 1536, SINGLE, config, kn=kn).arguments
    by_columns = kn and not copied
    assert (found["WEIGHT_KN"], found["stride_w"]) == (by_columns, 768 if by_columns else 1536)


def test_loads_and_products_of_hopper_overlap():
    config = TEMPLATE.first(sized(32768, 3072, 768), HOPPER)
    text = compile_launch(recorded(32768, 3072, 768, HALF, config), 90).asm["ttgir"]
    assert "async_tma_copy_global_to_local" in text
    assert "warp_group_dot_wait" in text and "pendings = 1" in text
    assert text.count("scf.for") == 1, "tiles and steps are not one loop"


@pytest.mark.parametrize("change", [{}, {"split_k": 4}, {"persistent": 1}, {"tma": 1}], ids=str)
def test_torch_sees_that_only_the_results_are_written(change):
    """A tensor taken for written would be cloned at every call of a compiled graph."""
    config = SMALL | {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4} | change
    launch = recorded(100, 768, 768, HALF, config, residual=True, factor=True)
    extra = {"parts", "flags"} if "split_k" in change else set()
    assert written_tensors(launch) == {"out"} | extra
