"""Ceilings of the device, measured, and the floors of a masked attention and of a whole model.

element floor = max(bytes of Q, K, V, O / bandwidth, kept elements x 4 D operations / rate); tile
floor = the same with all elements of the touched 64x64 tiles. Bandwidth is a large copy (read +
written); rate is the best dense attention kernel at that head dim, since no attention kernel
reaches the rate of a plain matrix product; for fp32 a sixth of it (``Ceilings.rate``). A model's
floor is the larger of two: its products at the rate of a large product plus the tile floors of its
attention, and its weights at copy bandwidth.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import Cell
from fa4 import fa4_attention, load_fa4
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

log = logging.getLogger(__name__)

# FA4, dense, of the same device (not importable everywhere): (device, head dim) -> TFLOP/s
PUBLISHED_TFLOPS = {("NVIDIA H200", 64): 535.0, ("NVIDIA H200", 128): 730.0}


@dataclass(frozen=True)
class AttentionWork:
    """Equal attention layers of a model.

    Args:
        count: how many. flop: operations of one in the tiles its mask touches.
        moved_bytes: Q, K, V and output of one, each once.
    """

    count: int
    flop: float
    moved_bytes: float
    head_dim: int


@dataclass(frozen=True)
class ModelWork:
    """What one call of a model has to do.

    Args:
        product_flop: operations of all matrix products but attention's.
        weight_bytes: all parameters but tables that are looked up.
    """

    product_flop: float
    weight_bytes: float
    attention: tuple[AttentionWork, ...]


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches.

    Args:
        copy_tb_s: device-to-device copy in TB/s, read + written.
        matmul_tflops: large matrix product (bf16 8192^3 on CUDA, fp32 2048^3 on CPU).
        attention_tflops: head dim (as text, for JSON) -> best dense attention.
        sources: head dim -> where that figure comes from.
    """

    device: str
    copy_tb_s: float
    matmul_tflops: float
    attention_tflops: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def rate(self, head_dim: int, dtype: str = "float16") -> float:
        """Operations per second of attention at a head dim.

        Where it was measured in half precision, that of fp32 is a sixth: a product is three of TF32
        numbers, which tensor cores multiply at half the rate.
        """
        rate = self.attention_tflops.get(str(head_dim), self.matmul_tflops) * 1e12
        return rate / self._slower(dtype)

    def floor_us(self, cell: Cell, fraction: float) -> float:
        """Least microseconds of a kernel that works on ``fraction`` of the elements."""
        rate = self.rate(cell.head_dim, cell.dtype)
        return self._attention_us(cell.moved_bytes, fraction * cell.dense_flop, rate)

    def _slower(self, dtype: str) -> int:
        """How many times as long products of a dtype take as those that were measured, which are in
        half precision on CUDA and fp32 on a CPU."""
        return 6 if self.attention_tflops and dtype == "float32" else 1

    def model_floor_us(self, work: ModelWork, dtype: str = "float16") -> float:
        """Least microseconds of a whole model: products plus attention, or reading its weights."""
        products = 1e6 * work.product_flop / (self.matmul_tflops * 1e12 / self._slower(dtype))
        attention = sum(
            layer.count
            * self._attention_us(layer.moved_bytes, layer.flop, self.rate(layer.head_dim, dtype))
            for layer in work.attention
        )
        return max(products + attention, 1e6 * work.weight_bytes / (self.copy_tb_s * 1e12))

    def _attention_us(self, moved_bytes: float, flop: float, rate: float) -> float:
        return 1e6 * max(moved_bytes / (self.copy_tb_s * 1e12), flop / rate)


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the CPU with its thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = "CPU"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{model} ({torch.get_num_threads()} threads)"


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of one call; long calls only, so launch cost does not count.

    The median, on a CPU the least: what it reaches is what other programs do not take away.
    """
    times = []
    for index in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= 2:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2 if device.type == "cuda" else 0]


def measure_ceilings(device: torch.device, head_dims: tuple[int, ...] = (64, 128)) -> Ceilings:
    """Measure copy bandwidth, matrix rate and dense attention on random data (a few seconds)."""
    cuda = device.type == "cuda"
    copied = _copy_rate(device)
    edge, dtype = (8192, torch.bfloat16) if cuda else (2048, torch.float32)
    a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    matmul = 2 * edge**3 / _seconds(lambda: a @ b, device, 10 if cuda else 30) / 1e12
    name = device_name(device)
    rates: dict[str, float] = {}
    sources: dict[str, str] = {}
    if cuda:
        for head_dim in head_dims:
            rates[str(head_dim)], sources[str(head_dim)] = _dense_attention(name, device, head_dim)
    return Ceilings(name, copied, matmul, rates, sources)


def _copy_rate(device: torch.device) -> float:
    """TB/s of a large copy, read + written."""
    size = 2**32 if device.type == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device, 5) / 1e12


def _dense_attention(name: str, device: torch.device, head_dim: int) -> tuple[float, str]:
    shape = (16, 12, 4096, 64) if head_dim == 64 else (1, 32, 12288, head_dim)
    q, k, v = (torch.randn(shape, device=device).half() for _ in range(3))
    flop = 4 * shape[0] * shape[1] * shape[2] ** 2 * head_dim
    best, source = PUBLISHED_TFLOPS.get((name, head_dim), 0.0), "FA4, published for this device"
    for library, attend in _dense_kernels().items():
        try:
            seconds = _seconds(partial(attend, q, k, v), device, 10)
        except Exception as error:  # not in this build, or too wide a head: FA4 has many classes
            log.debug("no rate of %s at head dim %d: %s", library, head_dim, error)
            continue
        if flop / seconds / 1e12 > best:
            best, source = flop / seconds / 1e12, library
    return best, source


def _dense_kernels() -> dict[str, Callable[..., Any]]:
    """Attention without a mask by libraries, which raise where they cannot run."""

    def forced(backend: SDPBackend, *tensors: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors)

    def of_fa4(*tensors: Tensor) -> Tensor:
        function = load_fa4()
        if function is None:
            raise RuntimeError("it is not installed")
        return fa4_attention(function)(*tensors)

    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    return {**{b.name: partial(forced, b) for b in backends}, "FA4": of_fa4}


def load_ceilings(path: Path, device: torch.device, head_dim: int = 64) -> Ceilings:
    """Read the ceilings of this device, measuring and writing what the file does not have."""
    ceilings = read_ceilings(path)
    if ceilings is None or ceilings.device != device_name(device):
        ceilings = measure_ceilings(device)
    elif device.type != "cuda" or str(head_dim) in ceilings.attention_tflops:
        return ceilings
    if device.type == "cuda" and str(head_dim) not in ceilings.attention_tflops:
        rate, source = _dense_attention(ceilings.device, device, head_dim)
        if rate > 0.0:
            ceilings = replace(
                ceilings,
                attention_tflops={**ceilings.attention_tflops, str(head_dim): rate},
                sources={**ceilings.sources, str(head_dim): source},
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(ceilings), indent=1) + "\n")
    return ceilings


def read_ceilings(path: Path) -> Ceilings | None:
    """Ceilings that were measured before, of whatever device; None where there is no file."""
    return Ceilings(**json.loads(path.read_text())) if path.exists() else None
