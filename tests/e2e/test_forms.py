"""The form as torch.compile runs it, compiled before the search while other processes compile."""

from dataclasses import replace

import pytest
import torch
from close import assert_close
from running import without_flex, without_inductor
from torch import nn

from stof_compile import explain, forms, masks, verdict
from stof_compile.attention import select
from stof_compile.budget import Budget
from stof_compile.fuse import Fusion, search_budget
from stof_compile.fusion_result import FusionResult
from stof_compile.plan import PackPlan
from stof_compile.verdict import AS_TORCH, FastestForm, Verdict


class Packable(nn.Module):
    """Attention whose projections are packed: a graph that fusion changes without a template."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        heads = (p(x).unflatten(-1, (4, -1)).mT for p in (self.query, self.key, self.value))
        q, k, v = (h.permute(0, 3, 1, 2) for h in heads)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.fixture
def compiles(monkeypatch):
    """What is compiled for timing, in order; as if there were processes that compile."""
    compiled = []

    def compile_form(when):
        def compile_now(gm, inputs, opts):
            compiled.append(when)
            return without_inductor(gm, inputs, opts)

        return compile_now

    def search(self, form_s=0.0):
        compiled.append("search" if form_s else "search, seconds unknown")
        return run(self, form_s)

    run = Fusion.run
    monkeypatch.setattr(forms, "compile_for_timing", compile_form("ahead"))
    monkeypatch.setattr(verdict, "compile_for_timing", compile_form("timed"))
    monkeypatch.setattr(Fusion, "compile_ahead", lambda self: True)
    monkeypatch.setattr(Fusion, "run", search)
    monkeypatch.setattr(FusionResult, "changed", True)
    with without_flex():
        yield compiled


def run(model, x, tmp_path, **options):
    torch._dynamo.reset()
    options = {"cache_dir": str(tmp_path), "mask": masks.sliding_window(3), **options}
    fast = torch.compile(model, backend="stof", options=options)
    with torch.no_grad():
        return fast(x), explain(fast)


@pytest.mark.parametrize("tokens", [1024, 16])
def test_it_is_compiled_once_and_before_the_search(
    compiles, fresh_dynamo, tmp_path, monkeypatch, tokens
):
    every = select._candidates

    def candidates(problem):  # with few tokens a busy machine may measure either to be faster
        return [c for c in every(problem) if (c[0] == "sdpa") == (tokens == 16)]

    monkeypatch.setattr(select, "_candidates", candidates)
    model, x = Packable().eval(), torch.randn(1, tokens, 64)
    out, record = run(model, x, tmp_path)
    (site,) = record.sites
    assert site.kernel == ("sdpa" if tokens == 16 else "gather")
    # where SDPA is chosen, the graph with attention rewritten only is torch.compile's
    assert compiles == ["ahead", "search", "timed"] + ["timed"] * (site.kernel != "sdpa")
    assert record.graphs[0].timings_s["form ahead"] > 0
    assert any(AS_TORCH in note for note in record.notes if note.startswith("whole graph"))
    plain, _ = run(model, x, tmp_path, fusion="off", attention="sdpa")
    assert_close(out, plain.double(), torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "gather"}, {"strict": True}, {"tune_budget_s": 20},
        {"fusion": "off"}, {"tune_budget_s": 0},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_it_is_not_where_it_takes_no_part_or_time_is_short(
    compiles, fresh_dynamo, tmp_path, options
):
    _, record = run(Packable().eval(), torch.randn(2, 16, 64), tmp_path, **options)
    assert not record.graphs[0].timings_s.get("form ahead")
    assert "ahead" not in compiles


def test_it_is_not_for_graphs_that_write_to_their_inputs(compiles, fresh_dynamo, tmp_path):
    class Counting(Packable):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Counting().eval()
    run(model, torch.randn(2, 16, 64), tmp_path)
    assert model.calls == 1 and compiles == ["search, seconds unknown"]


@pytest.mark.parametrize("failure", [RuntimeError("no kernel"), KeyboardInterrupt()])
def test_a_form_that_fails_is_out(compiles, fresh_dynamo, tmp_path, monkeypatch, failure):
    def fail(gm, inputs, opts):
        raise failure

    monkeypatch.setattr(forms, "compile_for_timing", fail)
    model, x = Packable().eval(), torch.randn(2, 16, 64)
    out, record = run(model, x, tmp_path)
    assert compiles[0] == "search, seconds unknown"
    form = next((note for note in record.notes if note.startswith("whole graph")), "")
    assert "ahead" not in compiles and AS_TORCH not in form
    if isinstance(failure, KeyboardInterrupt):  # nothing was measured after it
        assert "not compared" in form and compiles == ["search, seconds unknown", "timed"]
    assert out.isfinite().all()


def test_the_search_leaves_the_forms_their_time():
    now = [0.0]
    whole = Budget(40.0, clock=lambda: now[0])
    assert search_budget(whole, 0.0).left == pytest.approx(24.0)
    assert search_budget(whole, 5.0).left == pytest.approx(26.0)  # two forms and four seconds
    assert search_budget(whole, 15.0).left == pytest.approx(20.0)  # half of what is left
    assert search_budget(whole, 25.0).left == pytest.approx(36.0)  # no time for a form in any case
    now[0] = 50.0
    assert search_budget(whole, 5.0).spent


def test_what_the_kept_graph_has_not_packed_is_not_called_packed():
    pack = PackPlan(True, (96, 96), "measured", 2.0, 1.0, "packing is faster", nbytes=4096)
    told = forms._left_apart(pack)
    assert not told.packed and told.nbytes == 0 and told.packed_us == 1.0
    assert told.reason == "packing is faster; the graph that was kept leaves them apart"
    assert forms._left_apart(told) == told


def test_what_only_the_fused_graph_has_is_not_said_of_another(
    compiles, fresh_dynamo, tmp_path, monkeypatch
):
    search = Fusion.run

    def folding(self, form_s=0.0):
        return replace(search(self, form_s), folded=3, rotated=2, apart={"no table": 1})

    for winner in ("fused", "attention only"):
        found = FastestForm(Verdict(winner, {"fused": 2.0, "attention only": 1.0}))
        with monkeypatch.context() as patch:
            patch.setattr(Fusion, "run", folding)
            patch.setattr(forms, "fastest_form", lambda *given, found=found: found)
            _, record = run(Packable().eval(), torch.randn(1, 16, 64), tmp_path / winner)
        told = " ".join(record.notes)
        assert "rotary embeddings left to Inductor, 1 times: no table" in told
        for words in ("operands folded into products: 3", "in the epilogue of 2 products"):
            assert (words in told) == (winner == "fused")


def test_most_of_a_long_compile_is_given_back(compiles, fresh_dynamo, tmp_path, monkeypatch):
    """Of a budget of 60 s a form that takes 40 s uses 15."""
    compile_form, now, lefts = forms.compile_for_timing, [0.0], []

    def compile_slowly(gm, inputs, opts):
        now[0] += 40.0
        return compile_form(gm, inputs, opts)

    def search(self, form_s=0.0):
        lefts.append((self._context.budget.left, form_s))
        return FusionResult()

    def budget(seconds):
        return Budget(seconds, clock=lambda: now[0])

    # attention is measured; where SDPA wins, on a busy machine, two forms are one graph
    monkeypatch.setattr(forms, "_all_left_to_torch", lambda choices: False)
    monkeypatch.setattr(forms, "compile_for_timing", compile_slowly)
    monkeypatch.setattr(Fusion, "run", search)
    monkeypatch.setattr("stof_compile.backend.Budget", budget)
    run(Packable().eval(), torch.randn(1, 1024, 64), tmp_path)
    ((left, form_s),) = lefts
    assert left == pytest.approx(45.0) and form_s == pytest.approx(40.0)
    assert compiles == ["ahead", "timed", "timed"]


class FakeWorkers:
    """Processes that have compiled what they were sent, at once or never."""

    def __init__(self, compiled, takes_s=20.0, fails=False, busy=False):
        self.compiled, self.takes_s, self.fails, self.busy = compiled, takes_s, fails, busy
        self.sent, self.closed = {}, False

    def send(self, name, gm, inputs, settings):
        self.sent[name] = gm
        self.compiled.append(f"sent: {name}")
        return True

    def has(self, name):
        return name in self.sent

    def failed(self, name):
        return self.has(name) and self.fails

    def seconds(self, name):
        return 0.0 if self.fails or not self.has(name) else self.takes_s

    def done(self, name):
        return self.has(name) and not (self.fails or self.busy)

    def wait(self, name, budget):
        self.compiled.append(f"waited: {name}")
        return not self.fails

    def keep_only_these(self):
        self.compiled.append("others dropped")

    def close(self):
        self.closed = True


@pytest.fixture
def workers(compiles, monkeypatch):
    """Gives a function that makes the workers of the next compile."""

    def use(**how):
        made = FakeWorkers(compiles, **how)
        monkeypatch.setattr(Fusion, "form_workers", lambda self: made)
        return made

    return use


@pytest.fixture
def gather(monkeypatch):
    every = select._candidates
    monkeypatch.setattr(
        select, "_candidates", lambda problem: [c for c in every(problem) if c[0] != "sdpa"]
    )


def test_other_processes_compile_the_forms(
    compiles, workers, gather, fresh_dynamo, tmp_path, monkeypatch
):
    made, told = workers(), []
    search = Fusion.run
    monkeypatch.setattr(
        Fusion, "run", lambda self, form_s=0.0: told.append(form_s) or search(self, form_s)
    )
    model, x = Packable().eval(), torch.randn(1, 1024, 64)
    out, record = run(model, x, tmp_path)
    assert compiles == [
        f"sent: {AS_TORCH}", "sent: attention only", "search", "timed",
        f"waited: {AS_TORCH}", "timed", "waited: attention only", "timed",
    ]  # fmt: skip
    assert told == [pytest.approx(forms.FORM_SHARE * 20.0)]
    assert record.graphs[0].timings_s["form ahead"] > 0 and not made.closed
    targets = [[node.target for node in gm.graph.nodes] for gm in made.sent.values()]
    sdpa = nn.functional.scaled_dot_product_attention
    assert [sdpa in found for found in targets] == [True, False]
    assert any(AS_TORCH in note for note in record.notes if note.startswith("whole graph"))
    plain, _ = run(model, x, tmp_path, fusion="off", attention="sdpa")
    assert_close(out, plain.double(), torch.float32)


def test_where_sdpa_is_chosen_one_form_is_sent(compiles, workers, fresh_dynamo, tmp_path):
    workers()
    run(Packable().eval(), torch.randn(1, 16, 64), tmp_path, attention="auto")
    sent = [event for event in compiles if event.startswith("sent")]
    assert sent[0] == f"sent: {AS_TORCH}"


def test_a_form_that_could_not_be_compiled_there_is_compiled_here_before_the_search(
    compiles, workers, gather, fresh_dynamo, tmp_path
):
    workers(fails=True)
    run(Packable().eval(), torch.randn(1, 1024, 64), tmp_path)
    assert compiles == [
        f"sent: {AS_TORCH}", "sent: attention only", "ahead", "search", "timed", "timed",
    ]  # fmt: skip


def test_a_form_that_an_interrupt_ended_there_is_not_compiled_here(
    compiles, workers, gather, fresh_dynamo, tmp_path, monkeypatch
):
    """A terminal's Ctrl-C reaches the processes that compile as well."""
    workers(fails=True)
    chosen = forms.Forms.attention_chosen

    def interrupted(self, choices):
        chosen(self, choices)
        self._budget.stop()

    monkeypatch.setattr(forms.Forms, "attention_chosen", interrupted)
    out, _ = run(Packable().eval(), torch.randn(1, 1024, 64), tmp_path)
    assert out.isfinite().all() and "ahead" not in compiles


def test_workers_that_are_busy_are_kept_until_the_forms_are_compared(
    compiles, workers, gather, fresh_dynamo, tmp_path
):
    made = workers(busy=True)
    run(Packable().eval(), torch.randn(1, 1024, 64), tmp_path)
    assert compiles.index("others dropped") == compiles.index("search") + 1
    assert made.closed


def test_they_end_where_the_comparison_fails(
    compiles, workers, gather, fresh_dynamo, tmp_path, monkeypatch
):
    made = workers(busy=True)

    def fail(*given):
        raise RuntimeError("no comparison")

    monkeypatch.setattr(forms, "fastest_form", fail)
    with pytest.raises(Exception, match="no comparison"):
        run(Packable().eval(), torch.randn(1, 1024, 64), tmp_path)
    assert made.closed


def test_interrupting_while_a_form_is_made_keeps_the_graph(
    compiles, workers, gather, fresh_dynamo, tmp_path, monkeypatch
):
    workers()

    def interrupt(self, attention, choices):
        raise KeyboardInterrupt

    monkeypatch.setattr(forms.Forms, "_made", interrupt)
    out, _ = run(Packable().eval(), torch.randn(1, 1024, 64), tmp_path)
    assert out.isfinite().all() and "ahead" not in compiles
