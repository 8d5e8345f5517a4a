"""``stof demo | tune``: commands that run a model."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from stof_compile.cli.output import AsJson, output

MODELS = (
    *("bert-base", "bert-large", "gpt2", "distilgpt2", "llama-1b"),
    *("t5-base", "vit-base", "distilbert"),
    *("bert-tiny", "gpt2-tiny", "llama-tiny", "t5-tiny", "vit-tiny", "distilbert-tiny"),
)
"""Of the zoo, which cannot be asked for them without torch."""


class Mask(str, Enum):
    """Values of ``--mask``."""

    NONE = "none"
    CAUSAL = "causal"
    SLIDING = "sliding"
    LONGFORMER = "longformer"
    BIGBIRD = "bigbird"


class Dtype(str, Enum):
    """Values of ``--dtype``."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Mode(str, Enum):
    """Values of ``--mode``."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


Device = Annotated[
    str | None,
    typer.Option(
        "--device",  # spelt out: typer 0.27 names an option after its metavar
        metavar="DEVICE",
        help="cpu or cuda; default: cuda if there is one.",
        autocompletion=lambda: ["cpu", "cuda"],
    ),
]


def demo(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Local Hugging Face directory.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Length of the text.")] = 1024,
    device: Device = None,
    dump_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Where STOF writes its dump.")
    ] = Path("stof-dump"),
    as_json: AsJson = False,
) -> None:
    """Run a real encoder with and without STOF."""
    from stof_compile.demo import DemoSettings, run_demo
    from stof_compile.dump import versions

    settings = DemoSettings(model_dir=model, tokens=tokens, device=device, dump_dir=dump_dir)
    with output(as_json) as out:
        found = run_demo(settings, out.console)
        out.result = {
            "versions": versions(),
            "rows": [
                {
                    "name": row.name,
                    "median_us": row.timing.median_us,
                    "p20_us": row.timing.p20_us,
                    "p80_us": row.timing.p80_us,
                    "runs": row.timing.runs,
                    "first_call_s": row.first_call_s,
                    "max_error": row.error.max_rel,
                    "rms_error": row.error.rms_rel,
                }
                for row in found.rows
            ],
            "sites": [
                {"name": site.name, "status": site.status, "kernel": site.kernel}
                for site in found.explanation.sites
            ],
            "dump": str(found.dump_dir),
        }


def tune(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help=f"A model of the zoo ({', '.join(MODELS)}: random weights), a local directory of "
            "transformers, or module:function, which returns (model, example inputs as a dict or "
            "tuple).",
            autocompletion=lambda: list(MODELS),
        ),
    ],
    batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences; default 1.")] = None,
    seq: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of each (ViT: patches); default 512."),
    ] = None,
    mask: Annotated[
        Mask,
        typer.Option(help="And-ed with the model's own; sqrt(seq) wide, at least 16."),
    ] = Mask.NONE,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Default float16 on cuda, else float32.")
    ] = None,
    device: Device = None,
    mode: Annotated[Mode | None, typer.Option(help="Inductor's mode.")] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most seconds of measuring per graph.")
    ] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The plan; default <model>-<batch>x<seq>.plan.json here."
        ),
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a dump there as well.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights, inputs, search.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Tune a model, show its schemes before and after, save the plan for options={'plan': FILE}."""
    from stof_compile.cli.dumps import record_json
    from stof_compile.tune import run_tune
    from stof_compile.tune_subject import TuneSettings

    settings = TuneSettings(
        model=model,
        batch=batch,
        seq=seq,
        mask=mask.value,
        dtype=_value(dtype),
        device=device,
        mode=_value(mode),
        budget_s=budget,
        out=out,
        dump_dir=dump_dir,
        seed=seed,
    )
    with output(as_json) as printed:
        found = run_tune(settings, printed.console)
        printed.result = {
            "model": model,
            "plan": str(found.plan),
            "seconds": found.seconds,
            "trials": found.trials,
            "graphs": [record_json(record) for record in found.explanation.graphs],
        }


def _value(choice: Enum | None) -> Any:
    return None if choice is None else choice.value
