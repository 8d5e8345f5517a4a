"""Gradients of one attention cell: forward and backward pass of every variant of every peer.

Runs in a process of its own (``run.py`` starts it). A row needs gradients of q, k and v that agree
with fp64 in some planes and are finite in all. ``median_us`` is both passes together, by
CUDA-graph replay on a GPU, ``forward_us`` the forward pass with what it saves for the other, and
``backward_us`` the difference.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timing
import torch
from attention import Paths, stof_choice
from cases import Cell, dense_mask, densities, keep_rows, make_inputs
from machine import conditions
from peers import (
    SAFE,
    SAFE_MASKS,
    Attend,
    PeerMissingError,
    Setup,
    Variant,
    attention_variants,
    chosen_of,
    flex_expert,
    flex_split,
)
from results import append_row, log_event, say
from torch import Tensor

from stof_compile.attention.trial import GRADIENT_SCALE
from stof_compile.measure import ErrorReport, check_close

FIELDS = (
    "cell", "batch", "seq", "mask", "window", "global_tokens", "heads", "head_dim", "dtype",
    "density", "tile_density",
    "peer", "variant", "median_us", "p20_us", "p80_us", "runs", "method", "forward_us",
    "backward_us", "launch_us", "launch_p20_us", "launch_p80_us",
    "compile_s", "peak_bytes", "max_rel", "rms_rel",
    "detail", "device", "torch", "triton", "stof", "date",
)  # fmt: skip
PLANES = 8  # of batch and heads that are compared, the first and the last among them
STRIP = 2**24  # elements of scores at a time: 128 MiB in fp64
SHARED = ("stof", "stof_fn", "sdpa_mask", "sdpa_causal", "cudnn", "flex_default")
AUTOTUNED = "max-autotune-no-cudagraphs"
# of FlexAttention's backward kernels; by themselves they take 64 x 128 and 128 x 64 on Hopper
BACKWARD_64 = {
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4,
}  # fmt: skip
Gradients = tuple[Tensor, Tensor, Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k and v that want gradients, and the gradient of the output."""


def backward_variants(cell: Cell, device: torch.device) -> list[Variant]:
    """Every variant of every peer that has gradients there, STOF first.

    FlexAttention has none on a CPU. On a GPU its blocks of 64 need ``max-autotune``: by itself it
    looks for backward kernels of other sizes only.
    """
    variants = [v for v in attention_variants(cell, device) if v.peer in SHARED and not v.fp8]
    if device.type == "cpu":
        return [v for v in variants if v.peer != "flex_default"]
    safe = SAFE if cell.mask in SAFE_MASKS else {}
    experts: list[tuple[str, int, dict[str, Any], str | None]] = [
        ("b128", 128, safe, None),
        ("b128-bwd64", 128, safe | BACKWARD_64, None),
        ("b128-bwd64-s2", 128, safe | BACKWARD_64 | {"bwd_num_stages": 2}, None),
        ("b128-autotuned", 128, safe, AUTOTUNED),
        ("b64-autotuned", 64, safe, AUTOTUNED),
    ]
    for name, block, options, mode in experts:
        settings = {"block": block, "options": options, "mode": mode}
        variants.append(Variant("flex_expert", name, partial(flex_expert, **settings)))
        if cell.mask == "bigbird" and block == 64:
            variants.append(Variant("flex_split", name, partial(flex_split, **settings)))
    return variants


@dataclass(frozen=True)
class Prepared:
    """What all variants of a cell share.

    Args:
        planes: (batch, head) of what is compared. expected: the gradients there in fp64,
            ``[planes, S, D]`` each.
    """

    inputs: Inputs
    planes: list[tuple[int, int]]
    expected: Gradients
    sets: list[Inputs]
    facts: dict[str, Any]


def draw(cell: Cell, device: torch.device, generator: torch.Generator) -> Inputs:
    """Random inputs and a random gradient of the output."""
    q, k, v = (t.requires_grad_() for t in make_inputs(cell, device, generator))
    wanted, _, _ = make_inputs(cell, device, generator)
    return q, k, v, wanted


def exact_gradients(
    cell: Cell, inputs: Inputs, keep: Tensor | None, planes: Sequence[tuple[int, int]]
) -> Gradients:
    """Gradients of q, k and v in fp64 in some planes."""
    from stof_compile.kernels.reference import attention_backward_reference

    def kept(first: int, last: int) -> Tensor:
        rows = torch.arange(first, last, device=inputs[0].device)
        return (keep_rows(cell, rows) if keep is None else keep[rows])[None, None]

    found: list[tuple[Tensor, ...]] = []
    for at in planes:
        q, k, v, wanted = (t.detach()[at][None, None].double() for t in inputs)
        found.append(
            attention_backward_reference(
                wanted, None, q, k, v, kept, None, None, cell.head_dim**-0.5, 0.0,
                strip=max(1, STRIP // cell.seq),
            )[:3]
        )  # fmt: skip
    dq, dk, dv = (torch.cat(parts)[:, 0] for parts in zip(*found, strict=True))
    return dq, dk, dv


def chosen_planes(cell: Cell, seed: int) -> list[tuple[int, int]]:
    """(batch, head) of at most ``PLANES`` planes, the first and the last among them."""
    count = cell.batch * cell.heads
    between = range(1, count - 1)
    inner = random.Random(seed).sample(between, min(PLANES - 2, len(between)))
    return [divmod(plane, cell.heads) for plane in sorted({0, *inner, count - 1})]


def prepare(cell: Cell, device: torch.device, seed: int) -> Prepared:
    """Draw inputs from ``seed`` and evaluate the reference once for the cell."""
    generator = torch.Generator(device=device).manual_seed(seed)
    keep = dense_mask(cell, device) if cell.has_dense_mask else None
    inputs, planes = draw(cell, device, generator), chosen_planes(cell, seed)
    expected = exact_gradients(cell, inputs, keep, planes)
    # q, k, v, the output and a gradient of each
    count = timing.set_count(2 * cell.moved_bytes, device)
    sets = [draw(cell, device, generator) for _ in range(count)]
    density, tiles = densities(cell, keep, device)
    facts = {"density": density, "tile_density": tiles, **conditions(device)}
    return Prepared(inputs, planes, expected, sets, {**cell.columns(), **facts})


def check(
    step: Callable[..., Gradients], prepared: Prepared, dtype: torch.dtype
) -> tuple[ErrorReport, str]:
    """The largest distance of a gradient from fp64, and in words what is wrong, "" for nothing."""
    inputs = prepared.inputs
    for _ in range(2):  # from the third on a launch may be a repeated one, as those timed
        step(*inputs)
    timing.poison((3, *inputs[0].shape), dtype, inputs[0].device)
    found, worst, wrong = step(*inputs), ErrorReport(0.0, 0.0, True), []
    for name, whole, reference in zip("qkv", found, prepared.expected, strict=True):
        if not bool(whole.isfinite().all()):
            wrong.append(f"d{name} is not finite or not written everywhere")
        parts = torch.stack([whole[at] for at in prepared.planes])
        report = check_close(parts, reference, dtype, scale=GRADIENT_SCALE)
        worst = max(worst, report, key=lambda r: r.max_rel)
        if not report.ok:
            wrong.append(f"d{name}: max {report.max_rel:.3g} rms {report.rms_rel:.3g} against fp64")
    return worst, "; ".join(wrong)


def both_passes(attend: Attend) -> Callable[..., Gradients]:
    """A function of q, k, v and the gradient of the output that gives the gradients of q, k, v."""

    def step(q: Tensor, k: Tensor, v: Tensor, wanted: Tensor) -> Gradients:
        with torch.enable_grad():
            dq, dk, dv = torch.autograd.grad(attend(q, k, v), (q, k, v), wanted)
        return dq, dk, dv

    return step


def forward_pass(attend: Attend) -> Callable[..., Tensor]:
    """The forward pass as training runs it, on the same arguments."""

    def step(q: Tensor, k: Tensor, v: Tensor, wanted: Tensor) -> Tensor:
        with torch.enable_grad():
            return attend(q, k, v).detach()

    return step


@torch.no_grad()
def run_cell(
    cell: Cell,
    device: torch.device,
    paths: Paths,
    seed: int,
    done: Iterable[tuple[str, str]] = (),
    only: Iterable[str] = (),
) -> None:
    """Measure the variants of a cell not ``done`` yet; ``only`` restricts to some peers."""
    prepared, finished = prepare(cell, device, seed), set(done)
    keep = dense_mask(cell, device) if cell.has_dense_mask else None
    for variant in chosen_of(backward_variants(cell, device), only):
        if (variant.peer, variant.name) in finished:
            continue
        setup = Setup(cell, device, keep, paths.store)
        where = (paths.out, cell.name, variant.peer, variant.name)
        with timing.own_caches(paths.caches, f"{variant.peer}-backward", setup.store):
            try:
                row = _measure(variant, setup, prepared)
            except PeerMissingError as missing:
                log_event(*where, "missing", str(missing))
                continue
            except Exception as failure:  # one peer's failure is a line of the log
                trace = traceback.format_exc()[-400:]
                log_event(*where, "error", f"{type(failure).__name__}: {failure}\n{trace}")
                continue
        if isinstance(row, str):
            log_event(*where, "incorrect", row)
            continue
        append_row(paths.out, FIELDS, row)
        say(
            f"  {cell.name:22s} {variant.peer:13s} {variant.name:16s} both {row['median_us']:9.1f} "
            f"us  forward {row['forward_us']:9.1f}  launch {row['launch_us']:9.1f}  (compile "
            f"{row['compile_s']:.1f} s)"
        )


def _measure(variant: Variant, setup: Setup, prepared: Prepared) -> dict[str, Any] | str:
    """A row, or what is wrong with the gradients."""
    device, attend = setup.device, variant.build(setup)
    step, forward = both_passes(attend), forward_pass(attend)
    compile_s = timing.first_call(step, prepared.inputs, device)
    report, problem = check(step, prepared, setup.cell.torch_dtype)
    if problem:
        return problem
    peak = timing.peak_bytes(step, prepared.inputs, device)
    launch = timing.launch_time(step, prepared.sets, device)
    both = timing.replay_time(step, prepared.sets, device)
    first = timing.replay_time(forward, prepared.sets, device)
    return {
        **prepared.facts,
        "peer": variant.peer,
        "variant": variant.name,
        "median_us": both.median_us,
        "p20_us": both.p20_us,
        "p80_us": both.p80_us,
        "runs": both.runs,
        "method": both.method,
        "forward_us": first.median_us,
        "backward_us": both.median_us - first.median_us,
        "launch_us": launch.median_us,
        "launch_p20_us": launch.p20_us,
        "launch_p80_us": launch.p80_us,
        "compile_s": compile_s,
        "peak_bytes": peak,
        "max_rel": report.max_rel,
        "rms_rel": report.rms_rel,
        "detail": stof_choice(attend) if variant.peer == "stof" else "",
    }
