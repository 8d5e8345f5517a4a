"""The model that ``stof tune`` works on: found by its name, built, given inputs."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stof_compile import zoo
from stof_compile.errors import StofOptionError
from stof_compile.places import check_file, check_folder

MASKS = ("none", "causal", "sliding", "longformer", "bigbird")
DTYPES = ("float16", "bfloat16", "float32")
_KINDS = (
    f"a model of the zoo ({', '.join(zoo.ZOO)}), a directory of transformers, or module:function"
)


@dataclass(frozen=True)
class TuneSettings:
    """What is tuned, and for how long.

    Args:
        model: a name of the zoo, a local directory of transformers, or ``module:function``.
        batch, seq: sequences and tokens of each; None = 1 and 512. ``module:function`` makes its
            own inputs: it takes no batch, and ``seq`` only gives the mask its width.
        mask: one of :data:`MASKS`, of width ``sqrt(seq)`` and at least 16.
        dtype: one of :data:`DTYPES`; None = float16 on cuda, else float32.
        device: None = cuda if there is one. mode: Inductor's mode.
        budget_s: seconds of measuring per graph.
        out: the plan; None = ``<model>-<batch>x<seq>.plan.json``.
        dump_dir: where the compile is dumped; None = nowhere.
        seed: of weights, inputs and the search.
    """

    model: str
    batch: int | None = None
    seq: int | None = None
    mask: str = "none"
    dtype: str | None = None
    device: str | None = None
    mode: str | None = None
    budget_s: float = 60.0
    out: Path | None = None
    dump_dir: Path | None = None
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """A model with one set of inputs; ``tokens`` is None where they cannot be told."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    tokens: int | None


def make_subject(settings: TuneSettings) -> Subject:
    """Find and build what is to be tuned.

    Raises:
        StofOptionError: there is no such model, or it does not take these sizes.
    """
    device, dtype = _device(settings.device), settings.dtype
    if dtype is None:
        dtype = "float16" if device.type == "cuda" else "float32"
    if settings.model in zoo.ZOO:
        batch, seq = _sizes(settings)
        model, inputs = zoo.build(
            settings.model, batch, seq, settings.seed, "sdpa", getattr(torch, dtype), device
        )
        tokens = zoo.token_count(settings.model, seq)
        return Subject(model, (), dict(inputs), f"{settings.model}-{batch}x{seq}", tokens)
    if Path(settings.model).is_dir():
        return _from_directory(settings, device, getattr(torch, dtype))
    if ":" in settings.model:
        return _from_function(settings)
    raise StofOptionError(f"--model {settings.model}: there is no such model; give {_KINDS}")


def _from_directory(settings: TuneSettings, device: torch.device, dtype: torch.dtype) -> Subject:
    transformers = zoo.transformers_module()
    folder = Path(settings.model)
    batch, seq = _sizes(settings)
    try:
        model = transformers.AutoModel.from_pretrained(
            folder, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise StofOptionError(f"--model {folder} cannot be loaded: {error}") from error
    config = model.config
    if model.main_input_name != "input_ids":
        raise StofOptionError(
            f"--model {folder} takes {model.main_input_name}, and only token ids can be made up "
            "here: write a function that returns (model, inputs) and give it as module:function"
        )
    for field in ("max_position_embeddings", "n_positions"):
        limit = getattr(config, field, None)
        relative = hasattr(config, "relative_attention_num_buckets")  # T5 names a limit it ignores
        if isinstance(limit, int) and seq > limit > 0 and not relative:
            raise StofOptionError(f"--seq {seq}: {folder} has {limit} positions ({field})")
    config.use_cache = False
    model = model.to(device=device, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(settings.seed)
    names = ["input_ids", *(["decoder_input_ids"] if config.is_encoder_decoder else [])]
    vocabulary = config.get_text_config().vocab_size
    low = min(zoo.FIRST_ID, vocabulary - 1)
    inputs = {
        name: torch.randint(low, vocabulary, (batch, seq), generator=generator).to(device)
        for name in names
    }
    return Subject(model, (), inputs, f"{folder.resolve().name}-{batch}x{seq}", seq)


def _from_function(settings: TuneSettings) -> Subject:
    where = f"--model {settings.model}"
    for option in ("batch", "dtype", "device"):
        if getattr(settings, option) is not None:
            raise StofOptionError(
                f"--{option} and {where}: the function decides; leave --{option} out"
            )
    module_name, _, function_name = settings.model.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise StofOptionError(
            f"{where}: neither a directory nor module:function, which is a module as in `import` "
            "and the name of a function in it"
        )
    with _working_directory_on_path():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise StofOptionError(f"{where}: {module_name} cannot be imported: {error}") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise StofOptionError(f"{where}: {module_name} has no function {function_name!r}")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError) as error:  # some functions written in C
            raise StofOptionError(f"{where}: it must be a function of yours: {error}") from error
        needed = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise StofOptionError(
                f"{where}: it must take no arguments, it wants {', '.join(needed)}"
            )
        made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise StofOptionError(
            f"{where} must return (model, inputs), inputs a dict of keyword arguments or a tuple "
            f"of positional ones; it returned {type(made).__name__}"
        )
    model, inputs = made
    if isinstance(inputs, Mapping):
        return Subject(model, (), dict(inputs), function_name, None)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    return Subject(model, args, {}, function_name, None)


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    folder = str(Path.cwd())  # a console script has its own folder there, not the user's
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _sizes(settings: TuneSettings) -> tuple[int, int]:
    return settings.batch or 1, settings.seq or 512


def check_settings(settings: TuneSettings) -> None:
    """Refuse settings that no model could have, and places where nothing can be written.

    Raises:
        StofOptionError: with the setting and what it may be.
        StofPlaceError: ``out`` or ``dump_dir`` cannot be written to.
    """
    if not settings.model:
        raise StofOptionError(f"--model is empty: give {_KINDS}")
    for name in ("batch", "seq"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise StofOptionError(f"--{name} must be at least 1, got {value}")
    for name, value, valid in (
        ("mask", settings.mask, MASKS),
        ("dtype", settings.dtype, (None, *DTYPES)),
    ):
        if value not in valid:
            words = ", ".join(word for word in valid if word)
            raise StofOptionError(f"--{name} {value}: choose one of {words}")
    if not (math.isfinite(settings.budget_s) and settings.budget_s >= 0):
        raise StofOptionError(
            f"--budget must be a finite number of seconds, 0 or more, got {settings.budget_s:g}; "
            "0 measures nothing"
        )
    if not 0 <= settings.seed < 2**63:
        raise StofOptionError(f"--seed must be in 0 .. 2**63 - 1, got {settings.seed}")
    # tuning takes minutes: a place that cannot be written to is an error before it
    if settings.out is None:
        check_folder(Path(), "the current folder, where the plan goes without --out,")
    else:
        check_file(settings.out, f"--out {settings.out}")
    if settings.dump_dir is not None:
        check_folder(settings.dump_dir, f"--dump-dir {settings.dump_dir}")


def _device(name: str | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    name = name or ("cuda" if has_cuda else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise StofOptionError(f"--device {name}: models are tuned on cpu or cuda")
    if name.startswith("cuda") and not has_cuda:
        raise StofOptionError(
            f"--device {name}: torch sees no CUDA device; `stof doctor` says more"
        )
    return torch.device(name)
