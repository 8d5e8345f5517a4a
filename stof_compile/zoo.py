"""Models to tune and to measure: configurations of transformers with random weights from a seed.

``bench/`` and ``stof tune`` share them. Weights are drawn, nothing is downloaded. A model has no
head behind its last hidden state, no cache and no dropout, and its position limit is raised to the
length asked for.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stof_compile.errors import StofOptionError, StofUnsupportedError

PATCH = 16
"""Edge of a ViT patch in pixels."""

FIRST_ID = 3
"""Token ids below it stand for padding, start and end in one or the other of these models."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model.

    Args:
        family: ``bert`` | ``distilbert`` | ``gpt2`` | ``llama`` | ``t5`` | ``vit``.
        layers: of the encoder or decoder; T5 has as many of either.
        hidden: channels. heads: query heads. ffn: width of the feed-forward part.
        vocabulary: token ids, 0 where there are none.
        kv_heads: key and value heads, 0 = as many as query heads.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int = 0
    kv_heads: int = 0

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class AttentionLayers:
    """Equal attention layers of a model; queries and keys are equally long in all of them.

    Args:
        role: ``self`` | ``causal`` | ``cross``.
        count: how many there are. heads, kv_heads, head_dim: of each.
        bias: whether a learned bias is added to the scores.
    """

    role: str
    count: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False


def _tiny(family: str, kv_heads: int = 0) -> Sizes:
    return Sizes(family, 2, 64, 2, 128, 0 if family == "vit" else 1000, kv_heads)


ZOO: Mapping[str, Sizes] = {
    "bert-base": Sizes("bert", 12, 768, 12, 3072, 30522),
    "bert-large": Sizes("bert", 24, 1024, 16, 4096, 30522),
    "gpt2": Sizes("gpt2", 12, 768, 12, 3072, 50257),
    "distilgpt2": Sizes("gpt2", 6, 768, 12, 3072, 50257),
    "llama-1b": Sizes("llama", 16, 2048, 32, 8192, 32000, kv_heads=8),
    "t5-base": Sizes("t5", 12, 768, 12, 3072, 32128),
    "vit-base": Sizes("vit", 12, 768, 12, 3072),
    "distilbert": Sizes("distilbert", 6, 768, 12, 3072, 30522),
    "bert-tiny": _tiny("bert"),
    "gpt2-tiny": _tiny("gpt2"),
    "llama-tiny": _tiny("llama", kv_heads=1),
    "t5-tiny": _tiny("t5"),
    "vit-tiny": _tiny("vit"),
    "distilbert-tiny": _tiny("distilbert"),
}


def sizes_of(name: str) -> Sizes:
    """The sizes of a model of the zoo.

    Raises:
        StofOptionError: there is no such model.
    """
    if name not in ZOO:
        close = difflib.get_close_matches(name, ZOO, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]!r}" if close else ""
        raise StofOptionError(f"no model {name!r} in the zoo{hint}; models: {', '.join(ZOO)}")
    return ZOO[name]


def token_count(name: str, seq: int) -> int:
    """Positions attention sees when ``seq`` is asked for: ViT has a class token beside its patches.

    Raises:
        StofOptionError: there is no such model.
    """
    return seq + 1 if sizes_of(name).family == "vit" else seq


def attention_layers(name: str) -> tuple[AttentionLayers, ...]:
    """The attention layers of a model.

    Raises:
        StofOptionError: there is no such model.
    """
    sizes = sizes_of(name)
    kv_heads = sizes.kv_heads or sizes.heads
    group = partial(
        AttentionLayers,
        count=sizes.layers,
        heads=sizes.heads,
        kv_heads=kv_heads,
        head_dim=sizes.head_dim,
    )
    if sizes.family == "t5":
        return (group("self", bias=True), group("causal", bias=True), group("cross"))
    return (group("causal" if sizes.family in ("gpt2", "llama") else "self"),)


def build(
    name: str,
    batch: int,
    seq: int,
    seed: int = 0,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model and its inputs; equal arguments give equal weights and inputs.

    Args:
        name: key of :data:`ZOO`.
        batch: sequences. seq: tokens of each (T5: of either side; ViT: patches).
        attention: ``attn_implementation`` of transformers.
        dtype: of the parameters. device: where they are drawn; ``meta`` draws none.
    Returns:
        The model in eval mode, and keyword arguments for a call; its result has
        ``last_hidden_state`` [batch, tokens, hidden].
    Raises:
        StofOptionError: no such model, or an impossible size.
        StofUnsupportedError: transformers is missing.
    """
    model = build_model(name, seq, seed, attention, dtype, device)
    return model, make_inputs(name, batch, seq, seed, dtype, device)


def build_model(
    name: str,
    seq: int,
    seed: int = 0,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model of :func:`build` without inputs."""
    sizes = sizes_of(name)
    if seq < 1:
        raise StofOptionError(f"a sequence has at least one token, got {seq}")
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        model = _make(sizes, seq, attention)
    # parameters only: LLaMA's table of frequencies stays fp32, as transformers itself keeps it
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def make_inputs(
    name: str,
    batch: int,
    seq: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Random inputs of a model: token ids int64 ``[batch, seq]``, or pixels ``[batch, 3, H, W]``.

    Raises:
        StofOptionError: no such model, or an impossible size.
    """
    sizes = sizes_of(name)
    if batch < 1:
        raise StofOptionError(f"a batch has at least one sequence, got {batch}")
    generator = torch.Generator().manual_seed(seed)
    if sizes.family == "vit":
        rows, columns = _grid(seq)
        shape = (batch, 3, PATCH * rows, PATCH * columns)
        return {"pixel_values": torch.randn(shape, generator=generator).to(device, dtype)}
    names = ("input_ids", "decoder_input_ids") if sizes.family == "t5" else ("input_ids",)
    return {
        key: torch.randint(FIRST_ID, sizes.vocabulary, (batch, seq), generator=generator).to(device)
        for key in names
    }


def _grid(patches: int) -> tuple[int, int]:
    """Rows and columns of so many patches, as near to a square as they divide."""
    rows = next(r for r in range(math.isqrt(patches), 0, -1) if patches % r == 0)
    return rows, patches // rows


# -- families --------------------------------------------------------------------------------------


def transformers_module() -> Any:
    """The package transformers.

    Raises:
        StofUnsupportedError: it is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise StofUnsupportedError(
            "models by name need transformers: pip install 'stof-compile[demo]'"
        ) from error
    return transformers


def _bert(sizes: Sizes, seq: int) -> dict[str, Any]:
    return {
        **_common(sizes),
        "max_position_embeddings": max(512, seq),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _distilbert(sizes: Sizes, seq: int) -> dict[str, Any]:
    return {
        "dim": sizes.hidden,
        "n_layers": sizes.layers,
        "n_heads": sizes.heads,
        "hidden_dim": sizes.ffn,
        "max_position_embeddings": max(512, seq),
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _gpt2(sizes: Sizes, seq: int) -> dict[str, Any]:
    return {
        "n_embd": sizes.hidden,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_inner": sizes.ffn,
        "n_positions": max(1024, seq),
        "bos_token_id": sizes.vocabulary - 1,
        "eos_token_id": sizes.vocabulary - 1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    }


def _llama(sizes: Sizes, seq: int) -> dict[str, Any]:
    return {
        **_common(sizes),
        "num_key_value_heads": sizes.kv_heads or sizes.heads,
        "max_position_embeddings": max(2048, seq),
        "use_cache": False,
    }


def _t5(sizes: Sizes, seq: int) -> dict[str, Any]:
    return {  # relative positions: no limit to raise
        "d_model": sizes.hidden,
        "d_kv": sizes.head_dim,
        "d_ff": sizes.ffn,
        "num_layers": sizes.layers,
        "num_decoder_layers": sizes.layers,
        "num_heads": sizes.heads,
        "dropout_rate": 0.0,
        "use_cache": False,
    }


def _vit(sizes: Sizes, seq: int) -> dict[str, Any]:
    return {
        **_common(sizes),
        "image_size": [PATCH * edge for edge in _grid(seq)],
        "patch_size": PATCH,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _common(sizes: Sizes) -> dict[str, Any]:
    """Sizes by the names that most configs have for them."""
    return {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.ffn,
    }


FAMILIES: Mapping[str, tuple[str, Callable[[Sizes, int], dict[str, Any]]]] = {
    "bert": ("Bert", _bert),
    "distilbert": ("DistilBert", _distilbert),
    "gpt2": ("GPT2", _gpt2),
    "llama": ("Llama", _llama),
    "t5": ("T5", _t5),
    "vit": ("ViT", _vit),
}
"""Classes of transformers, without ``Model`` and ``Config``, and the fields of their configs."""


def _make(sizes: Sizes, seq: int, attention: str) -> nn.Module:
    name, fields = FAMILIES[sizes.family]
    package = transformers_module()
    vocabulary = {"vocab_size": sizes.vocabulary} if sizes.vocabulary else {}
    config = getattr(package, f"{name}Config")(
        **fields(sizes, seq), **vocabulary, attn_implementation=attention
    )
    headless = {"add_pooling_layer": False} if sizes.family in ("bert", "vit") else {}
    model: nn.Module = getattr(package, f"{name}Model")(config, **headless)
    return model
