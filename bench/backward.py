"""Gradients of one attention cell: forward and backward pass of every variant of every peer.

Runs in a process of its own (``run.py`` starts it). A row needs gradients of q, k and v that agree
with fp64 in some planes and are finite and keep two sums in all. ``median_us`` is both passes
together, by CUDA-graph replay on a GPU, ``forward_us`` the forward pass with what it saves for the
other, and ``backward_us`` the difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timing
import torch
from attention import Paths, record, stof_choice
from cases import Cell, dense_mask, densities, keep_rows, make_inputs
from machine import conditions
from peers import (
    M64,
    SAFE,
    SAFE_MASKS,
    Attend,
    Setup,
    Variant,
    attention_variants,
    chosen_of,
    flex_expert,
    flex_split,
)
from torch import Tensor

from stof_compile.attention.trial import GRADIENT_SCALE
from stof_compile.measure import TOLERANCE, ErrorReport, check_close

FIELDS = (
    "cell", "batch", "seq", "mask", "window", "global_tokens", "heads", "head_dim", "dtype",
    "density", "tile_density",
    "peer", "variant", "median_us", "p20_us", "p80_us", "runs", "method", "forward_us",
    "backward_us", "launch_us", "launch_p20_us", "launch_p80_us",
    "compile_s", "peak_bytes", "max_rel", "rms_rel",
    "detail", "device", "torch", "triton", "stof", "date",
)  # fmt: skip
PLANES = 8  # of batch and heads that are compared, the first and the last among them
TILE = 64  # rows of a gradient that are compared over their own size
STRIP = 2**24  # elements of scores at a time: 128 MiB in fp64
SHARED = ("stof", "stof_fn", "sdpa_mask", "sdpa_causal", "cudnn", "flex_default")
AUTOTUNED = "max-autotune-no-cudagraphs"
FORWARD_64 = {f"fwd_{name}": size for name, size in M64.items()}
# by themselves FlexAttention's backward kernels take 64 x 128 and 128 x 64 on Hopper
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
        ("b128-m64", 128, safe | FORWARD_64, None),
        ("b128-m64-bwd64", 128, safe | FORWARD_64 | BACKWARD_64, None),
        ("b128-m64-bwd64-s2", 128, safe | FORWARD_64 | BACKWARD_64 | {"bwd_num_stages": 2}, None),
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
        keep: bool ``[S, S]``, None where that is too long.
        planes: (batch, head) of what is compared. expected: the gradients there in fp64,
            ``[planes, S, D]`` each.
    """

    keep: Tensor | None
    inputs: Inputs
    planes: list[tuple[int, int]]
    expected: Gradients
    sets: list[Inputs]
    facts: dict[str, Any]


def draw(cell: Cell, device: torch.device, generator: torch.Generator) -> Inputs:
    """Random inputs and a random gradient of the output."""
    q, k, v = (t.requires_grad_() for t in make_inputs(cell, device, generator))
    wanted = torch.randn(q.shape, device=device, generator=generator).to(q.dtype)
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
    return Prepared(keep, inputs, planes, expected, sets, {**cell.columns(), **facts})


def check(
    step: Callable[..., Gradients], prepared: Prepared, dtype: torch.dtype
) -> tuple[ErrorReport, str]:
    """The largest distances of a gradient from fp64, and in words what is wrong, "" for nothing."""
    inputs = prepared.inputs
    for _ in range(2):  # from the third on a launch may be a repeated one, as those timed
        step(*inputs)
    timing.poison((3, *inputs[0].shape), dtype, inputs[0].device)
    found, reports, wrong = step(*inputs), [], []
    for name, whole, exact in zip("qkv", found, prepared.expected, strict=True):
        if not bool(whole.isfinite().all()):
            wrong.append(f"d{name} is not finite or not written everywhere")
            continue
        parts = torch.stack([whole[at] for at in prepared.planes]).double()
        reports.append(check_close(parts, exact, dtype, scale=GRADIENT_SCALE))
        # what few rows or keys contribute to is small beside the rest: faults would not show
        size = tile_sizes(exact)
        by_tile = check_close(parts / size, exact / size, dtype, scale=GRADIENT_SCALE)
        for report, over in ((reports[-1], ""), (by_tile, ", each tile over its own size")):
            if not report.ok:
                largest = f"max {report.max_rel:.3g} rms {report.rms_rel:.3g}"
                wrong.append(f"d{name}: {largest} against fp64{over}")
    wrong += broken_sums(prepared, found, dtype) if not wrong else []
    worst = ErrorReport(
        max((r.max_rel for r in reports), default=0.0),
        max((r.rms_rel for r in reports), default=0.0),
        not wrong,
    )
    return worst, "; ".join(wrong)


def tile_sizes(exact: Tensor) -> Tensor:
    """The rms of each tile of ``TILE`` rows of gradients ``[planes, S, D]``, ``[planes, S, 1]``."""
    tiles = exact.square().mean(dim=-1).split(TILE, dim=1)
    sizes = [t.mean(dim=1, keepdim=True).sqrt().expand_as(t) for t in tiles]
    size = torch.cat(sizes, dim=1)[..., None]
    return torch.where(size > 0, size, 1.0)


def broken_sums(prepared: Prepared, found: Gradients, dtype: torch.dtype) -> list[str]:
    """What is wrong in any plane with two sums that hold whatever the mask, in words.

    The weights of a row are 1 together, so dV over all keys is the gradient of the output over all
    rows that have a key. Scores are products of q and k, so q dq and k dk have the same sum.
    """
    q, k, _, wanted = (t.detach() for t in prepared.inputs)
    if prepared.keep is not None:
        wanted = wanted * prepared.keep.any(dim=1)[:, None]
    dq, dk, dv = found
    allowed = GRADIENT_SCALE * TOLERANCE[dtype][0]
    wrong = []
    if not check_close(
        dv.double().sum(dim=2), wanted.double().sum(dim=2), dtype, scale=GRADIENT_SCALE
    ).ok:
        wrong.append("dv over all keys is not the gradient of the output over all rows")
    of_rows, of_keys = q.double() * dq, k.double() * dk
    apart = (of_rows.sum(dim=(2, 3)) - of_keys.sum(dim=(2, 3))).abs()
    if bool((apart > allowed * (of_rows.norm(dim=(2, 3)) + of_keys.norm(dim=(2, 3)))).any()):
        wrong.append("q dq and k dk have different sums in some plane")
    return wrong


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
    setup = Setup(cell, device, prepared.keep, paths.store)
    for variant in chosen_of(backward_variants(cell, device), only):
        if (variant.peer, variant.name) not in finished:
            with timing.own_caches(paths.caches, f"{variant.peer}-backward", setup.store):
                record(variant, setup, paths.out, FIELDS, partial(_measure, prepared=prepared))


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
    if first.method.split()[0] != both.method.split()[0]:  # one of them could not be captured
        raise RuntimeError(f"both passes were timed by {both.method}, the first by {first.method}")
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
