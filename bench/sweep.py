"""Every config of a STOF kernel on one cell: what decision tables and tuning lists come from.

Configs are the kernel's own list, or the product of axes given on the command line
(``--axes "block_q=64;block_k=32,64;num_warps=4,8;loops=1,3,4,5"``; fields left out keep their
default). The pseudo axis ``form`` chooses how part tiles are masked: ``band`` (arithmetic, where
the mask has it) or ``bitmap``.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import oracle
import timing
import torch
from attention import Paths, Prepared, prepare
from cases import Cell, make_inputs, mask_spec
from results import append_row, log_event, say
from roofline import load_ceilings
from torch import Tensor

from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.masks.block_mask import BlockMask, build_block_mask

FIELDS = (
    "cell", "batch", "seq", "mask", "window", "global_tokens", "heads", "head_dim", "dtype",
    "density", "tile_density",
    "kernel", "form", "config", "settings", "median_us", "p20_us", "p80_us", "runs", "compile_s",
    "max_rel", "rms_rel",
    "element_floor_us", "tile_floor_us", "tile_floor_share", "statistics", "device", "torch",
    "triton", "stof", "date",
)  # fmt: skip
FORMS = ("band", "bitmap")


@dataclass(frozen=True)
class Trial:
    """One config and the way part tiles are masked."""

    config: tuple[int, ...]
    form: str

    @property
    def name(self) -> str:
        """``form`` and the config's numbers; unique in a cell."""
        return f"{self.form}:{','.join(map(str, self.config))}"


def _kernel_module(kernel: str) -> Any:
    name = {
        "block": "attention_blockwise",
        "row": "attention_rowwise",
        "gather": "attention_gather",
    }[kernel]
    return importlib.import_module(f"stof_compile.kernels.{name}")


def _config_type(kernel: str) -> Any:
    module = _kernel_module(kernel)
    return getattr(module, {"block": "BlockConfig", "row": "RowConfig"}.get(kernel, "GatherConfig"))


def parse_axes(text: str) -> dict[str, list[str]]:
    """Read ``name=value,value;name=value`` into lists of texts.

    Raises:
        SystemExit: a part has no ``=``.
    """
    axes: dict[str, list[str]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, separator, values = part.partition("=")
        if not separator:
            raise SystemExit(f"--axes: {part!r} is not name=value,value")
        axes[name.strip()] = [v.strip() for v in values.split(",")]
    return axes


def check_axes(kernel: str, text: str) -> dict[str, list[str]]:
    """Read the axes and see that each is a field of the kernel's config.

    Raises:
        SystemExit: one is not.
    """
    axes = parse_axes(text)
    fields = _config_type(kernel)._fields
    unknown = sorted(set(axes) - {"form", *fields})
    if unknown:
        raise SystemExit(
            f"--axes: no field {', '.join(unknown)}; fields: form, {', '.join(fields)}"
        )
    return axes


def trials(
    cell: Cell, kernel: str, axes: dict[str, list[str]], device: torch.device
) -> list[Trial]:
    """All trials of a cell, without repeats."""
    kind = _config_type(kernel)
    rest = dict(axes)
    forms = rest.pop("form", list(FORMS))
    if rest:
        combined = itertools.product(*(map(int, values) for values in rest.values()))
        configs = [tuple(kind(**dict(zip(rest, values, strict=True)))) for values in combined]
    else:
        configs = list(listed_configs(cell, kernel, device))
    return list(dict.fromkeys(Trial(config, form) for config in configs for form in forms))


def listed_configs(cell: Cell, kernel: str, device: torch.device) -> Iterator[tuple[int, ...]]:
    """The kernel's own configs for this problem.

    What a mask has (part tiles, full tiles) depends on the tile, so the lists of several tiles are
    joined.
    """
    listing = _kernel_module(kernel).configs
    wanted = inspect.signature(listing).parameters
    facts: dict[str, Any] = {
        "head_dim": cell.head_dim,
        "dtype": cell.torch_dtype,
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0),
        "q_len": cell.seq,
        "planes": cell.batch * cell.heads,
        "plain": True,
    }
    for block in (32, 64, 128):
        mask = build_block_mask(mask_spec(cell), cell.seq, cell.seq, block, device=device)
        facts |= {"has_part": mask.has_part, "has_full": mask.has_full, "is_band": mask.is_band}
        yield from (tuple(c) for c in listing(**{k: v for k, v in facts.items() if k in wanted}))


def fits(trial: Trial, kernel: str, mask: BlockMask) -> bool:
    """Whether a trial is about this mask at all: its loops and its form must exist in it."""
    if trial.form == "band" and (mask.band is None or kernel == "gather"):
        return False
    loops = getattr(_config_type(kernel)(*trial.config), "loops", 3)
    if loops >= 6:
        return mask.is_band and trial.form == "band"
    return not (loops == 1 and mask.has_full) and not (loops == 2 and mask.has_part)


@torch.no_grad()
def run_sweep(
    cell: Cell,
    device: torch.device,
    paths: Paths,
    seed: int,
    kernel: str,
    axes: dict[str, list[str]],
    done: Iterable[str] = (),
) -> None:
    """Check and time every trial of a cell; a row each, failures in the log."""
    prepared = prepare(cell, device, load_ceilings(paths.ceilings, device), seed)
    finished = set(done)
    masks: dict[tuple[int, int], BlockMask] = {}
    best = float("inf")
    listed = trials(cell, kernel, axes, device)
    with timing.own_caches(paths.caches, "sweep"):
        for trial in listed:
            if trial.name in finished:
                continue
            where = (paths.out, cell.name, kernel, trial.name)
            try:
                block_mask = _mask(masks, cell, trial, device)
                if not fits(trial, kernel, block_mask):
                    continue
                row = _measure(cell, kernel, trial, block_mask, prepared, device)
            except Exception as failure:  # a config that cannot run is a line of the log
                log_event(*where, "error", f"{type(failure).__name__}: {failure}", loud=False)
                continue
            if isinstance(row, str):
                log_event(*where, "incorrect", row)
                continue
            append_row(paths.out, FIELDS, row)
            if row["median_us"] < best:
                best = row["median_us"]
                say(
                    f"  {cell.name:22s} {trial.name:36s} {best:9.1f} us  "
                    f"{100 * row['tile_floor_share']:3.0f} % of the tile floor"
                )


def _mask(
    held: dict[tuple[int, int], BlockMask], cell: Cell, trial: Trial, device: torch.device
) -> BlockMask:
    tile = (trial.config[0], trial.config[1])
    if tile not in held:
        held[tile] = build_block_mask(mask_spec(cell), cell.seq, cell.seq, tile, device=device)
    return held[tile]


def _band(mask: BlockMask) -> list[int]:
    rule = mask.band
    return [] if rule is None else [rule.lo, rule.hi, rule.global_q, rule.global_k, rule.cap]


def bind(kernel: str, trial: Trial, mask: BlockMask, scale: float, planes: int) -> Any:
    """A kernel's launcher as ``(q, k, v) -> out``."""
    operator = getattr(torch.ops.stof, f"attention_{kernel}")
    config = honest_config(mask, trial.config, planes) if kernel == "block" else trial.config
    arrays = mask_arrays(mask, config if kernel == "block" else ()).values()
    band = _band(mask) if trial.form == "band" else []
    more = (None, None, *mask.packed) if kernel == "gather" else ()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return operator(
            q, k, v, *arrays, None, None, scale, 0.0, 0, band, list(config), False, *more
        )[0]  # fmt: skip

    return attend


def _measure(
    cell: Cell, kernel: str, trial: Trial, mask: BlockMask, prepared: Prepared, device: torch.device
) -> dict[str, Any] | str:
    """A row, or why the output is wrong."""
    attend = bind(kernel, trial, mask, cell.head_dim**-0.5, cell.batch * cell.heads)
    inputs = prepared.check_inputs
    compile_s = timing.first_call(attend, inputs, device)
    held = prepared.rows, prepared.expected, None, prepared.keep
    report, problem = oracle.check(attend, inputs, *held)
    if problem:
        return problem
    replay = timing.replay_time(attend, prepared.sets, device, budget_s=0.1)
    settings = _config_type(kernel)(*trial.config)._asdict()
    return {
        **prepared.facts,
        "kernel": kernel,
        "form": trial.form,
        "config": ",".join(map(str, trial.config)),
        "settings": json.dumps(settings),
        "median_us": replay.median_us,
        "p20_us": replay.p20_us,
        "p80_us": replay.p80_us,
        "runs": replay.runs,
        "compile_s": compile_s,
        "max_rel": report.max_rel,
        "rms_rel": report.rms_rel,
        "tile_floor_share": prepared.facts["tile_floor_us"] / replay.median_us,
        "statistics": json.dumps(mask.statistics(), sort_keys=True),
    }


@torch.no_grad()
def warm_sweep(
    cell: Cell,
    device: torch.device,
    paths: Paths,
    seed: int,
    kernel: str,
    axes: dict[str, list[str]],
    offset: int,
) -> None:
    """Compile the trials of a cell beside others; ``offset`` rotates them, so cells share work."""
    inputs = make_inputs(cell, device, torch.Generator(device=device).manual_seed(seed))
    listed = trials(cell, kernel, axes, device)
    start = offset * len(listed) // 8 % max(len(listed), 1)
    masks: dict[tuple[int, int], BlockMask] = {}
    with timing.own_caches(paths.caches, "sweep"):
        for trial in [*listed[start:], *listed[:start]]:
            try:
                block_mask = _mask(masks, cell, trial, device)
                if fits(trial, kernel, block_mask):
                    bind(kernel, trial, block_mask, cell.head_dim**-0.5, cell.batch * cell.heads)(
                        *inputs
                    )
            except Exception as failure:  # the timed pass meets it again and records it
                say(
                    f"  warm-up of {cell.name} {trial.name}: {type(failure).__name__}: "
                    f"{str(failure)[:160]}"
                )
