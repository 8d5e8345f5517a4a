"""Launches past Triton's binder: only of what was compiled for such arguments."""

import itertools

import pytest
import torch
from stof_compile.kernels import bound_launch, memo
from stof_compile.kernels.bound_launch import Descriptor, launch, layout
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
    launch(kernel, 7, [descriptor(), data, 32], CONSTANTS, OPTIONS)
    launch(kernel, 7, [second, data, 48], CONSTANTS, OPTIONS)  # a multiple of 16, too
    ((_, asked, _),) = kernel.asked
    assert isinstance(asked[0], TensorDescriptor)  # Triton's own, with its checks
    assert asked[0].base is None  # nothing keeps the tensor
    ((form, grid, values),) = kernel.launched
    assert form == 1 and grid == (7, 1, 1)
    assert values[1] is data and values[2:] == (48, 64)
    again, wanted = values[0], second.checked()
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


def repeated(compiled, between=()):
    first, second = descriptor(rows=128), descriptor(torch.float16)
    kernel = Kernel()
    kernel.__class__ = type(
        "Asked", (Kernel,), {"__getitem__": lambda *_: lambda *a, **n: compiled}
    )
    again = None
    for _ in range(2):
        again = launch(kernel, 7, [first, *between, second, 32, 5], CONSTANTS, OPTIONS)
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


def test_plain_tensors_are_put_where_they_were(hooks):
    compiled = Launched()
    kernel, data = Kernel(), [torch.empty(16), torch.empty(32)]
    kernel.__class__ = type(
        "Asked", (Kernel,), {"__getitem__": lambda *_: lambda *a, **n: compiled}
    )
    for _ in range(2):
        again = launch(kernel, 7, [descriptor(), data[0], 32, data[1], 5], CONSTANTS, OPTIONS)
    for hooked in (False, True):  # and nothing is left of the tensors of the call before
        base, one, two = torch.zeros(64, 64, dtype=torch.float16), torch.ones(16), torch.ones(32)
        compiled.hooked.clear()
        compiled.direct.clear()
        hooks.calls[:] = [print] * hooked
        again(base, one, two)
        values = compiled.hooked[0][1] if hooked else compiled.direct[0][9:]
        assert values[0].base is base and values[1] is one and values[3] is two
        assert (values[2], *values[4:]) == (32, 5, 64)
    assert not any(isinstance(held, torch.Tensor) for held in again._rest)


def test_layouts_differ_by_all_that_a_launch_depends_on():
    held = torch.zeros(8, 8)
    assert layout(held) == layout(torch.ones(8, 8)) and layout(None) is None
    others = [held.t(), held[1:], held.half(), torch.zeros(72)[1:65].view(8, 8)]
    assert len({layout(other) for other in (held, *others)}) == 5


# -- Triton 3.6: descriptors encoded once for an address ---------------------------------------


_BASE_ARGS_FORMAT_LEN = 13  # as in Triton 3.6


def launcher_of_3_6(launcher, tensordesc_meta):
    """The step above Triton 3.6's launcher, as its closure shows it."""

    def inner(*values):
        return launcher(*values[:_BASE_ARGS_FORMAT_LEN], tensordesc_meta)

    return inner


def launcher_of_3_7(launcher, tensordesc_meta):
    """The same of Triton 3.7, whose launcher takes its arguments in another order."""

    def inner(*values):
        return launcher(*values[:-1], [*values[-1], tensordesc_meta])

    return inner


class Direct(Launched):
    """A compiled form with the launcher of Triton 3.6."""

    def __init__(self, scratch=0, facts=("facts of one", "facts of two"), launcher=launcher_of_3_6):
        super().__init__()
        self.started = []
        self.run = type("Run", (), {"__call__": lambda _, *values: self.direct.append(values)})()
        self.run.launch = launcher(lambda *values: self.started.append(values), facts)
        self.run.global_scratch_size, self.run.profile_scratch_size = scratch, 0
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, True


@pytest.fixture
def encoded(hooks, monkeypatch):
    """Descriptors that were encoded."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    made = []

    def make_tensordesc_arg(arg, metadata):
        made.append((arg.base.data_ptr(), metadata))
        return [f"map {len(made)}", *arg.shape, *arg.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make_tensordesc_arg)
    return made


def test_descriptors_are_encoded_once_for_an_address(encoded):
    compiled = Direct()
    *_, again = repeated(compiled)
    one, two, other = (torch.zeros(128, 64, dtype=torch.float16) for _ in range(3))
    for bases in ((one, two), (one, other), (one, two)):
        again(*bases)
    assert not compiled.direct
    place = (7, 1, 1, 77, "function", False, True, None, None, "metadata", None, None, None)
    maps = [("map 1", "map 2"), ("map 1", "map 3"), ("map 1", "map 2")]
    for values, (first, second) in zip(compiled.started, maps, strict=True):
        assert values[:13] == place
        assert values[13:] == (first, 128, 64, 64, 1, second, 64, 64, 64, 1, 32, 5, 64)
    wanted = [(one, "facts of one"), (two, "facts of two"), (other, "facts of two")]
    assert encoded == [(base.data_ptr(), facts) for base, facts in wanted]


def test_numbers_between_descriptors_keep_their_places(encoded):
    """They stand for descriptors that a form of a kernel does without."""
    bases = [torch.zeros(128, 64, dtype=torch.float16) for _ in range(2)]
    compiled = Direct()
    *_, again = repeated(compiled, between=(0, 3))
    again(*bases)
    (values,) = compiled.started
    assert values[13:] == ("map 1", 128, 64, 64, 1, 0, 3, "map 2", 64, 64, 64, 1, 32, 5, 64)
    compiled = Launched()
    *_, again = repeated(compiled, between=(0, 3))
    again(*bases)
    first, *numbers, second, number, last, constant = compiled.direct[0][9:]
    assert (numbers, number, last, constant) == ([0, 3], 32, 5, 64)
    assert [first.base is bases[0], second.base is bases[1]] == [True, True]


def test_few_addresses_are_remembered(encoded, monkeypatch):
    monkeypatch.setattr(memo, "MOST", 3)
    *_, again = repeated(Direct())
    bases = [torch.zeros(128, 64, dtype=torch.float16) for _ in range(8)]
    for one, two in itertools.pairwise(bases):
        again(one, two)
        assert len(again._encoded) <= 3


@pytest.mark.parametrize(
    "changes",
    [{"scratch": 64}, {"facts": (None, None)}, {"facts": ()}, {"launcher": launcher_of_3_7}],
    ids=["scratch", "not-tma", "no-facts", "3.7"],
)
def test_other_launchers_encode_by_themselves(encoded, changes):
    compiled = Direct(**changes)
    *_, again = repeated(compiled)
    again(torch.zeros(128, 64), torch.ones(64, 64))
    assert not encoded and not compiled.started and len(compiled.direct) == 1
