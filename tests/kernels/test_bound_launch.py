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
