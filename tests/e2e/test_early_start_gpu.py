"""On Hopper Inductor's kernels start early between ours and the library's, with equal results."""

import re

import pytest
import torch
import torch.nn.functional as F
from linear_recipes import SMALL
from stof_compile.templates.triton_linear import DIMENSIONS
from torch._inductor.utils import run_and_get_code

from stof_compile.early_start import EARLY, SETTING
from stof_compile.inductor import compile_with_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="launches overlap on Hopper and newer",
    ),
]
CONFIG = SMALL | {
    "block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3, "group_m": 8,
}  # fmt: skip


def layers(x, weights):
    """Norms, sums, fills that read nothing, products of ours and of the library, in turns."""
    config = [CONFIG[name] for name in DIMENSIONS]
    for number, weight in enumerate(weights):
        y = F.rms_norm(x, x.shape[-1:])
        if number % 2:
            y = torch.ops.stof.fused_linear(y, weight, None, None, None, "relu", config)
        else:
            y = torch.relu(F.linear(y, weight))
        marks = x.new_zeros((16,), dtype=torch.int32)
        y = torch.ops.stof.fused_linear_marked(y, weight, None, x, None, "", config, marks, 0)
        x = torch.clamp(y, max=1000.0) + marks[0].to(x.dtype)
    return x, x.float().softmax(-1)


@pytest.mark.parametrize("rows", [1, 128, 4096])
def test_gpu_results_are_those_of_ordinary_launches(rows, fresh_dynamo):
    torch.manual_seed(rows)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.float16)
    weights = [torch.randn(512, 512, device="cuda", dtype=torch.float16) / 23 for _ in range(12)]

    def compiled(settings):
        def backend(gm, inputs):
            return compile_with_settings(gm, inputs, settings, trains=False)

        torch._dynamo.reset()
        return torch.compile(layers, backend=backend, dynamic=False)

    with torch.no_grad():
        wanted = compiled({"force_disable_caches": True})(x, weights)
        early = compiled({"force_disable_caches": True, SETTING: EARLY})
        found, codes = run_and_get_code(early, x, weights)
        code = "".join(codes)
        kinds = "pointwise|reduction|persistent_reduction"
        own = re.findall(rf"@triton_heuristics\.(?:{kinds})\(.*?\'\'\'", code, re.S)
        assert own
        if rows < 4096:  # short kernels
            assert all("gdc_wait" in text and "'launch_pdl': True" in text for text in own)
        for _ in range(20):
            torch.testing.assert_close(early(x, weights), wanted, rtol=0, atol=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = early(x, weights)
        for _ in range(50):
            for part in found:
                part.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
