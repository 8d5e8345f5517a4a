"""The option fp8: where it is used, what keeps its normal kernel and says why, what is stored."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from stof_compile import attention_kernel, explain, masks, ops_fp8, sparse_attention
from stof_compile.attention import fp8, select
from stof_compile.attention.call import bind_kernel
from stof_compile.attention.decision_table import decide, plausible_configs
from stof_compile.attention.fp8 import fp8_obstacle
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.select import choose
from stof_compile.budget import Budget
from stof_compile.errors import StofOptionError, StofPlanError, StofUnsupportedError
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, Candidate, Plan, PlanFile
from stof_compile.store import Store
from tests.e2e.running import without_inductor

WINDOW = masks.sliding_window(4)
CPU = torch.device("cpu")


def problem(length=64, dtype=torch.float16, **kwargs):
    meta = TensorMeta((1, 2, length, 16), (2 * length * 16, 16, 32, 1), dtype)
    given = {"fp8": True, **kwargs}
    return AttentionProblem(meta, meta, meta, WINDOW, 0, CPU, 0.25, **given)


@pytest.fixture
def as_if_on_hopper(monkeypatch):
    """Selection and rewriting think of this CPU as a GPU that has e4m3; nothing can run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fp8, "refusal_on", lambda *facts: "")
    monkeypatch.setitem(select.KERNELS, "cpu", ("block", "gather", "sdpa"))


# -- where it is used -----------------------------------------------------------------------------


def test_it_is_an_option_that_is_off():
    assert StofOptions().fp8 is False
    with pytest.raises(StofOptionError, match="'fp8' must be True or False"):
        StofOptions(fp8=1)


@pytest.mark.parametrize(
    ("facts", "attention", "reason"),
    [
        ({}, "auto", "the device is 'cpu'"),
        ({}, "sdpa", "the device is 'cpu'"),  # whatever kernel: that is what has to be told
        ({"training": True}, "auto", "gradients"),
    ],
)
def test_obstacles(facts, attention, reason):
    assert reason in fp8_obstacle(problem(**facts), attention)


def test_no_obstacle_on_new_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    asked = replace(problem(), device=torch.device("cuda", 0))
    assert fp8_obstacle(asked, "auto") == fp8_obstacle(asked, "block") == ""
    for other in ("row", "paper", "sdpa"):
        reason = fp8_obstacle(asked, other)
        assert f"attention={other!r}" in reason and "give auto or block" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "8.9" in fp8_obstacle(asked, "auto")


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def compiled(**options):
    options = {"mask": WINDOW, "tune_budget_s": 0, "fusion": "off", "fp8": True, **options}
    return torch.compile(attend, backend="stof", options=options)


@torch.no_grad()
def test_a_cpu_keeps_its_kernel_and_says_why(monkeypatch, fresh_dynamo, caplog):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    q = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    fast = compiled()
    with caplog.at_level("INFO", logger="stof_compile"):
        out = fast(q, q, q)
    assert caplog.text.count("fp8 is not used: it needs an NVIDIA GPU") == 1
    (site,) = explain(fast).sites
    assert site.status == "rewritten"
    assert [note for note in site.notes if "fp8 is not used" in note] == site.notes[1:]
    assert "fp8 is not used" in str(explain(fast))
    torch._dynamo.reset()
    assert torch.equal(out, compiled(fp8=False)(q, q, q))
    torch._dynamo.reset()
    with pytest.raises(StofUnsupportedError, match=r"not run in fp8.*strict=True"):
        compiled(strict=True)(q, q, q)


@torch.no_grad()
def test_symbolic_lengths_keep_theirs(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    options = {"mask": WINDOW, "tune_budget_s": 0, "fusion": "off", "fp8": True}
    fast = torch.compile(attend, backend="stof", dynamic=True, options=options)
    q = torch.randn(1, 2, 64, 16)
    fast(q, q, q)
    (site,) = explain(fast).sites
    assert site.notes[1:] == ["fp8 is not used: its lengths are symbolic"]


# -- the rewritten graph --------------------------------------------------------------------------


def test_a_site_is_rounded_and_rewritten(as_if_on_hopper, monkeypatch, fresh_dynamo):
    graphs = []

    def captured(gm, inputs, options):
        graphs.append(gm)
        return lambda *given: (given[0],)

    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", captured)
    q = torch.randn(2, 4, 70, 24, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 4, 70, 24, dtype=torch.bfloat16)
    fast = compiled(strict=True)
    with torch.no_grad():
        fast(q, k, v)
    (site,) = explain(fast).sites
    assert site.status == "rewritten" and site.choice.kernel == "block"
    assert " in fp8: fp8 was asked for" in site.notes[0]
    nodes = [n for n in graphs[0].graph.nodes if n.op == "call_function"]
    rounding = [n for n in nodes if n.target is torch.ops.stof.fp8_heads.default]
    assert [n.args[1] for n in rounding] == [False, False, True]
    (call,) = (n for n in nodes if n.target is torch.ops.stof.attention_fp8.default)
    shapes = [tuple(n.meta["example_value"].shape) for n in call.args[:6]]
    assert shapes == [(2, 4, 70, 32)] * 2 + [(2, 4, 40, 128)] + [(2, 4)] * 3
    dtypes = [n.meta["example_value"].dtype for n in call.args[:6]]
    assert dtypes == [torch.float8_e4m3fn] * 3 + [torch.float32] * 3
    (out,) = (n for n in nodes if n.args and n.args[0] is call)
    value = out.meta["example_value"]
    assert value.shape == q.shape and value.dtype == q.dtype
    assert value.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kernel", ["sdpa", "row", "gather"])
def test_no_other_kernel_is_bound(kernel):
    with pytest.raises(StofUnsupportedError, match="e4m3"):
        bind_kernel(problem(), kernel, (16, 32, 4, 2))


def test_the_hopper_kernel_is_not_bound():
    with pytest.raises(StofUnsupportedError, match="e4m3"):
        bind_kernel(problem(), "block", (64, 64, 4, 2, 3, 0, 1, 0, 0, 3, 0))


# -- choice, plan, store --------------------------------------------------------------------------


def test_keys_tell_fp8():
    plain = problem(fp8=False)
    assert plain.key != problem().key


def test_only_its_configs_are_offered(as_if_on_hopper):
    asked = problem(length=512)
    assert plausible_configs(asked, "sdpa") == plausible_configs(asked, "gather") == []
    offered = plausible_configs(asked, "block")
    assert offered and all(config[1] >= 32 and not config[9] for config in offered)
    kernel, config, reason = decide(asked)
    assert (kernel, config) == ("block", offered[0]) and "asked for" in reason
    dense = replace(asked, spec=None)
    assert decide(dense)[0] == "block"


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("q_len", [1, 64, 4096])
def test_there_is_a_config_for_all_that_is_not_refused(head_dim, capability, q_len):
    pytest.importorskip("triton")
    from stof_compile.kernels.attention_blockwise import configs

    facts = {"q_len": q_len, "planes": 48, "value_dim": 128}
    for offered in (
        configs(head_dim, torch.float8_e4m3fn, capability, **facts),
        configs(head_dim, torch.float8_e4m3fn, capability, is_band=True, narrow=True, **facts),
    ):
        assert offered and len(set(offered)) == len(offered)
        assert all(c.block_k >= 32 and not c.hopper and not c.registers for c in offered)


@pytest.fixture
def timer(as_if_on_hopper, monkeypatch):
    def fake(problem, kernel, config, generator):
        us = 10.0 + config[3]
        return Candidate(kernel, config, "measured", us, us, us, 2e-2)

    monkeypatch.setattr(select, "measure_candidate", fake)


def test_the_choice_is_stored_and_followed(timer, tmp_path):
    store, asked = Store(tmp_path, "here"), problem(length=256)
    first = choose(asked, StofOptions(fp8=True), store, Budget(60))
    assert (first.kernel, first.source) == ("block", "measured")
    assert {c.kernel for c in first.candidates} == {"block"}
    again = choose(asked, StofOptions(fp8=True), store, Budget(60))
    assert (again.config, again.source) == (first.config, "store")
    forced = choose(asked, StofOptions(attention="block"), None, Budget(60))
    assert (forced.kernel, forced.source) == ("block", "forced")
    text = PlanFile.of([Plan("here", {asked.key: first}, graph="g")]).to_json()
    plan = PlanFile.from_json(text).for_graph("g")
    followed = choose(asked, StofOptions(), None, Budget(0), plan)
    assert (followed.config, followed.source) == (first.config, "plan")


@pytest.mark.parametrize(
    ("kernel", "config"), [("sdpa", ()), ("block", (64, 64, 4, 2, 3, 0, 1, 0, 0, 3, 0))]
)
def test_an_edited_choice_is_not_followed(timer, tmp_path, kernel, config):
    store, asked = Store(tmp_path, "here"), problem(length=256)
    edited = AttentionPlan(kernel, config, "measured", "edited")
    store.put("attention", asked.key, edited.to_dict())
    assert choose(asked, StofOptions(), store, Budget(60)).source == "measured"
    with pytest.raises(StofPlanError, match="e4m3"):
        choose(asked, StofOptions(), None, Budget(0), Plan("here", {asked.key: edited}))


@torch.no_grad()
def test_where_no_candidate_is_right_the_site_keeps_its_kernel(
    as_if_on_hopper, monkeypatch, fresh_dynamo
):
    def wrong(problem, kernel, config, generator):
        us = 1.0
        if problem.fp8:
            return Candidate(kernel, config, "failed", reason="output differs from the reference")
        return Candidate(kernel, config, "measured", us, us, us, 1e-3)

    monkeypatch.setattr(select, "measure_candidate", wrong)
    monkeypatch.setitem(select.KERNELS, "cpu", ("gather", "block"))
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    configs = {"gather": [(64, 16)], "sdpa": [()]}
    monkeypatch.setattr(
        select,
        "plausible_configs",
        lambda p, kernel: plausible_configs(p, kernel) if p.fp8 else configs.get(kernel, []),
    )
    q = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    fast = compiled(tune_budget_s=60.0)
    fast(q, q, q)
    (site,) = explain(fast).sites
    assert site.choice.kernel == "gather" and "output differs" in site.notes[1]

    def call(q):  # as sparse_attention(..., fp8=True) traces on a GPU: it asks by itself
        rule = list(WINDOW.tensors()), WINDOW.to_json()
        given = None, None, None, 0.25, 0.0, 0, "fp8", False
        return torch.ops.stof.attention_rule(q, q, q, *rule, *given)[0]

    options = {"tune_budget_s": 60.0, "fusion": "off"}
    with pytest.raises(StofUnsupportedError, match="no e4m3 candidate runs"):
        torch.compile(call, backend="stof", options=options)(q)


# -- the function ---------------------------------------------------------------------------------


def test_the_function_refuses_what_it_cannot(monkeypatch):
    q = torch.randn(1, 2, 32, 16, dtype=torch.bfloat16)
    with pytest.raises(StofUnsupportedError, match=r"8\.9"):
        sparse_attention(q, q, q, WINDOW, fp8=True)
    monkeypatch.setattr(fp8, "refusal_on", lambda *facts: "")
    with pytest.raises(StofUnsupportedError, match="gradients"):
        sparse_attention(q.requires_grad_(), q, q, WINDOW, fp8=True)
    with (
        torch.no_grad(),
        attention_kernel("gather"),
        pytest.raises(StofUnsupportedError, match=r"attention_kernel\('gather'\)"),
    ):
        sparse_attention(q, q, q, WINDOW, fp8=True)


@pytest.mark.parametrize("backend", ["eager", "stof"])
def test_the_function_refuses_a_cpu_when_compiled(backend, fresh_dynamo):
    q = torch.randn(1, 2, 32, 16, dtype=torch.bfloat16)
    fast = torch.compile(lambda q: sparse_attention(q, q, q, WINDOW, fp8=True), backend=backend)
    with pytest.raises(StofUnsupportedError, match=r"8\.9"), torch.no_grad():
        fast(q)


# -- as on a GPU, in the interpreter --------------------------------------------------------------


@pytest.fixture
def e4m3():
    from right_e4m3 import right_e4m3

    with right_e4m3():
        yield


@pytest.mark.interpreter
@torch.no_grad()
def test_the_function(monkeypatch, e4m3):
    from stof_compile.kernels.reference import attention_reference, rounded_to_e4m3

    from tests.close import assert_close

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (fp8, ops_fp8):
        monkeypatch.setattr(module, "refusal_on", lambda *facts: "")
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, h, 70, 16).half() for h in (4, 2, 2))
    bias = torch.randn(4, 70, 70)
    how = {"bias": bias, "softcap": 5.0, "enable_gqa": True, "return_lse": True}
    out, lse = sparse_attention(q, k, v, masks.causal(), **how, fp8=True)
    assert out.dtype == torch.float16
    keep = torch.ones(70, 70, dtype=torch.bool).tril()
    wide = [rounded_to_e4m3(x) for x in (q, k, v)]
    wanted, wanted_lse = attention_reference(*wide, keep, None, bias, None, 5.0, True)
    assert_close(out, wanted, torch.float8_e4m3fn)
    assert (lse - wanted_lse).abs().max() < 0.061


@pytest.mark.interpreter
@torch.no_grad()
def test_candidates_pass_the_gate_only_if_right(e4m3):
    from stof_compile.attention import trial

    for facts in ({}, {"padding": True}):
        asked = problem(length=130, **facts)
        call = bind_kernel(asked, "block", (16, 32, 4, 2))
        inputs = trial._random_inputs(asked, torch.Generator().manual_seed(0))
        error = trial._gate(asked, call, inputs)
        assert error is not None and 1e-3 < error < 5e-2
        (prepared,) = trial._prepared(call, [inputs])
        assert prepared[2][0].shape == (1, 2, 32, 256)
        out = trial._timed(asked, call)(*prepared)
        assert torch.equal(out, call.run(*inputs, call.buffers))
        wrong = replace(call, attend=lambda *given, call=call: call.attend(*given) * 1.06)
        assert trial._gate(asked, wrong, inputs) is None
