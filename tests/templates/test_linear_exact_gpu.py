"""fp32 linear layers on a GPU, where a product is three of TF32 numbers: as exact as torch's, or
their error is that of rounding a few times."""

import pytest
import torch
import torch.nn.functional as F
from linear_recipes import sized
from norm_recipes import SINGLE
from stof_compile.kernels import limits
from stof_compile.kernels.gated_linear import fused_gated_linear_forward
from stof_compile.kernels.linear import fused_linear_forward
from stof_compile.kernels.linear_chain import fused_linear_chain_forward
from stof_compile.templates.gemm_estimate import Product
from stof_compile.templates.gemm_tiles import ranked_tiles
from stof_compile.templates.triton_gated_linear import DIMENSIONS as GATED
from stof_compile.templates.triton_linear import DIMENSIONS, TritonLinear

from stof_compile.device import device_facts

pytestmark = pytest.mark.gpu

ROUNDED = 2e-7  # of what torch reaches where sums are short: 1.1e-7 of 300 products
SHAPES = [(128, 768, 3072), (1000, 776, 768), (4096, 768, 768), (33, 72, 300)]


def drawn(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda") * scale


def rms_error(out, exact):
    return ((out.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gpu_every_tile_is_exact(shape, part):
    m, n, k = shape
    x, weight, bias = drawn(m, k), drawn(n, k, scale=k**-0.5), drawn(n)
    exact = F.linear(x.double(), weight.double(), bias.double())
    of_torch = rms_error(F.linear(x, weight, bias), exact)
    configs = TritonLinear().space(sized(m, n, k, SINGLE), device_facts("cuda")).configs()
    stored = weight.t().contiguous().t()
    by_columns = ranked_tiles(Product(m, n, k, SINGLE, kn=True), device_facts("cuda"), DIMENSIONS)
    cases = [(weight, config) for config in configs]
    cases += [(stored, tile.config(DIMENSIONS)) for tile in by_columns[::3]]
    cases += [(stored, config) for config in configs[::5]]
    for w, config in cases[part::4]:
        given = [config[name] for name in DIMENSIONS]
        out = fused_linear_forward(x, w, bias, None, None, "", given)
        assert rms_error(out, exact) <= max(1.2 * of_torch, ROUNDED), (config, w.stride())


def test_gpu_gated_layers_and_chains():
    x, gate, up = drawn(256, 512), drawn(1024, 512, scale=512**-0.5), drawn(1024, 512, scale=0.04)
    exact = F.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    of_torch = rms_error(F.silu(F.linear(x, gate)) * F.linear(x, up), exact)
    product = Product(256, 1024, 512, SINGLE, sums=2)
    for tile in ranked_tiles(product, device_facts("cuda"), GATED)[::4]:
        given = list(tile.config(GATED).values())
        out = fused_gated_linear_forward(x, gate, up, None, None, "silu", given)
        assert rms_error(out, exact) <= 1.5 * of_torch, tile
    down = drawn(512, 1024, scale=1 / 32)
    exact = F.gelu(x.double() @ gate.double().t()) @ down.double().t()
    of_torch = rms_error(F.linear(F.gelu(F.linear(x, gate)), down), exact)
    config = [64, 64, 64, 32, 4, 2, 1]
    out = fused_linear_chain_forward(x, gate, None, "gelu", down, None, None, config)
    assert rms_error(out, exact) <= 1.5 * of_torch


@pytest.mark.parametrize("tile", [(64, 64, 32, 4, 3), (128, 64, 32, 4, 3), (32, 32, 32, 4, 2)])
def test_gpu_infinities_and_nan_come_out_where_torch_has_them(tile):
    x, weight = drawn(200, 256), drawn(96, 256)
    x[3, 5], x[7, 11], x[9, 0] = torch.inf, torch.nan, -torch.inf
    x[150] = 0
    x[151, 17] = 1e37
    weight[8, 2], weight[20, 30] = torch.nan, torch.inf
    out = fused_linear_forward(x, weight, None, None, None, "", [*tile, 8, 1, 0, 0])
    wanted = F.linear(x, weight)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf())
    infinite = wanted.isinf()
    assert torch.equal(out[infinite], wanted[infinite])


def test_gpu_tf32_is_used_as_it_is_where_torch_may(monkeypatch):
    x, weight = drawn(256, 1024), drawn(128, 1024, scale=1 / 32)
    exact = F.linear(x.double(), weight.double())
    given = [64, 64, 32, 4, 3, 8, 1, 0, 0]
    out = fused_linear_forward(x, weight, None, None, None, "", given)
    monkeypatch.setattr(limits, "tf32_allowed", lambda: True)
    rounded = fused_linear_forward(x, weight, None, None, None, "", given)
    assert rms_error(out, exact) < 1e-6 < 1e-4 < rms_error(rounded, exact) < 1e-3
