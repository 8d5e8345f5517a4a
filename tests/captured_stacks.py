"""Stacks of layers as models write them, and a backend that records their normalised graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from stof_compile.capture import CaptureFacts, read_capture
from stof_compile.fusion.chain import OpChain, find_chains
from stof_compile.normalize import normalize


@dataclass
class Graph:
    """One captured graph after normalisation, with its chains."""

    gm: GraphModule
    facts: CaptureFacts
    chains: list[OpChain]

    def node(self, name: str) -> Node:
        return next(node for node in self.gm.graph.nodes if node.name == name)

    def chain_with(self, kind: str) -> OpChain:
        return next(c for c in self.chains if any(op.kind.name == kind for op in c.ops))


@pytest.fixture
def capture(fresh_dynamo: None) -> Callable[..., Graph]:
    """Compile a callable with a backend that records its one graph; nothing is run."""

    def run(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> Graph:
        graphs: list[Graph] = []

        def record(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            facts = read_capture(gm, inputs)
            normalize(gm, facts)
            graphs.append(Graph(gm, facts, find_chains(gm, facts)))
            return gm.forward

        torch.compile(fn, backend=record, dynamic=dynamic)(*args)
        (graph,) = graphs
        return graph

    return run


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


class BertLayer(nn.Module):
    def __init__(
        self, width: int = 32, eps: float = 1e-12, approximate: str = "none", count: int = 4
    ):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.count = count
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=eps) for _ in range(2))
        self.approximate = approximate

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(layer(x), self.count) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(self.o(seen.transpose(1, 2).reshape(x.shape)) + x)
        inner = F.gelu(self.up(x), approximate=self.approximate)
        return self.norm2(self.down(inner) + x)


class RmsNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


class LlamaLayer(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, width, bias=False)
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (heads(layer(y), 4) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *others)
        return x


@pytest.fixture
def stacks() -> dict[str, Callable[..., nn.Module]]:
    return {
        "bert": lambda layers=3, **k: Stack(*(BertLayer(**k) for _ in range(layers))).eval(),
        "llama": lambda layers=3, **k: Stack(*(LlamaLayer(**k) for _ in range(layers))).eval(),
    }


@pytest.fixture
def bert(capture, stacks) -> Callable[..., Graph]:
    """Graph of a BERT-like stack; without gradients."""

    def run(
        layers: int = 3, length: int = 33, dtype: torch.dtype = torch.float32, **given: Any
    ) -> Graph:
        mask = torch.ones(length, length, dtype=torch.bool)
        with torch.no_grad():
            model = stacks["bert"](layers, **given).to(dtype)
            width = given.get("width", 32)
            return capture(model, torch.randn(2, length, width, dtype=dtype), mask)

    return run


@pytest.fixture
def llama(capture, stacks) -> Callable[..., Graph]:
    """Graph of a LLaMA-like stack in bfloat16; without gradients."""

    def run(layers: int = 3) -> Graph:
        with torch.no_grad():
            model = stacks["llama"](layers).bfloat16()
            x = torch.randn(2, 33, 32).bfloat16()
            return capture(model, x, *torch.randn(2, 33, 8).bfloat16().unbind())

    return run
