"""``stof doctor``: what is here, what is missing, and the command that gets it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from stof_compile.cli.output import AsJson, Output, output
from stof_compile.cli.parts import (
    Cache,
    Problem,
    Tool,
    bytecode_problems,
    caches,
    missing,
    supported_torch,
    tools,
    torch_problems,
)

if TYPE_CHECKING:
    from stof_compile.device import DeviceFacts


def doctor(as_json: AsJson = False) -> None:
    """Check this machine and the installation."""
    with output(as_json) as out:
        try:
            import torch
        except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
            get = f"pip install '{supported_torch()[0]}'"
            _conclude(out, [Problem(f"torch cannot be imported: {error}", get, True)])
            return
        from stof_compile.device import device_facts
        from stof_compile.dump import versions

        names = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = [_Device(name, device_facts(name)) for name in names]
        found_tools, found_caches = tools([device.facts for device in devices]), caches()
        for name, version in versions().items():
            out.say(f"{name} {version}")
        for device in devices:
            out.say(device.line)
        out.show(_tool_table(found_tools))
        out.show(_cache_table(found_caches))
        out.result = {
            "versions": versions(),
            "devices": [device.to_json() for device in devices],
            "tools": [asdict(tool) for tool in found_tools],
            "caches": [asdict(cache) for cache in found_caches],
        }
        problems = torch_problems([device.facts for device in devices])
        problems += missing(found_tools, found_caches) + bytecode_problems()
        _conclude(out, problems)


def _conclude(out: Output, problems: list[Problem]) -> None:
    for problem in problems:
        out.say(f"{'problem' if problem.fatal else 'remark'}: {problem.what}; {problem.fix}")
    works = not any(problem.fatal for problem in problems)
    if not works:
        out.say("STOF cannot work here")
    elif problems:
        out.say("STOF works here, with less than it could: see the remarks")
    else:
        out.say("all there: try `stof demo`")
    out.result |= {"problems": [asdict(problem) for problem in problems], "works": works}
    out.status = 0 if works else 1


class _Device:
    """A device with what was measured on it."""

    def __init__(self, name: str, facts: DeviceFacts) -> None:
        self.name, self.facts = name, facts
        self.copy_gb_s: float | None = None
        self.matmul_tflops: float | None = None
        self.failure = ""
        try:
            self.copy_gb_s, self.matmul_tflops = measured_ceilings(name, facts.is_cuda)
        except RuntimeError as failure:  # no memory left, mostly: others use the device, too
            self.failure = (str(failure).splitlines() or [type(failure).__name__])[0]

    @property
    def _measured(self) -> str:
        if self.copy_gb_s is None:
            return f"not measured: {self.failure}"
        rates = f"copy {self.copy_gb_s:.0f} GB/s, matrix product {self.matmul_tflops:.2f} TFLOP/s"
        return f"measured: {rates}"

    @property
    def line(self) -> str:
        facts = self.facts
        line = (
            f"{self.name}: {facts.name}, {facts.runtime}, {facts.arch}, {facts.units} "
            f"{'multiprocessors' if facts.is_cuda else 'threads'}; {self._measured}"
        )
        if facts.is_cuda:
            memory = f"{facts.memory_bytes / 2**30:.0f} GiB"
            line += f"; {facts.shared_memory_bytes} B shared memory, {memory}"
        return line

    def to_json(self) -> dict[str, Any]:
        measured = {"copy_gb_s": self.copy_gb_s, "matmul_tflops": self.matmul_tflops}
        return {"device": self.name, **self.facts.to_json(), **measured}


def measured_ceilings(device: str, is_cuda: bool) -> tuple[float, float]:
    """Copy rate (read + written) in GB/s, and matrix rate in TFLOP/s (fp16 on CUDA, else fp32)."""
    import torch

    from stof_compile.measure import time_callable

    size, edge = (2**30, 8192) if is_cuda else (2**26, 1024)
    dtype = torch.float16 if is_cuda else torch.float32
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = time_callable(lambda: target.copy_(source), [()], device)
    left = torch.randn(edge, edge, dtype=dtype, device=device)
    product = time_callable(lambda: left @ left, [()], device)
    return 2 * size / copied.median_us / 1e3, 2 * edge**3 / product.median_us / 1e6


def _tool_table(found: list[Tool]) -> Table:
    table = Table(title="parts")
    for column in ("part", "found", "needed for"):
        table.add_column(column, overflow="fold")
    for tool in found:
        place = tool.found or ("missing" if tool.needed else "none, and not needed here")
        table.add_row(tool.name, escape(place), tool.use)
    return table


def _cache_table(found: list[Cache]) -> Table:
    table = Table(title="caches")
    for column in ("cache", "folder", "files", "MB"):
        table.add_column(
            column,
            overflow="fold",
            justify="right" if column in ("files", "MB") else "left",
        )
    for cache in found:
        size = f"{cache.size_bytes / 1e6:.1f}"
        table.add_row(cache.name, escape(cache.folder), str(cache.files), size)
    return table
