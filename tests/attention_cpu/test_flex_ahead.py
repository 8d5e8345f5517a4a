"""FlexAttention on the CPU: its call written as a graph, its sizes, and its kernel begun ahead."""

import importlib
import os
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from stof_compile.kernels import attention_cpu_flex, build_later
from stof_compile.kernels.attention_cpu_flex import FlexCall, _Callables
from stof_compile.kernels.attention_cpu_flex_graph import (
    FlexOperands,
    can_be_written,
    flex_graph,
    in_band,
)
from stof_compile.kernels.build_later import LateKernel, can_build_later, kernels_built_later
from stof_compile.kernels.reference import attention_reference
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import InductorError
from torch.nn.functional import scaled_dot_product_attention as sdpa

from stof_compile import masks
from tests.close import assert_close

SPECS = {
    "band": masks.longformer(20, 5),
    "bitmap": masks.bigbird(20, 5, 0.2, random_block=32),
}
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "padding": {"padding": True},
    "softcap-padding": {"softcap": 2.0, "padding": True},
}


def given(spec: masks.MaskSpec, length: int, softcap: float = 0.0, padding: bool = False) -> Any:
    """A call of ``flex_forward`` with two heads over one, and the mask of every pair."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, length, 16, generator=generator) for h in (2, 1, 1))
    block_mask = masks.build_block_mask(spec, length, length, 32, heads=2)
    band = [] if block_mask.band is None else block_mask.band.as_ints()
    kept = torch.arange(length)[None] < length - 7 if padding else None
    call = FlexCall(q, k, v, block_mask.tensors, kept, 0.3, softcap, 0, band, (32, 32))
    return call, block_mask.to_dense()


def run_uncompiled(operands: FlexOperands) -> torch.Tensor:
    """The graph's operator has a definition of its own, which needs no C++."""
    graph, inputs = flex_graph(operands)
    result: torch.Tensor = graph(*inputs)[0]
    return result


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("spec", SPECS)
def test_the_written_graph_is_the_reference(spec: str, scores: str) -> None:
    assert can_be_written()
    call, keep = given(SPECS[spec], 70, **SCORES[scores])
    _, operands = attention_cpu_flex._told(call)
    wide = [t.double() for t in call[:3]]
    expected = attention_reference(*wide, keep, call.key_keep, None, call.scale, call.softcap)
    assert_close(run_uncompiled(operands), expected, torch.float32)


@pytest.mark.parametrize("ahead", [False, True], ids=["at-the-call", "ahead"])
def test_autocast_around_the_call_rounds_nothing(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled inside a region is kept for calls outside, too."""
    inside: list[bool] = []

    def compile_fx(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        inside.append(torch.is_autocast_enabled("cpu"))
        return graph

    module = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(module, "compile_fx", compile_fx)
    monkeypatch.setattr(attention_cpu_flex, "can_build_later", lambda: True)
    attention_cpu_flex._compiled.cache_clear()
    call, keep = given(SPECS["band"], 70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if ahead:
            attention_cpu_flex.flex_ahead(call)
        found = attention_cpu_flex.flex_forward(call)
    attention_cpu_flex._compiled.cache_clear()
    assert inside == [False]
    wide = [t.double() for t in call[:3]]
    expected = attention_reference(*wide, keep, None, None, call.scale, 0.0)
    assert_close(found, expected, torch.float32)


# -- what is compiled for which sizes --------------------------------------------------------------


class Compiled:
    """In place of both compilers: says what was compiled for one size and what ran for all."""

    def __init__(self, fails: bool = False) -> None:
        self.ran: list[Any] = []
        self.made: list[int] = []
        self.fails = fails

    def compile(self, function: Any, dynamic: bool) -> Any:
        def run(*operands: Any) -> torch.Tensor:
            self.ran.append("all" if dynamic else "traced")
            if dynamic and self.fails:
                raise InductorError(RuntimeError("s7 is not s75"), None)
            return operands[0]

        return run

    def alone(self, operands: FlexOperands) -> Any:
        self.made.append(operands.q.shape[2])

        def run(now: FlexOperands) -> torch.Tensor:
            self.ran.append(now.q.shape[2])
            return now.q

        return run


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    made = Compiled()
    monkeypatch.setattr(torch, "compile", made.compile)
    return made


def at(length: int) -> FlexOperands:
    return attention_cpu_flex._told(given(SPECS["band"], length)[0])[1]


def test_the_first_sizes_have_a_callable_of_their_own(compiled: Compiled) -> None:
    form = _Callables(compiled.alone)
    for length in (32, 32, 48, 64, 32):
        form(at(length))
    assert compiled.ran == [32, 32, "all", "all", 32]
    assert compiled.made == [32]


def test_a_form_that_does_not_build_for_all_sizes_is_tried_at_three_of_them(
    compiled: Compiled,
) -> None:
    compiled.fails = True
    form = _Callables(compiled.alone)
    for length in (32, 48, 48, 64, 80, 96, 112):
        form(at(length))
    assert compiled.ran == [32, "all", 48, 48, "all", 64, "all", 80, 96, 112]


def test_codes_for_one_size_are_held_up_to_a_number(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cpu_flex, "MOST_SIZES", 2)
    form = _Callables(compiled.alone)
    for threads in (1, 2, 3, 3, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        form(at(32))
    assert len(form._made) == 2 and compiled.made == [32] * 4


def test_what_cannot_be_written_is_traced(compiled: Compiled) -> None:
    form = _Callables(None)
    for length in (32, 32, 48):
        form(at(length))
    assert compiled.ran == ["traced", "traced", "all"]


def test_what_was_begun_is_what_runs(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    form = _Callables(compiled.alone)
    form.begin(at(32))
    form.begin(at(48))  # no second size: it waits for its first call
    assert (compiled.made, compiled.ran) == ([32], [])
    for length in (32, 48, 32):
        form(at(length))
    assert (compiled.made, compiled.ran) == ([32], [32, "all", 32])
    # the code is for this many threads, and for these strides
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    form(at(32))
    wide = at(32)
    form(wide._replace(q=wide.q.transpose(1, 2).contiguous().transpose(1, 2)))
    assert compiled.made == [32, 32, 32]


def test_a_failure_ahead_leaves_the_sizes_to_the_first_call(compiled: Compiled) -> None:
    def refuse(operands: FlexOperands) -> Any:
        raise RuntimeError("no compiler")

    form = _Callables(refuse)
    with pytest.raises(RuntimeError, match="no compiler"):
        form.begin(at(32))
    form._compile = compiled.alone
    form(at(48))
    assert compiled.ran == [48]


# -- kernels that are built later ------------------------------------------------------------------


@pytest.fixture
def built_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that were built while their first call waited."""
    sources: list[str] = []

    def build(argtypes: list[str], source: str) -> Any:
        sources.append(source)
        return lambda x: x + 1

    monkeypatch.setattr(build_later, "_built_here", build)
    return sources


def test_a_late_kernel_is_waited_for_once(built_here: list[str]) -> None:
    asked: list[int] = []

    def result() -> Any:
        asked.append(1)
        return lambda x: 2 * x

    kernel = LateKernel(result, ["long"], "code")
    assert not asked
    assert [kernel(1), kernel(2)] == [2, 4]
    assert (asked, built_here) == ([1], [])


@pytest.mark.parametrize("error", [RuntimeError, ImportError, OSError])
def test_a_build_that_failed_is_done_again(built_here: list[str], error: type) -> None:
    future: Future[Any] = Future()
    future.set_exception(error("g++ was killed"))
    kernel = LateKernel(future.result, ["long"], "code")
    assert [kernel(1), kernel(2)] == [2, 3]
    assert built_here == ["code"]


def test_a_fork_does_not_wait_for_threads_it_has_not(
    built_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = LateKernel(Future[Any]().result, ["long"], "code")  # never done
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    assert kernel(1) == 2
    assert built_here == ["code"]


def test_only_what_this_thread_compiles_is_built_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, argtypes: list[str], source: str) -> Future[Any]:
        return Future()

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", begin)

    def ask() -> None:
        kinds.append(type(AsyncCompile.cpp_pybinding(None, [], "code")))  # type: ignore[arg-type]

    kinds: list[type] = []
    with pytest.raises(ValueError, match="inside"), kernels_built_later():
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        raise ValueError("inside")
    ask()
    assert kinds == [LateKernel, Future, Future]
    assert AsyncCompile.cpp_pybinding is begin


def test_nothing_is_begun_where_nothing_goes_on() -> None:
    with config.patch(compile_threads=2):
        assert can_build_later()
    for setting in ({"compile_threads": 1}, {"force_disable_caches": True}, {"cpp_wrapper": True}):
        with config.patch({"compile_threads": 2, **setting}):
            assert not can_build_later()


# -- in a whole compile ----------------------------------------------------------------------------


class Attend(torch.nn.Module):
    """One attention behind a linear layer; x [B, S, 32], keep bool [B, S] or None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mask = None if keep is None else keep[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        return sdpa(q, k, v, mask).transpose(1, 2)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Any:
    """What happened, in order; neither Inductor nor g++ has anything to do with it."""
    from torch._dynamo.backends.debugging import aot_eager

    story: list[str] = []

    def compile_flex(operands: FlexOperands) -> Any:
        story.append("flex")

        def run(now: FlexOperands) -> torch.Tensor:
            story.append("run")
            position = torch.arange(now.q.shape[2])
            keep = in_band(position[:, None], position, now.numbers)
            if now.kept is not None:
                keep = keep & now.kept[:, None, None]
            return sdpa(now.q, now.k, now.v, keep, scale=float(now.scale))

        return run

    def compile_graph(gm: torch.fx.GraphModule, inputs: Any, options: Any) -> Any:
        story.append("graph")
        return aot_eager(gm, list(inputs))

    monkeypatch.setattr(attention_cpu_flex, "compiled_flex", compile_flex)
    monkeypatch.setattr(attention_cpu_flex, "can_build_later", lambda: True)
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", compile_graph)
    attention_cpu_flex._compiled.cache_clear()
    yield story
    attention_cpu_flex._compiled.cache_clear()


OPTIONS = {"attention": "flex", "fusion": "off", "strict": True, "mask": masks.longformer(20, 5)}


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padding"])
@torch.no_grad()
def test_the_kernel_of_a_graph_is_begun_before_the_graph(told: list[str], padded: bool) -> None:
    x, model = torch.randn(2, 70, 32), Attend()
    keep = torch.arange(70)[None] < torch.tensor([[63], [70]]) if padded else None
    fast = torch.compile(model, backend="stof", dynamic=False, options=OPTIONS)
    found = fast(x, keep)
    assert told == ["flex", "graph", "run"]  # for the very operands that came
    bound = OPTIONS["mask"].bind(70, 70, 0)  # type: ignore[attr-defined]
    zero, position = torch.tensor(0), torch.arange(70)
    kept = bound.keep(zero, zero, position[:, None], position).expand(2, 70, 70)
    both = kept if keep is None else kept & keep[:, None]
    q, k, v = model.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    expected = attention_reference(*(t.double() for t in (q, k, v)), both[:, None])
    assert_close(found, expected.transpose(1, 2), torch.float32)


@torch.no_grad()
def test_symbols_and_failures_wait_for_the_first_call(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> bool:
        raise RuntimeError("no thread")

    monkeypatch.setattr(attention_cpu_flex, "can_build_later", refuse)
    fast = torch.compile(Attend(), backend="stof", dynamic=False, options=OPTIONS)
    fast(torch.randn(2, 70, 32))
    assert told == ["graph", "flex", "run"]
