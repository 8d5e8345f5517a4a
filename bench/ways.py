"""The ways to compile a model under a mask: peers of the end-to-end benchmark, and ablations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cases import RANDOM_BLOCK, Cell, dense_mask, mask_spec, table2_cell
from models import build_model, caller, flex_model, masked_model, roles
from peers import M64, SAFE, Setup, split_block_mask
from results import usual_dtype
from torch import Tensor

from stof_compile import zoo

MODES = {"default": None, "ro": "reduce-overhead"}
AUTOTUNE = "compile-max-autotune"
AUTOTUNED = (("bert-base", "1x128"), ("bert-base", "16x2048"), ("llama-1b", "8x512"))
"""Cells that have the slow max-autotune row without being asked for it."""


@dataclass(frozen=True)
class Way:
    """One way to compile the model.

    Args:
        attention: ``sdpa`` | ``flex`` | ``stof``. mode: Inductor's.
        options: of STOF, beside the mask. implementation: of the model's attention, for STOF.
        named: runs only where it is asked for by name.
    """

    name: str
    attention: str
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    implementation: str = "sdpa"
    named: bool = False

    @property
    def has_graphs(self) -> bool:
        """Whether calls replay CUDA graphs of Inductor."""
        return self.mode == "reduce-overhead" and "inductor" not in self.options


def ways(device: torch.device, model: str, shape: str) -> list[Way]:
    """All ways of a cell; CUDA graphs (ro) and Triton's autotuning only where there is a GPU."""
    cuda = device.type == "cuda"
    modes = {k: v for k, v in MODES.items() if cuda or v is None}
    found = [
        Way(f"{label}-{short}", attention, mode)
        for label, attention in (("compile", "sdpa"), ("flex", "flex"), ("stof", "stof"))
        for short, mode in modes.items()
    ]
    if cuda:  # without graphs of its own, so that its replay is timed like the others'
        asked_only = (model, shape) not in AUTOTUNED
        found.append(Way(AUTOTUNE, "sdpa", "max-autotune-no-cudagraphs", named=asked_only))
        # for callers who capture graphs: the host has no say in which form is kept
        captured = {"inductor": {"triton.cudagraphs": False}}
        found.append(Way("stof-captured", "stof", "reduce-overhead", captured))
    return [
        *found,
        Way("stof-attention", "stof", None, {"fusion": "off", "strict": True}, named=True),
        Way("stof-fusion", "stof", None, {"attention": "off"}, named=True),
        # the boundary of attention broken: its products, mask and softmax are operators like others
        Way("stof-broken-mha", "stof", None, {"attention": "off"}, "eager", named=True),
    ]


def chosen_ways(device: torch.device, model: str, shape: str, peers: str | None) -> list[Way]:
    """The ways that ``--peers`` selects: by name, or all unnamed ones of ``sdpa``, ``flex`` ...

    Raises:
        SystemExit: an entry selects nothing that exists.
    """
    every = ways(device, model, shape)
    if not peers:
        return [way for way in every if not way.named]
    words = {word.strip() for word in peers.split(",")}
    known = {way.name for way in every} | {way.attention for way in every}
    if (
        words
        - known
        - {AUTOTUNE, "stof-captured", *(f"{p}-ro" for p in ("compile", "flex", "stof"))}
    ):
        raise SystemExit(
            f"no way {', '.join(sorted(words - known))}; ways: {', '.join(sorted(known))}"
        )
    return [w for w in every if w.name in words or (w.attention in words and not w.named)]


def asked(way: Way, args: argparse.Namespace) -> Way:
    """A way with the options that the command line has for STOF; ``args.worker`` names the cell."""
    if way.attention != "stof":
        return way
    options = {"tune_budget_s": args.tune_budget, **way.options}
    if args.dump_dir is not None:
        model, shape = args.worker.split("/")[:2]
        options["dump_dir"] = str(args.dump_dir / f"{model}-{shape}-{way.name}")
    return replace(way, options=options)


def model_cell(model: str, shape: str, device: torch.device, dtype: str | None = None) -> Cell:
    """The attention problem inside the model; its length is what attention sees.

    Args:
        dtype: of the model; None is the device's usual one.
    """
    batch, seq = (int(n) for n in shape.split("x"))
    layers = zoo.attention_layers(model)[0]
    return table2_cell(
        batch,
        zoo.token_count(model, seq),
        "bigbird",
        heads=layers.heads,
        head_dim=layers.head_dim,
        dtype=dtype or usual_dtype(device.type == "cuda"),
    )


@dataclass(frozen=True)
class Subject:
    """A model in a cell: its name, the length asked for, input sets and the fp64 answer."""

    model: str
    shape: str
    seq: int
    setup: Setup
    seed: int
    names: tuple[str, ...]
    sets: list[tuple[Tensor, ...]]
    expected: Tensor | None = None


def make_subject(
    model: str,
    shape: str,
    device: torch.device,
    store: Path,
    seed: int,
    *,
    answer: bool,
    dtype: str | None = None,
) -> Subject:
    """Mask, inputs and, with ``answer``, the fp64 answer of a cell ``BxS``."""
    cell, seq = model_cell(model, shape, device, dtype), int(shape.split("x")[1])
    setup = Setup(cell, device, dense_mask(cell, device), store)
    drawn = [
        zoo.make_inputs(model, cell.batch, seq, seed + i, cell.torch_dtype, device)
        for i in range(3)
    ]
    sets = [tuple(inputs.values()) for inputs in drawn]
    expected = reference(model, seq, setup, drawn[0], seed) if answer else None
    return Subject(model, shape, seq, setup, seed, tuple(drawn[0]), sets, expected)


def compile_model(way: Way, subject: Subject) -> tuple[Callable[..., Tensor], Any]:
    """Build and compile the model of one way; nothing runs yet."""
    setup, cell = subject.setup, subject.setup.cell
    given = (subject.seed, cell.torch_dtype, setup.device)
    if way.attention == "sdpa":
        masked, extra = masked_model(
            subject.model, subject.seq, subject.seed, setup.dense, cell.torch_dtype, setup.device
        )
        compiled = torch.compile(masked, dynamic=False, mode=way.mode)
        return caller(compiled, dict.fromkeys(subject.names), extra), compiled
    if way.attention == "flex":
        cuda = setup.device.type == "cuda"
        block = 64 if cuda else 32
        blocks = {
            role: split_block_mask(setup, block, causal=role == "causal")
            for role in roles(subject.model)
            if role != "cross"
        }
        chosen = _flex_options(cell) if cuda else {}
        model = flex_model(
            subject.model, subject.seq, subject.seed, blocks, chosen, cell.torch_dtype, setup.device
        )
        compiled = torch.compile(model, dynamic=False, mode=way.mode)
        return caller(compiled, dict.fromkeys(subject.names), {}), compiled
    model = build_model(subject.model, subject.seq, way.implementation, *given)
    options = {"mask": mask_spec(cell), "cache_dir": setup.choices, **way.options}
    options |= {"mode": way.mode} if way.mode else {}
    compiled = torch.compile(model, backend="stof", dynamic=False, options=options)
    return caller(compiled, dict.fromkeys(subject.names), {}), compiled


def _flex_options(cell: Cell) -> dict[str, Any]:
    # with SAFE a row must find a key in its first partial block: the global keys do, while they
    # do not fill that block
    return M64 | SAFE if cell.global_tokens < RANDOM_BLOCK else dict(M64)


def reference(name: str, seq: int, setup: Setup, inputs: Mapping[str, Tensor], seed: int) -> Tensor:
    """The masked model in fp64 with the tested dtype's weights, one sequence at a time."""
    model, extra = masked_model(name, seq, seed, setup.dense, setup.cell.torch_dtype, setup.device)
    call = caller(model.double(), inputs, extra)
    wide = [t.double() if t.is_floating_point() else t for t in inputs.values()]
    return torch.cat([call(*(t[i : i + 1] for t in wide)) for i in range(setup.cell.batch)])
