"""Workers that compile: the protocol, with jobs that need no GPU."""

import sys
import time

import pytest
import torch

from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec
from stof_compile.search.compile_pool import CompilePool, Job
from stof_compile.triton_environment import TritonEnvironment

ECHO = """
import pickle, sys, time
pickle.dump("ready", sys.stdout.buffer); sys.stdout.buffer.flush()
while True:
    try:
        job = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    if job.template == "dies":
        sys.exit(1)
    pickle.dump("" if job.template == "fits" else f"no template {job.template}", sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""
SPEC = TensorSpec((4, 4), (4, 1), torch.float32, "cpu")
RECIPE = Recipe((SPEC,), (Step("exp", (Ref("operand", 0),), (4, 4), torch.float32),))


def job(template):
    return Job(RECIPE, template, (("warps", 4),), "cpu", TritonEnvironment(()))


@pytest.fixture
def pool():
    made = CompilePool(2, [sys.executable, "-c", ECHO])
    yield made
    made.close()


def test_jobs_are_answered(pool):
    answers = [pool.submit(job(name)).result(30) for name in ("fits", "other", "fits")]
    assert answers == ["", "no template other", ""]


def test_a_worker_that_dies_answers_its_job_and_leaves_the_others(pool):
    assert "ended" in pool.submit(job("dies")).result(30)
    assert pool.submit(job("fits")).result(30) == "" and pool.alive
    assert "ended" in pool.submit(job("dies")).result(30)
    deadline = time.monotonic() + 10
    while pool.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pool.alive


def test_workers_that_do_not_start_are_not_alive():
    pool = CompilePool(2, [sys.executable, "-c", "raise SystemExit(1)"])
    deadline = time.monotonic() + 10
    while pool.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pool.alive
    pool.close()


def test_the_real_worker_says_why_it_cannot():
    pool = CompilePool(1)
    try:
        assert "ValueError" in pool.submit(job("no such template")).result(60)
    finally:
        pool.close()
