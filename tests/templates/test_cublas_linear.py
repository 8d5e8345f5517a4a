"""The linear template of cuBLAS's epilogues: what it takes, and its results on CPU and GPU."""

import pytest
import torch
from close import assert_close
from recipes import A100, H200, linear_recipe, random_operands
from stof_compile.templates.cublas_linear import CublasLinear

from stof_compile.fusion.recipe import run_recipe
from stof_compile.search.nan_check import keeps_nan

TEMPLATE = CublasLinear()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "no activation ''"),
        ({"activation": "gelu"}, "no activation 'gelu'"),
        ({"activation": "relu", "residual": True}, "behind the activation"),
        ({"activation": "relu", "dtype": torch.float32}, "fp16"),
        ({"activation": "relu", "m": 1}, "a single row or column"),
        ({"activation": "relu", "n": 1}, "a single row or column"),
    ],
)
def test_what_it_refuses(changes, words):
    assert words in TEMPLATE.refusal(linear_recipe(**changes), H200)


@pytest.mark.parametrize("device", [A100, H200])
def test_what_it_takes(device):
    recipe = linear_recipe(activation="relu")
    assert TEMPLATE.refusal(recipe, device) is None
    assert TEMPLATE.space(recipe, device).configs() == [TEMPLATE.first(recipe, device)]


def test_an_unknown_activation_is_an_error():
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="activation 'silu'"):
        torch.ops.stof.cublas_linear(x, torch.zeros(3, 4), None, "silu")


@pytest.mark.parametrize(("k", "bias"), [(4, torch.full((1,), 2.0)), (0, None)])
def test_one_bias_for_all_and_no_columns(k, bias):
    x, weight = torch.randn(2, 3, k), torch.randn(5, k)
    found = torch.ops.stof.cublas_linear(x, weight, bias, "relu")
    wanted = x @ weight.T + (0.0 if bias is None else bias)
    torch.testing.assert_close(found, wanted.relu())


CASES = {
    "gelu": {"activation": "gelu_tanh"},
    "relu": {"activation": "relu"},
    "no bias": {"activation": "relu", "bias": False},
    "[K, N]": {"activation": "gelu_tanh", "kn": True},
    "ragged": {"m": 77, "n": 36, "k": 100, "activation": "gelu_tanh", "bias": False},
    "two rows": {"m": 2, "n": 136, "k": 72, "activation": "relu"},
}


@pytest.mark.parametrize("case", CASES)
def test_results_on_a_cpu(case):
    recipe = linear_recipe(**CASES[case])
    operands = random_operands(recipe, "cpu")
    out = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200)).run(operands)
    assert_close(out, run_recipe(recipe, operands, torch.float64), scale=2.0)


def test_the_operator_is_kept_whole_in_a_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    def layer(x, weight, bias):
        return torch.ops.stof.cublas_linear(x, weight, bias, "relu")

    counter = CompileCounterWithBackend("inductor")
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(1, 5)
    with torch.no_grad():
        out = torch.compile(layer, backend=counter)(x, weight, bias)
    assert counter.frame_count == 1
    torch.testing.assert_close(out, (x @ weight.T + bias).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, {"m": 4096, "n": 3072, "k": 768}], ids=["", "large"])
@pytest.mark.parametrize("case", CASES)
def test_results(case, sizes, dtype):
    recipe = linear_recipe(**{**CASES[case], **sizes, "dtype": dtype})
    operands = random_operands(recipe)
    out = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200)).run(operands)
    assert_close(out, run_recipe(recipe, operands, torch.float64), dtype, scale=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, {"m": 4096, "n": 3072, "k": 768}], ids=["", "large"])
@pytest.mark.parametrize("case", CASES)
def test_nan_and_infinities(case, sizes, dtype):
    """A cuBLAS that drops NaN fails here; a trial then refuses it on its own."""
    recipe = linear_recipe(**{**CASES[case], **sizes, "dtype": dtype})
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200))
    operands = random_operands(recipe)
    assert keeps_nan(recipe, lambda *given: call.run(given), operands)
    operands[0][1, 0] = torch.inf
    got, want = (f(operands) for f in (call.run, lambda given: run_recipe(recipe, given)))
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(what(got), what(want))


@pytest.mark.gpu
def test_rows_and_weights_that_are_views():
    x = torch.randn(4, 300, 96, device="cuda", dtype=torch.float16)[:, ::3, :72]
    weight = torch.randn(72, 80, device="cuda", dtype=torch.float16)[:, 8:].t() / 8
    bias = torch.randn(72, device="cuda", dtype=torch.float16)
    out = torch.ops.stof.cublas_linear(x, weight, bias, "gelu_tanh")
    exact = x.double() @ weight.double().T + bias.double()
    wanted = torch.nn.functional.gelu(exact, approximate="tanh")
    assert_close(out, wanted, torch.float16, scale=2.0)
