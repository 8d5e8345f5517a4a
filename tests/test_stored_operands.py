"""What our operators read is stored once, however many of them read it."""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch._inductor import ir
from torch._inductor.graph import GraphLowering

import stof_compile.ops_hopper_linear  # noqa: F401 (the operator)
from stof_compile import stored_operands
from stof_compile.inductor import compile_with_settings
from stof_compile.kernel_facts import remembered_kernel_facts

hopper = torch.ops.stof.hopper_linear.default
CONFIG = [16, 16, 1, 2]


@pytest.fixture
def on_the_cpu(fresh_dynamo):
    """``stof::hopper_linear`` by its definition."""

    def plain(x, weight, bias, residual, activation, config):
        out = F.linear(x, weight)
        return out if residual is None else out + residual

    library = torch.library.Library("stof", "IMPL")
    library.impl("hopper_linear", plain, "CPU")
    yield
    library._destroy()


def backend(gm, inputs):
    return compile_with_settings(gm, inputs, {"force_disable_caches": True}, trains=False)


def layers(x, weights):
    """A norm that two products read, each layer; the state is the residual of a third."""
    for weight in weights:
        y = F.layer_norm(x, (64,)).cos()
        both = hopper(y, weight, None, None, "", CONFIG) * hopper(y, weight, None, None, "", CONFIG)
        x = hopper(both, weight, None, x, "", CONFIG)
    return x


def inner(x, weights):
    """A product reads a part of what is computed, or all of it in another order."""
    y = x.sin()
    return (
        hopper(y[:, :16], weights[0][:, :16], None, None, "", CONFIG)
        + hopper(y.t(), weights[0][:, :9], None, None, "", CONFIG).t()[:9, :9].sum()
    )


def check(fn, *args):
    with torch.no_grad():
        found = torch.compile(fn, backend=backend, dynamic=False)(*args)
        assert_close(found, fn(*args).double(), torch.float32, scale=64.0)


def given(rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator)
    return x, [torch.randn(64, 64, generator=generator) / 8 for _ in range(3)]


def test_what_products_read_is_in_memory(on_the_cpu, monkeypatch):
    stored, store = [], stored_operands._store

    def watched(operand):
        store(operand)
        stored.append(isinstance(operand.data.data, ir.Buffer | ir.InputBuffer))

    monkeypatch.setattr(stored_operands, "_store", watched)
    check(layers, *given(9))
    assert stored == [True] * 3 * (2 + 2 + 3)  # of each layer, the same tensor again or not


def test_parts_and_other_orders_are_right(on_the_cpu):
    check(inner, *given(9))


def test_torch_is_as_it_was_afterwards():
    before = GraphLowering.run_node
    with pytest.raises(KeyError), remembered_kernel_facts():
        assert GraphLowering.run_node is not before
        raise KeyError
    assert GraphLowering.run_node is before
