"""Figures 3 and 4: operators tuned and timed on a bench of invented times."""

import csv
import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("bench_path")


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("operator", ["bias_norm", "linear_norm", "linear_linear"])
def test_parts_of_an_operator_compute_the_whole(operator):
    from operators import make_problem

    from stof_compile.fusion.recipe import run_recipe
    from stof_compile.search.operands import random_operand

    problem = make_problem(operator, 2, 5, 8, torch.float32, "cpu")
    whole, generator = problem.whole, torch.Generator().manual_seed(0)
    given = [random_operand(whole, i, CPU, generator) for i in range(len(whole.operands))]
    value, rest = None, list(given)
    for part in problem.parts:
        own = [rest.pop(0)] if value is None else [value]
        own += [rest.pop(0) for _ in part.operands[1:]]
        value = run_recipe(part, own)
    torch.testing.assert_close(value, run_recipe(whole, given))
    assert problem.parts[problem.heaviest].result.kind in ("linear", "layer_norm")


class FakeBench:
    """Candidates of one template; a smaller tile is faster, alone the other way round.

    Args:
        failing: recipes of which nothing runs. spent: whether there are no seconds left.
    """

    def __init__(self, whole, templates=("t",), failing=(), spent=False):
        from stof_compile.search.candidate import Candidate

        self.whole, self.device, self.failing = whole, CPU, failing
        self.budget = SimpleNamespace(spent=spent)
        self.table = SimpleNamespace(measured=0)
        self._space = [Candidate(t, (("block", b), ("warps", 4))) for t in templates
                       for b in (16, 32, 64)]  # fmt: skip

    def candidates(self, recipe):
        return self._space

    def prepare(self, recipe, candidates):
        assert set(candidates) <= set(self._space)

    def trial(self, recipe, candidate):
        self.table.measured += 1
        if recipe in self.failing:
            return SimpleNamespace(cost_us=math.inf, error=None, status="failed", reason="too far")
        block = candidate.settings.get("block", 100)
        us = float(block) if recipe is self.whole else 1.0 / block
        return SimpleNamespace(cost_us=us, error=us / 1000, status="measured", reason="")

    def compare(self, schemes):
        return [sum(self.trial(*pair).cost_us for pair in scheme) for scheme in schemes]


def test_an_operator_is_tuned_fused_and_with_settings_of_before(tmp_path):
    from operators import make_problem, measure

    problem = make_problem("linear_norm", 1, 4, 8, torch.float32, "cpu")
    row = measure(problem, FakeBench(problem.whole), 0, (tmp_path / "rows.csv", "cell"))
    assert (row["fused_config"], row["fused_us"]) == ("block=16 warps=4", 16.0)
    assert row["single_config"] == row["before_config"] == "block=64 warps=4"
    assert (row["before_us"], row["inductor_us"]) == (64.0, 100.0)
    assert row["detached_us"] == pytest.approx(0.02)
    errors = {n: row[f"{n}_rel"] for n in ("detached", "inductor", "fused", "before")}
    assert errors == {"detached": 1e-5, "inductor": 0.1, "fused": 0.016, "before": 0.064}
    assert row["fused_tried"] == row["single_tried"] == "3/3"
    assert not (tmp_path / "rows.log.csv").exists()


def test_an_operator_that_was_hardly_tuned_says_so(tmp_path):
    from operators import FIELDS, make_problem, measure

    problem = make_problem("linear_norm", 1, 4, 8, torch.float32, "cpu")
    bench = FakeBench(problem.whole, spent=True)
    row = measure(problem, bench, 0, (tmp_path / "rows.csv", "cell"))
    assert row["fused_tried"] == row["single_tried"] == "1/3" and set(row) <= set(FIELDS)
    notes = [(r["kind"], r["variant"], r["reason"]) for r in rows_of(tmp_path / "rows.log.csv")]
    text = "1/3 candidates tried when the seconds were spent"
    assert notes == [("note", "fused", text), ("note", "single", text)]


def test_operations_apart_that_are_wrong_are_not_timed(tmp_path):
    from operators import make_problem, measure

    problem = make_problem("linear_norm", 1, 4, 8, torch.float32, "cpu")
    bench = FakeBench(problem.whole, failing=problem.parts[1:])
    row = measure(problem, bench, 0, (tmp_path / "rows.csv", "cell"))
    assert row["detached_us"] == "" and "detached_rel" not in row and row["fused_us"] == 16.0
    (line,) = rows_of(tmp_path / "rows.log.csv")
    assert (line["peer"], line["kind"], line["reason"]) == ("detached", "error", "too far")


def test_an_operator_of_which_no_candidate_runs_says_so(tmp_path):
    from operators import make_problem, measure

    problem = make_problem("linear_norm", 1, 4, 8, torch.float32, "cpu")
    bench = FakeBench(problem.whole, failing=[problem.parts[problem.heaviest]])
    row = measure(problem, bench, 0, (tmp_path / "rows.csv", "cell"))
    assert row["single_tried"] == "3/3" and row["before_us"] == "" and row["fused_us"] == 16.0
    reasons = [r["reason"] for r in rows_of(tmp_path / "rows.log.csv")]
    assert "no candidate runs, of 3/3 tried" in reasons


def test_an_operator_without_a_template_says_so(tmp_path, capsys):
    from operators import make_problem, measure

    problem = make_problem("bias_norm", 1, 4, 8, torch.float32, "cpu")
    row = measure(problem, FakeBench(problem.whole, ()), 0, (tmp_path / "rows.csv", "cell"))
    assert row["fused_us"] == row["before_us"] == "" and row["inductor_us"] == 100.0
    assert "no template of STOF takes it here" in capsys.readouterr().err


def test_nearest_settings_count_doublings():
    from operators import nearest

    from stof_compile.search.candidate import candidate_of

    space = [candidate_of("t", {"m": m, "form": form}) for m in (16, 64, 256) for form in "ab"]
    order = nearest(space, candidate_of("u", {"m": 128, "form": "b", "other": 3}))
    assert [c.settings["m"] for c in order[:2]] == [64, 256] and order[0].settings["form"] == "b"


def test_cells_of_operators_by_name_size_or_both(tmp_path):
    from operators import operator_units

    args = Namespace(device="cpu", out=tmp_path / "rows.csv", cells="bias_norm")
    assert operator_units(args) == ["bias_norm/1x128x256", "bias_norm/1x512x256"]
    args.cells = "1x128x256"
    assert len(operator_units(args)) == 3
    args.cells = "1x128"
    with pytest.raises(SystemExit, match="no cell 1x128; cells: bias_norm"):
        operator_units(args)
