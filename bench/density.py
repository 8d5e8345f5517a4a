"""Table 2 of the STOF paper: how sparse its four masks are, beside the figures it prints."""

from __future__ import annotations

import argparse

import torch
from cases import MASKS, Cell, dense_mask
from machine import conditions
from results import append_row, say

FIELDS = (
    "cell", "seq", "window", "global_tokens", "sparsity_percent", "paper_percent",
    "device", "torch", "triton", "stof", "date",
)  # fmt: skip
SEQ, WIDTH = 1024, 32
PAPER = {"causal": 50.0, "sliding": 93.8, "longformer": 88.8, "bigbird": 80.8}


def run_density(args: argparse.Namespace, device: torch.device) -> None:
    """Write a row for each mask; STOF's rule is compared with its definition on the way."""
    for mask in MASKS:
        keep = dense_mask(Cell(1, SEQ, mask, WIDTH, WIDTH), device)
        row = {
            "cell": mask,
            "seq": SEQ,
            "window": WIDTH,
            "global_tokens": WIDTH,
            "sparsity_percent": 100.0 * (1.0 - float(keep.double().mean())),
            "paper_percent": PAPER[mask],
            **conditions(device),
        }
        append_row(args.out, FIELDS, row)
        say(f"  {mask}: {row['sparsity_percent']:.2f} %, in the paper {PAPER[mask]} %")
