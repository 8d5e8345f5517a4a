"""`sparse_attention` through torch.export, fixed and symbolic lengths, and AOTInductor."""

import io
import subprocess
import sys

import pytest
import torch
from close import assert_close
from torch import nn

from stof_compile import masks, sparse_attention

MASKS = {
    "rule": masks.causal() & masks.sliding_window(5),
    "tensors of a rule": masks.document(torch.arange(200) // 30),
    "function": lambda b, h, q, k: (q - k).abs() < 5,
    "none": None,
}
LENGTHS = {name: {2: torch.export.Dim("length", min=2, max=200)} for name in "qkv"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return sparse_attention(q, k, v, self.mask)


def operands(tokens, device):
    return torch.randn(3, 2, 2, tokens, 16, device=device).unbind()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("mask", MASKS)
def test_saved_and_loaded(mask, strict, symbolic, device):
    module = Attention(MASKS[mask]).eval()
    lengths = LENGTHS if symbolic else None
    program = torch.export.export(
        module, operands(64, device), dynamic_shapes=lengths, strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    run = torch.export.load(file).module()
    given = operands(110 if symbolic else 64, device)
    assert_close(run(*given), module(*[x.double() for x in given]), torch.float32)


def test_in_another_process_by_aot_inductor_too(tmp_path):
    """On a CPU: on a GPU torch 2.11 crashes when it loads a package of its own operators, too."""
    module, given = Attention(MASKS["rule"]).eval(), operands(90, "cpu")
    program = torch.export.export(module, operands(64, "cpu"), dynamic_shapes=LENGTHS)
    files = [str(tmp_path / name) for name in ("compiled.pt2", "given.pt", "out.pt", "program.pt2")]
    torch._inductor.aoti_compile_and_package(program, package_path=files[0])
    torch.save(given, files[1])
    torch.export.save(program, files[3])
    script = (
        "import sys, torch, stof_compile.ops\n"
        "run = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "given = torch.load(sys.argv[2])\n"
        "loaded = torch.export.load(sys.argv[4]).module()\n"
        "torch.save((run(*given), loaded(*given)), sys.argv[3])\n"
    )
    child = subprocess.run([sys.executable, "-c", script, *files], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    for out in torch.load(files[2]):
        assert_close(out, module(*[x.double() for x in given]), torch.float32)
