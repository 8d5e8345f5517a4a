"""The report as data, in the terminal, as JSON; the command with its errors."""

import io
import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from stof_compile import masks
from stof_compile.cli import main
from stof_compile.dump import STAGES, Record, read_dump, write_dump
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.tile_map import tile_map
from stof_compile.plan import Plan
from stof_compile.report.html import html_page
from stof_compile.report.load import Ceilings
from stof_compile.report.model import read_report, read_verdict, untimed
from stof_compile.report.terminal import longest, mask_lines, microseconds, print_report
from stof_compile.search.stage1 import MoveRecord
from stof_compile.search.told import MAX_MOVES, told_moves
from stof_compile.verdict import Verdict


def printed(record, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_report([read_report(0, record)], Console(file=file, width=140))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_terminal_says_what_a_reader_asks(record):
    text = printed(record)
    for words in (
        "changes what the model computes",
        "3x add + layer_norm -> stof.fused_norm",
        "encoder.layer.0 and 2 more",
        "softmax (kept)",
        "8 x 8 tiles of 64 x 64",
        "██▒▒",
        "block[64,64,4,2] (measured)",
        "3.00x",  # attention against SDPA
        "2.00x",  # the fused norm
        "1000 GB/s",
        "scheme before 0101 (5)",
        "scheme after  0100 (4)",
        "of 9 measured",
        "rolled back",
        "illegal",
        "7 more moves",
        "150.0 us  as torch.compile runs it",
        "<- kept",
        "left to PyTorch",
        "no matmul <script>",
    ):
        assert words in text, words


def test_terminal_without_unicode(record):
    assert "++" in printed(record, "ascii")


def test_an_empty_record_has_a_report():
    text = printed(Record())
    assert "nothing was measured" in text and "not compared" in text


def test_times_and_work(record):
    report = read_report(0, record, Ceilings(4.0, 500.0))
    attention, product, _, norm = report.steps
    assert (attention.us, attention.library_us, attention.count) == (10.0, 30.0, 3)
    density = record.sites[0].statistics["density"]
    assert attention.flops == 4 * 2 * 8 * 512 * 512 * 64 * density
    assert attention.nbytes == 4 * 2 * 8 * 512 * 64 * 2
    assert product.floor_us == pytest.approx(2e9 / 500e6)
    assert product.floor_share == pytest.approx(4 / 12)
    assert norm.gb_s == pytest.approx(1000)
    assert norm.floor_share == pytest.approx(0.25)
    assert untimed(report.steps) == 3
    assert read_report(0, record).steps[0].floor_share is None  # never invented


def test_verdict_is_read_from_its_note():
    verdict = Verdict("as torch.compile runs it", {"fused": 12.5, "attention only": 11.0}, "store")
    found = read_verdict(str(verdict))
    assert found is not None
    assert (found.winner, found.times_us, found.source) == (
        verdict.winner, verdict.times_us, "store",
    )  # fmt: skip
    nothing = read_verdict(str(Verdict("fused", {})))
    assert nothing is not None and nothing.times_us == {}
    assert read_verdict("something else") is None


def test_json_is_complete(dump, capsys):
    assert main(["inspect", str(dump), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    (graph,) = body["graphs"]
    assert graph["operations"] == {"captured": 17, "normalized": 17, "rewritten": 18}
    assert [group["members"] for group in graph["groups"]][1] == ["sum_0", "norm_0"]
    assert graph["groups"][1]["config"] == {"num_warps": 2, "rows": 4}
    assert graph["chains"][0]["bits"] == "0100"
    assert graph["chains"][0]["moves"][0]["outcome"] == "kept"
    assert graph["verdict"]["winner"] == "fused"
    assert graph["steps"][0]["us"] == 10.0
    assert len(graph["pictures"]["mask_0"]["cells"]) == 8


def test_times_side_by_side_have_one_unit(record):
    assert [microseconds(us) for us in (None, 9.96, 9999.0, 10550.0)] == [
        "-", "10.0 us", "9999.0 us", "10.55 ms",
    ]  # fmt: skip
    assert [microseconds(us, 10550.0) for us in (None, 4.2, 999.0, 6500.9, 10550.0)] == [
        "-", "0.0042 ms", "0.999 ms", "6.50 ms", "10.55 ms",
    ]  # fmt: skip
    assert longest([None, 3.0, 4.0]) == 4.0 and longest([None]) == 0.0
    choice = record.sites[0].choice
    slow = replace(choice.candidates[1], median_us=30_000.0)
    choice = replace(choice, candidates=(choice.candidates[0], slow))
    record.sites = [replace(site, choice=choice) for site in record.sites[:3]]
    text = printed(record)
    assert re.search(r"block\[64,64,4,2\] +measured +0\.01 ms", text)
    assert re.search(r"encoder\.layer\.0 and 2 more .* 30\.00 ms +0\.01 ms +3000\.00x", text)
    assert re.search(r"layer_norm .* 0\.008 ms +0\.004 ms", text)
    assert re.search(r"100\.0 us +fused", text)  # in another column
    page = html_page([read_report(0, record)], "dump")
    assert "90.00 ms → 0.03 ms, 3000.00x" in page and "0.024 ms → 0.012 ms, 2.00x" in page
    assert "0.0095 ms to 0.011 ms" in page and "Measured in turns: 90.0 us before" in page


# -- what the record holds for it -----------------------------------------------------------------


def test_what_the_report_needs_survives_the_disk(dump, record):
    (read,) = read_dump(dump)
    assert read.chains == record.chains
    assert read.pictures == record.pictures and read.sites[0].picture == "mask_0"
    assert len((next(dump.glob("graph_*")) / "record.json").read_text()) < 20_000


def test_a_moved_dump_names_the_folder_that_it_is_read_from(dump, tmp_path, capsys):
    (folder,) = dump.glob("graph_*")
    moved = dump.rename(tmp_path / "moved") / folder.name
    for place in (moved.parent, moved):
        assert [record.folder for record in read_dump(place)] == [str(moved)]
        for command in ("explain", "inspect"):
            assert main([command, str(place)]) == 0
            said = capsys.readouterr().out.replace("\n", "")
            assert str(moved) in said and str(folder) not in said


def test_a_record_of_an_older_stof_is_read(dump):
    (file,) = dump.glob("graph_*/record.json")
    body = json.loads(file.read_text())
    del body["pictures"]
    for site in body["sites"]:
        del site["picture"]
    for chain in body["chains"]:
        del chain["moves"], chain["moves_left_out"]
        for segment in chain["segments"]:
            for name in ("flops", "nbytes", "trials", "measured"):
                del segment[name]
    file.write_text(json.dumps(body))
    (read,) = read_dump(dump)
    text = printed(read)
    assert "the dump holds no moves" in text
    assert main(["inspect", str(dump), "--html", str(dump / "page.html")]) == 0


def test_a_plan_holds_choices_only(record):
    chain = record.chains[0]
    body = Plan("here", chains={"key": chain}).to_dict()["chains"]["key"]
    assert body["moves"] == () and all(s["trials"] == () for s in body["segments"])
    assert body["segments"][2]["nbytes"] == 4 * 10**6


def test_told_moves_keep_what_was_kept():
    moves = [
        MoveRecord("expand", "0", str(i), 2.0, float("inf"), "kept" if i % 50 == 49 else "illegal")
        for i in range(300)
    ]
    told = told_moves(moves)
    assert len(told) == MAX_MOVES
    assert sum(move.outcome == "kept" for move in told) == 6
    assert told[0].after_us is None  # JSON has no infinity
    assert [int(move.after) for move in told] == sorted(int(move.after) for move in told)


@pytest.mark.parametrize("lengths", [(512, 512), (33, 257), (1000, 70), (64 * 100, 64 * 70)])
@pytest.mark.parametrize("block", [32, (64, 16)])
def test_picture_of_a_mask(lengths, block):
    mask = build_block_mask(masks.causal() & masks.sliding_window(100), *lengths, block)
    picture = tile_map(mask)
    rows, cols = picture["tiles"]
    cells = picture["cells"]
    assert (rows, cols) == (mask.rows, mask.cols)
    assert len(cells) == min(rows, 64) and all(len(row) == min(cols, 64) for row in cells)
    values = torch.tensor([[int(cell) for cell in row] for row in cells])
    if rows <= 64 and cols <= 64:
        assert int((values == 9).sum()) == mask.full_tiles
        assert int((values == 0).sum()) == mask.empty_tiles
        assert int(((values > 0) & (values < 9)).sum()) == mask.part_tiles
    dense = mask.to_dense()[0, 0]
    for i in range(0, len(cells), 7):  # a cell is empty exactly where nothing is kept
        for j in range(0, len(cells[0]), 5):
            tile_rows = [r for r in range(rows) if r * len(cells) // rows == i]
            tile_cols = [c for c in range(cols) if c * len(cells[0]) // cols == j]
            part = dense[
                tile_rows[0] * mask.block_q : (tile_rows[-1] + 1) * mask.block_q,
                tile_cols[0] * mask.block_k : (tile_cols[-1] + 1) * mask.block_k,
            ]
            assert (cells[i][j] == "0") == (not bool(part.any()))


def test_mask_as_text_is_no_larger_than_asked():
    picture = {"cells": ["90" * 32] * 64}
    lines = mask_lines(picture, 16, "ascii")
    assert len(lines) == 16 and set(lines) == {"++" * 16}
    assert mask_lines({"cells": []}) == []


# -- errors ---------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_folder_that_is_no_dump(tmp_path, capsys):
    assert "no such folder" in refused(capsys, tmp_path / "nothing")
    error = refused(capsys, tmp_path)
    assert str(tmp_path) in error and "dump_dir" in error
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refused(capsys, file)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{ not json", "not a record of STOF"),
        ("[]", "not a record of STOF"),
        ('{"format": 1}', "not a record of STOF"),
        ('{"format": 99, "versions": {"stof-compile": "9.9"}}', "stof-compile 9.9"),
        ('{"format": 1, "new_field": 3}', "new_field"),
    ],
)
def test_a_damaged_dump_and_one_of_another_version(tmp_path, dump, capsys, text, words):
    page = tmp_path / "page.html"
    page.write_text("the old page")
    (file,) = dump.glob("graph_*/record.json")
    file.write_text(text)
    error = refused(capsys, dump, "--html", page)
    assert words in error and str(file) in error and "dump again" in error
    assert page.read_text() == "the old page" and file.read_text() == text


def test_other_graphs_of_a_damaged_dump_are_named(dump, record, capsys):
    record.graphs["captured"] = record.graphs["captured"].replace("arange", "range_1")
    good = write_dump(record, dump)
    bad = next(folder for folder in dump.glob("graph_*") if folder != good)
    (bad / "record.json").write_bytes(b"\xff\xfe\x00")
    error = refused(capsys, dump)
    assert str(bad) in error and str(good) in error
    assert main(["inspect", str(good)]) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_that_is_cut_off(dump, capsys, stage):
    (file,) = dump.glob(f"graph_*/{stage}.py")
    text = file.read_text()
    *_, middle, last = (i for i, letter in enumerate(text) if letter == "\n")
    for stop in (0, text.index("forward"), middle // 2, middle, last - 1, last - 9):
        file.write_text(text[:stop])
        error = refused(capsys, dump)
        assert error.startswith(f"stof: {file}: the {stage} graph is cut off (")
        assert error.endswith(
            "a graph ends with the return of its forward()); restore the file or dump again\n"
        )
        assert main(["explain", str(dump)]) == 0  # it reads no graphs
        capsys.readouterr()
    for whole in (text, text.rstrip(), text.replace("\n", "\r\n")):
        file.write_text(whole)
        assert main(["inspect", str(dump)]) == 0
        capsys.readouterr()


def test_wrong_calls(dump, tmp_path, capsys):
    assert "one DUMP" in refused(capsys)
    assert "one DUMP" in refused(capsys, dump, "--diff", dump, dump)
    assert "cannot be written" in refused(capsys, dump, "--html", dump / "graph_0" / ".." / "")
    error = refused(capsys, dump, "--html", tmp_path)
    assert error == (
        f"stof: --html {tmp_path} is a folder; name a file, for instance {tmp_path}/report.html\n"
    )


def test_ceilings_that_cannot_be_taken(dump, tmp_path, capsys):
    for place, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        error = refused(capsys, dump, "--ceilings", place)
        assert error.startswith(f"stof: --ceilings {place} cannot be read ({why}")
        assert "name a file *.ceilings.json" in error and "Errno" not in error
    other = tmp_path / "ceilings.json"
    for text in ("{ cut", '{"device": "Some GPU"}', "[1]", '{"device": 1, "copy_tb_s": []}'):
        other.write_text(text)
        error = refused(capsys, dump, "--ceilings", other)
        assert error.startswith(f"stof: --ceilings {other} holds no ceilings (")
        assert "copy_tb_s" in error and "`stof bench ceilings`" in error
    other.write_text('{"device": "Another GPU", "copy_tb_s": 4, "matmul_tflops": 500}')
    assert "Another GPU" in refused(capsys, dump, "--ceilings", other)
    other.write_text('{"device": "Some GPU", "copy_tb_s": 4, "matmul_tflops": 500}')
    assert main(["inspect", str(dump), "--ceilings", str(other)]) == 0
    assert "33%" in capsys.readouterr().out
