"""The dump: complete folders, readable text, JSON that reads back."""

import ast
import json

import pytest
import torch

from stof_compile import StofPlanError
from stof_compile.cli import main
from stof_compile.dump import Record, SiteRecord, graph_text, read_dump, versions, write_dump
from stof_compile.explanation import explain_dump
from stof_compile.plan import AttentionPlan, Candidate


def make_graph() -> torch.fx.GraphModule:
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return torch.fx.symbolic_trace(Model())


def make_record(captured: str = "def f(): ...") -> Record:
    choice = AttentionPlan(
        kernel="block",
        config=(64, 64, 4, 2),
        source="measured",
        reason="fastest of 2",
        candidates=(
            Candidate("block", (64, 64, 4, 2), "measured", 10.0, 9.5, 11.0, 1e-4),
            Candidate("row", (), "refused", reason="more than 32 keys a row"),
        ),
    )
    shape = {"batch": 1, "q_heads": 8, "kv_heads": 2, "q_len": 128, "k_len": 128, "head_dim": 64}
    site = SiteRecord(
        name="encoder.layer.0",
        form="sdpa",
        status="rewritten",
        kernel="block",
        source="model.py:12",
        shape={**shape, "dtype": "torch.float16"},
        mask="bigbird(window=32)",
        statistics={"density": 0.21, "full_tiles": 2, "part_tiles": 5, "empty_tiles": 9},
        choice=choice,
    )
    kept = SiteRecord("head", "softmax", "kept", "softmax", notes=["its output has another user"])
    record = Record(
        device={"name": "Some GPU"},
        options={"mask": "bigbird(window=32)", "seed": 0},
        sites=[site, kept],
        masked=["encoder.layer.0"],
        mask_paths={"encoder.*": ["encoder.layer.0"]},
        graphs={"captured": captured, "normalized": "n = 1", "rewritten": "r = 1"},
        timings_s={"match": 0.25},
    )
    record.add_near_miss("pool", "softmax_3", "no matmul behind the softmax")
    record.add_fallback("head", "its output has another user")
    return record


def test_folder_is_complete_and_reads_back(tmp_path):
    record = make_record()
    folder = write_dump(record, tmp_path / "dump")
    names = {"captured.py", "normalized.py", "rewritten.py", "record.json", "summary.txt"}
    assert {file.name for file in folder.iterdir()} == names
    (read,) = read_dump(tmp_path / "dump")
    assert read.to_json() == record.to_json()
    assert read.sites[0].choice == record.sites[0].choice
    assert "n = 1" in read.graphs["normalized"]
    assert read_dump(folder)[0].to_json() == record.to_json()
    body = json.loads((folder / "record.json").read_text())
    assert body["changes_function"] is True


def test_folders_are_numbered_and_the_same_graph_replaces_itself(tmp_path):
    first = write_dump(make_record("a"), tmp_path)
    second = write_dump(make_record("b"), tmp_path)
    again = write_dump(make_record("a"), tmp_path)
    assert first.name.startswith("graph_0_")
    assert second.name.startswith("graph_1_")
    assert again == first
    assert [record.folder for record in read_dump(tmp_path)] == [str(first), str(second)]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".new", ".old"))]


def test_a_failed_write_leaves_the_old_dump(tmp_path):
    folder = write_dump(make_record(), tmp_path)
    before = (folder / "record.json").read_text()
    broken = make_record()
    broken.timings_s["match"] = object()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        write_dump(broken, tmp_path)
    assert (folder / "record.json").read_text() == before
    assert len(list(tmp_path.glob("*graph*"))) == 1
    assert not list(tmp_path.glob(".new*"))


def test_summary_says_what_a_reader_asks():
    text = make_record().summary()
    for words in (
        "Some GPU",
        "another function",  # the option's mask changes the model
        "encoder.layer.0",
        "block[64,64,4,2] (measured)",
        "fastest of 2",
        "10.0 us (p20 9.5, p80 11.0)",
        "more than 32 keys a row",
        "B1 H8/2 128x128 D64 float16",
        "2 full, 5 part, 9 empty",
        "0.210",
        "softmax (kept)",
        "no matmul behind the softmax",
        "match 0.25 s",
    ):
        assert words in text


def test_equal_decisions_are_told_once():
    record = make_record()
    site = record.sites[0]
    record.sites = [
        SiteRecord.from_dict({**site.to_dict(), "name": f"layer.{i}"}) for i in range(12)
    ]
    text = record.summary()
    assert text.count("fastest of 2") == 1
    assert "layer.0 and 11 more" in text


def test_empty_record():
    text = Record().summary()
    assert "no attention found" in text
    assert versions()["torch"] in text


def test_graph_text_is_python():
    text = graph_text(make_graph())
    ast.parse(text)
    assert "scaled_dot_product_attention" in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9, "sites": []}', '{"format": 1}'])
def test_malformed_record(tmp_path, text):
    folder = write_dump(make_record(), tmp_path)
    (folder / "record.json").write_text(text)
    with pytest.raises(StofPlanError, match="dump again"):
        read_dump(tmp_path)


def test_command_line_prints_the_same(tmp_path, capsys):
    write_dump(make_record(), tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "STOF: 1 graph(s), 2 attention site(s), 1 rewritten, 1 left to PyTorch" in printed
    assert printed.strip() == str(explain_dump(tmp_path)).strip()
    assert main(["explain", str(tmp_path / "nothing")]) == 2
    assert "holds no dump" in capsys.readouterr().err
