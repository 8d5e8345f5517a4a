"""Attention in the processes that compile: what is sent, and what the real worker does with it."""

import pickle
from concurrent.futures import Future

import pytest
import torch

from stof_compile import masks
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.budget import Budget
from stof_compile.search import attention_workers
from stof_compile.search.attention_workers import AttentionWorkers
from stof_compile.search.compile_pool import AttentionJob, CompilePool
from stof_compile.triton_environment import TritonEnvironment

SPEC = masks.sliding_window(8)
BLOCK = ("block", (64, 64))


def problem(spec=SPEC, length=64, device="cpu", **kwargs):
    meta = TensorMeta((1, 2, length, 16), (2 * length * 16, 16, 32, 1), torch.float32)
    return AttentionProblem(meta, meta, meta, spec, 0, torch.device(device), 0.25, **kwargs)


class Pool:
    """A pool whose futures the test answers."""

    def __init__(self):
        self.jobs, self.futures, self.alive, self.ready = [], [], True, True

    def submit(self, job):
        self.jobs.append(job)
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def pool(monkeypatch):
    """A pool, for problems of a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    monkeypatch.setattr(
        TritonEnvironment, "of_this_process", classmethod(lambda cls, device: cls(()))
    )
    monkeypatch.setattr(
        AttentionProblem, "key", property(lambda self: getattr(self.spec, "key", ""))
    )
    return Pool()


def test_a_candidate_is_sent_once_and_sdpa_never(pool):
    workers = AttentionWorkers(pool, Budget(60))
    given = problem(device="cuda")
    for _ in range(2):
        workers.send(given, [BLOCK, ("sdpa", ())])
    (job,) = pool.jobs
    assert (job.template, job.config, job.device) == (*BLOCK, "cuda:0")
    again = pickle.loads(job.problem)
    assert again == given and again.spec == SPEC
    assert not workers.has(given, ("sdpa", ()))


def test_a_failed_or_cancelled_candidate_is_not_had(pool):
    workers, given = AttentionWorkers(pool, Budget(60)), problem(device="cuda")
    workers.send(given, [BLOCK])
    assert workers.has(given, BLOCK)  # it is being compiled
    pool.futures[0].set_result("it does not fit")
    assert not workers.has(given, BLOCK)
    other = ("block", (32, 32))
    workers.send(given, [other])
    pool.ready = False  # no worker has started: threads are faster
    assert not workers.has(given, other) and pool.futures[1].cancelled()


@pytest.mark.timeout(60)
def test_nothing_is_waited_for_beyond_the_budget_or_without_workers(pool):
    workers, given = AttentionWorkers(pool, Budget(60)), problem(device="cuda")
    workers.send(given, [BLOCK])
    pool.futures[0].set_running_or_notify_cancel()
    pool.alive = False
    workers.wait(given, BLOCK)
    pool.alive = True
    workers.budget.stop()
    workers.wait(given, BLOCK)
    workers.send(given, [("block", (32, 32))])
    assert len(pool.jobs) == 1


def test_what_no_worker_has_begun_is_not_waited_for(pool):
    workers, given = AttentionWorkers(pool, Budget(60)), problem(device="cuda")
    workers.send(given, [BLOCK])
    workers.wait(given, BLOCK)
    assert pool.futures[0].cancelled() and not workers.has(given, BLOCK)


class Kept(torch.Tensor):
    """A tensor of the user's own class, by whose module it would be read again."""


@pytest.mark.parametrize("tensor", [torch.ones(64, 64).bool().as_subclass(Kept), None])
def test_tensors_of_other_classes_and_large_ones_are_compiled_here(pool, monkeypatch, tensor):
    if tensor is None:
        tensor = torch.rand(64, 64) > 0.5
        monkeypatch.setattr(attention_workers, "MOST_PICKLED", 1000)
    workers = AttentionWorkers(pool, Budget(60))
    workers.send(problem(masks.from_tensor(tensor), device="cuda"), [BLOCK])
    assert pool.jobs == []


def test_operands_count_from_their_first_to_their_last_element(pool, monkeypatch):
    """Heads beside each other in one projection, and long keys of one query."""
    one = TensorMeta((1, 2, 64, 16), (64 * 96, 16, 96, 1), torch.float32)
    long = TensorMeta((1, 2, 2**16, 16), (2**21, 2**20, 16, 1), torch.float32)
    monkeypatch.setattr(AttentionProblem, "key", property(lambda self: str(self.k)))
    monkeypatch.setattr(attention_workers, "worker_count", lambda: 1)
    workers = AttentionWorkers(pool, Budget(60))
    for keys, megabytes, sent in ((one, 0.25, 0), (one, 1, 1), (long, 64, 1), (long, 256, 2)):
        free = int(megabytes * 2**20)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2**37))
        workers = AttentionWorkers(pool, Budget(60))
        given = AttentionProblem(one, keys, keys, None, 0, torch.device("cuda"), 0.25)
        workers.send(given, [BLOCK])
        assert len(pool.jobs) == sent


class Own(masks.MaskSpec):
    """A rule of the user's own class, which says nothing of how it is written."""

    key = "own"

    def __reduce__(self):
        raise TypeError("it holds a file")


def test_a_mask_that_cannot_be_written_is_compiled_here(pool):
    workers = AttentionWorkers(pool, Budget(60))
    workers.send(problem(Own(), device="cuda"), [BLOCK])
    assert pool.jobs == [] and not workers.has(problem(Own(), device="cuda"), BLOCK)


@pytest.mark.parametrize(
    "spec",
    [
        None,
        masks.causal(),
        masks.longformer(8, 8),
        masks.bigbird(8, 8, 0.1),
        masks.causal() & ~masks.sliding_window(4),
        masks.from_tensor(torch.rand(64, 64) > 0.5),
        masks.rule(lambda b, h, q, k: (q - k).abs() <= 4),
    ],
    ids=["none", "causal", "longformer", "bigbird", "joined", "tensor", "rule"],
)
def test_masks_are_sent_as_they_are(pool, spec):
    workers = AttentionWorkers(pool, Budget(60))
    bound = None if spec is None else spec.bind(64, 64, 0, torch.device("cpu"))
    workers.send(problem(bound, device="cuda"), [BLOCK])
    (job,) = pool.jobs
    again = pickle.loads(job.problem).spec
    assert again == bound and (bound is None or again.key == bound.key)


def test_long_sequences_and_full_devices_compile_in_one_process(pool, monkeypatch):
    workers = AttentionWorkers(pool, Budget(60))
    workers.send(problem(length=16384, device="cuda"), [BLOCK])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**14, 2**37))
    workers.send(problem(masks.causal(), device="cuda"), [BLOCK])
    assert pool.jobs == []


def test_the_real_worker_takes_attention():
    pool = CompilePool(1)
    try:
        data = pickle.dumps(problem())
        environment = TritonEnvironment(())
        job = AttentionJob(data, "gather", (32, 32), "cpu", environment)
        assert pool.submit(job).result(120) == ""
        broken = AttentionJob(b"no pickle", "gather", (32, 32), "cpu", environment)
        assert "UnpicklingError" in pool.submit(broken).result(60)
        unknown = AttentionJob(data, "no kernel", (), "cpu", environment)
        assert "no attention kernel" in pool.submit(unknown).result(60)
    finally:
        pool.close()
