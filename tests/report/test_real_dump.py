"""A dump of a real compile on the CPU: nothing of the report depends on how a dump was written."""

import json

import pytest
import torch
import torch.nn.functional as F
from running import without_inductor
from torch import nn
from torch_templates import templates_win

from stof_compile import masks
from stof_compile.cli import main
from stof_compile.report.html import html_page
from stof_compile.report.load import load_dump
from stof_compile.report.model import read_report
from stof_compile.verdict import FastestForm, Verdict

FUSED = Verdict("fused", {"fused": 5.0, "as torch.compile runs it": 9.0})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(seen))
        return self.norm(x + self.down(F.gelu(self.up(x))))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Folder of a dump whose search was real but for the kernels and their times."""
    folder = tmp_path_factory.mktemp("real")
    torch._dynamo.reset()
    options = {
        "mask": masks.sliding_window(16),
        "attention": "gather",
        "dump_dir": str(folder / "dump"),
        "cache_dir": str(folder / "cache"),
    }
    with pytest.MonkeyPatch.context() as patch, templates_win(packs=False):
        patch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
        patch.setattr("stof_compile.forms.fastest_form", lambda *_: FastestForm(FUSED))
        model = nn.Sequential(*(Layer() for _ in range(3))).eval()
        with torch.no_grad():
            torch.compile(model, backend="stof", options=options)(torch.randn(2, 128, 32))
    torch._dynamo.reset()
    return folder / "dump"


def test_report_of_a_real_dump(real):
    (record,) = load_dump(real)
    report = read_report(0, record)
    attention = [group for group in report.groups if "attention" in group.op.kind]
    assert [group.site for group in attention] == [site.name for site in record.sites]
    assert len(attention) == 3 and all(group.members for group in attention)
    fused = [group for group in report.groups if group not in attention]
    assert fused and all(len(group.members) > 1 for group in fused)
    claimed = [name for group in report.groups for name in group.members]
    assert len(claimed) == len(set(claimed))
    assert all(op.source is not None and "test_real_dump.py" in op.source.file
               for op in report.before.ops)  # fmt: skip
    assert record.pictures["mask_0"]["tiles"] == [4, 4]
    assert {site.picture for site in record.sites} == {"mask_0"}
    assert report.verdict is not None
    moves = [move for chain in record.chains for move in chain.moves]
    assert {"kept", "illegal"} <= {move.outcome for move in moves}
    segments = [s for chain in record.chains for s in chain.segments if s.template != "inductor"]
    assert segments and all(s.flops and s.nbytes and s.trials and s.measured for s in segments)
    assert any(group.segment in segments for group in fused)
    assert "layers: 3x" in html_page([report], "dump")


def test_the_command_on_it(real, tmp_path, capsys):
    assert main(["inspect", str(real)]) == 0
    printed = capsys.readouterr().out
    assert "-> stof_test.recipe" in printed and "kept" in printed
    assert main(["inspect", str(real), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"][0]["pictures"]
    (plan,) = real.glob("graph_*/plan.json")
    body = json.loads(plan.read_text())["graphs"][0]
    assert body["chains"] and not any(chain["moves"] for chain in body["chains"].values())
