"""Options: every mistake is refused under its own type, with the way out."""

import pickle
from pathlib import Path

import pytest
import torch

from stof_compile import StofError, StofOptionError, StofOptions
from stof_compile.options import MODES, options_table


def build(**options):
    return StofOptions.from_compile_kwargs(None, options)


def test_defaults():
    options = StofOptions.from_compile_kwargs()
    assert options.attention == "auto"
    assert options.tune_budget_s == 60.0
    assert options.pack_memory == 0.3
    assert options.mask is None
    assert options.inductor == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tune_budgt": 1}, ["unknown option 'tune_budgt'", "did you mean 'tune_budget_s'"]),
        ({"zzz": 1}, ["unknown option 'zzz'", "valid: attention, cache_dir"]),
        ({"mode": "turbo"}, ["'turbo'", "reduce-overhead"]),
        ({"mode": "max-autotun"}, ["did you mean 'max-autotune'"]),
        ({"mode": 3}, ["a string or None"]),
        ({"attention": "blocks"}, ["did you mean 'block'"]),
        ({"attention": None}, ["'attention' must be a string"]),
        ({"fusion": "on"}, ["valid: auto, off"]),
        ({"tune_budget_s": -1}, [">= 0", "-1"]),
        ({"tune_budget_s": float("nan")}, ["finite"]),
        ({"tune_budget_s": float("inf")}, ["finite"]),
        ({"tune_budget_s": 10**400}, ["finite"]),
        ({"tune_budget_s": "60"}, ["number of seconds", "'60' (str)"]),
        ({"tune_budget_s": True}, ["number of seconds"]),
        ({"pack_memory": -0.1}, [">= 0", "-0.1", "0 packs nothing"]),
        ({"pack_memory": float("nan")}, ["finite"]),
        ({"pack_memory": 10**400}, ["finite"]),
        ({"pack_memory": "1"}, ["a number", "'1' (str)"]),
        ({"pack_memory": True}, ["a number"]),
        ({"pack_memry": 1}, ["did you mean 'pack_memory'"]),
        ({"seed": 1.5}, ["'seed' must be an int"]),
        ({"seed": True}, ["'seed' must be an int"]),
        ({"seed": -1}, ["'seed' must be in"]),
        ({"strict": 1}, ["True or False"]),
        ({"dump_dir": 7}, ["a path or None"]),
        ({"plan": "/does/not/exist.json"}, ["existing file"]),
        ({"inductor": 3}, ["a dict"]),
        ({"inductor": {"max_autotun": True}}, ["did you mean 'max_autotune'"]),
        ({"mask": lambda b, h, q, k: q >= k}, ["masks.rule(function)"]),
        ({"mask": torch.zeros(4, 4)}, ["float32", "True = attend"]),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ["q_len, k_len"]),
        ({"mask": "causal"}, ["'causal' (str)"]),
        ({"mask": {}}, ["empty dict"]),
        ({"mask": {3: torch.ones(4, 4, dtype=torch.bool)}}, ["module path"]),
        ({"mask": {"layer": None}}, ["['layer'] must be a mask"]),
        ({"mask": {"layer": "causal"}}, ["['layer']", "'causal' (str)"]),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}"[:30] for k, v in value.items())
        if value and isinstance(value, dict)
        else ""
    ),
)
def test_refused(options, words):
    with pytest.raises(StofOptionError) as caught:
        build(**options)
    for word in words:
        assert word in str(caught.value)


def test_folder_options_refuse_files(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for name in ("dump_dir", "cache_dir"):
        with pytest.raises(StofOptionError, match="is a file"):
            build(**{name: file})


def test_a_dump_that_cannot_be_written_is_refused_before_tuning(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StofOptionError, match="file is a file; give another"):
        build(dump_dir=file / "below" / "it")
    build(dump_dir=tmp_path / "new" / "one")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("os.access", lambda path, how: Path(path) != tmp_path)
    with pytest.raises(StofOptionError, match="may not be written to"):
        build(dump_dir=tmp_path / "new")


def test_every_mode_of_this_torch_is_accepted():
    from torch._inductor import list_mode_options

    assert {mode for mode in MODES if mode} <= set(list_mode_options())
    for mode in list_mode_options():
        assert build(mode=mode).mode == mode


def test_accepted(tmp_path):
    mask = torch.ones(4, 4, dtype=torch.bool)
    options = build(
        mode="reduce-overhead",
        mask={"encoder.layer.0": mask, "decoder.*": mask},
        tune_budget_s=0,
        pack_memory=1,
        dump_dir=str(tmp_path),
        cache_dir=tmp_path / "new",
        inductor={"max-autotune": True},
    )
    assert options.dump_dir == tmp_path
    assert isinstance(options.cache_dir, Path)
    assert options.tune_budget_s == 0.0
    assert type(options.pack_memory) is float and options.to_json()["pack_memory"] == 1.0
    assert options.inductor == {"max_autotune": True}
    plain = options.to_json()
    assert plain["mask"]["decoder.*"].startswith("bool tensor (4, 4)")
    assert plain["dump_dir"] == str(tmp_path)


def test_rule_is_accepted():
    from stof_compile import masks

    rule = masks.sliding_window(16)
    assert build(mask=rule).mask is rule


def test_mode_may_come_from_either_place():
    assert StofOptions.from_compile_kwargs("max-autotune", None).mode == "max-autotune"
    both = StofOptions.from_compile_kwargs("max-autotune", {"mode": "max-autotune"})
    assert both.mode == "max-autotune"
    with pytest.raises(StofOptionError, match="differ"):
        StofOptions.from_compile_kwargs("max-autotune", {"mode": "default"})


def test_frozen():
    with pytest.raises(AttributeError):
        build().seed = 3


def test_table_lists_every_option():
    table = options_table()
    for name in StofOptions.__dataclass_fields__:
        assert f"| `{name}` |" in table
    assert "| s |" in table


def test_error_reaches_the_user_under_its_own_type():
    def backend(gm, example_inputs, options=None):
        StofOptions.from_compile_kwargs(None, options)
        return gm

    fast = torch.compile(lambda x: x + 1, backend=backend, options={"tune_budgt": 1})
    with pytest.raises(StofOptionError, match="did you mean"):
        fast(torch.ones(2))


def test_errors_are_value_errors_and_pickle():
    error = pickle.loads(pickle.dumps(StofOptionError("what, where, rule")))
    assert isinstance(error, StofError)
    assert isinstance(error, ValueError)
    assert str(error).startswith("what, where, rule")
