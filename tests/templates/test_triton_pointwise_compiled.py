"""The pointwise template: what its generated kernels compile to for GPUs that are not here."""

import pytest

pytest.importorskip("triton")

from norm_compiling import assert_fits, needed_by, written_by
from norm_recipes import HALF, MACHINES, NAMES, SINGLE, machine
from pointwise_recipes import TEMPLATE, gelu_residual
from stof_compile.kernels import pointwise as made
from stof_compile.templates.triton_pointwise import program_of

pytestmark = pytest.mark.compile_only


def generated(recipe, even=True, wide=False):
    shape = recipe.result.shape
    accesses = [made.access_of(operand.shape, shape) for operand in recipe.operands]
    program = made.read_program(program_of(recipe), len(recipe.operands))
    kernel = made.kernel_of(made.source_of(program, accesses, even, wide))
    types = {f"x{i}": f"*{NAMES[o.dtype]}" for i, o in enumerate(recipe.operands)}
    sizes = {f"COUNT{i}": a.size for i, a in enumerate(accesses) if a.kind in ("tail", "middle")}
    sizes |= {f"INNER{i}": a.inner for i, a in enumerate(accesses) if a.kind in ("head", "middle")}
    return kernel, types | {"out": f"*{NAMES[recipe.result.dtype]}"}, sizes


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
def test_offered_configs_stay_in_registers(target, dtype):
    recipe = gelu_residual((4096,), 3072, dtype, device="meta").recipe()
    kernel, types, sizes = generated(recipe)
    configs = TEMPLATE.space(recipe, machine(target)).configs()
    for config in configs[-3:] if target == 90 else configs[-1:]:
        constants = sizes | {"BLOCK": config["block"]}
        compiled, found = needed_by(kernel, target, types, constants, config["num_warps"])
        assert_fits(found, target)
        if config["block"] >= 256 * config["num_warps"] or dtype == SINGLE:
            assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("target", [80, 90])
def test_every_step_compiles(target):
    types = dict.fromkeys(("x0", "x1", "x2", "x3", "x4", "out"), "*fp16")
    sizes = {"COUNT1": 768, "INNER2": 768, "COUNT3": 12, "INNER3": 64, "BLOCK": 1024}
    sizes["PDL"] = target >= 90  # waits for the kernel before
    for kernel in made.KERNELS:
        compiled, found = needed_by(kernel, target, types, sizes, 4)
        assert_fits(found, target)
        text = compiled.asm["ptx"]
        assert text.count("griddepcontrol.wait") == (target >= 90)
        assert "ld.global" not in text[: text.find("griddepcontrol.wait")] or target < 90


def test_only_the_result_is_written():
    recipe = gelu_residual(device="meta").recipe()
    for even, wide in ((True, False), (False, True)):
        kernel, types, sizes = generated(recipe, even, wide)
        assert written_by(kernel, types, sizes | {"BLOCK": 256}) == {"out"}
