"""Layers like those of T5 on a GPU, whose checks for infinities the kernels of products do.

The scheme is forced, so that every run takes this path whatever is faster.
"""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch import nn

from stof_compile import explain

pytestmark = pytest.mark.gpu
LIMIT = torch.finfo(torch.float16).max
SCHEME = "595"  # cast | norm | cast | product, relu | product, residual | isinf | any | ...


class Layers(nn.Module):
    """Three times a norm, a product, its activation, a product, the residual and the clamp."""

    def __init__(self, width=768):
        super().__init__()
        make = dict(bias=False, device="cuda", dtype=torch.float16)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, **make) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, **make) for _ in range(3))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            y = F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)
            x = x + down(torch.relu(up(y)))
            limit = torch.where(torch.isinf(x).any(), LIMIT - 1000, LIMIT)
            x = torch.clamp(x, min=-limit, max=limit)
        return x


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("shape", [(1, 128), (2, 100), (4, 512)], ids=["128", "200", "2048"])
def test_gpu_layers_with_and_without_an_infinity(shape, mode, fresh_dynamo, tmp_path):
    torch.manual_seed(0)
    model = Layers().eval()
    options = {"tune_budget_s": 0, "fusion": SCHEME, "cache_dir": str(tmp_path), "mode": mode}
    compiled = torch.compile(model, backend="stof", dynamic=False, options=options)
    x = torch.randn(*shape, 768, device="cuda", dtype=torch.float16)
    one, two = x.clone(), x.clone()
    one[0, 5, 7] = torch.inf
    two[-1, -1, 3] = -torch.inf
    two[0, 0, 0], two[0, 1, 0] = LIMIT - 1, 1 - LIMIT  # finite, beyond the lower limit
    with torch.no_grad():
        for given in (x, one, x, two, x):
            out = compiled(given.clone()).clone()
            wanted = model(given)
            assert out.isfinite().equal(wanted.isfinite())
            assert_close(out, wanted.double(), torch.float16, scale=8.0)
    notes = [note for graph in explain(compiled).graphs for note in graph.notes]
    assert "checks for infinities done by the kernels of products: 3" in notes
