"""Makes the dump that docs/tour.md walks through.

    python docs/tools/make_tour_dump.py tour-dump

A BERT of two layers with random weights reads 1,024 token ids, the last 64 of them padding, on the
CPU under a BigBird mask.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

import stof_compile
from stof_compile import masks


def small_bert() -> torch.nn.Module:
    """A BERT of 2 layers, 4 heads of 32 channels, for sequences of up to 1,024 tokens."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def make_dump(folder: Path, budget_s: float = 60.0) -> stof_compile.Explanation:
    """Compile the model, call it once and leave the dump in ``folder``.

    Args:
        folder: where graph_<n>_<hash> is written; measured choices are kept in its ``cache``.
        budget_s: most seconds spent on measuring; 0 = decision table.
    """
    model = small_bert()
    ids = torch.arange(1024)[None] % 128
    padding = torch.ones_like(ids)
    padding[:, -64:] = 0
    options = {
        "mask": masks.bigbird(window=32, global_tokens=32, random_fill=0.1),
        "dump_dir": str(folder),
        "cache_dir": str(folder / "cache"),
        "tune_budget_s": budget_s,
    }
    fast = torch.compile(model, backend="stof", options=options)
    with torch.no_grad():
        fast(input_ids=ids, attention_mask=padding)
    return stof_compile.explain(fast)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.stdout.write(f"{make_dump(Path(sys.argv[1]))}\n")
