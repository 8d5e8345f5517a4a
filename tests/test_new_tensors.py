"""Fake results of equal calls are worked out once, and are tensors of their own all the same."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import stof_compile.ops_norm  # noqa: F401  # registers the operators
from stof_compile import new_tensors
from stof_compile.emit import emit
from stof_compile.new_tensors import remembered_result

NORM = torch.ops.stof.fused_norm.default


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(new_tensors, "_known", {})


class Calls:
    """Asks for results in a fake mode and counts how often they had to be worked out."""

    def __init__(self, mode=None):
        self.mode, self.count = mode or FakeTensorMode(), 0

    def empty(self, *shape, **named):
        with self.mode:
            return torch.empty(*shape, **named)

    def ask(self, target, *args, result=None, **kwargs):
        def call():
            self.count += 1
            return target(*args, **kwargs) if result is None else result()

        with self.mode, torch.no_grad():
            return remembered_result(call, target, args, kwargs, self.mode)


def storage(tensor):
    return tensor.untyped_storage()._cdata


@pytest.fixture
def calls():
    return Calls()


def product(calls, rows=33, dtype=torch.float16, bias=True):
    x, weight = calls.empty(2, rows, 16, dtype=dtype), calls.empty(24, 16, dtype=dtype)
    return calls.ask(F.linear, x, weight, calls.empty(24, dtype=dtype) if bias else None)


def test_equal_products_are_worked_out_once(calls):
    first, again = product(calls), product(calls)
    assert calls.count == 1
    assert (again.shape, again.stride(), again.dtype) == (first.shape, first.stride(), first.dtype)
    assert again.fake_mode is calls.mode and storage(again) != storage(first)
    assert not again.requires_grad


@pytest.mark.parametrize(
    "other", [{"rows": 257}, {"dtype": torch.float32}, {"bias": False}], ids=str
)
def test_other_products_are_not(calls, other):
    assert product(calls).shape == (2, 33, 24)
    assert product(calls, **other).shape == (2, other.get("rows", 33), 24)
    assert calls.count == 2


def test_a_result_with_a_history_is_worked_out(calls):
    product(calls)
    x, weight = (
        calls.empty(2, 33, 16, dtype=torch.float16),
        calls.empty(24, 16, dtype=torch.float16),
    )
    weight.requires_grad_()
    given = (x, weight, calls.empty(24, dtype=torch.float16))
    with calls.mode:
        trained = remembered_result(lambda: F.linear(*given), F.linear, given, {}, calls.mode)
    assert trained.requires_grad


def test_strides_count(calls):
    x, weight = calls.empty(33, 4, 16).transpose(0, 1), calls.empty(24, 16)
    direct = calls.ask(F.linear, calls.empty(4, 33, 16), weight)
    assert calls.ask(F.linear, x, weight).shape == direct.shape and calls.count == 2


def test_our_operators_are_remembered_with_all_their_arguments(calls):
    x = calls.empty(33, 16)
    rest = (None, None, None, None, None, "rms", 1e-6, [1, 2])
    args = rest[: len(NORM._schema.arguments) - 1]
    for _ in range(2):
        assert calls.ask(NORM, x, *args, result=lambda: x.new_empty(x.shape)).shape == (33, 16)
    assert calls.count == 1
    for same in ([True, 2], [1.0, 2], (1, 2)):
        calls.ask(NORM, x, *args[:-1], same, result=lambda: x.new_empty(x.shape))
    assert calls.count == 4  # 1, 1.0 and True are equal to Python


def test_results_that_share_memory_are_not_remembered(calls):
    x, weight = calls.empty(16, 16), calls.empty(16, 16)
    held = calls.empty(16, 16)
    for result in (lambda: x, lambda: x.t(), lambda: calls.empty(32, 16)[:16]):
        before = calls.count
        for _ in range(2):
            calls.ask(F.linear, x, weight, result=result)
        assert calls.count == before + 2
    for _ in range(2):  # two results, one memory
        calls.ask(NORM, x, result=lambda: (held, held))
    assert not new_tensors._known


def test_several_results_each_have_memory(calls):
    x = calls.empty(16, 16)
    for _ in range(2):
        pair = calls.ask(NORM, x, result=lambda: (x.new_empty(3), x.new_empty(4, 5)))
        assert type(pair) is tuple and [tuple(t.shape) for t in pair] == [(3,), (4, 5)]
        assert storage(pair[0]) != storage(pair[1])
    assert calls.count == 1


def test_autocast_decides_anew(calls):
    first = product(calls, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = product(calls, dtype=torch.float32)
    assert (first.dtype, cast.dtype) == (torch.float32, torch.bfloat16) and calls.count == 2


def test_symbolic_sizes_are_left_to_torch():
    shapes = ShapeEnv()
    calls = Calls(FakeTensorMode(shape_env=shapes))
    x = calls.mode.from_tensor(torch.empty(7, 16))
    assert isinstance(x.shape[0], torch.SymInt)
    for _ in range(2):
        calls.ask(F.linear, x, calls.empty(24, 16))
    assert calls.count == 2 and not new_tensors._known


def test_other_functions_and_other_modes_are_left_to_torch(calls):
    x = calls.empty(16, 16)
    for _ in range(2):
        calls.ask(torch.relu, x)
        calls.ask(F.linear, x, Calls().empty(16, 16), result=lambda: x.new_empty(2))
    assert calls.count == 4


def test_few_calls_are_remembered(calls, monkeypatch):
    monkeypatch.setattr(new_tensors, "MOST", 2)
    for rows in (1, 2, 3, 3, 1):
        product(calls, rows=rows)
    assert calls.count == 4 and len(new_tensors._known) == 2


def test_written_nodes_have_values_of_their_own(calls):
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["example_value"] = calls.empty(33, 16)
    weight.meta["example_value"] = calls.empty(16, 16)
    end = graph.output(x)
    (one,) = emit(graph, end, x, F.linear, x, weight)
    (two,) = emit(graph, end, x, F.linear, one, weight)
    values = [node.meta["example_value"] for node in (one, two)]
    assert len(new_tensors._known) == 1 and storage(values[0]) != storage(values[1])
