"""The patch embedding of a vision Transformer on a GPU, which is a matrix product there."""

import pytest
import torch
from close import assert_close
from torch import nn

from stof_compile import explain

pytestmark = pytest.mark.gpu


class Embedding(nn.Module):
    """Patches of an image behind a class token, with positions, normalised."""

    def __init__(self, width=768, patch=16, image=224):
        super().__init__()
        self.projection = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        rows = self.projection(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1), rows], dim=1)
        return self.norm(rows + self.positions)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_gpu_patch_embedding(dtype, batch, fresh_dynamo, tmp_path):
    torch.manual_seed(0)
    model = Embedding().eval().to("cuda", dtype)
    exact = Embedding().eval().to("cuda", torch.float64)
    exact.load_state_dict(model.state_dict())
    options = {"tune_budget_s": 0, "cache_dir": str(tmp_path)}
    compiled = torch.compile(model, backend="stof", dynamic=False, options=options)
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype)
    with torch.no_grad():
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            assert_close(compiled(given), exact(given.double()), dtype, scale=4.0)
    notes = [note for graph in explain(compiled).graphs for note in graph.notes]
    assert "patch embeddings computed as products: 1" in notes
