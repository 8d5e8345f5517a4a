"""Projections of one input, and a backend that packs all of them that it finds."""

import torch
import torch.nn.functional as F
from torch import nn
from true_values import assert_values_are_true

from stof_compile.capture import read_capture
from stof_compile.node_ops import operation
from stof_compile.normalize import normalize
from stof_compile.packing import apply_packs, search_packs
from stof_compile.packing_memory import parameter_bytes

WIDTH = 16
GEMMS = ("linear", "addmm", "matmul")
KN, BIAS = (WIDTH, 8), (8,)
"""Shapes of a [K, N] weight and its bias."""


class Packing:
    """A backend that packs all it finds; ``inductor`` compiles the result for real."""

    def __init__(self, inductor=False, again=True):
        self.inductor, self.again = inductor, again
        self.packs, self.refusals, self.gm, self.guard, self.copied = [], [], None, None, 0

    def __call__(self, gm, inputs):
        self.facts = facts = read_capture(gm, inputs)
        normalize(gm, facts)
        self.before = self.gemms(gm)
        packs, self.refusals = search_packs(gm, facts)
        self.packs += packs
        self.model_bytes = parameter_bytes(gm, facts)
        self.guard = guard = apply_packs(gm, facts, packs)
        gm.graph.lint()
        gm.recompile()
        if self.again:
            assert not search_packs(gm, facts)[0], "a second run finds nothing"
            assert_values_are_true(gm, skipped=("empty", "rand"))
        self.gm, self.after = gm, self.gemms(gm)
        run = gm.forward
        if self.inductor:
            from torch._inductor.compile_fx import compile_fx

            graphs = inputs[0].is_cuda
            run = compile_fx(gm, inputs, config_patches={"triton.cudagraphs": graphs})

        def call(*given):
            self.copied = guard.refresh(given)
            return run(*given)

        return call

    @staticmethod
    def gemms(gm):
        return sum(operation(node) in GEMMS for node in gm.graph.nodes)


def packed(fn, *args, dynamic=False, **kwargs):
    """(backend, result) of a call without gradients."""
    backend = Packing()
    torch._dynamo.reset()
    with torch.no_grad():
        return backend, torch.compile(fn, backend=backend, dynamic=dynamic)(*args, **kwargs)


def found(fn, *args, **kwargs):
    """(sizes of each pack, reasons) after checking that the result is that of the plain call."""
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.no_grad():
        wanted = fn(*given)
    backend, result = packed(fn, *args, **kwargs)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    return [p.sizes for p in backend.packs], [r.reason for r in backend.refusals]


def rows(*lead, width=WIDTH):
    return torch.randn(*(lead or (2, 5)), width, generator=torch.Generator().manual_seed(0))


class Three(nn.Module):
    """Three projections of x; ``use`` makes the result of them and x."""

    def __init__(self, use=None, sizes=(WIDTH, WIDTH, WIDTH), biases=(True, True, True)):
        super().__init__()
        torch.manual_seed(0)
        pairs = zip(sizes, biases, strict=True)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=b) for n, b in pairs)
        self.use = use or (lambda q, k, v, x: F.relu(q) + torch.tanh(k) * v)

    def forward(self, x):
        return self.use(self.q(x), self.k(x), self.v(x), x)


class Weights(nn.Module):
    """Weights as plain parameters, for other spellings of a linear layer."""

    def __init__(self, forward, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(s) / 4) for s in shapes)
        self.function = forward

    def forward(self, x):
        # one by one: Dynamo of torch 2.11 cannot unpack a ParameterList
        return self.function(x, *[self.w[i] for i in range(len(self.w))])
