"""``stof demo``: a real encoder on real text, with and without STOF, all measured in that run.

All rows compute one function: the model under a BigBird mask. PyTorch gets the mask as a dense bool
tensor through the model's own ``attention_mask``, STOF gets the rule.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stof_compile.device import device_facts
from stof_compile.dump import versions
from stof_compile.errors import StofOptionError, StofUnsupportedError
from stof_compile.explanation import Explanation, explain
from stof_compile.measure import ErrorReport, Timing, check_close, time_in_turns
from stof_compile.places import check_folder

Forward = Callable[[], torch.Tensor]

ROUNDS = 3
"""The rows take turns, so that a machine that slows down meanwhile slows all of them."""


@dataclass(frozen=True)
class DemoSettings:
    """What a run of the demo is made of.

    Args:
        model_dir: local Hugging Face directory with weights and tokenizer; None = a BERT-base with
            random weights that reads bytes.
        tokens: sequence length; a local model may limit it.
        device: "cpu", "cuda"; None = cuda (fp16) if there is one, else cpu (fp32).
        dump_dir: where STOF writes its dump.
        layers: of the random BERT.
        budget_s: seconds of timing per row.
    """

    model_dir: Path | None = None
    tokens: int = 1024
    device: str | None = None
    dump_dir: Path = Path("stof-dump")
    layers: int = 12
    budget_s: float = 10.0


@dataclass(frozen=True)
class Row:
    """One line of the result table."""

    name: str
    first_call_s: float
    timing: Timing
    error: ErrorReport


@dataclass(frozen=True)
class DemoResult:
    """All rows, and what STOF did."""

    rows: tuple[Row, ...]
    explanation: Explanation
    dump_dir: Path


def run_demo(settings: DemoSettings, console: Console) -> DemoResult:
    """Run the demo and print its table.

    Raises:
        StofOptionError: a setting is impossible here.
        StofPlaceError: the dump cannot be written.
        StofUnsupportedError: transformers is missing.
    """
    device = _device(settings.device)
    check_folder(settings.dump_dir, f"--dump-dir {settings.dump_dir}")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with torch.no_grad():
        with _step(console, "loading model and text"), _quiet():
            model, ids = _model_and_ids(settings)
            model = model.to(device=device, dtype=dtype).eval()
            ids = ids.to(device)
        length = ids.shape[1]
        rule, dense = _masks(model, ids)
        _describe(console, model, ids, dense, device, dtype)

        with _step(console, "reference in fp64"):
            reference = _reference(model, ids, dense)

        # CUDA graphs on both sides: at this size the launches would drown the kernels
        mode = "reduce-overhead" if device.type == "cuda" else None
        options: dict[str, Any] = {"mask": rule, "dump_dir": str(settings.dump_dir)}
        if mode:
            options["mode"] = mode
        compiled = torch.compile(model, mode=mode)
        fast = torch.compile(model, backend="stof", options=options)
        masked = {"input_ids": ids, "attention_mask": dense}
        calls: list[tuple[str, Forward]] = [
            ("eager, SDPA + mask", lambda: _hidden(model(**masked))),
            ("torch.compile, SDPA + mask", lambda: _hidden(compiled(**masked))),
            ("STOF", lambda: _hidden(fast(input_ids=ids))),
        ]
        first = [_first_call(console, name, call, reference, dtype) for name, call in calls]
        with _step(console, f"timing, {ROUNDS} rounds over all rows"):
            timings = time_in_turns(
                [call for _, call in calls],
                [()],
                device,
                budget_s=settings.budget_s,
                rounds=ROUNDS,
                capture=False,
            )
    rows = tuple(
        Row(name, seconds, timing, error)
        for (name, _), (seconds, error), timing in zip(calls, first, timings, strict=True)
    )
    result = DemoResult(rows, explain(fast), settings.dump_dir)
    _print_result(console, result, length)
    return result


def _device(name: str | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    name = name or ("cuda" if has_cuda else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise StofOptionError(f"--device {name}: the demo runs on cpu or cuda")
    if name.startswith("cuda") and not has_cuda:
        raise StofOptionError(
            f"--device {name}: torch sees no CUDA device; `stof doctor` says more"
        )
    return torch.device(name)


# -- model and text -------------------------------------------------------------------------------


def _model_and_ids(settings: DemoSettings) -> tuple[Any, torch.Tensor]:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise StofUnsupportedError(
            "the demo needs transformers: pip install 'stof-compile[demo]'"
        ) from error
    if settings.tokens < 16:
        raise StofOptionError(f"the demo needs at least 16 tokens, got {settings.tokens}")
    text = document()
    if settings.model_dir is None:
        config = transformers.BertConfig(
            vocab_size=256,
            num_hidden_layers=settings.layers,
            max_position_embeddings=max(512, settings.tokens),
            attn_implementation="sdpa",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.BertModel(config, add_pooling_layer=False)
        data = text.encode()
        repeats = -(-settings.tokens // len(data))
        ids = torch.tensor(list((data * repeats)[: settings.tokens]))[None]
        return model, ids
    if not settings.model_dir.is_dir():
        raise StofOptionError(f"--model {settings.model_dir} is no folder")
    loaded = transformers.AutoModel.from_pretrained(
        settings.model_dir, attn_implementation="sdpa", local_files_only=True
    )
    model = loaded.get_encoder() if loaded.config.is_encoder_decoder else loaded
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        settings.model_dir, local_files_only=True
    )
    limits = (
        getattr(loaded.config, "max_position_embeddings", None),
        getattr(loaded.config, "n_positions", None),
        tokenizer.model_max_length,
    )
    length = min(settings.tokens, *(limit for limit in limits if isinstance(limit, int)))
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)["input_ids"]
    return model, ids


@contextmanager
def _quiet() -> Iterator[None]:
    # optional packages that transformers picks up log about GPU extensions they cannot load
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def document() -> str:
    """The text the demo reads: README.md of the checkout, or the copy in an installed package."""
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "README.md").is_file():
        return (checkout / "README.md").read_text(encoding="utf-8")
    described = metadata.metadata("stof-compile")
    body: Any = described.get("Description") or described.get_payload()  # type: ignore[attr-defined]
    return str(body)


def _masks(model: Any, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The rule for STOF, and the same mask as a dense [1, 1, S, S] bool tensor for the peers."""
    from stof_compile import masks

    rule = masks.bigbird(window=32, global_tokens=32, random_fill=0.1, seed=0)
    length = ids.shape[1]
    index = torch.arange(length)
    zero = torch.zeros((), dtype=torch.int64)
    keep = rule.bind(length, length).keep(zero, zero, index[:, None], index[None, :])
    if _is_causal(model, ids):
        keep = keep & (index[:, None] >= index)
    return rule, keep.expand(length, length)[None, None].contiguous().to(ids.device)


def _is_causal(model: Any, ids: torch.Tensor) -> bool:
    """Whether a later token leaves earlier results alone, by trying it."""
    one = ids[:, :8].clone()
    other = one.clone()
    other[:, -1] = ids[0, 8]
    if other[0, -1] == one[0, -1]:
        other[:, -1] = (one[0, -1] + 1) % 100
    changed = _hidden(model(input_ids=one)) - _hidden(model(input_ids=other))
    return bool(changed[:, :-1].abs().max() <= 1e-5 * changed.abs().max())


def _reference(model: Any, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    exact = copy.deepcopy(model).double()
    return _hidden(exact(input_ids=ids, attention_mask=dense)).clone()


def _hidden(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0]
    return hidden


# -- measuring and printing -----------------------------------------------------------------------


def _first_call(
    console: Console, name: str, call: Forward, reference: torch.Tensor, dtype: torch.dtype
) -> tuple[float, ErrorReport]:
    """Seconds of the first call, compilation included, and the error of its result."""
    with _step(console, f"{name}: first call"):
        start = time.perf_counter()
        out = call().clone()  # under CUDA graphs the next call overwrites the result
        if out.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds, check_close(out, reference, dtype)


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    start = time.perf_counter()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s", highlight=False)


def _describe(
    console: Console,
    model: Any,
    ids: torch.Tensor,
    dense: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    facts = device_facts(device)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    lines = [
        f"device   {facts.name}, {facts.runtime}, {str(dtype).removeprefix('torch.')}"
        + ("" if facts.is_cuda else f", {facts.units} thread(s)"),
        "versions " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        f"model    {type(model).__name__}, {parameters:.0f} M parameters, "
        f"batch {ids.shape[0]}, {ids.shape[1]} tokens of README.md",
        f"mask     bigbird(window=32, global_tokens=32, random_fill=0.1), density "
        f"{dense.double().mean().item():.3f}",
    ]
    for line in lines:
        console.print(line, highlight=False)


def _print_result(console: Console, result: DemoResult, length: int) -> None:
    eager = result.rows[0].timing.median_us
    table = Table(title=f"one forward pass of {length} tokens, ms")
    table.add_column("what")
    for column in ("median", "p20", "p80", "speed-up", "max error", "rms error", "first call s"):
        table.add_column(column, justify="right")
    for row in result.rows:
        timing = row.timing
        table.add_row(
            row.name,
            *(f"{us / 1e3:.2f}" for us in (timing.median_us, timing.p20_us, timing.p80_us)),
            f"{eager / timing.median_us:.2f}x",
            f"{row.error.max_rel:.1e}",
            f"{row.error.rms_rel:.1e}",
            f"{row.first_call_s:.1f}",
        )
    console.print(table)
    compiled, stof = result.rows[1].timing.median_us, result.rows[2].timing.median_us
    console.print(
        f"STOF against torch.compile: {compiled / stof:.2f}x. Errors: relative to the same masked "
        f"model in fp64. {stof_runs(result)}",
        highlight=False,
    )
    sites = Table(title="kernel per site")
    for column in ("site", "kernel", "density", "why"):
        sites.add_column(column)
    for site in result.explanation.sites:
        density = site.statistics.get("density")
        kernel = site.kernel if site.status == "rewritten" else f"{site.kernel} (kept)"
        why = site.choice.source if site.choice else "; ".join(site.notes)
        sites.add_row(site.name, kernel, "-" if density is None else f"{density:.3f}", why)
    console.print(sites)
    console.print(
        f"dump: {result.dump_dir} (read it with: stof explain {result.dump_dir})", highlight=False
    )


def stof_runs(result: DemoResult) -> str:
    """How many samples stand behind each median."""
    counts = ", ".join(f"{row.name.split(',')[0]} {row.timing.runs}" for row in result.rows)
    return f"Runs: {counts}."
