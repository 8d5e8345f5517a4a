"""Accuracy of whole models: STOF's distance from the fp64 model beside torch.compile's own.

No mask is given, so every way computes the model's own function, on the same weights and inputs.
``max`` and ``mean`` are |out - fp64| over ``SETS`` inputs; ``*_ratio`` divides STOF's by that of
torch.compile in the default mode, or by one rounding unit (``unit``: eps times the largest, or the
mean, size of the result) where that is larger. ``ok`` tells whether both ratios are at most
``MOST``. fp16 on a GPU, fp32 on a CPU.

    python bench/run.py accuracy [--models bert-base,gpt2] [--cells 1x128] [--peers fused,auto]

Settings (``--peers``):
    auto    as users get it; where the whole graph is faster without us nothing of ours runs
    fused   as auto, but the fused graph is kept whatever the comparison of whole graphs says
    rules   nothing is measured: the templates that rules choose
    ro      as fused, under mode="reduce-overhead"
"""

from __future__ import annotations

import argparse
import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import timing
import torch
from details import stof_detail
from e2e import wanted_shapes
from machine import conditions, version_of
from models import caller, model_names
from results import append_row, log_event, read_rows, say
from torch import Tensor

from stof_compile import zoo

FIELDS = (
    "cell", "model", "batch", "seq", "dtype", "setting",
    "max", "max_compile", "max_unit", "max_ratio", "mean", "mean_compile", "mean_unit",
    "mean_ratio", "ok", "segments", "compile_s", "detail",
    "device", "torch", "triton", "transformers", "stof", "date",
)  # fmt: skip
SETS = 3
MOST = 2.0


@dataclass(frozen=True)
class Setting:
    """One way to compile with STOF.

    Args:
        kept: keep the fused graph. options: of STOF. mode: Inductor's.
    """

    kept: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None


SETTINGS = {
    "auto": Setting(),
    "fused": Setting(kept=True),
    "rules": Setting(kept=True, options={"tune_budget_s": 0.0}),
    "ro": Setting(kept=True, mode="reduce-overhead"),
}
DEFAULT = {"cuda": tuple(SETTINGS), "cpu": ("auto", "fused", "rules")}


def wanted_settings(args: argparse.Namespace) -> list[str]:
    """Settings to run.

    Raises:
        SystemExit: there is no such setting.
    """
    names = args.peers.split(",") if args.peers else DEFAULT[args.device]
    unknown = sorted(set(names) - set(SETTINGS))
    if unknown:
        raise SystemExit(f"no setting {', '.join(unknown)}; settings: {', '.join(SETTINGS)}")
    return list(names)


def accuracy_units(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Cells with settings missing: (``model/BxS``, how many)."""
    wanted = wanted_settings(args)
    names = [
        (model, shape)
        for model in model_names(args.model, args.smoke)
        for shape in wanted_shapes(args)
    ]
    left = [(f"{m}/{s}", len([n for n in wanted if n not in _done(args, m, s)])) for m, s in names]
    return [(name, count) for name, count in left if count]


def _done(args: argparse.Namespace, model: str, shape: str) -> set[str]:
    rows = read_rows(args.out)
    return {row["setting"] for row in rows if (row["model"], row["cell"]) == (model, shape)}


@dataclass(frozen=True)
class Case:
    """A model in a cell: input sets, and the fp64 answer of each."""

    name: str
    batch: int
    seq: int
    seed: int
    dtype: torch.dtype
    device: torch.device
    inputs: list[dict[str, Tensor]]
    answers: list[Tensor]

    def model(self) -> torch.nn.Module:
        """The model, with equal weights at each call."""
        return zoo.build_model(self.name, self.seq, self.seed, "sdpa", self.dtype, self.device)

    def outputs(self, compiled: Callable[..., Any]) -> Iterator[Tensor]:
        """Its answers, as the compiled model gives them."""
        call = caller(compiled, self.inputs[0], {})
        for given in self.inputs:
            yield call(*given.values()).clone()  # CUDA graphs write into the same memory again


def make_case(name: str, shape: str, seed: int, device: torch.device) -> Case:
    """A cell ``BxS`` of a model with its fp64 answers, computed one sequence at a time."""
    batch, seq = (int(n) for n in shape.split("x"))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    inputs = [zoo.make_inputs(name, batch, seq, seed + i, dtype, device) for i in range(SETS)]
    case = Case(name, batch, seq, seed, dtype, device, inputs, [])
    exact = caller(case.model().double(), inputs[0], {})
    for given in inputs:
        wide = [t.double() if t.is_floating_point() else t for t in given.values()]
        parts = [exact(*(t[i : i + 1] for t in wide)) for i in range(batch)]
        case.answers.append(torch.cat(parts))
    return case


@dataclass(frozen=True)
class Distance:
    """Largest and mean |out - answer| over all input sets."""

    largest: float
    mean: float


def distance(outputs: Sequence[Tensor] | Iterator[Tensor], answers: Sequence[Tensor]) -> Distance:
    """Distances of results from the fp64 answers; infinite where a result is not finite."""
    largest, means = 0.0, []
    for out, answer in zip(outputs, answers, strict=True):
        error = (out.double() - answer).abs().nan_to_num(nan=float("inf"))
        largest = max(largest, float(error.max()))
        means.append(float(error.mean()))
    return Distance(largest, sum(means) / len(means))


def unit_of(answers: Sequence[Tensor], dtype: torch.dtype) -> Distance:
    """One rounding unit of the answers, at their largest and their mean size."""
    eps = torch.finfo(dtype).eps
    sizes = [answer.abs() for answer in answers]
    mean = sum(float(size.mean()) for size in sizes) / len(sizes)
    return Distance(eps * max(float(size.max()) for size in sizes), eps * mean)


def compared(ours: Distance, base: Distance, unit: Distance) -> dict[str, Any]:
    """The columns of a row that say how far STOF and torch.compile are."""
    columns: dict[str, Any] = {}
    for name, attribute in (("max", "largest"), ("mean", "mean")):
        error, theirs, floor = (getattr(d, attribute) for d in (ours, base, unit))
        columns |= {name: error, f"{name}_compile": theirs, f"{name}_unit": floor}
        columns[f"{name}_ratio"] = error / max(theirs, floor)
    columns["ok"] = int(columns["max_ratio"] <= MOST and columns["mean_ratio"] <= MOST)
    return columns


@torch.no_grad()
def run_accuracy(args: argparse.Namespace, device: torch.device) -> None:
    """Measure every setting of a cell that has no row yet."""
    name, shape = args.worker.split("/")
    case = make_case(name, shape, args.seed, device)
    with timing.own_caches(args.caches, "accuracy-compile"):
        plain = torch.compile(case.model(), dynamic=False)
        base = distance(case.outputs(plain), case.answers)
        del plain
    done = _done(args, name, shape)
    for setting in wanted_settings(args):
        if setting in done:
            continue
        gc.collect()
        store = args.caches / "accuracy-store"  # of all settings: what is tuned once is known
        with timing.own_caches(args.caches, f"accuracy-{setting}", store):
            try:
                row = _row(args, case, SETTINGS[setting], base)
            except Exception as failure:  # the other settings still run
                text = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
                log_event(args.out, args.worker, setting, name, "error", text)
                continue
        append_row(args.out, FIELDS, {**row, "cell": shape, "setting": setting})
        say(
            f"  {args.worker:18s} {setting:6s} max {row['max']:.2e} ({row['max_ratio']:.2f}x), "
            f"mean {row['mean']:.2e} ({row['mean_ratio']:.2f}x)"
            f"{'' if row['ok'] else '  TOO FAR'}"
        )


def _row(args: argparse.Namespace, case: Case, setting: Setting, base: Distance) -> dict[str, Any]:
    options: dict[str, Any] = {"tune_budget_s": args.tune_budget, **setting.options}
    options |= {"mode": setting.mode} if setting.mode else {}
    with ExitStack() as stack:
        if setting.kept:
            stack.enter_context(fused_form_kept())
        fast = torch.compile(case.model(), backend="stof", dynamic=False, options=options)
        first = tuple(case.inputs[0].values())
        call = caller(fast, case.inputs[0], {})
        seconds = timing.first_call(call, first, case.device)
        ours = distance(case.outputs(fast), case.answers)
    return {
        "model": case.name,
        "batch": case.batch,
        "seq": case.seq,
        "dtype": str(case.dtype).removeprefix("torch."),
        **compared(ours, base, unit_of(case.answers, case.dtype)),
        "segments": fused_segments(fast),
        "compile_s": seconds,
        "detail": stof_detail(fast),
        **conditions(case.device),
        "transformers": version_of("transformers"),
    }


@contextmanager
def fused_form_kept() -> Iterator[None]:
    """Whole graphs are not compared: the fused form stays, however fast it is."""
    from stof_compile.verdict import FastestForm

    with mock.patch("stof_compile.forms.fastest_form", lambda *given: FastestForm(None)):
        yield


def fused_segments(compiled: Any) -> int:
    """Segments that a template runs, over all graphs; 0 where another form was kept."""
    import stof_compile

    count = 0
    for record in stof_compile.explain(compiled).graphs:
        verdict = [note for note in record.notes if note.startswith("whole graph")]
        if any("kept: fused" not in note for note in verdict):
            continue
        for chain in record.chains:
            count += chain.count * sum(s.template != "inductor" for s in chain.segments)
    return count


def accuracy_summary(rows: Sequence[dict[str, str]]) -> str:
    """A line for each row, then the worst ratios."""
    first = rows[0]
    lines = [
        f"device {first['device']} · torch {first['torch']} · stof {first['stof']}",
        f"{'model':12s} {'cell':8s} {'setting':7s} {'dtype':8s} {'segments':>8s} {'max':>9s} "
        f"{'compile':>9s} {'ratio':>6s} {'mean':>9s} {'compile':>9s} {'ratio':>6s}",
    ]
    for row in rows:
        numbers = "".join(
            f" {float(row[name]):9.2e} {float(row[name + '_compile']):9.2e} "
            f"{float(row[name + '_ratio']):6.2f}"
            for name in ("max", "mean")
        )
        far = "" if row["ok"] == "1" else "  TOO FAR"
        lines.append(
            f"{row['model']:12s} {row['cell']:8s} {row['setting']:7s} {row['dtype']:8s} "
            f"{row['segments']:>8s}{numbers}{far}"
        )
    far_rows = [row for row in rows if row["ok"] != "1"]
    worst = {name: max(float(row[f"{name}_ratio"]) for row in rows) for name in ("max", "mean")}
    lines.append(
        f"{len(rows) - len(far_rows)} of {len(rows)} within {MOST:g}x of torch.compile's own "
        f"distance from fp64; worst ratio {worst['max']:.2f} (max), {worst['mean']:.2f} (mean)"
    )
    return "\n".join(lines)
