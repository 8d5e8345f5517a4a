"""Launches past Triton's binder: only of what was compiled for such arguments."""

import pytest
import torch
from stof_compile.kernels import bound_launch
from stof_compile.kernels.bound_launch import Descriptor, launch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Kernel:
    """Says how often it was asked for a compiled form, and what was launched."""

    def __init__(self):
        self.fn = object()
        self.asked, self.launched = [], []

    def __getitem__(self, grid):
        def ask(*arguments, **named):
            self.asked.append((grid, arguments, named))
            form = len(self.asked)
            return SimpleCompiled(lambda grid, *values: self.launched.append((form, grid, values)))

        return ask


class SimpleCompiled:
    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return lambda *values: self.run(grid, *values)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bound_launch, "_compiled", {})


def descriptor(dtype=torch.float16, block=(64, 64), swizzle=128, rows=64):
    base = torch.empty(rows, 64, dtype=dtype)
    layout = gl.NVMMASharedLayout(swizzle, 16, rank=2)
    return Descriptor(base, base.shape, base.stride(), block, layout)


CONSTANTS, OPTIONS = {"BLOCK": 64}, {"num_warps": 4}


def test_the_second_launch_asks_nothing():
    kernel, data = Kernel(), torch.empty(16)
    second = descriptor(rows=128)
    launch(kernel, 7, [data, descriptor(), 32], CONSTANTS, OPTIONS)
    launch(kernel, 7, [data, second, 48], CONSTANTS, OPTIONS)  # a multiple of 16, too
    ((_, asked, _),) = kernel.asked
    assert isinstance(asked[1], TensorDescriptor)  # Triton's own, with its checks
    assert asked[1].base is None  # nothing keeps the tensor
    ((form, grid, values),) = kernel.launched
    assert form == 1 and grid == (7, 1, 1)
    assert values[0] is data and values[2:] == (48, 64)
    again, wanted = values[1], second.checked()
    assert type(again) is TensorDescriptor and again.base is second.base
    assert vars(again) == vars(wanted)  # of a tensor of another size


@pytest.mark.parametrize(
    "other",
    [
        ([torch.empty(16, dtype=torch.float16), descriptor(), 32], CONSTANTS, OPTIONS),
        ([torch.empty(17)[1:], descriptor(), 32], CONSTANTS, OPTIONS),  # not aligned
        ([torch.empty(16), descriptor(torch.bfloat16), 32], CONSTANTS, OPTIONS),
        ([torch.empty(16), descriptor(block=(32, 64)), 32], CONSTANTS, OPTIONS),
        ([torch.empty(16), descriptor(swizzle=64), 32], CONSTANTS, OPTIONS),
        ([torch.empty(16), descriptor(), 1], CONSTANTS, OPTIONS),
        ([torch.empty(16), descriptor(), 33], CONSTANTS, OPTIONS),
        ([torch.empty(16), descriptor(), 2**32], CONSTANTS, OPTIONS),
        ([torch.empty(16), descriptor(), 32], {"BLOCK": 32}, OPTIONS),
        ([torch.empty(16), descriptor(), 32], CONSTANTS, {"num_warps": 8}),
    ],
)
def test_another_form_is_asked_for(other):
    kernel = Kernel()
    launch(kernel, 7, [torch.empty(16), descriptor(), 32], CONSTANTS, OPTIONS)
    launch(kernel, 7, *other)
    assert len(kernel.asked) == 2 and not kernel.launched


def test_another_device_and_another_kernel_have_forms_of_their_own(monkeypatch):
    one, two = Kernel(), Kernel()
    for kernel in (one, two):
        launch(kernel, 7, [32], CONSTANTS, OPTIONS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(one, 7, [32], CONSTANTS, OPTIONS)
    assert len(one.asked) == 2 and len(two.asked) == 1


# -- repeats --------------------------------------------------------------------------------------


class Chain:
    """A chain of Triton's hooks."""

    def __init__(self):
        self.calls = []


@pytest.fixture
def hooks(monkeypatch):
    from triton import knobs

    enter, leave = Chain(), Chain()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", enter)
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", leave)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return enter


class Launched(SimpleCompiled):
    """A compiled form as Triton makes them: with handles and a launcher of its own."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.direct, self.hooked = [], []
        super().__init__(lambda *values: self.direct.append(values))

    def __getitem__(self, grid):
        return lambda *values: self.hooked.append((grid, values))


def repeated(compiled):
    first, second = descriptor(rows=128), descriptor(torch.float16)
    kernel = Kernel()
    kernel.__class__ = type(
        "Asked", (Kernel,), {"__getitem__": lambda *_: lambda *a, **n: compiled}
    )
    again = None
    for _ in range(2):
        again = launch(kernel, 7, [first, second, 32, 5], CONSTANTS, OPTIONS)
    return first, second, again


def test_a_launch_is_repeated_on_other_tensors(hooks):
    compiled = Launched()
    first, second, again = repeated(compiled)
    compiled.hooked.clear()
    bases = torch.zeros(128, 64, dtype=torch.float16), torch.ones(64, 64, dtype=torch.float16)
    again(*bases)
    ((*place, one, two, number, last, constant),) = compiled.direct
    assert place == [7, 1, 1, 77, "function", "metadata", None, None, None]
    assert (number, last, constant) == (32, 5, 64)
    for made, base, before in ((one, bases[0], first), (two, bases[1], second)):
        wanted = vars(before.checked()) | {"base": base}
        assert made.base is base and vars(made) == wanted
    assert not compiled.hooked


def test_hooks_hear_of_repeats(hooks):
    compiled = Launched()
    *_, again = repeated(compiled)
    compiled.hooked.clear()
    hooks.calls.append(print)
    again(torch.zeros(128, 64), torch.ones(64, 64))
    assert not compiled.direct
    assert [grid for grid, _ in compiled.hooked] == [(7, 1, 1)]


@pytest.mark.parametrize("hook", [None, print])
def test_a_hook_need_not_be_a_chain(hooks, monkeypatch, hook):
    from triton import knobs

    compiled = Launched()
    *_, again = repeated(compiled)
    compiled.hooked.clear()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    again(torch.zeros(128, 64), torch.ones(64, 64))
    assert (len(compiled.direct), len(compiled.hooked)) == ((1, 0) if hook is None else (0, 1))


def test_what_is_not_loaded_is_launched_by_its_compiled_form(hooks):
    """A compile worker switches launches off there."""
    compiled = Launched()
    *_, again = repeated(compiled)
    compiled.hooked.clear()
    compiled.function = None
    again(torch.zeros(128, 64), torch.ones(64, 64))
    assert not compiled.direct and len(compiled.hooked) == 1


def test_a_repeat_keeps_no_tensor_and_knows_its_device(hooks, monkeypatch):
    *_, again = repeated(Launched())
    assert all(held.base is None for held in again._descriptors)
    assert again.here
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not again.here


def test_launches_with_plain_tensors_are_not_repeated():
    kernel, data = Kernel(), torch.empty(16)
    results = [launch(kernel, 7, [descriptor(), data, 32], CONSTANTS, OPTIONS) for _ in range(2)]
    assert results == [None, None]
