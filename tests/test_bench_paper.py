"""The papers' tables: statistics, pipelines, long cells, parts. All of toy sizes."""

import csv
import math
import random
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("bench_path")


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- statistics ------------------------------------------------------------------------------------


def drawn(mean, spread, seed, rounds=10, each=20):
    source = random.Random(seed)
    return [[source.gauss(mean, spread) for _ in range(each)] for _ in range(rounds)]


def test_welch_as_stof_itself_has_it():
    stats = pytest.importorskip("scipy.stats")
    import significance

    from stof_compile.compare import compare

    base, new = drawn(10.5, 1.2, 1), drawn(10.0, 1.0, 2)
    found, own = significance.difference(base, new, stats), compare(base, new)
    assert (found.t, found.dof, found.p) == pytest.approx((own.t, own.dof, own.p), rel=1e-9)
    assert found.round_p == pytest.approx(own.round_p, rel=1e-9)
    assert found.speedup == pytest.approx(own.speedup)
    assert significance.verdict(found, found.p) == own.verdict == "win"
    assert 0.3 < found.effect_d < 0.6  # half a unit in standard deviations of 1.1


@pytest.mark.parametrize(("other", "p", "t"), [(2.0, 1.0, 0.0), (1.0, 0.0, math.inf)])
def test_samples_without_any_variance(other, p, t):
    import significance

    for stats in (None, SimpleNamespace(ttest_ind=None, ttest_rel=None)):  # scipy is not asked
        found = significance.difference([[2.0] * 4] * 3, [[other] * 4] * 3, stats)
        assert (found.p, found.round_p, found.t) == (p, p, t)
        assert significance.verdict(found, found.p) == ("win" if t else "neutral")


def test_holm_corrects_by_rank_and_decides_as_stof_does():
    import significance

    from stof_compile.compare import ALPHA, holm

    assert significance.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    source = random.Random(3)
    for _ in range(50):
        p_values = [source.random() ** 6 for _ in range(5)]
        assert [p < ALPHA for p in significance.holm(p_values)] == holm(p_values)


# -- pipelines -------------------------------------------------------------------------------------


def test_rounds_run_forwards_and_backwards():
    from passes import in_turns

    order = []

    def taker(name):
        def take():
            order.append(name)
            return float(len(order))

        return take

    first, second = in_turns([taker("a"), taker("b")], 8)
    assert "".join(order[:16]) == "a" * 8 + "b" * 8  # warm-up
    assert "".join(order[16:]) == "aabbbbaa" * 2
    assert [len(r) for r in (*first, *second)] == [4, 4, 4, 4]


def test_without_scipy_the_own_tests_stand_in_and_a_line_says_so(tmp_path, monkeypatch, capsys):
    import passes
    import significance

    monkeypatch.setattr(significance, "scipy_stats", lambda: None)
    rounds = {"baseline": drawn(10.5, 1.2, 1), "qkv": drawn(10.0, 1.0, 2)}
    found = passes.tested(rounds, tmp_path / "rows.csv", "m/1x128")["qkv"]
    assert found["verdict"] == "win" and found["p_holm"] == found["p"] < 1e-3
    assert found["tested_by"] == "stof_compile.compare"
    assert "scipy is not installed" in capsys.readouterr().err
    (line,) = rows_of(tmp_path / "rows.log.csv")
    assert line["kind"] == "missing" and "stof-compile[bench]" in line["reason"]


@pytest.mark.parametrize(("name", "places"), [("qkv", 2), ("fuse_transpose", None)])
def test_a_single_pass_changes_places_and_no_result(name, places, monkeypatch):
    import passes

    from stof_compile import zoo

    monkeypatch.setattr("stof_compile.inductor.compile_with_inductor", lambda gm, *_: gm.forward)
    model, inputs = zoo.build("distilbert-tiny", 1, 16)
    counted = []
    backend = passes.single_pass(name, counted)
    with torch.no_grad():
        out = torch.compile(model, backend=backend)(**inputs).last_hidden_state
        torch.testing.assert_close(out, model(**inputs).last_hidden_state)
    assert sum(counted) == places if places else counted


# -- attention cells -------------------------------------------------------------------------------


def test_grids_name_every_cell_once():
    from cases import DENSE_LIMIT, GRIDS

    for cells in GRIDS.values():
        assert len({cell.name for cell in cells}) == len(cells)
    assert len(GRIDS["table2"]) + len(GRIDS["mha"]) == 3 * 6 * 4  # Figures 9 and 10
    assert not {c.name for c in GRIDS["table2"]} & {c.name for c in GRIDS["mha"]}
    assert max(c.seq for c in GRIDS["long"]) == 2**20 > DENSE_LIMIT
    assert {c.head_dim for c in GRIDS["headdims"]} == {64, 80, 96, 128, 192, 256}
    assert {c.dtype for c in GRIDS["single"]} == {"float32"}


def test_random_tiles_and_densities_without_the_matrix():
    from cases import dense_mask, densities, keep_rows, random_tile_table, table2_cell

    cell = table2_cell(1, 512, "bigbird")
    keep = dense_mask(cell, CPU)
    assert densities(cell, None, CPU) == pytest.approx(densities(cell, keep, CPU))
    table, regular = random_tile_table(cell, CPU), table2_cell(1, 512, "longformer")
    extra = keep & ~keep_rows(regular, torch.arange(512))
    assert torch.equal(table.repeat_interleave(64, 0).repeat_interleave(64, 1), extra)


def test_documents_and_random_tiles():
    from cases import GRIDS, WITH_RANDOM_TILES, dense_mask, document_ids, random_tile_table
    from stats import SPELLED  # read where torch is not

    assert SPELLED == WITH_RANDOM_TILES
    documents, random = GRIDS["blocks"][:2]
    ids = document_ids(documents)
    assert torch.equal(ids, document_ids(documents)) and int(ids.max()) == 3  # of 512 in the mean
    assert torch.equal(dense_mask(documents, CPU), ids[:, None] == ids)
    keep, table = dense_mask(random, CPU), random_tile_table(random, CPU)
    assert torch.equal(table.repeat_interleave(64, 0).repeat_interleave(64, 1), keep)
    assert 0.08 < float(keep.double().mean()) < 0.12


def test_a_peer_that_takes_the_mask_as_a_matrix_is_missing_where_it_is_too_long():
    from cases import GRIDS
    from peers import PeerMissingError, Setup, chosen_variants

    cell = next(c for c in GRIDS["long"] if c.seq == 262144)
    setup = Setup(cell, CPU, None, Path())
    (variant,) = chosen_variants(cell, CPU, ["sdpa_mask/compiled"])
    with pytest.raises(PeerMissingError, match="as a matrix, here of 64 GiB"):
        variant.build(setup)
    assert [v.name for v in chosen_variants(cell, CPU, ["flex_expert"])] == ["b32", "b64"]


def test_several_grids_go_to_files_of_their_own(monkeypatch, tmp_path):
    import driver

    seen = []

    def run(args):
        seen.append((args.grid, args.out, args.resume))
        return 1

    monkeypatch.setattr(driver, "run_command", run)
    args = Namespace(command="attention", grid="table2,long", out=None, budget=9.0, resume=False)
    assert driver.drive(args) == 2
    args.out = tmp_path / "rows.csv"
    driver.drive(args)
    assert seen == [
        ("table2", None, False),
        ("long", None, False),
        ("table2", args.out, False),  # the second grid adds to the file of the first
        ("long", args.out, True),
    ]


def test_head_dims_without_a_ceiling_get_one(tmp_path, monkeypatch):
    import roofline

    known = roofline.Ceilings("GPU", 4.0, 700.0, {"64": 500.0}, {"64": "there"})
    monkeypatch.setattr(roofline, "device_name", lambda device: "GPU")
    monkeypatch.setattr(roofline, "measure_ceilings", lambda device: known)
    monkeypatch.setattr(roofline, "_dense_attention", lambda *_: (400.0, "cuDNN"))
    path, cuda = tmp_path / "c.json", torch.device("cuda")
    assert roofline.load_ceilings(path, cuda).attention_tflops == {"64": 500.0}
    found = roofline.load_ceilings(path, cuda, 96)
    assert found.rate(96) == 400e12 and found.rate(96, "float32") == 400e12 / 6
    assert roofline.read_ceilings(path).attention_tflops == {"64": 500.0, "96": 400.0}


# -- the papers ------------------------------------------------------------------------------------


def command_line(*words):
    import run

    return run.parser().parse_args(["paper", *words])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_parts_are_commands_that_exist(device, quick, tmp_path):
    import paper
    import run
    from cases import GRIDS, select_cells
    from models import model_names
    from ways import chosen_ways

    parts = (paper.quick_parts if quick else paper.full_parts)(device)
    files = [part.name for part in parts if not part.adds]
    assert len(files) == len(set(files))
    for part in parts:
        assert part.command in run.COMMANDS
        if "grid" in part.given:
            assert select_cells(GRIDS[part.given["grid"]], part.given.get("cells"))
        if part.command == "e2e":
            names = model_names(part.given["model"], False)
            for name in names:
                ways = chosen_ways(torch.device(device), name, "1x128", part.given.get("peers"))
                assert ways
    told = " ".join(part.shows for part in parts)
    for shown in ("Table 2", "9 and 10", "11", "12", "13", "Table 4", "3 and 4", "Graph", "long"):
        assert shown in told


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_quick_run_leaves_out_what_takes_long(device):
    import paper
    import passes

    parts = paper.quick_parts(device)
    (pipelines,) = (p.given["peers"].split(",") for p in parts if p.command == "passes")
    assert len(pipelines) == 3 and set(pipelines) < set(passes.PIPELINES)
    (tuning,) = (p for p in parts if p.command == "tuning")
    args = command_line("--quick", "--device", device, "--caches", "caches")
    assert args.repeats == 2
    assert paper.part_arguments(args, tuning, Path()).repeats == 1
    models = [p for p in parts if p.command == "e2e" and p.name == "e2e"]
    flex = [p for p in models if "flex" in p.given["peers"]]
    assert len(flex) == 1 and "," not in flex[0].given["model"] + flex[0].given["cells"]
    assert flex[0] is models[-1 if device == "cpu" else 0]  # with the others, or where C++ is slow
    (four,) = (p.given for p in models if "," in p.given["model"])  # two models at two settings
    assert [len(four[name].split(",")) for name in ("model", "cells")] == [2, 2]
    begun = [p.name for p in parts if not p.adds]
    assert [p.name for p in parts][: len(begun)] == begun  # every kind of rows before more of one


def test_a_resumed_quick_run_begins_with_what_has_no_rows(monkeypatch, tmp_path):
    import driver
    import paper

    seen = []
    monkeypatch.setattr(paper, "run_command", lambda a: seen.append(a.out.stem) or 0)
    monkeypatch.setattr(paper, "pending_units", lambda args: [])
    monkeypatch.setattr(paper, "write_folder", lambda folder: None)
    for name in ("density", "e2e"):
        (tmp_path / f"{name}-cpu.csv").write_text("")
    driver.drive(command_line("--device", "cpu", "--out", str(tmp_path), "--quick", "--resume"))
    assert seen[:2] == ["operators-cpu", "passes-cpu"]
    assert seen[-4:] == ["density-cpu", "e2e-cpu", "e2e-cpu", "e2e-cpu"]


def test_parts_run_in_order_with_one_budget(monkeypatch, tmp_path):
    import driver
    import paper

    seen = []
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(paper, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(paper, "run_command", lambda a: seen.append(Namespace(**vars(a))) or 0)
    monkeypatch.setattr(paper, "pending_units", lambda args: [])
    monkeypatch.setattr(paper, "write_folder", lambda folder: None)
    args = command_line("--device", "cpu", "--out", str(tmp_path), "--budget", "1000", "--quick")
    assert driver.drive(args) == 0
    assert [one.command for one in seen[:2]] == ["density", "operators"]
    assert seen[0].out == tmp_path / "density-cpu.csv" and seen[0].seed == seen[1].seed
    assert [one.budget for one in seen] == sorted((one.budget for one in seen), reverse=True)
    assert len(seen) < len(paper.quick_parts("cpu"))  # the budget ended it
    assert not any(one.resume for one in seen if one.out.stem != "e2e-cpu")


def test_the_default_folder_of_a_quick_run_holds_no_results():
    import paper

    assert paper.out_folder(Namespace(out=None, quick=False, device="cpu")).name == "results"
    quick = paper.out_folder(Namespace(out=None, quick=True, device="cpu"))
    assert quick.parts[-2:] == ("out", "quick-cpu")  # .gitignore has bench/out


def test_the_density_table_runs(tmp_path, capsys):
    import run

    out = tmp_path / "density-cpu.csv"
    assert run.main(["density", "--device", "cpu", "--out", str(out), "--worker", "masks"]) == 0
    found = {r["cell"]: float(r["sparsity_percent"]) for r in rows_of(out)}
    assert found == pytest.approx(
        {"causal": 49.951, "sliding": 93.753, "longformer": 87.799, "bigbird": 80.768}, abs=1e-3
    )


def test_scipy_is_found_or_not(monkeypatch):
    import significance

    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.stats", raising=False)
    assert significance.scipy_stats() is None
