"""torch's questions about our kernels are answered once a kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap

from stof_compile import kernel_facts
from stof_compile.kernel_facts import EFFECTS, SOURCE, remembered_kernel_facts


def kernel(module):
    def fn():
        pass

    fn.__module__ = module
    return SimpleNamespace(fn=fn)


@pytest.fixture
def asked(monkeypatch):
    """Replace torch's function; returns (its name, the list of what was asked)."""
    (name,) = (name for name in EFFECTS if hasattr(triton_kernel_wrap, name))
    questions = []

    def identify(kernel, kwargs, descriptors):
        questions.append(kwargs)
        return [key for key in kwargs if key.startswith("out")]

    monkeypatch.setattr(triton_kernel_wrap, name, identify)
    monkeypatch.setattr(kernel_facts, "_known", {})
    return lambda *a: getattr(triton_kernel_wrap, name)(*a), questions


OURS = kernel("stof_compile.kernels.linear_kernel")


def arguments(dtype=torch.float16, **constants):
    return {"x": torch.empty(2, dtype=dtype), "out": torch.empty(2), "BLOCK": 64, **constants}


def test_a_kernel_of_ours_is_asked_about_once(asked):
    ask, questions = asked
    with remembered_kernel_facts():
        first = ask(OURS, arguments(), {})
        first.append("changed by the reader")
        assert ask(OURS, arguments(), {}) == ["out"]
    assert len(questions) == 1
    ask(OURS, arguments(), {})
    assert len(questions) == 2  # torch's own function is back


@pytest.mark.parametrize(
    "other",
    [
        arguments(torch.float32),
        arguments(BLOCK=32),
        arguments(FLAG=True),
        {**arguments(), "x": None},
    ],
)
def test_other_constants_and_kinds_are_other_questions(asked, other):
    ask, questions = asked
    with remembered_kernel_facts():
        ask(OURS, arguments(), {})
        ask(OURS, other, {})
    assert len(questions) == 2


def test_numbers_that_are_no_constants_are_one_question(asked):
    ask, questions = asked
    params = [
        SimpleNamespace(name=name, is_constexpr=name == "BLOCK")
        for name in ("x", "out", "mark", "BLOCK")
    ]
    ours = SimpleNamespace(fn=OURS.fn, params=params)
    with remembered_kernel_facts():
        for mark in (0, 16, 32):
            ask(ours, arguments(mark=mark), {})
        assert len(questions) == 1
        ask(ours, arguments(mark=1), {})  # Triton makes a constant of it
        ask(ours, arguments(mark=True), {})
        ask(ours, arguments(mark=2**40), {})
        ask(ours, arguments(mark=0, BLOCK=32), {})
    assert len(questions) == 5


def test_foreign_kernels_and_what_has_no_key_are_left_alone(asked):
    ask, questions = asked
    theirs = kernel("their_package.kernels")
    with remembered_kernel_facts():
        for given in ((theirs, arguments(), {}), (OURS, arguments(n=object()), {})):
            ask(*given)
            ask(*given)
        ask(OURS, arguments(), {"x": "tma"})
        ask(OURS, arguments(), {"x": "tma"})
    assert len(questions) == 6


def test_a_failing_compile_gives_the_function_back(asked):
    ask, questions = asked
    with pytest.raises(RuntimeError), remembered_kernel_facts():
        raise RuntimeError
    ask(OURS, arguments(), {})
    ask(OURS, arguments(), {})
    assert len(questions) == 2


def test_the_source_of_a_kernel_is_collected_once(monkeypatch):
    from torch._inductor.codegen import wrapper

    questions = []

    def collect(kernel, *epilogue):
        questions.append(kernel)
        return "source"

    monkeypatch.setattr(wrapper, SOURCE[0], collect)
    monkeypatch.setattr(kernel_facts, "_known", {})
    theirs = kernel("their_package.kernels")
    with remembered_kernel_facts():
        for _ in range(3):
            assert getattr(wrapper, SOURCE[0])(OURS) == "source"
        assert questions == [OURS]
        getattr(wrapper, SOURCE[0])(OURS, ("node", "other source"))
        getattr(wrapper, SOURCE[0])(theirs)
        getattr(wrapper, SOURCE[0])(theirs)
    assert len(questions) == 4
    assert getattr(wrapper, SOURCE[0]) is collect
