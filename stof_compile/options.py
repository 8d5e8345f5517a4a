"""Options of the backend: one frozen dataclass, checked once, documented where it is defined."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stof_compile.errors import StofOptionError, StofPlaceError

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ATTENTION_CHOICES = ("auto", "paper", "block", "row", "gather", "flex", "sdpa", "off")
FUSION_CHOICES = ("auto", "off")
SCHEME_CODES = r"[0-9a-fA-F]+(,[0-9a-fA-F]+)*"  # beside the choices: codes of schemes


def _about(doc: str, unit: str = "") -> dict[str, str]:
    return {"doc": doc, "unit": unit}


@dataclass(frozen=True, eq=False)
class StofOptions:
    """What a user can set through ``torch.compile(..., backend="stof", options={...})``."""

    mode: str | None = field(
        default=None,
        metadata=_about(
            "Inductor's mode: default, reduce-overhead (CUDA graphs), max-autotune, "
            "max-autotune-no-cudagraphs, or another one that this torch has; `mode=` of "
            "torch.compile sets the same. Who captures CUDA graphs of the calls himself "
            "says reduce-overhead and `inductor={'triton.cudagraphs': False}`"
        ),
    )
    mask: Any = field(
        default=None,
        metadata=_about(
            "mask and-ed with the model's own: a rule of stof_compile.masks, a block mask, a bool "
            "tensor (True = attend), or a dict from module path (`encoder.layer.0`, `decoder.*`) "
            "to one of those; it changes the function"
        ),
    )
    attention: str = field(
        default="auto",
        metadata=_about(
            "kernel choice: auto (measured), paper (Equation 1), block, row, gather, flex, sdpa, "
            "or off (attention is left alone)"
        ),
    )
    fusion: str = field(
        default="auto",
        metadata=_about(
            "operators after attention: auto (searched, measured, kept where faster), off (all is "
            "left to Inductor), or scheme codes in hexadecimal, separated by commas (each for the "
            "chains whose number of ops it fits)"
        ),
    )
    tune_budget_s: float = field(
        default=60.0,
        metadata=_about(
            "most time spent on measuring per graph; 0 = a decision table, no timing", "s"
        ),
    )
    pack_memory: float = field(
        default=0.3,  # Q/K/V is 19 % of BERT-base, 10 % of a LLaMA of 1B; gate and up about 55 %
        metadata=_about(
            "most memory that packed copies of weights take together, as a share of the bytes of "
            "the parameters; 0.3 is enough for Q/K/V, 1.0 also for the gate and up projections of "
            "gated MLPs, 0 = nothing is packed. What fits is packed where it is measured to be "
            "faster"
        ),
    )
    cache_dir: Path | None = field(
        default=None,
        metadata=_about("where measured choices are kept; None = the user's cache folder"),
    )
    dump_dir: Path | None = field(
        default=None,
        metadata=_about("where every stage is written as text and JSON; None = nowhere"),
    )
    seed: int = field(
        default=0, metadata=_about("seed of the random tensors of timing runs and of the search")
    )
    fp8: bool = field(
        default=False,
        metadata=_about(
            "round the queries, keys and values of attention to 8 bits (e4m3, one scale for each "
            "batch row and head) where its kernel can: NVIDIA GPUs of capability 8.9 and newer, "
            "fp16 and bf16, no gradients; it changes results by some percent and is never chosen "
            "by itself"
        ),
    )
    strict: bool = field(
        default=False, metadata=_about("raise where STOF would leave a part to PyTorch")
    )
    plan: Path | None = field(
        default=None,
        metadata=_about(
            "a plan file to follow in place of measuring; it holds the graphs of a whole model"
        ),
    )
    inductor: Mapping[str, Any] = field(
        default_factory=dict, metadata=_about("settings of torch._inductor.config, handed on")
    )

    def __post_init__(self) -> None:
        for name in ("cache_dir", "dump_dir", "plan"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Path(value).expanduser())
        for name in ("tune_budget_s", "pack_memory"):
            value = getattr(self, name)
            if type(value) is int:
                try:
                    object.__setattr__(self, name, float(value))
                except OverflowError:  # as large a float is infinite, which is refused below
                    object.__setattr__(self, name, math.inf)
        _check_types(self)
        _check_values(self)
        object.__setattr__(self, "inductor", _checked_inductor(self.inductor))

    @classmethod
    def from_compile_kwargs(
        cls, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> StofOptions:
        """Build the options from what ``torch.compile`` hands to a backend.

        Args:
            mode: ``mode=`` of torch.compile, passed on unchecked, and only when not "default".
            options: ``options=`` of torch.compile; its key "mode" means the same as ``mode``.
        Raises:
            StofOptionError: unknown key, wrong type, impossible value, or two different modes.
        """
        given = dict(options or {})
        valid = [f.name for f in dataclasses.fields(cls)]
        for key in given:
            if key not in valid:
                raise StofOptionError(
                    f"unknown option {key!r}{_did_you_mean(key, valid)}; "
                    f"valid: {', '.join(sorted(valid))}"
                )
        if mode is not None:
            if given.get("mode", mode) != mode:
                raise StofOptionError(
                    f"mode={mode!r} and options['mode']={given['mode']!r} differ; give one of them"
                )
            given["mode"] = mode
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The options as plain JSON values; masks by their description."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("cache_dir", "dump_dir", "plan"):
            plain[name] = None if plain[name] is None else str(plain[name])
        plain["mask"] = describe_mask(self.mask)
        plain["inductor"] = {key: _plain(value) for key, value in self.inductor.items()}
        return plain


def describe_mask(mask: Any) -> Any:
    """A short JSON description of the option's mask, for dumps and logs."""
    if mask is None:
        return None
    if isinstance(mask, Mapping):
        return {path: describe_mask(value) for path, value in mask.items()}
    if isinstance(mask, torch.Tensor):
        return f"bool tensor {tuple(mask.shape)} on {mask.device}"
    return str(mask)


def options_table() -> str:
    """The options as a Markdown table: name, type, default, unit, meaning."""
    rows = ["| option | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for f in dataclasses.fields(StofOptions):
        default = "{}" if f.default is dataclasses.MISSING else repr(f.default)
        kind = "mask" if f.name == "mask" else str(f.type).replace("|", "or")
        meaning = f.metadata["doc"].replace("|", "\\|")
        rows.append(f"| `{f.name}` | {kind} | `{default}` | {f.metadata['unit']} | {meaning} |")
    return "\n".join(rows) + "\n"


# -- checks ---------------------------------------------------------------------------------------


def _check_types(options: StofOptions) -> None:
    expected: dict[str, tuple[tuple[type, ...], str]] = {
        "mode": ((str, type(None)), "a string or None"),
        "attention": ((str,), "a string"),
        "fusion": ((str,), "a string"),
        "tune_budget_s": ((float,), "a number of seconds"),
        "pack_memory": ((float,), "a number, a share of the parameters' bytes"),
        "cache_dir": ((Path, type(None)), "a path or None"),
        "dump_dir": ((Path, type(None)), "a path or None"),
        "seed": ((int,), "an int"),
        "fp8": ((bool,), "True or False"),
        "strict": ((bool,), "True or False"),
        "plan": ((Path, type(None)), "a path or None"),
        "inductor": ((Mapping,), "a dict"),
    }
    for name, (types, words) in expected.items():
        value = getattr(options, name)
        is_bool_for_int = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or is_bool_for_int:
            raise StofOptionError(f"option {name!r} must be {words}, got {_show(value)}")


def _check_values(options: StofOptions) -> None:
    choices: list[tuple[str, tuple[str, ...]]] = [("attention", ATTENTION_CHOICES)]
    if options.mode not in MODES:
        choices.append(("mode", _modes()))
    for name, valid in choices:
        value = getattr(options, name)
        if value not in valid:
            raise StofOptionError(
                f"option {name!r} cannot be {value!r}{_did_you_mean(value, valid)}; "
                f"valid: {', '.join(valid)}"
            )
    if options.fusion not in FUSION_CHOICES and not re.fullmatch(SCHEME_CODES, options.fusion):
        raise StofOptionError(
            f"option 'fusion' cannot be {options.fusion!r}"
            f"{_did_you_mean(options.fusion, FUSION_CHOICES)}; valid: "
            f"{', '.join(FUSION_CHOICES)}, or scheme codes such as '0c' or '0c,1f'"
        )
    if not math.isfinite(options.tune_budget_s) or options.tune_budget_s < 0:
        raise StofOptionError(
            f"option 'tune_budget_s' must be >= 0 and finite, got {options.tune_budget_s}; "
            "0 turns timing off"
        )
    if not math.isfinite(options.pack_memory) or options.pack_memory < 0:
        raise StofOptionError(
            f"option 'pack_memory' must be >= 0 and finite, got {options.pack_memory}; 0 packs "
            "nothing, with 1.0 packed copies of weights may take as much as the parameters"
        )
    if options.seed < 0 or options.seed >= 2**63:
        raise StofOptionError(f"option 'seed' must be in 0 .. 2**63 - 1, got {options.seed}")
    for name in ("cache_dir", "dump_dir"):
        folder = getattr(options, name)
        if folder is not None and folder.exists() and not folder.is_dir():
            raise StofOptionError(f"option {name!r} must be a folder, {folder} is a file")
    if options.dump_dir is not None:
        _check_writable(options.dump_dir, "dump_dir")
    if options.plan is not None and not options.plan.is_file():
        raise StofOptionError(f"option 'plan' must be an existing file, {options.plan} is none")
    _check_mask(options.mask, "option 'mask'")


def _modes() -> tuple[str, ...]:
    """Inductor's modes: those of ``MODES``, and what else this version of torch has."""
    from torch._inductor import list_mode_options

    known = [mode for mode in MODES if mode is not None]
    return *known, *(mode for mode in list_mode_options() if mode not in known)


def _check_writable(folder: Path, name: str) -> None:
    """Tuning may take a minute; a folder that cannot be made is an error before it."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise (StofPlaceError if there.is_dir() else StofOptionError)(
            f"option {name!r} must be a folder that can be written, or be made: {folder} cannot, "
            f"since {there} {why}; give another one"
        )


def _check_mask(mask: Any, where: str) -> None:
    if mask is None or _is_rule_or_block_mask(mask):
        return
    if isinstance(mask, Mapping):
        if not mask:
            raise StofOptionError(f"{where} is an empty dict; give None for no mask")
        for path, value in mask.items():
            if not isinstance(path, str) or not path.strip():
                raise StofOptionError(
                    f"{where}: a key must be a module path such as 'encoder.layer.0' or "
                    f"'decoder.*', got {_show(path)}"
                )
            if isinstance(value, Mapping) or value is None:
                raise StofOptionError(f"{where}[{path!r}] must be a mask, got {_show(value)}")
            _check_mask(value, f"{where}[{path!r}]")
        return
    if isinstance(mask, torch.Tensor):
        if mask.dtype is not torch.bool:
            raise StofOptionError(
                f"{where} is a tensor of {mask.dtype}; a mask is bool with True = attend "
                "(an additive bias belongs into the model)"
            )
        if mask.dim() < 2:
            raise StofOptionError(
                f"{where} has shape {tuple(mask.shape)}; needed: [..., q_len, k_len]"
            )
        return
    if callable(mask):
        raise StofOptionError(
            f"{where} is a plain function; wrap it: stof_compile.masks.rule(function)"
        )
    raise StofOptionError(
        f"{where} must be a rule of stof_compile.masks, a block mask, a bool tensor or a dict of "
        f"those by module path, got {_show(mask)}"
    )


def _is_rule_or_block_mask(mask: Any) -> bool:
    # by attributes, not by type: the mask classes live in a higher layer, FlexAttention's class
    # is costly to import
    is_rule = callable(getattr(mask, "keep", None)) and hasattr(mask, "key")
    is_block_mask = hasattr(mask, "row_ptr") and hasattr(mask, "bitmap")
    is_flex = hasattr(mask, "kv_num_blocks") and hasattr(mask, "mask_mod")
    return is_rule or is_block_mask or is_flex


def _checked_inductor(settings: Mapping[str, Any]) -> dict[str, Any]:
    if not settings:
        return {}
    from torch._inductor import config  # costly, and needed only here

    known = config.get_config_copy()
    checked: dict[str, Any] = {}
    for key, value in settings.items():
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name not in known:
            raise StofOptionError(
                f"option 'inductor': torch._inductor.config has no setting {key!r}"
                f"{_did_you_mean(str(key), known)}"
            )
        checked[name] = value
    return checked


def _did_you_mean(word: Any, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(valid), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}" if close else ""


def _show(value: Any) -> str:
    text = repr(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    return f"{short} ({type(value).__name__})"


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | type(None)) else repr(value)
