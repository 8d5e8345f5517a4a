"""One attention cell: build, check and time every variant of every peer; a row each.

Runs in a process of its own (``run.py`` starts it), under ``no_grad``. A variant that fails or
computes something else is a line of the log, never a row.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import timing
import torch
from cases import Cell, dense_mask, densities, make_inputs
from machine import conditions
from peers import Attend, PeerMissingError, Setup, Variant, chosen_variants
from results import append_row, log_event, say
from roofline import Ceilings, load_ceilings
from torch import Tensor

from stof_compile.dump import SiteRecord

FIELDS = (
    "cell", "batch", "seq", "mask", "window", "global_tokens", "heads", "head_dim", "dtype",
    "density", "tile_density",
    "peer", "variant", "median_us", "p20_us", "p80_us", "runs", "method", "launch_us",
    "launch_p20_us", "launch_p80_us", "burst_us", "burst_p20_us", "burst_p80_us",
    "compile_s", "peak_bytes", "max_rel", "rms_rel", "element_floor_us", "tile_floor_us",
    "tile_floor_share",
    "detail", "device", "torch", "triton", "stof", "date",
)  # fmt: skip
COMPILED = ("stof", "stof_block", "stof_fp8")  # whose callables tell what STOF chose


@dataclass(frozen=True)
class Paths:
    """Where a run keeps things: CSV, caches of the peers, STOF's store, ceilings of the device."""

    out: Path
    caches: Path

    @property
    def store(self) -> Path:
        """STOF's measured choices."""
        return self.caches / "stof-store"

    @property
    def ceilings(self) -> Path:
        """Measured ceilings of the device, beside the CSV."""
        return self.out.with_name(self.out.stem + ".ceilings.json")


@dataclass(frozen=True)
class Prepared:
    """What all variants of a cell share: mask, check inputs, fp64 answer, timing inputs.

    Args:
        keep: bool ``[S, S]``, None where that is too long.
        rows: query positions of each plane that ``expected`` has, None for all of them.
    """

    keep: Tensor | None
    check_inputs: tuple[Tensor, Tensor, Tensor]
    rows: Tensor | None
    expected: Tensor
    sets: list[tuple[Tensor, Tensor, Tensor]]
    facts: dict[str, Any]


def prepare(cell: Cell, device: torch.device, ceilings: Ceilings, seed: int) -> Prepared:
    """Draw inputs from ``seed`` and evaluate the oracle once for the cell."""
    generator = torch.Generator(device=device).manual_seed(seed)
    keep = dense_mask(cell, device) if cell.has_dense_mask else None
    rows = oracle.choose_rows(cell, seed, device)
    check_inputs = make_inputs(cell, device, generator)
    expected = oracle.answers(cell, check_inputs, keep, rows)
    count = timing.set_count(cell.moved_bytes, device)
    sets = [make_inputs(cell, device, generator) for _ in range(count)]
    density, tiles = densities(cell, keep, device)
    facts = {
        **cell.columns(),
        "density": density,
        "tile_density": tiles,
        "element_floor_us": ceilings.floor_us(cell, density),
        "tile_floor_us": ceilings.floor_us(cell, tiles),
        **conditions(device),
    }
    return Prepared(keep, check_inputs, rows, expected, sets, facts)


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
    ceilings = load_ceilings(paths.ceilings, device, cell.head_dim)
    prepared = prepare(cell, device, ceilings, seed)
    setup, finished = Setup(cell, device, prepared.keep, paths.store), set(done)
    for variant in chosen_variants(cell, device, only):
        if (variant.peer, variant.name) not in finished:
            with timing.own_caches(paths.caches, variant.peer, setup.store):
                record(variant, setup, paths.out, FIELDS, partial(_measure, prepared=prepared))


def record(
    variant: Variant,
    setup: Setup,
    out: Path,
    fields: Sequence[str],
    measure: Callable[[Variant, Setup], dict[str, Any] | str],
) -> None:
    """Measure a variant into a row, or into a line of the log.

    Args:
        measure: gives the row, with ``median_us``, ``launch_us`` and ``compile_s``, or says what is
            wrong with the result.
    """
    where = (out, setup.cell.name, variant.peer, variant.name)
    try:
        row = measure(variant, setup)
    except PeerMissingError as missing:
        log_event(*where, "missing", str(missing))
    except Exception as failure:  # one peer's failure is a line of the log; the others still run
        log_event(
            *where, "error", f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
        )
    else:
        if isinstance(row, str):
            log_event(*where, "incorrect", row)
            return
        append_row(out, fields, row)
        say(
            f"  {where[1]:22s} {variant.peer:13s} {variant.name:20s} {row['median_us']:10.1f}"
            f" us  launch {row['launch_us']:10.1f} us  (compile {row['compile_s']:.1f} s)"
        )


def _measure(variant: Variant, setup: Setup, prepared: Prepared) -> dict[str, Any] | str:
    """A row, or what is wrong with the output."""
    device = setup.device
    attend = variant.build(setup)
    compile_s = timing.first_call(attend, prepared.check_inputs, device)
    inputs, rows = prepared.check_inputs, prepared.rows
    rounded = None
    if variant.fp8:
        rounded = oracle.rounded_answers(setup.cell, inputs, prepared.keep, rows)
    held = rows, prepared.expected, rounded, prepared.keep
    report, problem = oracle.check(attend, inputs, *held)
    del rounded
    if problem:
        return problem
    peak = timing.peak_bytes(attend, prepared.check_inputs, device)
    launch = timing.launch_time(attend, prepared.sets, device)
    replay = timing.replay_time(attend, prepared.sets, device)
    burst = timing.burst_time(attend, prepared.sets, device)
    return {
        **prepared.facts,
        "peer": variant.peer,
        "variant": variant.name,
        "median_us": replay.median_us,
        "p20_us": replay.p20_us,
        "p80_us": replay.p80_us,
        "runs": replay.runs,
        "method": replay.method,
        "launch_us": launch.median_us,
        "launch_p20_us": launch.p20_us,
        "launch_p80_us": launch.p80_us,
        "burst_us": burst and burst.median_us,
        "burst_p20_us": burst and burst.p20_us,
        "burst_p80_us": burst and burst.p80_us,
        "compile_s": compile_s,
        "peak_bytes": peak,
        "max_rel": report.max_rel,
        "rms_rel": report.rms_rel,
        "tile_floor_share": prepared.facts["tile_floor_us"] / replay.median_us,
        "detail": stof_choice(attend) if variant.peer in COMPILED else "",
    }


def stof_choice(compiled: Attend) -> str:
    """Kernel, config and source of every site of a callable compiled by STOF."""
    import stof_compile

    return " | ".join(map(describe_site, stof_compile.explain(compiled).sites)) or "no site"


def describe_site(site: SiteRecord) -> str:
    """``kernel[config] (source)`` of one site."""
    if site.choice is None:
        return f"{site.kernel} ({site.status})"
    config = ",".join(str(n) for n in site.choice.config)
    return f"{site.choice.kernel}[{config}] ({site.choice.source})"


@torch.no_grad()
def warm_cell(
    cell: Cell,
    device: torch.device,
    paths: Paths,
    seed: int,
    done: Iterable[tuple[str, str]] = (),
    only: Iterable[str] = (),
) -> None:
    """Compile what :func:`run_cell` will, beside other processes, so that it finds warm caches.

    STOF's measured choices of this pass go to a store that nobody reads: they were taken on a busy
    GPU.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    keep = dense_mask(cell, device) if cell.has_dense_mask else None
    inputs = make_inputs(cell, device, generator)
    finished = set(done)
    for variant in chosen_variants(cell, device, only):
        if (variant.peer, variant.name) in finished:
            continue
        setup = Setup(
            cell, device, keep, paths.caches / f"warm-store-{cell.name.replace('/', '-')}"
        )
        with timing.own_caches(paths.caches, variant.peer, setup.store):
            try:
                timing.first_call(variant.build(setup), inputs, device)
            except PeerMissingError:
                continue
            except Exception as failure:  # the timed pass meets it again and records it
                say(
                    f"  warm-up of {cell.name} {variant.peer} {variant.name}: "
                    f"{type(failure).__name__}: {str(failure)[:300]}"
                )
