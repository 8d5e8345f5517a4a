"""Whole graphs compiled by other processes: what is sent, waited for and found again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import _inductor as inductor
from torch import nn
from torch._inductor.fx_passes import pad_mm
from torch.fx import symbolic_trace
from worker_echo import echo_pool, job

import stof_compile.ops  # noqa: F401 (registers operators)
from stof_compile.budget import Budget
from stof_compile.search import form_workers as form_workers_module
from stof_compile.search.form_workers import FormWorkers, form_workers

CPU = torch.device("cpu")
GRAPH = symbolic_trace(lambda x: x + 1)
INPUTS = (torch.ones(2),)


@pytest.fixture
def pool():
    made = echo_pool()
    yield made
    made.close()


@pytest.fixture
def workers(pool):
    return FormWorkers(pool, CPU)


def test_what_was_compiled_is_known_with_its_seconds(workers):
    assert workers.send("slow", GRAPH, INPUTS, {})
    assert workers.has("slow") and workers.busy and not workers.failed("slow")
    assert workers.wait("slow", None)
    took = workers.seconds("slow")
    assert 0.4 < took < 60 and workers.seconds("slow") == took
    assert not workers.busy


def test_what_failed_counts_no_seconds(workers):
    assert workers.send("no such", GRAPH, INPUTS, {})
    assert not workers.wait("no such", None)
    assert workers.failed("no such") and workers.seconds("no such") == 0


def test_a_worker_that_dies_is_not_waited_for(pool, workers):
    workers.send("dies", GRAPH, INPUTS, {})
    started = time.monotonic()
    assert not workers.wait("dies", None) and workers.failed("dies")
    assert time.monotonic() - started < 20
    while pool.alive:
        time.sleep(0.01)
    assert not workers.send("fits", GRAPH, INPUTS, {})  # there is no process left
    assert not workers.has("fits")


def test_what_torch_cannot_tell_of_its_precision_stays_here(workers, monkeypatch):
    def mixed():
        raise RuntimeError("legacy and new APIs")

    monkeypatch.setattr(form_workers_module.TorchModes, "here", mixed)
    assert not workers.send("fits", GRAPH, INPUTS, {})


def test_nothing_is_waited_for_beyond_the_budget(workers):
    workers.send("slow", GRAPH, INPUTS, {})
    assert not workers.wait("slow", Budget(0.05))
    assert not workers.failed("slow") and workers.seconds("slow") > 0


def test_at_the_end_of_a_search_only_forms_are_kept(pool, workers):
    workers.send("slow", GRAPH, INPUTS, {})
    others = [pool.submit(job("fits")) for _ in range(3)]
    workers.send("fits", GRAPH, INPUTS, {})
    workers.keep_only_these()
    assert workers.wait("slow", None) and workers.wait("fits", None)
    assert all(other.cancelled() or other.done() for other in others)
    assert sum(other.cancelled() for other in others) >= 2


@pytest.mark.parametrize(
    ("patch", "settings"),
    [
        ({}, {"max_autotune": True}), ({"freezing": True}, {}), ({"fx_graph_cache": False}, {}),
        ({}, {"triton.multi_kernel": 1}),
    ],
    ids=["max_autotune", "freezing", "cache", "multi_kernel"],
)  # fmt: skip
def test_settings_that_another_process_cannot_follow(workers, patch, settings):
    with inductor.config.patch(patch):
        assert not workers.send("fits", GRAPH, INPUTS, settings)
    assert workers.send("fits", GRAPH, INPUTS, {})


def test_settings_that_are_code_stay_here(workers):
    def own_pass(graph):
        return graph

    assert not workers.send("fits", GRAPH, INPUTS, {"post_grad_custom_post_pass": own_pass})
    with inductor.config.patch({"post_grad_custom_post_pass": own_pass}):
        assert not workers.send("fits", GRAPH, INPUTS, {})
    assert not workers.has("fits")


def product(target, *shapes, dtype=torch.float16):
    """A graph of one product: of ``shapes[:-1]``, into the last of them."""
    made = torch.fx.Graph()
    operands = [made.placeholder(f"x{i}") for i in range(len(shapes) - 1)]
    y = made.call_function(target, tuple(operands))
    made.output((y,))
    for node, shape in zip((*operands, y), shapes, strict=True):
        node.meta["example_value"] = torch.empty(shape, dtype=dtype, device="meta")
    return torch.fx.GraphModule(nn.Module(), made)


def asks(monkeypatch):
    """Have Inductor's question answered without a GPU; the sizes that were asked for."""
    asked = []

    def is_mm_compute_bound(*sizes_and_dtype):
        asked.append(sizes_and_dtype[:3])
        m, k, n, _ = sizes_and_dtype
        return m * n * k / (m * k + n * k + m * n) > 100

    monkeypatch.setattr(pad_mm, "is_mm_compute_bound", is_mm_compute_bound)
    return asked


def test_products_that_inductor_may_pad_are_compiled_here(monkeypatch):
    asks(monkeypatch)
    linear = nn.functional.linear
    unfit, cuda = form_workers_module._unfit, torch.device("cuda")
    assert unfit(product(linear, (512, 768), (256, 768), (512, 256)), {}, cuda) == ""
    head = product(linear, (4, 128, 768), (50257, 768), (4, 128, 50257))
    assert "padding" in unfit(head, {}, cuda)
    assert unfit(head, {"shape_padding": False}, cuda) == ""
    assert unfit(head, {}, CPU) == ""


def test_products_that_inductor_pads_without_timing_or_not_at_all_may_go(monkeypatch):
    asked = asks(monkeypatch)
    unfit, cuda = form_workers_module._unfit, torch.device("cuda")
    rotary = product(torch.matmul, (1, 32, 1), (1, 1, 128), (1, 32, 128), dtype=torch.float32)
    assert unfit(rotary, {}, cuda) == "" and not asked  # a size of one is not padded
    tokens = product(nn.functional.linear, (8, 513, 768), (768, 768), (8, 513, 768))
    assert unfit(tokens, {}, cuda) == "" and not asked  # 4,104 rows
    small = product(torch.addmm, (100,), (64, 32), (32, 100), (64, 100))
    assert unfit(small, {}, cuda) == "" and asked == [(64, 32, 100)]  # memory bounds it
    asked.clear()
    assert "padding" in unfit(
        product(torch.bmm, (9, 300, 768), (9, 768, 300), (9, 300, 300)), {}, cuda
    )
    assert asked and set(asked) <= {(300, 768, 300), (2700, 768, 300)}


def test_what_inductor_cannot_be_asked_is_taken_for_padded(monkeypatch):
    monkeypatch.delattr(pad_mm, "is_mm_compute_bound")
    small = product(torch.mm, (64, 32), (32, 100), (64, 100))
    assert "padding" in form_workers_module._unfit(small, {}, torch.device("cuda"))


def test_graphs_of_the_users_own_functions_are_compiled_here(workers):
    def own(x):
        return x

    graph = torch.fx.Graph()
    graph.output((graph.call_function(own, (graph.placeholder("x"),)),))
    assert not workers.send("fits", torch.fx.GraphModule(nn.Module(), graph), INPUTS, {})
    with torch.autocast("cpu", torch.bfloat16):
        assert not workers.send("fits", GRAPH, INPUTS, {})


def test_few_processes_are_for_candidates(pool, monkeypatch):
    assert form_workers(None, CPU) is None
    for count, wanted in ((3, False), (4, True)):
        monkeypatch.setattr(form_workers_module, "worker_count", lambda count=count: count)
        assert (form_workers(pool, CPU) is not None) == wanted


def test_what_a_worker_compiled_is_in_inductors_cache_here(tmp_path):
    """In a process of its own: what other tests set of torch is part of Inductor's key."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).parent.parent / "cached_form.py"
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.get("fxgraph_cache_hit") == 1 and not found.get("fxgraph_cache_miss")
