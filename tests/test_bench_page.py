"""docs/benchmarks.md and the pictures are made from the rows that are there, and from no others."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AGAIN = "`python bench/run.py page` makes it anew"

pytestmark = pytest.mark.usefixtures("bench_path")


def test_the_committed_page_is_what_the_committed_rows_say():
    from page import PAGE, RESULTS, render

    assert PAGE.read_text() == render(RESULTS), AGAIN


def test_its_pictures_are_there_and_no_others():
    from gather import groups
    from page import PICTURES, RESULTS
    from plot import pictures_of

    wanted = {picture.name for group in groups(RESULTS) for picture in pictures_of(group)}
    assert {path.name for path in PICTURES.glob("bench-*.png")} == wanted, AGAIN


# -- rows of every kind ----------------------------------------------------------------------------

HERE = {"device": "NVIDIA H200", "torch": "2", "triton": "3", "transformers": "5", "stof": "0"}
MEASURED = {
    **HERE,
    "date": "2026-01-02T00:00Z",
    "dtype": "float16",
    "batch": "1",
    "rms_rel": "1e-3",
}


def attention(peer, median_us, launch_us, cell="1x128/causal", **other):
    return {
        **MEASURED, "cell": cell, "seq": "128", "heads": "12", "head_dim": "64", "density": "0.5",
        "mask": "causal", "peer": peer, "variant": "v", "median_us": median_us,
        "launch_us": launch_us, "element_floor_us": "1", "tile_floor_us": "2", "detail": "block[]",
        "peak_bytes": "1048576", **other,
    }  # fmt: skip


def model(peer, graph_us, median_us, **other):
    return {
        **MEASURED, "cell": "1x128", "model": "gpt2", "seq": "128", "mask": "bigbird", "peer": peer,
        "graph_us": graph_us, "median_us": median_us, "floor_us": "10", "compile_s": "3", **other,
    }  # fmt: skip


def pipeline(name, mean_us, **other):
    tests = dict.fromkeys(
        ("speedup", "t", "dof", "p", "p_holm", "round_p", "effect_d", "tested_by"), ""
    )
    return {
        **MEASURED, "model": "distilbert", "cell": "1x128", "pipeline": name, "changes": "6",
        "samples": "200", "rounds": "10", "method": "cuda-graph", "mean_us": mean_us, "sd_us": "2",
        **tests, "verdict": "", **other,
    }  # fmt: skip


TESTED = {
    "t": "9",
    "dof": "300",
    "p": "1e-9",
    "p_holm": "2e-9",
    "round_p": "1e-4",
    "tested_by": "scipy 1",
}
TUNED = {
    "tuning_s": "20", "budget_s": "60", "trials": "99", "bookkeeping_s": "0.2",
    "bookkeeping_percent": "2", "cold_s": "30",
    "plain_cold_s": "9", "warm_extra_s": "0.4", "gain": "1.1",
}  # fmt: skip
OPERATOR = {
    "detached_us": "4", "inductor_us": "2", "fused_us": "2.5", "before_us": "3",
    "fused_template": "triton_norm", "fused_rel": "1e-3", "inductor_rel": "1e-3",
}  # fmt: skip
MASKED = {
    "seq": "131072", "median_ms": "3", "first_ms": "200", "kept_bytes": "2e5",
    "tiles_kept": "26582", "peak_bytes": "5e7", "rms_rel": "",
}  # fmt: skip
COMPILED = {"compile_s": "8", "stof_s": "9", "overhead_percent": "12.5"}
FILES = {
    "attention-cuda": [
        attention("sdpa_mask", "20", "40"), attention("flex_default", "9", "50"),
        attention("flex_expert", "8", "60"), attention("stof", "4", "80"),
    ],
    "backward-cuda": [
        attention(peer, both, both, "16x2048/causal", forward_us="10", backward_us=alone,
                  rms_rel="2e-3")
        for peer, both, alone in (("sdpa_mask", "90", "70"), ("flex_expert", "60", "40"),
                                  ("stof", "50", "45"))
    ],
    "attention-long-cuda": [
        attention(peer, us, us, "1x65536/sliding")
        for peer, us in (("flex_expert", "8"), ("stof", "4"))
    ],
    "attention-headdims-cuda": [
        attention(peer, us, us, f"4x4096/causal/d{dim}/float16", head_dim=dim)
        for peer, us in (("flex_expert", "3"), ("stof", "4")) for dim in ("64", "96")
    ],
    "attention-single-cuda": [
        attention(peer, us, us, "16x2048/causal/float32", dtype="float32")
        for peer, us in (("sdpa_causal", "3"), ("stof", "2"))
    ],
    "attention-scattered-cuda": [
        attention(peer, us, us, "8x512/fixed")
        for peer, us in (("flex_expert", "6"), ("stof", "5"))
    ],
    "attention-blocks-cuda": [
        attention(peer, us, us, "16x2048/random")
        for peer, us in (("flex_expert", "7"), ("stof", "6"))
    ],
    "attention-dense-cuda": [
        attention(peer, us, us, "16x2048/dense", burst_us=burst)
        for peer, us, burst in (("fa4", "8", "7.5"), ("sdpa_dense", "8.5", ""), ("stof", "8", "6"))
    ],
    "e2e-cuda": [
        model("compile-default", "200", "500"), model("flex-default", "150", "300"),
        model("stof-default", "100", "400"), model("stof-attention", "120", "400"),
    ],
    "e2e-older-cuda": [model("stof-default", "700", "900", date="2025-12-31T00:00Z")],
    "e2e-gpt2-float32-cuda": [
        model("compile-default", "2000", "2100", dtype="float32"),
        model("stof-default", "1500", "1600", dtype="float32"),
    ],
    "e2e-long-cuda": [model("compile-default", "9", "9"), model("stof-default", "1", "1")],
    "tuning-cuda": [{**MEASURED, "model": "gpt2", "cell": "1x128", **TUNED}],
    "overhead-cuda": [{**MEASURED, "model": "gpt2", "cell": "inductor-cold", **COMPILED}],
    "operators-cuda": [{**MEASURED, "cell": "bias_norm/1x128x512", **OPERATOR}],
    "passes-cuda": [
        pipeline("baseline", "100"),
        pipeline("qkv", "90", speedup="1.11", **TESTED, effect_d="4", verdict="win"),
        pipeline("all", "120", speedup="0.83", **TESTED, effect_d="-9", verdict="loss"),
        pipeline("fuse_transpose", "", verdict="no match", changes="0", sd_us="", samples=""),
    ],
    "density-cuda": [
        {**MEASURED, "cell": "longformer", "sparsity_percent": "87.8", "paper_percent": "88.8"},
    ],
    "mask-cuda": [{**MEASURED, "cell": "build sliding", **MASKED}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name, rows in FILES.items():
        write(tmp_path / f"{name}.csv", rows)
    missing = {"cell": "1x128/causal", "peer": "flex_flash", "variant": "fa4", "kind": "missing"}
    write(tmp_path / "attention-cuda.log.csv", [{**missing, "reason": "FA4 is not installed"}])
    return tmp_path


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_every_kind_has_its_section(folder):
    from page import SECTIONS, render

    text = render(folder)
    for section in SECTIONS:
        assert f"## {section.title}\n" in text
    assert "Every kind of table has rows." in text and "nan" not in text
    assert "* `attention-cuda.csv`: flex_flash, FA4 is not installed (1 lines)" in text
    assert "| gpt2 1x128 | 0.2000 | 0.1500 | 0.1000 | 2.00 | 1.50 | 0.75 |" in text  # newer row
    assert "| gpt2 1x128 | 2.0000 | - | 1.5000 |" in text  # in fp32, which replaces no other row
    assert "attention only" in text and "| 1.67 |" in text  # of the ablation, 200 / 120


def test_bursts_count_where_the_fastest_peer_has_them(folder):
    from gather import groups
    from losses import all_losses
    from page import render

    def section(text):
        return text.split("## No mask\n")[1].split("\n## ")[0]

    text = render(folder)
    assert "best / STOF | with launches | in bursts |" in section(text)
    assert "| 1.00 | 1.00 | 1.25 |" in section(text)  # 8 / 8 replayed and launched, 7.5 / 6
    assert "In bursts of 20 to 30 ms" in section(text) and text.count("in bursts |") == 1
    faster = attention("cudnn", "7", "9", "16x2048/dense", burst_us="")
    rows = [*FILES["attention-dense-cuda"], faster]
    rows += [
        attention(peer, us, us, "16x4096/dense", burst_us=us)
        for peer, us in (("fa4", "9"), ("stof", "10"))
    ]
    write(folder / "attention-dense-cuda.csv", rows)
    assert "| 0.88 | 1.00 | - |" in section(render(folder))  # 7 / 8: who leads has no bursts
    titles = {told.title: told for told in all_losses(groups(folder))}
    told = titles["Attention (`attention-dense-cuda`), replay in bursts"]
    assert told.count == 1 and [loss.cell for loss in told.found] == ["16x4096/dense"]


def test_each_group_of_peers_needs_the_bursts_of_its_own_fastest():
    from stats import best_of, means

    rows = [
        attention("cudnn", "7", "9", burst_us="6"),
        {**attention("flex_expert", "8", "9", burst_us=""), "variant": "b128"},
        attention("flex_expert", "9", "9", burst_us="8.5"),
        attention("flex_default", "12", "9", burst_us="11"),
        attention("stof", "5", "9", burst_us="4"),
    ]
    assert best_of(rows, ("flex_expert",), "burst_us") is None
    text = means(rows, "burst_us")
    assert "best peer   : geometric mean 1.50x over 1 cells" in text
    assert "default flex: geometric mean 2.75x" in text and "expert" not in text
    assert not means([*rows, attention("stof", "4.5", "9", burst_us="")], "burst_us")


def test_rows_held_to_own_kernels_are_neither_a_peer_nor_stof():
    from losses import STOF
    from stats import best_of

    rows = [attention(peer, "1", "1", burst_us="1") for peer in ("stof_block", "stof_fn")]
    rows += [attention("cudnn", "7", "9", burst_us="6"), attention("stof", "8", "9", burst_us="7")]
    for column in ("median_us", "launch_us", "burst_us"):
        assert best_of(rows, None, column).peer == "cudnn"
        assert best_of(rows, ("stof",), column).peer == "stof"
    assert "stof_block" not in STOF


def test_floors_are_those_of_the_run_that_measured_stof():
    from stats import floor_row

    old = attention("cudnn", "7", "9", date="2026-01-01T00:00Z")
    rows = [old, attention("stof", "8", "9"), attention("stof", "6", "9", tile_floor_us="3")]
    assert floor_row(rows)["tile_floor_us"] == "3" and floor_row([old]) is old


def test_an_ablation_is_a_group_of_its_own(folder):
    """Its rows, of a process of their own, do not replace those of the whole models."""
    from gather import groups
    from page import render
    from plot import pictures_of

    newer = {"date": "2026-01-03T00:00Z"}
    write(folder / "e2e-ablation-cuda.csv", [
        model("compile-default", "900", "950", **newer),
        model("stof-default", "300", "350", **newer),
        model("stof-attention", "450", "500", **newer),
    ])  # fmt: skip
    held = {group.name: group for group in groups(folder)}
    assert "900" not in {row["graph_us"] for row in held["e2e-cuda"].rows}
    assert [p.name for p in pictures_of(held["e2e-ablation-cuda"])] == [
        "bench-e2e-ablation-cuda-ablation.png"
    ]
    text = render(folder)
    assert "### e2e-ablation-cuda\n" in text and "### ablation e2e-cuda\n" in text
    assert "| gpt2 1x128 | 0.9000 | 2.00 |" in text


def test_the_devices_of_a_kind_are_told_apart(folder):
    from gather import groups

    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GeForce")
    for number, device in enumerate(names):
        rows = [model("compile-default", "900", "950", device=device)]
        write(folder / f"e2e-x{number}-cuda.csv", rows)
    held = {group.name: group.device for group in groups(folder) if group.kind == "e2e"}
    held.pop("e2e-long-cuda")
    assert held.pop("e2e-float32-cuda") == "NVIDIA H200"
    assert held == {
        "e2e-cuda": "NVIDIA H200",
        "e2e-cuda_h100": "NVIDIA H100 80GB HBM3",
        "e2e-cuda_h100_2": "NVIDIA H100 PCIe",
        "e2e-cuda_nvidia": "NVIDIA GeForce",
    }


def test_where_stof_loses_is_told_cell_by_cell(folder):
    from page import render

    text = render(folder).split("## Where STOF loses")[1].split("\n## ")[0]
    assert "* Attention (`attention-cuda`), replay: in none of 1 cells." in text
    assert "| 1x128/causal | 80.00 us | 40.00 us | 0.500 | sdpa_mask v |" in text
    assert "* Attention (`attention-headdims-cuda`), replay: in **2 of 2** cells." in text
    assert "| gpt2 1x128 | 0.400 ms | 0.300 ms | 0.750 | flex-default |" in text
    assert "| bias_norm/1x128x512 | 2.50 us | 2.00 us | 0.800 | inductor |" in text
    assert "| distilbert 1x128 all | 0.120 ms | 0.100 ms | 0.833 | torch.compile |" in text
    assert "| gpt2 inductor-cold | 9.00 s | 8.00 s | 0.889 | torch.compile |" in text


def test_a_folder_without_rows_says_what_is_missing(tmp_path):
    from page import SECTIONS, render

    text = render(tmp_path)
    assert "Nothing is measured yet." in text
    assert all(f"`python bench/run.py {section.command}`" in text for section in SECTIONS)


def test_without_matplotlib_the_page_has_no_pictures(folder, monkeypatch, capsys):
    import paper

    monkeypatch.setattr(paper, "can_draw", lambda: False)
    paper.write_folder(folder)
    assert "![" not in (folder / "tables.md").read_text()
    assert "no pictures: matplotlib is missing (pip install" in "".join(capsys.readouterr())


def test_every_figure_is_drawn(folder, tmp_path):
    pytest.importorskip("matplotlib")
    from plot import draw_all

    target = tmp_path / "img"
    drawn = {path.name for path in draw_all(folder, target)}
    for stem in ("attention-cuda-bars", "attention-long-cuda-roofline", "e2e-cuda-models",
                 "e2e-cuda-ablation", "tuning-cuda-tuning", "tuning-cuda-overhead",
                 "operators-cuda-operators", "passes-cuda-passes",
                 "density-cuda-density"):  # fmt: skip
        assert f"bench-{stem}.png" in drawn
    assert all((target / name).stat().st_size > 3000 for name in drawn)


def test_one_picture_by_hand(folder, tmp_path):
    pytest.importorskip("matplotlib")
    import plot

    source, target = str(folder / "tuning-cuda.csv"), tmp_path / "a.png"
    plot.main([source, str(target), "overhead"])
    assert target.stat().st_size > 3000
    with pytest.raises(SystemExit, match="no figure 'roofline' of tuning: tuning, overhead"):
        plot.main([source, str(target), "roofline"])
    with pytest.raises(SystemExit, match="usage"):
        plot.main([source])
