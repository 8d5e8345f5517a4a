"""What the benchmark of gradients compares, which faults it sees, and what it says."""

import csv
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from close import assert_close

pytestmark = pytest.mark.usefixtures("bench_path")


@pytest.fixture
def cell():
    from cases import table2_cell

    return table2_cell(2, 96, "bigbird", heads=3, head_dim=16, dtype="float32")


@pytest.fixture
def prepared(cell):
    import backward

    return backward.prepare(cell, torch.device("cpu"), 7)


def attend_with(cell):
    from cases import dense_mask

    keep = dense_mask(cell, torch.device("cpu"))
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def test_the_reference_is_the_gradient_of_attention_in_fp64(cell, prepared):
    import backward

    q, k, v, wanted = (t.detach().double() for t in prepared.inputs)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    step = backward.both_passes(attend_with(cell))
    found = step(*leaves, wanted)
    assert prepared.planes == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for whole, expected in zip(found, prepared.expected, strict=True):
        assert_close(whole.flatten(0, 1), expected)


def test_some_planes_of_many_are_compared_the_first_and_last_among_them(cell):
    import backward

    planes = backward.chosen_planes(replace(cell, batch=16, heads=12), 3)
    assert len(set(planes)) == len(planes) == backward.PLANES
    assert planes[0] == (0, 0) and planes[-1] == (15, 11)
    assert all(0 <= b < 16 and 0 <= h < 12 for b, h in planes)
    assert backward.chosen_planes(replace(cell, batch=1, heads=1), 3) == [(0, 0)]


def test_right_gradients_pass_and_faults_are_seen(cell, prepared):
    import backward

    step = backward.both_passes(attend_with(cell))
    report, problem = backward.check(step, prepared, torch.float32)
    assert problem == "" and report.ok and report.max_rel > 0

    def spoiled(number, value, at):
        def run(*inputs):
            found = [t.clone() for t in step(*inputs)]
            found[number][at] = value
            return tuple(found)

        return backward.check(run, prepared, torch.float32)[1]

    assert "dv: max" in spoiled(2, 1.0, (1, 2, 5))
    assert "dv: max" in spoiled(2, 0.0, (1, 2, slice(90, 96)))
    assert "dq: max" in spoiled(0, 1.0, (0, 0, 95))
    assert "dk is not finite" in spoiled(1, float("nan"), (1, 0, 3))


def test_a_fault_in_keys_that_few_rows_see_is_seen(cell):
    """Under a causal mask the gradients of the last keys are small beside the others."""
    import backward

    causal = replace(cell, mask="causal", seq=2048, dtype="float16", batch=1, heads=1)
    prepared = backward.prepare(causal, torch.device("cpu"), 3)
    found = [t.half()[None] for t in prepared.expected]
    for number, name in ((1, "dk"), (2, "dv")):
        spoiled = [t.clone() for t in found]
        spoiled[number][:, :, -16:] = 0
        problem = backward.check(lambda *_, s=spoiled: tuple(s), prepared, torch.float16)[1]
        assert f"{name}: max" in problem and "each tile" in problem
    assert backward.check(lambda *_: tuple(found), prepared, torch.float16)[1] == ""


def test_faults_in_planes_without_a_reference_are_seen(cell, prepared):
    import backward

    step, few = backward.both_passes(attend_with(cell)), replace(prepared, planes=[(0, 0)])
    few = replace(few, expected=tuple(t[:1] for t in prepared.expected))

    def problem(number):
        def run(*inputs):
            found = [t.clone() for t in step(*inputs)]
            found[number][1, 2] *= 0.5
            return tuple(found)

        return backward.check(run, few, torch.float32)[1]

    assert backward.check(step, few, torch.float32)[1] == ""
    assert "dv over all keys" in problem(2)
    assert "different sums" in problem(0) and "different sums" in problem(1)


def test_rows_without_keys_have_no_gradient(cell):
    import backward

    random = replace(cell, mask="random", seq=512, window=0, global_tokens=0, batch=1, heads=1)
    prepared = backward.prepare(random, torch.device("cpu"), 3)
    assert not prepared.keep.any(dim=1).all()
    found = tuple(t.to(cell.torch_dtype)[None] for t in prepared.expected)
    assert backward.check(lambda *_: found, prepared, cell.torch_dtype)[1] == ""


def test_passes_that_were_timed_in_two_ways_are_no_row(cell, prepared, monkeypatch, tmp_path):
    import backward
    from peers import Setup, Variant

    from stof_compile.measure import Timing

    methods = iter(("cuda-graph", "events (cannot be captured)"))
    timed = Timing(1.0, 1.0, 1.0, 3, "launch")
    monkeypatch.setattr(backward.timing, "launch_time", lambda *a: timed)
    monkeypatch.setattr(
        backward.timing, "replay_time", lambda *a: replace(timed, method=next(methods))
    )
    variant = Variant("sdpa_mask", "v", lambda setup: attend_with(cell))
    setup = Setup(cell, torch.device("cpu"), prepared.keep, tmp_path)
    with pytest.raises(RuntimeError, match="by cuda-graph, the first by events"):
        backward._measure(variant, setup, prepared)


def test_a_forward_pass_holds_what_the_other_needs(cell, prepared):
    import backward

    seen = []

    def attend(q, k, v):
        seen.append((torch.is_grad_enabled(), q.requires_grad))
        return attend_with(cell)(q, k, v)

    with torch.no_grad():
        out = backward.forward_pass(attend)(*prepared.inputs)
        backward.both_passes(attend)(*prepared.inputs)
    assert not out.requires_grad and seen == [(True, True)] * 2


@pytest.mark.parametrize("mask", ["causal", "sliding", "longformer", "bigbird"])
def test_variants_on_each_device(cell, mask):
    import backward

    there = replace(cell, mask=mask)
    for device in ("cpu", "cuda"):
        names = [(v.peer, v.name) for v in backward.backward_variants(there, torch.device(device))]
        assert len(set(names)) == len(names) and names[0] == ("stof", "option")
        peers = {peer for peer, _ in names}
        assert "stof_fp8" not in peers and ("flex_expert" in peers) == (device == "cuda")
        assert ("flex_split" in peers) == (device == "cuda" and mask == "bigbird")


def test_a_cell_by_the_command_line(tmp_path, capsys):
    import driver
    import run

    out = tmp_path / "backward-cpu.csv"
    words = ["backward", "--smoke", "--device", "cpu", "--cells", "1x128/causal", "--out", str(out)]
    args = run.parser().parse_args([*words, "--peers", "sdpa_mask,stof_fn", "--seed", "5"])
    assert driver.drive(args) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [r["peer"] for r in rows] == ["stof_fn", "sdpa_mask"]
    for r in rows:
        assert float(r["median_us"]) == pytest.approx(
            float(r["forward_us"]) + float(r["backward_us"]), rel=1e-3
        )
        assert float(r["max_rel"]) > 0
    assert "1x128/causal" in capsys.readouterr().out
    again = run.parser().parse_args([*words, "--peers", "sdpa_mask,stof_fn", "--resume"])
    driver.settle(again)
    assert not driver.pending_units(again)


def test_the_summary_has_both_times():
    from stats import backward_summary

    facts = dict.fromkeys(("device", "torch", "triton", "stof"), "x")
    rows = [
        {**facts, "cell": "16x2048/causal", "seq": "2048", "mask": "causal",
         "density": "0.5", "peer": peer,
         "variant": "v", "median_us": both, "backward_us": alone, "launch_us": "1",
         "rms_rel": "1e-3"}
        for peer, both, alone in (("flex_expert", "900", "500"), ("sdpa_mask", "800", "600"),
                                  ("stof", "400", "250"))
    ]  # fmt: skip
    text = backward_summary(rows)
    assert "0.8000   0.4000   2.00   0.9000" in text and "0.5000   0.2500   2.00   0.5000" in text
    assert "sdpa_mask v" in text and text.count("STOF against best peer") == 2
