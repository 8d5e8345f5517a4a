"""Exact GELU in half precision, written shorter: as exact as torch's, and only where it applies."""

import re
from pathlib import Path

import pytest
import torch
from close import assert_close
from torch import nn
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace

from stof_compile.short_gelu import GELU_TAIL, short_gelu, shorten_gelu

HALF, BRAIN = torch.float16, torch.bfloat16
ROOT = Path(__file__).resolve().parent.parent


def every_number(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_every_half_number_is_rounded_at_least_as_well_as_by_torch(dtype):
    x = every_number(dtype)
    x = x[x.isfinite()]
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
    here = short_gelu(x, dtype)
    there = nn.functional.gelu(x.float()).to(dtype)
    wrong_here, wrong_there = ((y != exact.to(dtype)).sum().item() for y in (here, there))
    assert here.dtype == dtype and wrong_here <= wrong_there
    # units in the last place of the result, of which rounding alone takes a half
    step = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
    assert bool(((here.double() - exact).abs() <= 0.6 * step).all())


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_special_numbers(dtype):
    x = torch.tensor([float("inf"), float("nan"), float("-inf"), 0.0, -0.0], dtype=dtype)
    found = short_gelu(x, dtype)  # -inf: as in torch, -inf * 0
    assert found[0] == float("inf") and found[1:3].isnan().all() and bool((found[3:] == 0).all())
    assert not found.signbit()[3:].any()  # as documented; torch keeps the sign of zero
    assert nn.functional.gelu(x).signbit()[3:].tolist() == [False, True]


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_nothing_is_left_of_large_negative_numbers_before_rounding(dtype, monkeypatch):
    """A gate multiplies the result as it is in fp32, by up to the largest number of the dtype."""
    x = torch.tensor([-20.0, -1e3, torch.finfo(dtype).min], dtype=dtype)
    monkeypatch.setitem(GELU_TAIL, torch.float32, GELU_TAIL[dtype])
    assert bool((short_gelu(x.float(), torch.float32).abs() < 1e-33).all())


def test_a_share_and_one_are_exact():
    """So that all of GELU is exact at 0: Q is -1 there."""
    for tail in GELU_TAIL.values():
        share = torch.tensor(tail.share)
        assert (share + 1).item() == share.item() + 1 == torch.tensor(tail.share + 1).item()


@pytest.mark.parametrize(("name", "unit"), [("linear_epilogue", 1), ("hopper_linear_kernel", 2)])
def test_device_code_has_the_same_numbers(name, unit):
    """Triton and Gluon cannot read the table: their code spells it out, fp16 first. The Hopper
    kernel's is for halves of values, of which each counts twice (unit)."""
    text = (ROOT / "kernels" / f"{name}.py").read_text("utf-8")
    numbers = r"min\w+\(\w+\.abs\(v\), ([\d.]+)\)|exp2\([ab] \* -([\d.]+)\)|"
    numbers += r"q = [ab] \* (\S+) - (\S+)|q = q \* [ab] - (\S+)|w \* ([\d.]+) \+ q"
    hits = [[*map(float, filter(None, hit))] for hit in re.findall(numbers, text)]
    found = [n for hit in hits for n in ([-hit[0], hit[1]] if len(hit) == 2 else hit)]
    wanted = []
    for tail in GELU_TAIL.values():
        powers = [factor * unit ** (i + 1) for i, factor in enumerate(tail.powers)]
        last = tail.share + (unit == 1)  # Q, or Q + 1
        wanted += [tail.largest / unit, tail.rate * unit, *reversed(powers), last, tail.share]
    assert torch.equal(torch.tensor(found), torch.tensor(wanted))  # in fp32


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_of_halves_it_is_as_exact(dtype):
    """As the Hopper kernel has it; its device code cannot be run here."""
    x = every_number(dtype)
    x, tail = x[x.isfinite()], GELU_TAIL[dtype]
    h = x.float() * 0.5
    b = h.abs().clamp(max=tail.largest / 2)
    powers = [factor * 2 ** (i + 1) for i, factor in enumerate(tail.powers)]
    q = b * -powers[-1] - powers[-2]
    for factor in (*powers[-3::-1], tail.share):
        q = q * b - factor
    q = torch.exp2(b * -(tail.rate * 2)) * tail.share + q
    here = ((h + h.abs()) - b * torch.exp2(q)).to(dtype)
    differs = (here != short_gelu(x, dtype)).float().mean()
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
    step = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
    assert differs < 2e-3 and bool(((here.double() - exact).abs() <= 0.6 * step).all())


def graph_of(function, dtype, device):
    gm = symbolic_trace(function)
    with FakeTensorMode():
        value = torch.empty(4, 8, dtype=dtype, device=device)
    for node in gm.graph.nodes:
        node.meta["example_value"] = value
    return gm


def exact(x):
    return nn.functional.gelu(x) + torch._C._nn.gelu(x, approximate="none")


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_rewrites_exact_gelu_of_half_types_on_cuda(dtype):
    gm = graph_of(exact, dtype, "cuda")
    assert shorten_gelu(gm) == 2 and shorten_gelu(gm) == 0
    gm.graph.lint()
    names = [str(node.target) for node in gm.graph.nodes]
    assert not any("gelu" in name for name in names)
    added = [node for node in gm.graph.nodes if node.meta.get("stof_emitted")]
    results = [node for node in added if node.target == "to"]
    assert len(results) == 2 and {n.meta["example_value"].dtype for n in results} == {dtype}
    # steps without a value would keep the graph out of torch's cache of compiled graphs
    steps = {n.meta["example_value"].dtype for n in added if n not in results}
    assert steps == {torch.float32}
    check_cacheable(gm)
    gm.recompile()
    x = torch.randn(4, 8).to(dtype)
    assert_close(gm(x), exact(x.double()), dtype)


@pytest.mark.parametrize(
    ("function", "dtype", "device"),
    [
        (exact, torch.float32, "cuda"),
        (exact, HALF, "cpu"),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), HALF, "cuda"),
    ],
    ids=["fp32", "cpu", "tanh"],
)
def test_leaves_the_others(function, dtype, device):
    assert shorten_gelu(graph_of(function, dtype, device)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", ["auto", "off"])
def test_gpu_model(fusion, fresh_dynamo, tmp_path, monkeypatch):
    from stof_compile import explain

    layer = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8)).half().cuda()
    x = torch.randn(3, 33, 64, device="cuda", dtype=HALF)
    with torch.no_grad():
        options = {"fusion": fusion, "cache_dir": str(tmp_path)}
        monkeypatch.setattr("stof_compile.fuse.TEMPLATES", ())  # they would take the GELU
        fast = torch.compile(layer, backend="stof", options=options)
        torch.testing.assert_close(fast(x), layer(x), rtol=4e-3, atol=2e-3)
    assert ("GELU" in str(explain(fast))) == (fusion == "auto")
