"""A graph that another process compiles and this one asks for, under modes and settings that are
none of the defaults; prints what Inductor counts here. Run by tests/search/test_form_workers.py.
"""

import json

import torch
from torch import _inductor as inductor
from torch import nn
from torch._dynamo.utils import counters

import stof_compile.ops  # noqa: F401 (registers operators)
from stof_compile.budget import Budget
from stof_compile.graph_copy import copy_graph
from stof_compile.inductor import compile_with_settings
from stof_compile.search.compile_pool import CompilePool
from stof_compile.search.form_workers import FormWorkers

SETTINGS = {"epilogue_fusion": True}


class Block(nn.Module):
    """A layer with parameters, and a mask that is a buffer of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("keep", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, add and normalise."""
        q = self.project(x).view(2, 8, 2, 8).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.keep)
        return self.norm(out.transpose(1, 2).reshape(2, 8, 16) + x)


def backend(gm, inputs):
    """Have a worker compile the graph, then compile it here."""
    pool = CompilePool(1)
    try:
        workers = FormWorkers(pool, torch.device("cpu"))
        assert workers.send("form", gm, inputs, SETTINGS)
        assert workers.wait("form", Budget(240))
    finally:
        pool.close()
    counters.clear()
    compiled = compile_with_settings(copy_graph(gm), inputs, SETTINGS, trains=False)
    found.append(dict(counters["inductor"]))
    return compiled


if __name__ == "__main__":
    model, x, found = Block().eval(), torch.randn(2, 8, 16), []
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    with torch.no_grad(), inductor.config.patch({"cpp.simdlen": 1}):
        out = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(out, model(x), atol=1e-5, rtol=1e-5)
    print(json.dumps(found[0]))
