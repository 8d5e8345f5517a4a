"""Draws the pictures of the masks page: ``python -m stof_compile.masks.gallery docs/img/masks``."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from stof_compile import masks
from stof_compile.masks.spec import MaskSpec

LENGTH, BLOCK = 512, 32
"""Tokens drawn and tile edge: large enough to show the tiles, small enough for a page."""


def pictures() -> dict[str, MaskSpec]:
    """The masks of the page, by file name."""
    lengths = [0, 100, 130, 300, 420, LENGTH]
    return {
        "causal": masks.causal(),
        "sliding_window": masks.sliding_window(32),
        "sliding_window_causal": masks.sliding_window(64, causal=True),
        "longformer": masks.longformer(32, 32),
        "bigbird": masks.bigbird(32, 32, 0.1, random_block=32),
        "longformer_ae": masks.longformer_ae(32, 32),
        "bigbird_ae": masks.bigbird_ae(32, 32, 0.1),
        "global_tokens": masks.global_tokens(48),
        "random_blocks": masks.random_blocks(0.2, block=32),
        "dilated": masks.dilated(32, 4),
        "strided": masks.strided(64),
        "fixed": masks.fixed(64, summary=8),
        "block_diagonal": masks.block_diagonal(96),
        "document": masks.from_cu_seqlens(lengths) & masks.causal(),
        "prefix_lm": masks.prefix_lm(128),
        "rule": masks.rule(
            lambda b, h, q, k: (q - k).abs() < 16 + torch.div(q, 4, rounding_mode="floor")
        ),
    }


def main(arguments: list[str] | None = None) -> None:
    """Draw every mask into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the PNG files go")
    folder = parser.parse_args(arguments).folder
    for name, spec in pictures().items():
        path = masks.build_block_mask(spec, LENGTH, LENGTH, BLOCK).plot(folder / f"{name}.png")
        logging.getLogger(__name__).info("wrote %s", path)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
