"""What must not be packed: writes between, gradients, other dtypes, weights that may change."""

import torch
import torch.nn.functional as F
from packed_projections import BIAS, KN, WIDTH, Packing, Three, Weights, found, packed, rows
from torch import nn

from stof_compile.capture import read_capture
from stof_compile.packing import search_packs
from stof_compile.packing_memory import parameter_bytes


class Inserted(Three):
    """Does something between the projections."""

    def __init__(self, between):
        super().__init__()
        self.between = between

    def forward(self, x):
        y = x * 1
        q = self.q(y)
        y = self.between(y)
        return q + self.k(y) + self.v(y)


def test_a_write_to_x_between(fresh_dynamo):
    def write_view(y):
        y[:, 0].mul_(2.0)
        return y

    sizes, reasons = found(Inserted(write_view), rows())
    assert sizes == [] and "may write to their input" in reasons[0]

    def write(y):  # normalisation makes it a value of its own, which k and v share
        return y.add_(1)

    assert found(Inserted(write), rows())[0] == [(WIDTH, WIDTH)]


def test_a_write_to_an_input_between(fresh_dynamo):
    model = Three()

    def run(x):
        q = model.q(x)
        x[0].zero_()
        return q + model.k(x) * model.v(x)

    sizes, reasons = found(run, rows())
    assert sizes == [] and "may write to their input" in reasons[0]


def test_a_write_to_a_result(fresh_dynamo):
    def write(q, k, v, x):
        part = k[:, 0]
        part.zero_()
        return q + k * v

    sizes, reasons = found(Three(write), rows())
    assert sizes == [] and "writes to" in reasons[0]


def test_a_weight_the_graph_writes(fresh_dynamo):
    model = Three()

    def run(x):
        model.k.weight.data.mul_(1.0)
        return model(x)

    sizes, _ = found(run, rows())
    assert (WIDTH,) * 3 not in sizes

    class Averaged(Three):
        def __init__(self):
            super().__init__()
            for name in "qkv":
                self.register_buffer(f"{name}_mean", getattr(self, name).weight.detach().clone())

        def forward(self, x):
            self.k_mean.add_(0.0)
            return sum(F.linear(x, getattr(self, f"{n}_mean")) for n in "qkv")

    assert found(Averaged(), rows())[0] == [(WIDTH, WIDTH)]  # q and v


def test_gradients(fresh_dynamo):
    backend = Packing()
    torch.compile(Three(), backend=backend)(rows()).sum().backward()
    assert not backend.packs and backend.refusals[0].reason == "gradients are recorded"

    def inside(x):
        with torch.enable_grad():
            return model(x)

    model = Three()
    assert packed(inside, rows())[0].packs == []


def test_fake_inputs(fresh_dynamo):
    reasons = []

    def backend(gm, inputs):
        mode = torch._subclasses.FakeTensorMode()
        fakes = [mode.from_tensor(t) for t in inputs]
        facts = read_capture(gm, fakes)
        packs, refusals = search_packs(gm, facts)
        assert not packs and parameter_bytes(gm, facts) == 0
        reasons.extend(r.reason for r in refusals)
        return gm.forward

    with torch.no_grad():
        torch.compile(Three(), backend=backend)(rows())
    assert len(reasons) == 1 and "fake" in reasons[0]


def test_autocast_regions(fresh_dynamo):
    model = Three()

    def same(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def two(x):
        with torch.autocast("cpu", torch.bfloat16):
            q = model.q(x)
        with torch.autocast("cpu", torch.bfloat16):
            k = model.k(x)
        return q * k * model.v(x)

    with torch.no_grad():
        backend, result = packed(same, rows())
        assert [p.sizes for p in backend.packs] == [(WIDTH,) * 3]
        assert result.dtype == same(rows()).dtype
        torch.testing.assert_close(result, same(rows()), rtol=1.6e-2, atol=1.6e-2)
        backend, result = packed(two, rows())
        assert backend.packs == [] and result.dtype == two(rows()).dtype


def test_weights_that_are_no_constants(fresh_dynamo):
    model = Three()
    torch.nn.utils.parametrizations.weight_norm(model.k)
    assert found(model, rows())[0] == [(WIDTH, WIDTH)]
    a, b = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    assert found(lambda x, a, b: F.linear(x, a) * F.linear(x, b), rows(), a, b)[0] == []


def test_other_dtypes_and_devices(fresh_dynamo):
    model = Three()
    model.k.double()
    run = lambda x: model.q(x) + model.k(x.double()) + model.v(x)  # noqa: E731
    assert found(run, rows())[0] == [(WIDTH, WIDTH)]


class Tagged(torch.Tensor):
    """A weight of another tensor class."""


def test_subclasses(fresh_dynamo):
    model = Three()
    model.k.weight = nn.Parameter(model.k.weight.detach().as_subclass(Tagged))
    backend, _ = packed(model, rows())
    assert (WIDTH,) * 3 not in [p.sizes for p in backend.packs]


def test_a_bias_that_is_a_residual(fresh_dynamo):
    model = Weights(
        lambda x, a, b, r: torch.addmm(r, x[0], a) * torch.addmm(r, x[0], b), KN, KN, (5, 8)
    )
    assert found(model, rows())[0] == []

    def add(x, a, b, r):
        return (x @ a + r) * (x @ b + r)

    model = Weights(add, KN, KN, (5, 8))  # packed without it: the sums stay
    backend, result = packed(model, rows())
    assert [p.biases for p in backend.packs] == [(None, None)]
    with torch.no_grad():
        torch.testing.assert_close(result, model(rows()))


def test_scaled_addmm(fresh_dynamo):
    def run(x, a, b, c, d):
        x = x.flatten(0, 1)
        return torch.addmm(b, x, a, alpha=2.0) + torch.addmm(d, x, c, beta=0.5)

    assert found(Weights(run, KN, BIAS, KN, BIAS), rows())[0] == []


def test_too_many(fresh_dynamo):
    model = Weights(lambda x, *w: sum(F.linear(x, v) for v in w), *[(8, WIDTH)] * 5)
    sizes, reasons = found(model, rows())
    assert sizes == [] and "at most 4" in reasons[0]


def test_hooks(fresh_dynamo):
    """Hooks are traced: one that changes an input or a result is seen in the graph."""
    model = Three()
    model.k.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert found(model, rows())[0] == [(WIDTH, WIDTH)]
    model = Three()
    model.k.register_forward_hook(lambda module, args, out: out.clamp_(min=0))
    assert (WIDTH,) * 3 in found(model, rows())[0] or found(model, rows())[1]


class Adapted(nn.Module):
    """A low-rank adapter as peft writes it."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, WIDTH, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters(fresh_dynamo):
    model = Three()
    model.q, model.v = Adapted(model.q), Adapted(model.v)
    assert found(model, rows())[0] == []
