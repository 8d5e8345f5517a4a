"""Two processes on the CPU (gloo): data parallel, sharded and tensor-parallel training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parent
WORKER = TESTS / "distributed_worker.py"

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs the gloo backend"
)


def run(case, folder):
    """Start both ranks of a case; each prints OK when its checks held."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(p) for p in (TESTS, TESTS.parent)),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), case, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text in texts:
        assert text.rstrip().endswith("OK"), text[-3000:]


@pytest.mark.parametrize("case", ["ddp", "ddp-mask", "ddp-split", "fsdp", "tensor-parallel"])
def test_two_ranks(case, tmp_path):
    run(case, tmp_path)
