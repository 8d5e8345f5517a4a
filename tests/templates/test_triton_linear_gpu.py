"""The linear template on a GPU: its results, that they repeat, and its use in compiled code."""

import pytest
import torch
from linear_recipes import SMALL, linear_recipe
from norm_recipes import BRAIN, HALF, SINGLE
from stof_compile.templates.triton_linear import TritonLinear
from template_checks import check_compiled, check_template

import stof_compile.ops_linear  # noqa: F401
from stof_compile.device import device_facts

pytestmark = pytest.mark.gpu

TEMPLATE = TritonLinear()

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
    return device_facts("cuda")


@pytest.mark.parametrize("case", REAL)
def test_gpu_first_config(case):
    rows, n, k, dtype, form = REAL[case]
    recipe, operands = linear_recipe(rows, n, k, dtype, **FORMS[form])
    assert TEMPLATE.refusal(recipe, device()) is None
    check_template(TEMPLATE, recipe, operands, TEMPLATE.first(recipe, device()))


@pytest.mark.parametrize("shape", [(128, 768, 3072), (1000, 768, 768), (4096, 3072, 768)], ids=str)
def test_gpu_other_configs(shape):
    """Every twelfth config of the space: split, persistent and described ones are among them."""
    recipe, operands = linear_recipe(shape[:1], *shape[1:], HALF, residual=True)
    for config in TEMPLATE.space(recipe, device()).configs()[::12]:
        check_template(TEMPLATE, recipe, operands, config)


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


def test_gpu_parts_are_added_in_one_order_whatever_the_memory_held():
    recipe, operands = linear_recipe((128,), 768, 3072, HALF, residual=True)
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 4}
    call = TEMPLATE.build(recipe, SMALL | base | {"split_k": 8})
    first = call.run(operands)
    for seed in range(200):
        noise = torch.randint(-(2**62), 2**62, (1 << 17,), device="cuda")  # recycled as flags
        del noise
        assert torch.equal(call.run(operands), first), f"run {seed} differs"


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


@pytest.mark.parametrize(
    "change", [{}, {"split_k": 4}, {"persistent": 1, "tma": 1}], ids=["plain", "split", "tma"]
)
def test_gpu_under_inductor_and_in_a_cuda_graph(change, fresh_dynamo):
    recipe, operands = linear_recipe((4, 128), 768, 768, HALF, residual=True)
    base = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    check_compiled(TEMPLATE, recipe, operands, SMALL | base | change)
