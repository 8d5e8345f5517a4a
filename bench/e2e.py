"""End to end: a whole model under a BigBird mask, compiled in each way.

The mask reaches SDPA's peers as one 4-D bool tensor, FlexAttention as a block mask inside the
model's attention function, STOF as a rule in its options. ``median_us`` is one call of the compiled
model with an empty queue (plain timing, launches included), ``back_to_back_us`` a call in a row of
calls, ``graph_us`` the replay of a CUDA graph of it, which only modes without graphs of their own
allow. Compiling and tuning stand apart in ``compile_s``.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from attention import describe_site
from cases import Cell, dense_mask, mask_spec, table2_cell
from machine import conditions, version_of
from models import FLEX_NAME, build_model, call_with_mask, make_tokens, register_flex
from peers import M64, SAFE, Setup, split_block_mask
from results import append_row, log_event, read_rows, say
from torch import Tensor

FIELDS = (
    "cell", "model", "batch", "seq", "mask", "window", "global_tokens", "dtype", "density", "peer",
    "median_us", "p20_us", "p80_us", "runs", "back_to_back_us",
    "graph_us", "graph_method", "compile_s", "peak_bytes",
    "max_rel", "rms_rel", "detail", "device", "torch", "triton", "transformers", "stof", "date",
)  # fmt: skip
SHAPES = {"cuda": ("1x128", "8x512", "16x2048"), "cpu": ("1x128", "1x512", "1x1024")}
SMOKE_SHAPES = ("1x128", "2x192")
# rms error of a whole model against fp64 that rounding explains
MODEL_RMS = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.float32: 1e-4}
MODES = {"default": None, "ro": "reduce-overhead"}


@dataclass(frozen=True)
class Way:
    """One way to compile the model."""

    name: str
    attention: str  # sdpa | flex | stof
    mode: str | None


def ways(device: torch.device) -> list[Way]:
    """All ways; CUDA graphs (ro) only where there is a GPU."""
    modes = {k: v for k, v in MODES.items() if device.type == "cuda" or v is None}
    return [
        Way(f"{label}-{short}", attention, mode)
        for label, attention in (("compile", "sdpa"), ("flex", "flex"), ("stof", "stof"))
        for short, mode in modes.items()
    ]


def model_cell(shape: str, device: torch.device, smoke: bool) -> Cell:
    """The attention problem inside the model."""
    batch, seq = (int(n) for n in shape.split("x"))
    sizes: dict[str, Any] = {"heads": 2, "head_dim": 32} if smoke else {}
    dtype = "float16" if device.type == "cuda" else "float32"
    return table2_cell(batch, seq, "bigbird", dtype=dtype, **sizes)


def e2e_units(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Cells with ways missing: (shape, how many)."""
    shapes = SMOKE_SHAPES if args.smoke else SHAPES[args.device]
    wanted = args.cells.split(",") if args.cells else list(shapes)
    done: dict[str, set[str]] = {}
    for row in read_rows(args.out):
        done.setdefault(row["cell"], set()).add(row["peer"])
    units = []
    for shape in wanted:
        names = {way.name for way in ways(torch.device(args.device))}
        left = names - done.get(shape, set())
        if left:
            units.append((shape, len(left)))
    return units


@torch.no_grad()
def run_e2e(args: argparse.Namespace, device: torch.device) -> None:
    """Compile and measure every way that has no row yet (warming: only compile)."""
    cell = model_cell(args.worker, device, args.smoke)
    keep = dense_mask(cell, device)
    tokens = make_tokens(args.model, cell.batch, cell.seq, args.seed, device)
    warming = args.warm_worker is not None
    done = {r["peer"] for r in read_rows(args.out) if r["cell"] == cell.shape_name}
    expected = None if warming else reference(args.model, cell, keep, tokens, args.seed)
    peers = set(args.peers.split(",")) if args.peers else set()
    for way in ways(device):
        if way.name in done or (peers and way.name not in peers and way.attention not in peers):
            continue
        setup = Setup(cell, device, keep, _store(args.caches, cell, warming))
        where = (args.out, cell.shape_name, way.name, args.model)
        with timing.own_caches(args.caches, f"e2e-{way.name}", setup.store):
            try:
                call, compiled = compile_model(way, args.model, setup, args.seed)
                compile_s = timing.first_call(call, (tokens,), device)
                if expected is None:
                    continue
                row = _measure(call, tokens, expected, way, cell, where, device)
                if row is None:
                    continue
                detail = stof_detail(compiled) if way.attention == "stof" else ""
            except (
                Exception
            ) as failure:  # one way's failure is a line of the log; the others still run
                text = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
                log_event(*where, "error", text)
                continue
        density = float(keep.double().mean())
        facts = _facts(args.model, cell, density, device)
        append_row(args.out, FIELDS, {**facts, **row, "compile_s": compile_s, "detail": detail})
        say(
            f"  {cell.shape_name:9s} {way.name:16s} {row['median_us']:10.1f} us  (compile "
            f"{compile_s:.1f} s)"
        )


def _store(caches: Path, cell: Cell, warming: bool) -> Path:
    return caches / (f"warm-store-e2e-{cell.shape_name}" if warming else "stof-store")


def compile_model(
    way: Way, model_name: str, setup: Setup, seed: int
) -> tuple[Callable[[Tensor], Tensor], Any]:
    """Build and compile the model of one way; nothing runs yet."""
    cell = setup.cell
    if way.attention == "flex":
        cuda = setup.device.type == "cuda"
        tiles = M64 | SAFE if cuda else {}
        register_flex(split_block_mask(setup, 64 if cuda else 32), tiles, setup.device)
    implementation = FLEX_NAME if way.attention == "flex" else "sdpa"
    model = build_model(model_name, cell.seq, implementation, seed)
    model = model.to(setup.device, cell.torch_dtype)
    if way.attention == "stof":
        options = {"mask": mask_spec(cell), "cache_dir": setup.choices, "strict": True}
        options |= {"mode": way.mode} if way.mode else {}
        compiled = torch.compile(model, backend="stof", dynamic=False, options=options)
        return call_with_mask(compiled, None), compiled
    compiled = torch.compile(model, dynamic=False, mode=way.mode)
    mask = setup.keep[None, None] if way.attention == "sdpa" else None
    return call_with_mask(compiled, mask), compiled


def reference(name: str, cell: Cell, keep: Tensor, tokens: Tensor, seed: int) -> Tensor:
    """The masked model in fp64 with the tested dtype's weights, one sequence at a time."""
    model = build_model(name, cell.seq, "sdpa", seed).to(cell.torch_dtype)
    model = model.to(device=tokens.device, dtype=torch.float64)
    mask = keep[None, None]
    rows = [model(input_ids=row[None], attention_mask=mask).last_hidden_state for row in tokens]
    return torch.cat(rows)


def _measure(
    call: Callable[[Tensor], Tensor],
    tokens: Tensor,
    expected: Tensor,
    way: Way,
    cell: Cell,
    where: tuple[Path, str, str, str],
    device: torch.device,
) -> dict[str, Any] | None:
    """Timings and errors, or None when the output is wrong."""
    timing.poison(expected.shape, cell.torch_dtype, device)
    error = call(tokens).double() - expected
    rms = float(error.square().mean().sqrt() / expected.square().mean().sqrt())
    largest = float(error.abs().max() / expected.abs().max())
    if not rms <= MODEL_RMS[cell.torch_dtype]:
        log_event(*where, "incorrect", f"rms {rms:.3g} max {largest:.3g} against the fp64 model")
        return None
    del error
    other = tokens.flip(0).contiguous() if len(tokens) > 1 else tokens.flip(1).contiguous()
    sets = [(tokens,), (other,), (tokens.roll(1, 1).contiguous(),)]
    peak = timing.peak_bytes(call, (tokens,), device)
    plain = timing.launch_time(call, sets, device, budget_s=1.0)
    graph = None
    if way.mode is None and device.type == "cuda":  # reduce-overhead replays graphs of its own
        graph = timing.replay_time(call, sets, device, budget_s=0.5)
    return {
        "peer": way.name,
        "median_us": plain.median_us,
        "p20_us": plain.p20_us,
        "p80_us": plain.p80_us,
        "runs": plain.runs,
        "back_to_back_us": timing.back_to_back_us(call, sets, device),
        "graph_us": graph.median_us if graph else "",
        "graph_method": graph.method if graph else "",
        "peak_bytes": peak,
        "max_rel": largest,
        "rms_rel": rms,
    }


def stof_detail(compiled: Any) -> str:
    """How often each kernel and config was chosen over the model's sites."""
    import stof_compile

    counts: dict[str, int] = {}
    for site in stof_compile.explain(compiled).sites:
        text = describe_site(site)
        counts[text] = counts.get(text, 0) + 1
    return " | ".join(f"{n}x {text}" for text, n in counts.items()) or "no site"


def _facts(model: str, cell: Cell, density: float, device: torch.device) -> dict[str, Any]:
    columns = cell.columns()
    kept = ("batch", "seq", "mask", "window", "global_tokens", "dtype")
    return {
        "cell": cell.shape_name,
        "model": model,
        "density": density,
        **{name: columns[name] for name in kept},
        **conditions(device),
        "transformers": version_of("transformers"),
    }
