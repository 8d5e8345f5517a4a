"""The difference of two dumps."""

import json
from dataclasses import replace

from written_dump import make_record

from stof_compile.cli import main
from stof_compile.dump import write_dump
from stof_compile.report.diff import diff_reports
from stof_compile.report.model import read_report


def differences(a, b):
    return diff_reports([read_report(0, a)], [read_report(0, b)])


def test_equal_dumps_do_not_differ(record):
    assert differences(record, make_record()) == []


def test_everything_that_may_differ_is_told(record):
    other = make_record()
    other.versions["torch"] = "9.9"
    other.options["mask"] = None
    del other.sites[2]
    site = other.sites[1]
    candidates = (replace(site.choice.candidates[0], median_us=5.0), *site.choice.candidates[1:])
    site.choice = replace(site.choice, candidates=candidates, source="store")
    site.mask, site.statistics["density"] = "causal()", 0.5
    other.sites[0].kernel = "row"
    chain = other.chains[0]
    segments = (*chain.segments[:2], replace(chain.segments[2], config=(("rows", 8),)))
    other.chains[0] = replace(chain, segments=segments, code="5", final_us=80.0)
    other.packs = []
    other.fallbacks = []
    other.notes = [other.notes[0].replace("fused 100.0", "fused 50.0")]
    found = {(c.part, c.where, c.what): (c.a, c.b, c.only_in) for c in differences(record, other)}
    assert found["environment", "versions", "torch"][1] == "9.9"
    assert ("environment", "options", "dump_dir") not in found
    assert found["site", "encoder.layer.2", "only in one"][2] == "a"
    assert found["mask", "encoder.layer.1", "rule"][1] == "causal()"
    assert found["time", "encoder.layer.1", "chosen kernel"] == ("10.0 us", "5.0 us (2.00x)", "")
    assert found["kernel", "encoder.layer.1", "source"][:2] == ("measured", "store")
    assert found["kernel", "encoder.layer.0", "kernel"][1].startswith("row")
    name = "linear attention residual_add layer_norm"
    assert found["chain", name, "scheme"][:2] == ("0100", "0101")
    assert found["time", name, "chain"][1].startswith("80.0 us")
    runs = found["segment", "residual_add + layer_norm (ops 2 to 3)", "runs as"]
    assert runs[:2] == ("triton_norm num_warps=2, rows=4", "triton_norm rows=8")
    assert found["pack", "8 + 8 + 8", "only in one"][2] == "a"
    assert found["fallback", "fallbacks", "entry"][2] == "a"
    assert found["time", "whole graph", "fused"][1] == "50.0 us (2.00x)"


def test_noise_is_no_difference(record):
    other = make_record()
    other.chains[0] = replace(other.chains[0], final_us=60.5)
    assert differences(record, other) == []


def test_graphs_of_equal_text_are_pairs(record):
    second = make_record(2)
    a = [read_report(0, record), read_report(1, second)]
    b = [read_report(0, second)]
    (change,) = diff_reports(a, b)
    assert (change.graph, change.part, change.only_in) == (0, "graph", "a")
    (change,) = diff_reports(b, a)
    assert change.only_in == "b"


def test_command(tmp_path, record, capsys):
    other = make_record()
    other.sites[0].kernel = "row"
    for name, made in (("a", record), ("b", other)):
        write_dump(made, tmp_path / name)
    call = ["inspect", "--diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(call) == 0
    assert "row[64,64,4,2]" in capsys.readouterr().out
    assert main([*call, "--json"]) == 0
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert change["part"] == "kernel" and change["where"] == "encoder.layer.0"
    assert main(["inspect", "--diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["inspect", "--diff", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
