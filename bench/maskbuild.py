"""Long block masks: build time and memory at 131,072 tokens, and attention over one.

Build time is the median of five builds from a rule to a finished block mask on the device,
synchronised, nothing cached; ``peak_bytes`` is what the build took at its height, ``kept_bytes``
what the block mask holds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import timing
import torch
from attention import Paths
from cases import table2_cell
from machine import conditions
from results import append_row, log_event, say
from roofline import load_ceilings
from torch import Tensor

from stof_compile.masks.block_mask import build_block_mask
from stof_compile.measure import check_close

if TYPE_CHECKING:
    from stof_compile.masks.spec import MaskSpec

FIELDS = (
    "cell", "seq", "median_ms", "first_ms", "p80_ms", "peak_bytes", "kept_bytes", "tiles_kept",
    "bytes_per_tile",
    "density", "max_rel", "rms_rel", "launch_ms", "tile_floor_ms", "device", "torch", "triton",
    "stof", "date",
)  # fmt: skip
HEADS, HEAD_DIM = 32, 128


def length_of(args: argparse.Namespace) -> int:
    """Tokens: as asked, else the goal's 131,072 (toy runs: 2,048)."""
    return int(args.length or (2048 if args.smoke else 131072))


def rules(seq: int) -> dict[str, Callable[[], MaskSpec]]:
    """What is built: the built-in rules, and a rule STOF cannot read."""
    from stof_compile import masks

    width = math.isqrt(seq)
    return {
        "sliding": lambda: masks.sliding_window(width),
        "longformer": lambda: masks.longformer(window=width, global_tokens=width),
        "bigbird": lambda: masks.bigbird(
            window=width, global_tokens=width, random_fill=0.1, seed=0
        ),
        "causal": masks.causal,
        "opaque": lambda: masks.rule(lambda b, h, q, k: (q >= k) & (q - k < 512)),
    }


def steps(args: argparse.Namespace) -> list[str]:
    """One process each."""
    return [*(f"build {name}" for name in rules(length_of(args))), "attention sliding"]


@torch.no_grad()
def run_step(args: argparse.Namespace, device: torch.device) -> None:
    """Run one step and write its row."""
    seq = length_of(args)
    kind, name = args.worker.split(" ")
    paths = Paths(args.out, args.caches)
    with timing.own_caches(paths.caches, "mask"):
        if kind == "build":
            row = _build(rules(seq)[name](), seq, device)
        else:
            found = _attend(rules(seq)[name](), seq, device, paths, args.seed)
            if isinstance(found, str):
                log_event(args.out, args.worker, "stof", "-", "incorrect", found)
                return
            row = found
    append_row(args.out, FIELDS, {"cell": args.worker, "seq": seq, **row, **conditions(device)})
    say(f"  {args.worker}: {row['median_ms']:.2f} ms")


def _build(spec: MaskSpec, seq: int, device: torch.device) -> dict[str, Any]:
    def build() -> Any:
        return build_block_mask(spec, seq, seq, 64, device=device)

    times = []
    for _ in range(6):
        timing.synchronize(device)
        start = time.perf_counter()
        built = build()
        timing.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    again = sorted(times[1:])
    kept = built.full_tiles + built.part_tiles
    held = built.nbytes
    density = built.density
    del built
    return {
        "first_ms": times[0],
        "median_ms": again[2],
        "p80_ms": again[4],
        "peak_bytes": timing.peak_bytes(build, (), device),
        "kept_bytes": held,
        "tiles_kept": kept,
        "bytes_per_tile": held / max(kept, 1),
        "density": density,
    }


def _attend(
    spec: MaskSpec, seq: int, device: torch.device, paths: Paths, seed: int
) -> dict[str, Any] | str:
    """Attention over the long mask through the public function; a string when it is wrong."""
    import stof_compile

    cuda = device.type == "cuda"
    cell = table2_cell(
        1, seq, "sliding", heads=HEADS, head_dim=HEAD_DIM, dtype="float16" if cuda else "float32"
    )
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (1, HEADS, seq, HEAD_DIM)
    q, k, v = (
        torch.randn(shape, device=device, generator=generator, dtype=cell.torch_dtype)
        for _ in range(3)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof_compile.sparse_attention(q, k, v, mask=spec)

    first_ms = 1e3 * timing.first_call(attend, (q, k, v), device)
    out = attend(q, k, v)
    plane = seed % HEADS
    expected = _band_oracle(q[0, plane], k[0, plane], v[0, plane], cell.window)
    report = check_close(out[0, plane], expected, cell.torch_dtype)
    if not report.ok or not bool(torch.isfinite(out).all()):
        return f"max {report.max_rel:.3g} rms {report.rms_rel:.3g} against fp64"
    del expected
    replay = timing.replay_time(
        attend, [(q, k, v)], device
    )  # one set is already larger than the L2
    launch = timing.launch_time(attend, [(q, k, v)], device)
    block_mask = build_block_mask(spec, seq, seq, 64, device=device)
    fraction = (block_mask.full_tiles + block_mask.part_tiles) * 64 * 64 / (seq * seq)
    ceilings = load_ceilings(paths.ceilings, device)
    return {
        "first_ms": first_ms,
        "median_ms": replay.median_us / 1e3,
        "p80_ms": replay.p80_us / 1e3,
        "launch_ms": launch.median_us / 1e3,
        "peak_bytes": timing.peak_bytes(attend, (q, k, v), device),
        "kept_bytes": block_mask.nbytes,
        "tiles_kept": block_mask.full_tiles + block_mask.part_tiles,
        "density": block_mask.density,
        "max_rel": report.max_rel,
        "rms_rel": report.rms_rel,
        "tile_floor_ms": ceilings.floor_us(cell, fraction) / 1e3,
    }


def _band_oracle(q: Tensor, k: Tensor, v: Tensor, window: int, strip: int = 1024) -> Tensor:
    """fp64 attention of one plane ``[S, D]`` under ``|q - k| <= window``, in strips of rows."""
    seq, scale = q.shape[0], q.shape[1] ** -0.5
    position = torch.arange(seq, device=q.device)
    rows = []
    for start in range(0, seq, strip):
        stop = min(start + strip, seq)
        low, high = max(0, start - window), min(seq, stop + window)
        scores = q[start:stop].double() @ k[low:high].double().T * scale
        far = (position[start:stop, None] - position[None, low:high]).abs() > window
        rows.append(scores.masked_fill(far, float("-inf")).softmax(-1) @ v[low:high].double())
    return torch.cat(rows)
