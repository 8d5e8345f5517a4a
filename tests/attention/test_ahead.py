"""Attention candidates that other processes compile: which problems, and what is waited for."""

import contextlib
from collections import namedtuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from stof_compile import improve, masks, sparse_attention
from stof_compile.attention import ahead, select
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.select import choose, send_ahead
from stof_compile.budget import Budget
from stof_compile.options import StofOptions
from stof_compile.plan import Candidate, Plan
from stof_compile.store import Store

BIGBIRD = masks.bigbird(window=4, global_tokens=4, random_fill=0.1, random_block=16)


Device = namedtuple("Device", "arch")


class Noted:
    """Workers that note what they are asked for."""

    def __init__(self, compiled=lambda candidate: True):
        self.sent, self.waited, self._compiled = [], [], compiled

    def send(self, problem, candidates):
        self.sent += [(problem.key, c) for c in candidates if (problem.key, c) not in self.sent]

    def has(self, problem, candidate):
        return (problem.key, candidate) in self.sent and self._compiled(candidate)

    def wait(self, problem, candidate):
        self.waited.append(candidate)


class Model(torch.nn.Module):
    """Two layers of self-attention with a padding, one without, one of ours of half the length."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(4))

    def forward(self, x, keep):
        for number, layer in enumerate(self.inner):
            given = x[:, :32] if number == 3 else x
            q, k, v = layer(given).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            mask = keep[:, None, None, :] if number < 2 else None
            if number < 3:
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            else:
                out = sparse_attention(q, k, v, mask=masks.sliding_window(8))
            x = given + out.transpose(1, 2).flatten(-2)
        return x


@pytest.mark.parametrize("rule", [None, masks.causal(), BIGBIRD], ids=["none", "causal", "bigbird"])
@torch.no_grad()
def test_problems_ahead_are_those_that_are_chosen_for(rule, monkeypatch, fresh_dynamo, tmp_path):
    seen = {}

    def noted(gm, facts, opts, outcome, *rest):
        budget = rest[0]
        improve.normalize(gm, facts)
        sites, _ = improve.match_attention(gm, facts)
        resolved = improve.resolve_masks(
            opts.mask, sites, path_known=facts.place.path_known, whole_model=facts.place.whole_model
        )
        store = Store(tmp_path, "here")
        ctx = improve.LoweringContext(facts, opts, store, budget, None, {})
        text = str(gm.graph)
        found = ahead.problems_ahead(gm, facts, resolved, opts, ctx.bound)
        assert str(gm.graph) == text
        improve.lower_attention(gm, sites, resolved, ctx)
        seen["ahead"], seen["chosen"] = [p.key for p in found], list(ctx.choices)
        raise improve.StofError("enough was seen")

    monkeypatch.setattr(improve, "_rewrite", noted)
    options = {"tune_budget_s": 1.0, **({} if rule is None else {"mask": rule})}
    compiled = torch.compile(Model().eval(), backend="stof", options={**options, "strict": True})
    with pytest.raises(Exception, match="enough was seen"):
        compiled(torch.randn(2, 64, 32), torch.ones(2, 64, dtype=torch.bool))
    assert seen["ahead"] == seen["chosen"] and len(seen["chosen"]) == 3


@torch.no_grad()
def test_a_search_hands_its_workers_to_attention(monkeypatch, fresh_dynamo, tmp_path):
    """Which are on a GPU only: here in the place of none."""
    workers, sent = Noted(), []
    monkeypatch.setattr(improve.Fusion, "attention_workers", lambda self: workers)
    monkeypatch.setattr(improve, "send_ahead", lambda problem, *rest: sent.append(problem.key))
    options = {"mask": masks.causal(), "cache_dir": tmp_path, "strict": True}
    compiled = torch.compile(Model().eval(), backend="stof", options=options)
    compiled(torch.randn(2, 64, 32), torch.ones(2, 64, dtype=torch.bool))
    assert len(sent) == len(set(sent)) == 3
    assert workers.waited  # each candidate before it is measured


class Across(torch.nn.Module):
    """Cross-attention, under a mask that only the run knows or over symbolic lengths."""

    def __init__(self, masked):
        super().__init__()
        self.masked = masked

    def forward(self, x, y):
        mask = (x @ y.transpose(1, 2) > -50)[:, None] if self.masked else None
        q, k = x.unflatten(-1, (2, 16)).transpose(1, 2), y.unflatten(-1, (2, 16)).transpose(1, 2)
        return scaled_dot_product_attention(q, k, k, attn_mask=mask)


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_sites_that_stay_and_symbolic_lengths_are_left_out(dynamic, monkeypatch, fresh_dynamo):
    seen, opts = [], {"mask": masks.causal(), "tune_budget_s": 1.0}

    def noted(*args):
        seen.append(ahead.problems_ahead(*args))
        return seen[-1]

    monkeypatch.setattr(improve.Fusion, "attention_workers", lambda self: Noted())
    monkeypatch.setattr(improve, "problems_ahead", noted)
    x, y = torch.randn(1, 64, 32), torch.randn(1, 48, 32)
    if dynamic:
        torch._dynamo.mark_dynamic(y, 1)
    with contextlib.suppress(Exception):  # the option's mask may have no place here
        torch.compile(Across(not dynamic), backend="stof", options=opts)(x, y)
    assert seen and not any(seen)


def problem(device, spec=BIGBIRD, length=64):
    meta = TensorMeta((1, 2, length, 16), (2 * length * 16, 16, 32, 1), torch.float16)
    return AttentionProblem(meta, meta, meta, spec, 0, torch.device(device), 0.25)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Selection for a GPU that is not there: its candidates, and what is called in threads."""
    offered = [("block", (64, 64, n)) for n in (1, 2)] + [("block", (16, 16, 1)), ("sdpa", ())]
    threads, measured = [], []

    def fake(problem, kernel, config, generator):
        measured.append((kernel, config))
        times = {(64, 64): 1.0, (16, 16): 9.0}
        return Candidate(kernel, config, "measured", times.get(config[:2], 5.0), 1.0, 1.0, 1e-6)

    monkeypatch.setattr(select, "_candidates", lambda problem: offered)
    monkeypatch.setattr(select, "decide", lambda problem: ("sdpa", (), "a rule"))
    monkeypatch.setattr(select, "_family", lambda kernel, config: (kernel, *config[:2]))
    monkeypatch.setattr(select, "compile_together", lambda p, found: threads.append(found))
    monkeypatch.setattr(select, "measure_candidate", fake)
    monkeypatch.setattr(select, "device_facts", lambda device: Device("sm_90"))
    monkeypatch.setattr(select, "agree", lambda key, here, **kwargs: here())
    monkeypatch.setattr(torch, "Generator", lambda device=None: torch._C.Generator())
    monkeypatch.setattr(AttentionProblem, "key", "the problem")
    fake.offered, fake.threads, fake.measured = offered, threads, measured
    return fake


def test_firsts_of_families_go_ahead_and_each_is_waited_for(on_a_gpu, tmp_path):
    workers, given = Noted(), problem("cuda")
    store = Store(tmp_path, "here")
    send_ahead(given, store, None, workers)
    firsts = [("block", (64, 64, 1)), ("block", (16, 16, 1)), ("sdpa", ())]
    assert [c for _, c in workers.sent] == firsts
    chosen = choose(given, StofOptions(), store, Budget(60), None, workers)
    assert (chosen.kernel, chosen.config) == ("block", (64, 64, 1))
    # the second of the fast family is sent when its first was measured; the slow one has none
    assert workers.sent[-1][1] == ("block", (64, 64, 2)) and len(workers.sent) == 4
    assert workers.waited == on_a_gpu.measured
    assert on_a_gpu.threads == [[], []]


def test_what_no_worker_compiles_is_compiled_in_threads(on_a_gpu, tmp_path):
    workers = Noted(compiled=lambda candidate: candidate[1][:2] == (64, 64))
    choose(problem("cuda"), StofOptions(), Store(tmp_path, "here"), Budget(60), None, workers)
    assert on_a_gpu.threads[0] == [("block", (16, 16, 1)), ("sdpa", ())]


def test_stored_and_given_choices_are_not_sent(on_a_gpu, tmp_path):
    workers, given, store = Noted(), problem("cuda"), Store(tmp_path, "here")
    choose(given, StofOptions(), store, Budget(60))
    send_ahead(given, store, None, workers)
    of_plan = choose(given, StofOptions(), None, Budget(60))
    send_ahead(given, None, Plan("here", {given.key: of_plan}), workers)
    send_ahead(problem("cpu"), None, None, workers)
    assert workers.sent == []


@pytest.mark.parametrize("options", [{"attention": "block"}, {"tune_budget_s": 0}])
def test_nothing_goes_ahead_where_nothing_is_measured(options):
    assert ahead.problems_ahead(None, None, None, StofOptions(**options), None) == []


def test_a_pool_takes_attention_first(tmp_path):
    """By the order of answers of one worker that is slow to start."""
    from worker_echo import pool_of

    from stof_compile.search.compile_pool import AttentionJob, Job
    from stof_compile.triton_environment import TritonEnvironment

    (tmp_path / "tells_the_time.py").write_text(
        "import pickle, sys, time\n"
        "def main():\n"
        "    time.sleep(0.5)\n"
        "    pickle.dump('ready', sys.stdout.buffer); sys.stdout.buffer.flush()\n"
        "    while True:\n"
        "        job = pickle.load(sys.stdin.buffer)\n"
        "        pickle.dump(str(time.monotonic()), sys.stdout.buffer); sys.stdout.buffer.flush()\n"
    )
    pool = pool_of("tells_the_time", 1, tmp_path)
    try:
        none = TritonEnvironment(())
        last = [pool.submit(Job(None, name, (), "cpu", none)) for name in "ab"]
        then = [pool.submit(Job(None, "inductor", (), "cpu", none, b"its settings"))]
        first = [pool.submit(AttentionJob(b"", name, (), "cpu", none)) for name in "cd"]
        began = [float(f.result(60)) for f in (*first, *then, *last)]
        assert began == sorted(began)
    finally:
        pool.close()
