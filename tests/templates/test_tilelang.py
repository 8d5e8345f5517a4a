"""TileLang templates without a GPU: what they take, their spaces, operators, activations."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from linear_recipes import Writer
from norm_recipes import BRAIN, HALF, machine
from stof_compile.templates import (
    tilelang_chain,
    tilelang_linear,
    tilelang_linear_norm,
    tilelang_rules,
)
from tile_recipes import chain, linear, linear_norm
from torch._inductor.utils import run_and_get_code

from stof_compile import ops_tilelang
from stof_compile.fusion.recipe import ACTIVATIONS

LINEAR = tilelang_linear.TileLangLinear()
NORM = tilelang_linear_norm.TileLangLinearNorm()
CHAIN = tilelang_chain.TileLangChain()
DIMS = {LINEAR: tilelang_linear.DIMS, NORM: tilelang_linear_norm.DIMS, CHAIN: tilelang_chain.DIMS}
HOPPER, AMPERE, SMALL, ADA, BLACKWELL = map(machine, (90, 80, 86, 89, 100))


# -- what is taken --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _with_nvcc(request, monkeypatch):
    if "nvcc" not in request.node.name:
        monkeypatch.setattr(tilelang_rules, "_has_nvcc", lambda: True)
        monkeypatch.setattr(tilelang_rules, "find_spec", lambda name: object())


TAKEN = {
    "linear": (LINEAR, linear()),
    "linear bias": (LINEAR, linear(bias="input")),
    "linear add gelu": (LINEAR, linear(bias="step", activation="gelu")),
    "all, 3-D": (LINEAR, linear((2, 5), 72, 40, "input", "silu", True)),
    "weight [K, N]": (LINEAR, linear(kn=True, activation="gelu_tanh")),
    "a row": (LINEAR, linear((), bias="step", activation="relu", residual=True)),
    "layer norm": (NORM, linear_norm()),
    "rms norm": (NORM, linear_norm(norm="rms_norm", bias=False)),
    "wide norm": (NORM, linear_norm(n=1024)),
    "chain": (CHAIN, chain()),
    "plain chain": (CHAIN, chain(bias=False, activation="", residual=False, kn=True)),
}


@pytest.mark.parametrize("device", [HOPPER, AMPERE, SMALL, ADA, BLACKWELL], ids=lambda d: d.arch)
@pytest.mark.parametrize(("template", "made"), TAKEN.values(), ids=TAKEN)
def test_taken(template, made, device):
    recipe, operands = made
    assert template.refusal(recipe, device) is None
    space, first = template.space(recipe, device), template.first(recipe, device)
    assert 1 <= len(space) <= 30
    assert first in space.configs()
    call = template.build(recipe, first)
    assert call.shape == recipe.result.shape
    meta = [operand.to("meta") for operand in operands]
    out = call.run(meta)
    assert out.shape == recipe.result.shape and out.dtype == recipe.result.dtype
    assert out.is_contiguous()


@pytest.mark.parametrize("rows", [1, 33, 128, 1000, 4096, 32768])
@pytest.mark.parametrize(("n", "k"), [(768, 768), (3072, 768), (768, 3072), (8192, 2048)])
def test_spaces_are_small_and_not_empty(rows, n, k):
    recipe, _ = linear((8,), n, k, "input", "gelu", True)
    recipe = with_rows(recipe, rows)
    for device in (HOPPER, AMPERE, SMALL):
        assert 5 <= len(LINEAR.space(recipe, device)) <= 30


def with_rows(recipe, rows):
    """The recipe with another number of rows in place of 8; operands need not be made."""

    def more(shape):
        return (rows, *shape[1:]) if shape[:1] == (8,) and len(shape) > 1 else shape

    operands = tuple(
        replace(o, shape=more(o.shape), stride=torch.empty(more(o.shape), device="meta").stride())
        for o in recipe.operands
    )
    steps = tuple(replace(step, shape=more(step.shape)) for step in recipe.steps)
    return replace(recipe, operands=operands, steps=steps)


def test_large_tiles_come_first_for_many_rows_and_small_ones_for_few():
    recipe, _ = linear((8,), 768, 768)
    many, few = (LINEAR.first(with_rows(recipe, rows), HOPPER) for rows in (32768, 128))
    assert many["block_m"] * many["block_n"] >= 128 * 128 > 16 * few["block_m"]


def in_operand(recipe, number, **changes):
    operands = list(recipe.operands)
    operands[number] = replace(operands[number], **changes)
    return replace(recipe, operands=tuple(operands))


def two_activations():
    w = Writer(HALF, "cpu")
    value = w.linear(w.operand(8, 64), 64, 64)
    w.step("activation", w.step("activation", value, name="relu"), name="gelu")
    return w.done()[0]


def activation_behind_residual():
    w = Writer(HALF, "cpu")
    value = w.step("add", w.linear(w.operand(8, 64), 64, 64), w.operand(8, 64))
    w.step("activation", value, name="relu")
    return w.done()[0]


def with_number():
    w = Writer(HALF, "cpu")
    w.step("add", w.linear(w.operand(8, 64), 64, 64), number=1.0)
    return w.done()[0]


def cast_first():
    w = Writer(HALF, "cpu")
    w.linear(w.step("cast", w.operand(8, 64), to=HALF), 64, 64)
    return w.done()[0]


REFUSED = {
    "a cast first": (LINEAR, cast_first(), "starts with 'cast'"),
    "fp32": (LINEAR, linear(dtype=torch.float32)[0], "float32"),
    "tanh": (LINEAR, linear(activation="tanh")[0], "tanh"),
    "odd width": (LINEAR, linear(n=60)[0], "16 bytes"),
    "odd depth": (LINEAR, linear(k=60)[0], "16 bytes"),
    "no rows": (LINEAR, linear((0,))[0], "no rows"),
    "rows apart": (LINEAR, in_operand(linear()[0], 0, stride=(128, 1)), "contiguous"),
    "strided weight": (LINEAR, in_operand(linear()[0], 1, stride=(128, 1)), "contiguous"),
    "mixed dtypes": (LINEAR, in_operand(linear(bias="input")[0], 2, dtype=BRAIN), "bfloat16"),
    "on the CPU": (LINEAR, in_operand(linear()[0], 0, device="cpu"), "on cpu"),
    "two activations": (LINEAR, two_activations(), "activation"),
    "activation last": (LINEAR, activation_behind_residual(), "activation"),
    "a number": (LINEAR, with_number(), "add"),
    "a norm": (LINEAR, linear_norm()[0], "layer_norm"),
    "no norm": (NORM, linear()[0], "layer_norm"),
    "too wide": (NORM, linear_norm(n=1088)[0], "1024"),
    "width 72": (NORM, linear_norm(n=72)[0], "64"),
    "one layer": (CHAIN, linear()[0], "linear"),
    "two layers": (LINEAR, chain()[0], "linear"),
    "large weights": (CHAIN, chain(k=768, hidden=3072, n=768)[0], "bytes"),
    "wide hidden": (CHAIN, chain(hidden=8192)[0], "hidden"),
}


@pytest.mark.parametrize(("template", "recipe", "word"), REFUSED.values(), ids=REFUSED)
def test_refused_with_a_reason(template, recipe, word):
    reason = template.refusal(recipe, HOPPER)
    assert reason is not None and word in reason, reason


def test_a_transposed_weight_is_taken():
    recipe = in_operand(linear(n=64, k=128)[0], 1, stride=(1, 64))
    assert LINEAR.refusal(recipe, HOPPER) is None


@pytest.mark.parametrize("template", [LINEAR, NORM, CHAIN], ids=lambda t: t.name)
def test_devices(template, monkeypatch):
    recipe = {LINEAR: linear, NORM: linear_norm, CHAIN: chain}[template]()[0]
    old = replace(AMPERE, capability=(7, 5))
    assert "8.0" in template.refusal(recipe, old)
    assert "rocm" in template.refusal(recipe, replace(AMPERE, runtime="rocm 7.0"))
    assert "cpu" in template.refusal(recipe, replace(AMPERE, kind="cpu", runtime="cpu"))
    monkeypatch.setattr(tilelang_rules, "_has_nvcc", lambda: False)
    assert "nvcc" in template.refusal(recipe, HOPPER)
    monkeypatch.setattr(tilelang_rules, "find_spec", lambda name: None)
    assert "not installed" in template.refusal(recipe, HOPPER)


def test_nvcc_is_looked_for_where_tilelang_looks(monkeypatch, tmp_path):
    monkeypatch.setattr(tilelang_rules.shutil, "which", lambda name: None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    tilelang_rules._has_nvcc.cache_clear()
    assert tilelang_rules._has_nvcc()
    tilelang_rules._has_nvcc.cache_clear()  # the next test looks anew


def test_the_same_facts_on_both_sides():
    """Templates may not import kernels; what both state has to agree."""
    pytest.importorskip("tilelang")
    from stof_compile.kernels import tilelang_activation as activation
    from stof_compile.kernels.tilelang_chain import ChainConfig
    from stof_compile.kernels.tilelang_linear import LinearConfig
    from stof_compile.kernels.tilelang_linear_norm import MAX_WIDTH, WIDTH_STEP, NormConfig

    from stof_compile import short_gelu

    assert tuple(DIMS[LINEAR]) == LinearConfig._fields
    assert tuple(DIMS[NORM]) == NormConfig._fields
    assert tuple(DIMS[CHAIN]) == ChainConfig._fields
    assert tilelang_linear_norm.MAX_WIDTH == MAX_WIDTH
    assert tilelang_linear_norm._WIDTH_STEP == WIDTH_STEP
    assert ("", *tilelang_rules.ACTIVATIONS) == activation.ACTIVATIONS
    tails = {str(t).removeprefix("torch."): tail for t, tail in short_gelu.GELU_TAIL.items()}
    assert tails == activation._TAIL


# -- the operators --------------------------------------------------------------------------------


@pytest.fixture
def on_cpu():
    """CPU implementations of the operators, for as long as a test runs."""
    names = {"": lambda v: v, "gelu": F.gelu, "relu": F.relu}

    def linear_out(x, weight, bias, residual, activation, kn, config, out):
        value = names[activation](F.linear(x, weight.t() if kn else weight, bias))
        out.copy_(value if residual is None else value + residual)

    def norm_out(x, weight, bias, residual, norm, scale, shift, eps, kn, config, out):
        value = F.linear(x, weight.t() if kn else weight, bias)
        value = value if residual is None else value + residual
        out.copy_(F.layer_norm(value, value.shape[-1:], scale, shift, eps))

    library = torch.library.Library("stof", "FRAGMENT")
    library.impl("tile_linear_out", linear_out, "CPU")
    library.impl("tile_linear_norm_out", norm_out, "CPU")
    yield
    library._destroy()


def test_inductor_plans_the_results_without_copies(on_cpu, fresh_dynamo):
    """A layer as it is rewritten: hidden rows go from kernel to kernel, nothing is cloned."""
    weight, down = torch.randn(128, 64) / 8, torch.randn(64, 128) / 11
    bias, scale = torch.randn(128), torch.randn(64)

    def layer(x, residual):
        hidden = ops_tilelang.tile_linear(
            x, weight, bias, None, "gelu", False, [64, 64, 64, 128, 3], (2, 5, 128)
        )
        out = ops_tilelang.tile_linear_norm(
            hidden, down, None, residual, "layer_norm", scale, None, 1e-5, False,
            [64, 64, 128, 2], (2, 5, 64),
        )  # fmt: skip
        return out.reshape(10, 64) * 2

    x, residual = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    with torch.no_grad():
        out, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), x, residual)
    hidden = F.gelu(F.linear(x, weight, bias))
    expected = F.layer_norm(F.linear(hidden, down) + residual, (64,), scale, None, 1e-5)
    torch.testing.assert_close(out, expected.reshape(10, 64) * 2)
    body = code[code.index("def call") : code.index("return (buf")]
    assert "clone" not in body and "copy_" not in body and "auto_functionalized" not in body
    calls = [line for line in body.splitlines() if "tile_linear" in line and "ops.stof" in line]
    assert len(calls) == 2
    # two results of the operators and the product by two, which may reuse one of them
    assert body.count("empty_strided_cpu(") <= 3
    assert body.count("cpp_fused") == 1


def test_a_call_writes_two_nodes_into_a_graph():
    recipe, operands = linear((2, 5), 72, 40, "input", "gelu", True)
    call = LINEAR.build(recipe, {"block_m": 64, "block_n": 64, "block_k": 64, "threads": 128,
                                 "stages": 3})  # fmt: skip
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = [torch.fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(operands))]
    graph.output(call.run(proxies).node)
    targets = [node.target for node in graph.nodes if node.op.startswith("call")]
    assert targets == ["new_empty", torch.ops.stof.tile_linear_out.default, "reshape"]
    assert not graph.eliminate_dead_code()
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert module(*(o.to("meta") for o in operands)).shape == (2, 5, 72)


def test_wrong_arguments_are_named():
    pytest.importorskip("tilelang")
    from stof_compile.kernels.tilelang_linear import linear_forward
    from stof_compile.kernels.tilelang_operands import as_rows, as_weight, check_config

    x = torch.zeros(4, 64, dtype=HALF)
    with pytest.raises(ValueError, match="CUDA"):
        linear_forward(x, x, None, None, "", False, [64, 64, 64, 128, 3], x)
    with pytest.raises(ValueError, match="fp16 or bf16"):
        linear_forward(x.float(), x, None, None, "", False, [1], x)
    with pytest.raises(ValueError, match="block_m, block_n"):
        check_config([64, 64], ("block_m", "block_n", "threads"))
    with pytest.raises(ValueError, match="multiple of 8"):
        as_rows("x", torch.zeros(4, 60), 60)
    with pytest.raises(ValueError, match="must have 3 rows"):
        as_rows("residual", torch.zeros(4, 64), 64, 3)
    with pytest.raises(ValueError, match="matrix"):
        as_weight("weight", torch.zeros(64), False)


def test_operands_are_copied_only_when_they_must_be():
    pytest.importorskip("tilelang")
    from stof_compile.kernels.tilelang_operands import as_rows, as_weight

    x = torch.nn.Parameter(torch.randn(2, 5, 64))
    rows = as_rows("x", x, 64)
    assert rows.data_ptr() == x.data_ptr() and rows.shape == (10, 64) and not rows.requires_grad
    torch.testing.assert_close(
        as_rows("x", x.transpose(0, 1), 64).view(5, 2, 64), x.transpose(0, 1)
    )
    shifted = torch.randn(129)[1:].view(2, 64)  # rows that do not start on 16 bytes
    assert as_rows("x", shifted, 64).data_ptr() % 16 == 0
    weight = torch.randn(64, 128)
    turned, kn = as_weight("weight", weight.t(), False)
    assert kn and turned.data_ptr() == weight.data_ptr()
    turned, kn = as_weight("weight", weight.t(), True)
    assert not kn and turned.data_ptr() == weight.data_ptr()


# -- activations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 5e-5), ("bfloat16", 1.3e-4)])
def test_activations_are_torchs(dtype, rtol, tmp_path, monkeypatch):
    """Their formulas, compiled for the CPU, at ordinary and extreme arguments.

    rtol: far below half a unit in the last place of the dtype, which they are rounded to.
    """
    tilelang = pytest.importorskip("tilelang")
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    from stof_compile.kernels import tilelang_activation as activation
    from tile_programs import activation_program

    # the C back-end of TileLang knows no fabs
    T = activation.T
    monkeypatch.setattr(T, "abs", lambda x: T.Select(x < 0.0, -x, x))
    inf, nan = float("inf"), float("nan")
    extremes = [0.0, -0.0, inf, -inf, nan, 1e30, -1e30, 6e4, -6e4, 88.0, -88.0, -104.0]
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor(extremes)])
    out = torch.full((len(activation.ACTIVATIONS), len(x)), nan)
    tilelang.compile(activation_program(len(x), dtype), target="c")(x, out)
    for name, found in zip(activation.ACTIVATIONS, out.double(), strict=True):
        expected = ACTIVATIONS.get(name, lambda v: v)(x.double())
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6, equal_nan=True)
