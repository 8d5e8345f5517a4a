"""Two processes on the CPU (gloo): one tunes the operators of a graph, the other follows."""

from pathlib import Path

import test_distributed

pytestmark = test_distributed.pytestmark


CASES = ("alike", "graphs-of-their-own", "too-slow", "failing", "tensor-parallel")


def test_two_ranks_and_operators(tmp_path, monkeypatch):
    worker = Path(__file__).parent / "fusion_worker.py"
    monkeypatch.setattr(test_distributed, "WORKER", worker)
    test_distributed.run(CASES, tmp_path)
