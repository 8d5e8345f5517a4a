"""Whole graphs compiled by other processes: what is sent, waited for and found again."""

import sys
import time

import pytest
import torch
from torch import _inductor as inductor
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import symbolic_trace
from worker_echo import ECHO, job

import stof_compile.ops  # noqa: F401 (registers operators)
from stof_compile.budget import Budget
from stof_compile.graph_copy import copy_graph
from stof_compile.inductor import compile_with_settings
from stof_compile.search import form_workers as form_workers_module
from stof_compile.search.compile_pool import CompilePool
from stof_compile.search.form_workers import FormWorkers, form_workers

CPU = torch.device("cpu")
GRAPH = symbolic_trace(lambda x: x + 1)
INPUTS = (torch.ones(2),)


@pytest.fixture
def pool():
    made = CompilePool(1, [sys.executable, "-c", ECHO])
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


def test_products_that_inductor_may_pad_are_compiled_here(monkeypatch):
    def graph(rows, columns):
        made = torch.fx.Graph()
        x, w = made.placeholder("x"), made.placeholder("w")
        y = made.call_function(nn.functional.linear, (x, w))
        made.output((y,))
        for node, shape in ((x, (rows, 64)), (w, (columns, 64)), (y, (rows, columns))):
            node.meta["example_value"] = torch.empty(shape, dtype=torch.float16)
        return torch.fx.GraphModule(nn.Module(), made)

    unfit, cuda = form_workers_module._unfit, torch.device("cuda")
    assert unfit(graph(128, 256), {}, cuda) == ""
    assert "padding" in unfit(graph(128, 50257), {}, cuda)
    assert unfit(graph(128, 50257), {"shape_padding": False}, cuda) == ""
    assert unfit(graph(128, 50257), {}, CPU) == ""


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


class Block(nn.Module):
    """A layer with parameters, and a mask that is a buffer of the graph."""

    def __init__(self):
        super().__init__()
        self.project, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("keep", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, x):
        q = self.project(x).view(2, 8, 2, 8).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.keep)
        return self.norm(out.transpose(1, 2).reshape(2, 8, 16) + x)


@pytest.fixture
def own_modes():
    """Modes and settings that are none of the defaults."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_default_dtype(torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    with inductor.config.patch({"cpp.simdlen": 1}):
        yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(before)


def test_what_a_worker_compiled_is_in_inductors_cache_here(
    own_modes, tmp_path, monkeypatch, fresh_dynamo
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x, found = Block().eval(), torch.randn(2, 8, 16), []

    def backend(gm, inputs):
        pool = CompilePool(1)
        try:
            workers = FormWorkers(pool, CPU)
            assert workers.send("form", gm, inputs, {"epilogue_fusion": True})
            assert workers.wait("form", Budget(240))
        finally:
            pool.close()
        counters.clear()
        settings = {"epilogue_fusion": True}
        compiled = compile_with_settings(copy_graph(gm), inputs, settings, trains=False)
        found.append(dict(counters["inductor"]))
        return compiled

    with torch.no_grad():
        out = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(out, model(x), atol=1e-5, rtol=1e-5)
    assert found[0].get("fxgraph_cache_hit") == 1 and not found[0].get("fxgraph_cache_miss")
