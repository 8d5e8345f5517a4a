"""Facts about the device a graph runs on, read once."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """What kernel selection and reports need to know of one device.

    Args:
        kind: "cpu" or "cuda" (ROCm calls itself "cuda" too; ``runtime`` tells them apart).
        name: marketing name, for people and as part of the cache key.
        runtime: "cpu", "cuda 13.0", "rocm 7.0".
        capability: (major, minor) on CUDA, None elsewhere.
        arch: "sm_90", "gfx942", or the vector extension torch uses on a CPU ("AVX512").
        units: streaming multiprocessors of a GPU; threads torch uses on a CPU.
        shared_memory_bytes: shared memory one block may ask for; 0 on a CPU.
        l2_bytes: last cache before memory, 0 where torch does not know it.
        memory_bytes: device memory; 0 on a CPU.
    """

    kind: str
    name: str
    runtime: str
    capability: tuple[int, int] | None
    arch: str
    units: int
    shared_memory_bytes: int
    l2_bytes: int
    memory_bytes: int

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA (or ROCm) kernels run here."""
        return self.kind == "cuda"

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON values."""
        plain = dataclasses.asdict(self)
        plain["capability"] = list(self.capability) if self.capability else None
        return plain


def cuda_index(device: torch.device) -> int:
    """The number of a CUDA device; that of the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Read the facts of a device.

    Args:
        device: "cpu", "cuda" (the current one) or "cuda:<n>"; other kinds give a bare answer.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _cuda_facts(cuda_index(device))
    if device.type == "cpu":
        return _cpu_facts(torch.get_num_threads())
    return DeviceFacts(device.type, device.type, device.type, None, device.type, 0, 0, 0, 0)


@cache
def _cuda_facts(index: int) -> DeviceFacts:
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        runtime = f"rocm {torch.version.hip}"
        arch = str(props.gcnArchName).split(":")[0]
    else:
        runtime = f"cuda {torch.version.cuda}"
        arch = f"sm_{props.major}{props.minor}"
    shared = getattr(props, "shared_memory_per_block_optin", 0) or props.shared_memory_per_block
    return DeviceFacts(
        kind="cuda",
        name=props.name,
        runtime=runtime,
        capability=(props.major, props.minor),
        arch=arch,
        units=props.multi_processor_count,
        shared_memory_bytes=int(shared),
        l2_bytes=int(getattr(props, "L2_cache_size", 0)),
        memory_bytes=props.total_memory,
    )


@cache
def _cpu_facts(threads: int) -> DeviceFacts:
    return DeviceFacts(
        kind="cpu",
        name=_cpu_name(),
        runtime="cpu",
        capability=None,
        arch=torch.backends.cpu.get_cpu_capability(),
        units=threads,
        shared_memory_bytes=0,
        l2_bytes=0,
        memory_bytes=0,
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
