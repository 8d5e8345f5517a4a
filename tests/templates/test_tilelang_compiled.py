"""The TileLang templates: what their configs are lowered to for GPUs that are not here."""

from dataclasses import replace

import pytest

pytest.importorskip("tilelang")

from compile_targets import CUDA, on_each_gpu
from norm_recipes import BRAIN, machine
from stof_compile.kernels.tilelang_compile import lower_program, shared_bytes
from stof_compile.templates.tilelang_chain import TileLangChain
from stof_compile.templates.tilelang_linear import TileLangLinear
from stof_compile.templates.tilelang_linear_norm import TileLangLinearNorm
from tile_programs import program_of
from tile_recipes import chain, linear, linear_norm

pytestmark = pytest.mark.compile_only

LINEAR, NORM, CHAIN = TileLangLinear(), TileLangLinearNorm(), TileLangChain()
CASES = {
    "many rows": (LINEAR, linear((1000,), 776, 136, "input", "gelu", True)),
    "few rows": (LINEAR, linear((33,), 72, 72, "step", "silu", True, kn=True, dtype=BRAIN)),
    "one step": (LINEAR, linear((33,), 72, 40)),
    "layer norm": (NORM, linear_norm((1000,), 512, 136)),
    "rms norm": (NORM, linear_norm((33,), 320, 72, norm="rms_norm", dtype=BRAIN)),
    "chain": (CHAIN, chain((33,), 72, 72, 136, activation="relu")),
}
WIDE = {  # as large as the rules take, so that shared memory decides
    "many rows": CASES["many rows"],
    "layer norm": (NORM, linear_norm((1000,), 1024, 768)),
    "chain": (CHAIN, chain((1000,), 256, 2048, 256)),
}
# Of the architectures 8 TileLang 0.1 makes one and the same text, see below: of sm_86 and sm_89
# only the shared memory is their own. From 9.0 on it copies with TMA; the matrix instructions of
# 9.0 are not those of 10.0, where it multiplies by warps.
LOWERED = [
    (target, name)
    for template, fullest in ((LINEAR, "few rows"), (NORM, "layer norm"), (CHAIN, "chain"))
    for target, name in on_each_gpu([n for n in CASES if CASES[n][0] is template], fullest)
]


def lowered(template, recipe, config, target):
    """The program of a config, lowered to CUDA source: that needs no nvcc."""
    capability = machine(target).capability
    program, portable = program_of(template, recipe, config, capability)
    return lower_program(program, capability, portable=portable)


def kernel_text(artifact):
    return artifact.kernel_source.split("__global__")[-1]


def estimated_bytes(template, recipe, device, config):
    """What the rules take for the shared memory of a config; they say it where there is none."""
    space = template.space(recipe, replace(device, shared_memory_bytes=0))
    number, unit = space.refusal(config).split(maxsplit=1)
    assert unit == "bytes of shared memory, the device has 0"
    return int(number)


def largest(template, recipe, device):
    """The config with the most shared memory among those a device is offered."""
    configs = template.space(recipe, device).configs()
    return max(configs, key=lambda config: estimated_bytes(template, recipe, device, config))


@pytest.mark.parametrize(("target", "name"), LOWERED)
def test_lowers(target, name):
    """With the instructions meant, in no more shared memory than the rules allow for."""
    (template, (recipe, _)), device = CASES[name], machine(target)
    if target in (80, 90):
        config = template.first(recipe, device)
    else:  # one case stands for the template: as close to the device's limit as it gets
        config = largest(template, recipe, device)
    artifact = lowered(template, recipe, config, target)
    estimated = estimated_bytes(template, recipe, device, config)
    assert 0 < shared_bytes(artifact) <= estimated <= device.shared_memory_bytes
    one_step = config["block_k"] >= recipe.operands[0].shape[-1]
    specialised = target >= 90 and template is not CHAIN and not one_step
    kernel = kernel_text(artifact)
    assert ("mbarrier" in kernel) == specialised
    assert ("tma_load" in kernel) == specialised
    assert ("wgmma" in kernel) == (specialised and target == 90 and config["block_m"] >= 64)


def test_the_architectures_8_have_one_text():
    template, (recipe, _) = CASES["one step"]
    config = template.first(recipe, machine(80))
    texts = {kernel_text(lowered(template, recipe, config, t)) for t in CUDA if t < 90}
    assert len(texts) == 1


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("name", WIDE)
def test_pruned_by_the_shared_memory_of_the_device(target, name):
    (template, (recipe, _)), device = WIDE[name], machine(target)
    config = largest(template, recipe, device)
    needed = estimated_bytes(template, recipe, device, config)
    assert needed <= device.shared_memory_bytes
    exactly, less = (replace(device, shared_memory_bytes=needed - n) for n in (0, 1))
    assert config in template.space(recipe, exactly)
    assert config not in template.space(recipe, less)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("target", [86, 89])
def test_what_fits_164_kb_is_refused_by_100(target, name):
    template, (recipe, _) = WIDE[name]
    config = largest(template, recipe, machine(80))
    refusal = template.space(recipe, machine(target)).refusal(config)
    assert refusal is not None
    assert refusal.endswith("bytes of shared memory, the device has 101376")
