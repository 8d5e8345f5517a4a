"""Candidates for training are checked on their gradients before a time counts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import stof_compile.ops_cpu  # noqa: F401  # registers stof::attention_cpu
from stof_compile import masks
from stof_compile.attention import dynamic, trial
from stof_compile.attention.call import bind_kernel
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.options import StofOptions

SPECS = {
    "none": None,
    "window": masks.sliding_window(9),
    "by head": masks.per_head([masks.causal(), *[masks.sliding_window(4)] * 3]),
    "rows without keys": masks.rule(lambda b, h, q, k: (q % 3 > 0) & (q >= k)),
}


def problem(spec, **facts):
    queries = TensorMeta((2, 4, 64, 16), (4096, 16, 64, 1), torch.float32)
    keys = TensorMeta((2, 2, 64, 16), (2048, 16, 32, 1), torch.float32)
    cpu = torch.device("cpu")
    return AttentionProblem(queries, keys, keys, spec, 0, cpu, 0.25, training=True, **facts)


def agrees(held, spoil=None):
    kernel, config = ("gather", (32, 32)) if held.spec is not None else ("sdpa", ())
    call = bind_kernel(held, kernel, config)
    if spoil is not None:
        attend = call.attend

        def spoiled(*given):
            tensors = [Spoiled.apply(t) if i == spoil else t for i, t in enumerate(given[:3])]
            return attend(*tensors, *given[3:])

        call = replace(call, attend=spoiled)
    generator = torch.Generator().manual_seed(0)
    inputs = trial._random_inputs(held, generator)
    return trial._gradients_agree(held, call, inputs, generator)


class Spoiled(torch.autograd.Function):
    """Gives a wrong gradient for one key."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        wrong = grad.clone()
        wrong[-1, -1, 7] *= 1.5
        return wrong


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_right_gradients_pass(spec):
    assert agrees(problem(spec))


@pytest.mark.parametrize("bias", [(1, 1, 64, 64), (2, 4, 1, 64)])
def test_with_a_bias_and_softcap(bias):
    meta = TensorMeta(bias, torch.empty(bias).stride(), torch.float32)
    assert agrees(problem(SPECS["window"], bias=meta, softcap=5.0, padding=True))


@pytest.mark.parametrize("operand", range(3))
def test_a_wrong_gradient_of_one_row_is_seen(operand):
    assert not agrees(problem(SPECS["window"]), spoil=operand)


def test_hooks_on_saved_tensors_of_the_caller_stay_out(monkeypatch):
    """Those of a checkpoint around a compiled function would run it, and so compile it, again."""

    def called(saved):
        raise AssertionError("a hook of the caller saw a tensor of a trial")

    monkeypatch.setattr(trial, "OWN_GRADIENTS", {"cpu": ("gather",)})
    generator = torch.Generator().manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(called, called):
        found = trial.measure_candidate(problem(SPECS["window"]), "gather", (32, 32), generator)
    assert found.status == "measured", found.reason


def test_a_candidate_with_wrong_gradients_is_never_timed(monkeypatch):
    monkeypatch.setattr(trial, "OWN_GRADIENTS", {"cpu": ("gather",)})
    monkeypatch.setattr(trial, "_gradients_agree", lambda *given: False)
    monkeypatch.setattr(trial, "time_callable", None)
    found = trial.measure_candidate(
        problem(SPECS["window"]), "gather", (32, 32), torch.Generator().manual_seed(0)
    )
    assert (found.status, found.reason) == ("failed", "gradients differ from the fp64 reference")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "attention", "reason"),
    [
        (torch.float16, 64, "auto", ""),
        (torch.float64, 64, "auto", "no sparse kernel takes torch.float64"),
        (torch.float16, 288, "block", "no sparse kernel takes head dims of 288"),
        (torch.float64, 64, "sdpa", ""),
    ],
)
def test_what_no_kernel_takes_stays_with_pytorch_at_symbolic_lengths(
    dtype, head_dim, attention, reason
):
    with torch._subclasses.FakeTensorMode():
        operand = torch.empty(1, 2, 24, head_dim, dtype=dtype, device="cuda")
    node = SimpleNamespace(meta={"example_value": operand})
    site = SimpleNamespace(q=node, k=node, v=node)
    found = dynamic._unfit(site, StofOptions(attention=attention))
    assert reason in found if reason else not found
