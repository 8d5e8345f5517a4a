"""On a GPU a norm in front of products, and the tables of their rotations, are stored once."""

import re

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from linear_recipes import SMALL
from stof_compile.templates.triton_linear import DIMENSIONS
from torch._inductor.utils import run_and_get_code

from stof_compile.inductor import compile_with_settings

pytestmark = pytest.mark.gpu
HALF = torch.float16
CONFIG = SMALL | {
    "block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3, "group_m": 8,
}  # fmt: skip


def layers(x, positions, frequencies, qkv, back):
    angles = torch.outer(positions, frequencies)
    angles = torch.cat((angles, angles), -1)[None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    config = [CONFIG[name] for name in DIMENSIONS]
    for weight, other in zip(qkv, back, strict=True):
        y = F.rms_norm(x, x.shape[-1:])
        tables = cos.reshape(-1, 64), sin.reshape(-1, 64)
        h = torch.ops.stof.fused_rope_linear(y, weight, None, *tables, 64, 256, config)
        up = torch.ops.stof.fused_linear(y, weight, None, None, None, "relu", config)
        x = torch.ops.stof.fused_linear(h + up, other, None, x, None, "", config)
    return x


def test_gpu_norms_and_tables_are_stored_once(fresh_dynamo):
    torch.manual_seed(0)
    make = dict(device="cuda", dtype=HALF)
    x = torch.randn(2, 128, 256, **make)
    positions, frequencies = torch.arange(128.0, device="cuda"), torch.rand(32, device="cuda")
    qkv = [torch.randn(384, 256, **make) / 16 for _ in range(3)]
    back = [torch.randn(256, 384, **make) / 16 for _ in range(3)]

    def backend(gm, inputs):
        return compile_with_settings(gm, inputs, {"force_disable_caches": True}, trains=False)

    args = (x, positions, frequencies, qkv, back)
    with torch.no_grad():
        compiled = torch.compile(layers, backend=backend, dynamic=False)
        found, codes = run_and_get_code(compiled, *args)
        assert_close(found, layers(*args).double(), HALF, scale=8.0)
    (code,) = codes
    assert len(re.findall(r"(?:libdevice|tl_math)\.cos\(", code)) == 1
    kernels = re.findall(r"^def triton_\w+\(.*?\n'''", code, re.S | re.M)
    assert kernels
    assert all(kernel.count("tl.store(") <= 2 for kernel in kernels), code
