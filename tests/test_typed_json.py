"""Files read back: whatever stands in them is refused with the field's name, or ignored."""

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from written_dump import make_record

from stof_compile import masks
from stof_compile.attention import select
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.select import choose
from stof_compile.budget import Budget
from stof_compile.cli import main
from stof_compile.cli.environments import environments_here
from stof_compile.cli.tuning_file import TuningFile
from stof_compile.dump import Record, write_dump
from stof_compile.errors import StofMaskError, StofPlanError
from stof_compile.options import StofOptions
from stof_compile.plan import AttentionPlan, Candidate, Plan, PlanFile
from stof_compile.report.html import html_page
from stof_compile.report.load import load_ceilings
from stof_compile.report.model import read_report
from stof_compile.store import Store
from stof_compile.typed_json import built, typed

DEEP = "[" * 200_000


@dataclass
class Inner:
    flag: bool


@dataclass
class Outer:
    count: int = 1
    seconds: float = 0.5
    name: str | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[str, int] = ("a", 1)
    inner: tuple[Inner, ...] = ()
    table: dict[str, list[int]] | None = None
    rest: Any = None


@pytest.mark.parametrize(
    "good",
    [
        {"seconds": 3, "name": "x", "rest": object()},
        {"sizes": (1, 2), "inner": (Inner(True),), "table": {"a": [1], "b": []}},
    ],
)
def test_declared_types_pass(good):
    made = Outer(**good)
    assert typed(made) is made


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"count": 1.5}, "count is 1.5, which is no int"),
        ({"count": True}, "count is True"),
        ({"seconds": "1"}, "seconds is '1', which is no float"),
        ({"seconds": False}, "seconds is False"),
        ({"name": 3}, "name is 3"),
        ({"sizes": [1]}, r"sizes is \[1\]"),
        ({"sizes": (1, None)}, r"sizes\[1\] is None"),
        ({"pair": ("a",)}, "pair is"),
        ({"pair": ("a", "b")}, r"pair\[1\] is 'b'"),
        ({"inner": (Inner(1),)}, r"inner\[0\].flag is 1, which is no bool"),
        ({"inner": ({"flag": True},)}, r"inner\[0\] is"),
        ({"table": {"a": [1, "x"]}}, r"table\[a\]\[1\] is 'x'"),
        ({"table": {1: []}}, r"table\[key\] is 1"),
        ({"name": "x" * 200, "count": "y" * 200}, r"y{70,}\.\.\., which"),
    ],
)
def test_another_type_is_named(bad, words):
    with pytest.raises(TypeError, match=words):
        typed(Outer(**bad))


def spoiled(body, wrong):
    """Copies of a JSON tree, each with another value in place of one leaf or branch."""
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in items:
        swapped = dict(body) if isinstance(body, dict) else list(body)
        if value != wrong:
            swapped[key] = wrong
            yield swapped
        if isinstance(value, (dict, list)):
            for inner in spoiled(value, wrong):
                again = dict(body) if isinstance(body, dict) else list(body)
                again[key] = inner
                yield again


def plan_text():
    chosen = make_record()
    return PlanFile.of(
        [
            Plan(
                environment="here",
                attention={"a" * 32: next(site.choice for site in chosen.sites if site.choice)},
                chains={"b": chosen.chains[0]},
                packs={"c": chosen.packs[0]},
                graph="g",
                about="x",
                fusion=True,
            )
        ]
    ).to_json()


@pytest.mark.parametrize("wrong", [None, -1.5, "?", [[]], {"x": {}}, True], ids=repr)
def test_a_plan_with_any_value_changed_is_read_or_refused(wrong):
    whole = json.loads(plan_text())
    refused = read = 0
    for body in spoiled(whole, wrong):
        try:
            again = PlanFile.from_json(json.dumps(body))
        except StofPlanError:
            refused += 1
        else:
            read += 1
            again.to_json()
    assert refused > read


@pytest.mark.parametrize("wrong", [None, -1.5, "?", [[]], {"x": {}}, True], ids=repr)
def test_a_record_with_any_value_changed_is_read_or_refused(wrong):
    text = make_record().to_json()
    read = []
    for body in spoiled(json.loads(text), wrong):
        try:
            read.append(Record.from_json(json.dumps(body)))
        except StofPlanError:
            continue
    for again in read:
        again.to_json()
        assert "<html" in html_page([read_report(0, again)], "dump")


@pytest.mark.parametrize(
    "path, value, words",
    [
        (["graphs"], 7, "graphs is 7, which is no list"),
        (["graphs", 0], 7, r"graphs\[0\] is 7, which is no object"),
        (["graphs", 0, "attention"], 7, r"graphs\[0\]\.attention is 7, which is no"),
        (["graphs", 0, "chains"], None, r"the field graphs\[0\]\.chains is missing"),
        (
            ["graphs", 0, "chains", "b", "code"],
            None,
            r"graphs\[0\]\.chains\[b\]\.code is mis",
        ),
        (["graphs", 0, "packs", "c", "x"], 1, r"packs\[c\]\.x is a field that is not known here"),
        (["graphs", 0, "packs", "c", "count"], 10**400, "a number of 401 digits"),
        (["version"], None, "the field 'version' is missing"),
        (["stof_tuning_file"], 1, "a tuning file, which `stof cache import` takes"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_damaged_plan_is_told_by_its_field(path, value, words):
    """None = the field is deleted."""
    body = json.loads(plan_text())
    place = body
    for name in path[:-1]:
        place = place[name]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(StofPlanError, match=words) as raised:
        PlanFile.from_json(json.dumps(body), "plan p.json")
    assert str(raised.value).startswith("plan p.json: ") and "Error(" not in str(raised.value)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda text: "[1]", r"it is \[1\], which is no JSON object"),
        (lambda text: text.replace('"sites": [', '"sites": 7, "x": ['), "unknown fields"),
        (lambda text: text.replace('"batch": 2', '"batch": 1' + "0" * 400), "401 digits"),
        (lambda text: text.replace('"status": ', '"states": '), r"sites\[0\]\.states is a field"),
        (lambda text: b"\xff\xfe\x00", r"record\.json: cannot be read"),
    ],
    ids=["list", "field", "number", "name", "binary"],
)
def test_a_damaged_record_is_told_by_its_file_and_field(tmp_path, capsys, spoil, words):
    record = make_record()
    record.sites[0].shape["batch"] = 2
    file = write_dump(record, tmp_path) / "record.json"
    spoilt = spoil(file.read_text())
    file.write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    for command in ("explain", "inspect"):
        assert main([command, str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert re.search(words, said) and str(file) in said and "Error(" not in said


def test_an_object_is_built_with_all_that_is_in_it():
    text = '{"sizes": [1, 2], "inner": [{"flag": true}], "table": {"a": [1]}, "pair": ["b", 3]}'
    made = built(Outer, json.loads(text))
    assert made == Outer(sizes=(1, 2), inner=(Inner(True),), table={"a": [1]}, pair=("b", 3))
    for data, words in (
        ({"pair": ["b"]}, "pair is"),
        ({"inner": [{}]}, r"the field inner\[0\]\.flag is missing"),
        ({"table": {"a": 1}}, r"table\[a\] is 1"),
        ({"name": [1]}, r"name is \[1\]"),
    ):
        with pytest.raises(TypeError, match=words):
            built(Outer, data)


@pytest.mark.parametrize("read", [PlanFile.from_json, Record.from_json, masks.MaskSpec.from_json])
def test_brackets_in_brackets_are_refused(read):
    with pytest.raises((StofPlanError, StofMaskError)):
        read(DEEP)


@pytest.fixture
def measured(monkeypatch):
    """Kernels that take a microsecond, none of them run."""

    def fake(problem, kernel, config, generator):
        return Candidate(kernel, config, "measured", 1.0, 1.0, 1.0, 0.0)

    monkeypatch.setattr(select, "measure_candidate", fake)


def a_problem():
    meta = TensorMeta((1, 2, 64, 16), (2 * 64 * 16, 16, 32, 1), torch.float32)
    spec = masks.sliding_window(4)
    return AttentionProblem(meta, meta, meta, spec, 0, torch.device("cpu"), 0.25)


@pytest.mark.parametrize(
    "kernel, config",
    [
        ("block", (64, 64)),
        ("nothing", ()),
        ("flex", ()),
        ("flex", (0, 64)),
        ("flex", (64, 48)),
        ("flex", (64, 64, -1)),
        ("gather", (64, -64)),
        ("sdpa", (7,)),
    ],
)
def test_a_choice_no_problem_can_have(tmp_path, caplog, measured, kernel, config):
    """Refused where the user gave it, measured anew where it was stored."""
    problem, choice = a_problem(), AttentionPlan(kernel, config, "measured", "")
    plan = Plan(environment="here", attention={problem.key: choice})
    with pytest.raises(StofPlanError, match=r"cannot be followed: .* tune again"):
        choose(problem, StofOptions(), None, Budget(0), plan)
    store = Store(tmp_path, "here")
    store.put("attention", problem.key, choice.to_dict())
    found = choose(problem, StofOptions(), store, Budget(60))
    assert found.source == "measured"
    assert "cannot be followed" in caplog.text


def test_a_tuning_file_that_says_nonsense(capsys, tmp_path):
    here = environments_here()["cpu"]
    path = tmp_path / "tuning.json"
    for item in (("\ud800", "a" * 32, {}), ("attention", "\ud800", {})):
        path.unlink(missing_ok=True)
        TuningFile(here, (item,), "x").write(path)
        with pytest.raises(StofPlanError, match="damaged tuning file"):
            TuningFile.read(path)
    text = path.read_text()
    for nonsense in (DEEP, text.replace('"store_format": ', '"store_format": Infinity, "x": ')):
        path.write_text(nonsense)
        with pytest.raises(StofPlanError, match="damaged"):
            TuningFile.read(path)
    assert main(["cache", "import", str(path), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "StofPlanError" and str(path) in answer["error"]


def test_ceilings_that_say_nonsense(tmp_path):
    path = tmp_path / "ceilings.json"
    for text in (DEEP, '{"copy_tb_s": 1' + "0" * 400 + ', "matmul_tflops": 1, "device": ""}'):
        path.write_text(text)
        with pytest.raises(StofPlanError, match="holds no ceilings"):
            load_ceilings(path, [])


@pytest.mark.parametrize(
    "arguments, words",
    [(("tune", "--seq", "abc"), "--seq"), (("nothing",), "nothing"), (("explain",), "DUMP")],
)
def test_a_refused_call_is_json_too(capsys, arguments, words):
    assert main([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    assert words in json.loads(printed.out)["error"] and words in printed.err
