"""What normalisation makes of a call, and the inputs and spellings that its tests share."""

import math
from collections import Counter

import torch
from true_values import assert_values_are_true

from stof_compile.capture import read_capture
from stof_compile.node_ops import operation
from stof_compile.normalize import normalize

PASSES = ("rewrite_rms_norms", "rewrite_gelus", "rewrite_silus")
WIDTH = 24


class Normalized:
    """What normalisation made of a call: counts of the three passes, the graph, the result."""

    def __init__(self, fn, *args, dynamic=False, **kwargs):
        self.counts, self.again, self.gm = (), (), None

        def backend(gm, inputs):
            facts = read_capture(gm, inputs)
            runs = [normalize(gm, facts) for _ in range(2)]
            self.counts, self.again = ([run[name] for name in PASSES] for run in runs)
            self.gm = gm
            return gm.forward

        torch._dynamo.reset()
        self.result = torch.compile(fn, backend=backend, dynamic=dynamic)(*args, **kwargs)

    @property
    def names(self):
        return Counter(operation(n) for n in self.gm.graph.nodes)

    def assert_values_are_true(self):
        assert_values_are_true(self.gm)


def rows(dtype=torch.float32, width=WIDTH):
    return torch.randn(3, 33, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def weight(dtype=torch.float32):
    return torch.linspace(0.5, 1.5, WIDTH).to(dtype)


def llama(x, w):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
