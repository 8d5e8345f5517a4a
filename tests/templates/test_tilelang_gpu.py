"""TileLang templates on a GPU: every form of their kernels against the recipe in fp64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from linear_recipes import check_template
from norm_recipes import BRAIN, HALF
from stof_compile.templates.tilelang_chain import TileLangChain
from stof_compile.templates.tilelang_linear import TileLangLinear
from stof_compile.templates.tilelang_linear_norm import TileLangLinearNorm
from tile_recipes import chain, linear, linear_norm

from stof_compile.device import device_facts
from stof_compile.ops_tilelang import tile_linear, tile_linear_norm

pytestmark = pytest.mark.gpu
pytest.importorskip("tilelang")

LINEAR, NORM, CHAIN = TileLangLinear(), TileLangLinearNorm(), TileLangChain()

# template, how its recipe is made, arguments, config (None: the first of the rules). Between them
# all kinds of tiles: products of warps and of one or two warp groups, ragged in every dimension.
CASES = {
    "bert up, few rows": (LINEAR, linear, ((128,), 3072, 768, "input", "gelu"), BRAIN, None),
    "bert out, few rows": (LINEAR, linear, ((128,), 768, 768, "input", "", True), HALF, None),
    "bert up": (LINEAR, linear, ((4096,), 3072, 768, "input", "gelu"), HALF,
                (128, 256, 64, 256, 3)),
    "bert down": (LINEAR, linear, ((4096,), 768, 3072, "step", "", True), BRAIN, None),
    "ragged": (LINEAR, linear, ((1000,), 776, 776, "input", "gelu", True), HALF,
               (128, 128, 64, 256, 4)),
    "wide tile": (LINEAR, linear, ((2, 500), 776, 264, "input", "silu", True), BRAIN,
                  (64, 256, 64, 256, 3)),
    "tall tile": (LINEAR, linear, ((1000,), 136, 264, "", "gelu_tanh", True, True), HALF,
                  (128, 64, 64, 256, 3)),
    "one warp group": (LINEAR, linear, ((1000,), 136, 264, "input", "relu"), BRAIN,
                       (128, 64, 64, 128, 3)),
    "one warp group, long steps": (LINEAR, linear, ((257,), 200, 1032, "step", "", True), HALF,
                                   (64, 64, 128, 128, 3)),
    "warps, long steps": (LINEAR, linear, ((257,), 264, 1032, "input", "gelu"), BRAIN,
                          (32, 128, 128, 128, 2)),
    "warps": (LINEAR, linear, ((33,), 72, 72, "step", "silu", True, True), BRAIN,
              (16, 64, 64, 128, 3)),
    "one step": (LINEAR, linear, ((33,), 72, 40, "input", "gelu", True), HALF,
                 (64, 64, 64, 128, 3)),
    "a row": (LINEAR, linear, ((), 768, 768, "input", "", True), HALF, None),
    "norm, two warp groups": (NORM, linear_norm, ((4096,), 768, 768), HALF, (64, 64, 256, 2)),
    "norm, few rows": (NORM, linear_norm, ((128,), 768, 3072), BRAIN, None),
    "norm, warps": (NORM, linear_norm, ((1000,), 768, 768), HALF, (16, 64, 256, 2)),
    "norm, widest": (NORM, linear_norm, ((257,), 1024, 264, False), BRAIN, (32, 32, 256, 3)),
    "norm, one warp group": (NORM, linear_norm, ((1000,), 128, 72, True, False), HALF,
                             (64, 64, 128, 2)),
    "rms norm": (NORM, linear_norm, ((3, 11), 320, 136, False, True, "rms_norm", True), BRAIN,
                 (32, 64, 128, 3)),
    "rms norm, warp groups": (NORM, linear_norm, ((1000,), 512, 776, True, False, "rms_norm"),
                              HALF, (64, 64, 256, 2)),
    "chain": (CHAIN, chain, ((1000,), 264, 200, 136), HALF, None),
    "adapter": (CHAIN, chain, ((4096,), 768, 64, 768), BRAIN, None),
    "chain [K, N]": (CHAIN, chain, ((33,), 72, 72, 72, False, "relu", False, True), BRAIN, None),
    "chain, wide hidden": (CHAIN, chain, ((257,), 256, 1024, 256), HALF,
                           (16, 128, 128, 64, 128, 3)),
}  # fmt: skip


def made(name):
    template, make, arguments, dtype, values = CASES[name]
    recipe, operands = make(*arguments, dtype=dtype, device="cuda")
    device = device_facts("cuda")
    assert template.refusal(recipe, device) is None
    first = template.first(recipe, device)
    config = first if values is None else dict(zip(first, values, strict=True))
    return template, recipe, operands, config


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: TileLang keeps what it compiled for the operators to find."""
    from stof_compile.kernels.tilelang_compile import compile_program
    from tile_programs import program_of

    capability = torch.cuda.get_device_capability()
    programs = []
    for name in CASES:
        template, recipe, _, config = made(name)
        programs.append(program_of(template, recipe, config, capability))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: compile_program(p[0], capability, portable=p[1]), programs))


@pytest.mark.parametrize("name", CASES)
def test_against_the_recipe(name):
    template, recipe, operands, config = made(name)
    scale = 2.0 if template is CHAIN else 1.0
    check_template(template, recipe, operands, config, scale)


@pytest.mark.parametrize("name", ["ragged", "warps", "norm, warps"])
def test_programs_for_ampere_run_here(name):
    """Their code runs on any newer GPU too; there are no other tests of it."""
    from stof_compile.kernels.tilelang_compile import compile_program
    from tile_programs import program_of

    template, recipe, operands, config = made(name)
    program, _ = program_of(template, recipe, config, (8, 0))
    kernel = compile_program(program, torch.cuda.get_device_capability(), portable=True)
    out = torch.full(recipe.result.shape, float("nan"), dtype=recipe.result.dtype, device="cuda")
    if template is LINEAR:
        x, weight, bias, residual = operands
        kernel(x, weight, bias, residual, out)
    else:
        x, weight, bias, residual, scale, shift = operands
        kernel(x, weight, bias, scale, shift, residual, out)
    assert_close(out, template.reference(recipe, operands, torch.float64))


@pytest.mark.parametrize("name", ["one warp group", "warps", "chain [K, N]"])
def test_nan_and_inf_come_out_where_they_should(name):
    template, recipe, operands, config = made(name)
    operands[0][3, 5] = float("nan")
    operands[0][7, 1] = float("inf")
    out = check_template(template, recipe, operands, config, 2.0)
    assert out[3].isnan().all() and not out[4].isnan().any()


@pytest.mark.parametrize("kind", ["strided", "transposed", "offset"])
def test_any_strides(kind):
    _, recipe, operands, config = made("ragged")
    x, weight, bias, residual = operands
    if kind == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    elif kind == "transposed":
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    else:
        x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    assert kind == "offset" or not x.is_contiguous()
    out = LINEAR.build(recipe, config).run([x, weight, bias, residual])
    assert_close(out, LINEAR.reference(recipe, operands, torch.float64))


def test_no_rows():
    _, _, operands, config = made("ragged")
    values = list(config.values())
    x = operands[0][:0]
    out = tile_linear(x, operands[1], operands[2], None, "", False, values, (0, 776))
    assert out.shape == (0, 776) and out.dtype == HALF


def two_layers():
    """A BERT output: linear and gelu, then linear, residual and norm, at sizes among the cases."""
    _, up, (x, w1, b1), config1 = made("bert up, few rows")
    _, _, (_, w2, b2, residual, scale, shift), config2 = made("norm, few rows")

    def layers(x, residual):
        hidden = tile_linear(
            x, w1, b1, None, "gelu", False, list(config1.values()), up.result.shape
        )
        return tile_linear_norm(
            hidden, w2, b2, residual, "layer_norm", scale, shift, 1e-5, False,
            list(config2.values()), (128, 768),
        )  # fmt: skip

    def reference(x, residual):
        wide = [t.double() for t in (x, w1, b1, w2, b2, residual, scale, shift)]
        x, up, up_bias, down, down_bias, residual, gain, offset = wide
        hidden = F.gelu(F.linear(x, up, up_bias))
        return F.layer_norm(
            F.linear(hidden, down, down_bias) + residual, (768,), gain, offset, 1e-5
        )

    return layers, reference, x, residual


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_under_torch_compile(mode, fresh_dynamo):
    layers, reference, x, residual = two_layers()
    compiled = torch.compile(lambda x, r: layers(x * 2, r) + 1, fullgraph=True, mode=mode)
    with torch.no_grad():
        for step in range(4):
            out = compiled(x + step, residual).clone()
    assert_close(out, reference((x + 3) * 2, residual) + 1, scale=2)


def test_in_a_cuda_graph_and_on_another_stream():
    layers, reference, x, residual = two_layers()
    layers(x, residual)
    given, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(given, residual)
    given.copy_(x * 2)
    graph.replay()
    assert_close(captured, reference(x * 2, residual), scale=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = layers(x.mul(4), residual)
    stream.synchronize()
    assert_close(out, reference(x * 4, residual), scale=2)


def test_the_operators_want_the_gpu_and_its_dtypes():
    x = torch.zeros(8, 64, dtype=HALF, device="cuda")
    config = [16, 64, 64, 128, 3]
    with pytest.raises(ValueError, match="bias must be"):
        tile_linear(x, x, x[0].float(), None, "", False, config, (8, 8))
    with pytest.raises(ValueError, match="residual must have 8 rows"):
        tile_linear(x, x, None, x[:4, :8].contiguous(), "", False, config, (8, 8))
    with pytest.raises(ValueError, match="config must be 5"):
        tile_linear(x, x, None, None, "", False, [16], (8, 8))
