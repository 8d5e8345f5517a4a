"""Two processes on the CPU (gloo): data parallel, sharded and tensor-parallel training; one rank
tunes the operators of a graph, the other follows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parent
WORKER = TESTS / "distributed_worker.py"
CASES = (
    "ddp",
    "ddp-mask",
    "ddp-split",
    "fsdp",
    "tensor-parallel",
    "operators-alike",
    "operators-graphs-of-their-own",
    "operators-too-slow",
    "operators-failing",
    "operators-tensor-parallel",
)

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs the gloo backend"
)


def run(cases, folder):
    """Start both ranks; each prints a case as it begins, and OK when the checks of all held."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(p) for p in (TESTS, TESTS.parent)),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), ",".join(cases), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text in texts:
        assert text.rstrip().endswith("OK"), text[-3000:]


def test_two_ranks(tmp_path):
    run(CASES, tmp_path)
