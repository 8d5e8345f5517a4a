"""What Triton's cache depends on is settled before it is used, and handed to the workers."""

import os
from argparse import Namespace

import pytest
import torch
from torch._inductor.runtime import compile_tasks
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from stof_compile import triton_environment
from stof_compile.triton_environment import TritonEnvironment, settle_triton_environment

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def variables(monkeypatch, tmp_path):
    """No variable of Triton's, and the process's own afterwards."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in [name for name in os.environ if name.startswith("TRITON_")]:
        del os.environ[name]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", choose_assembler)


def choose_assembler():
    os.environ["TRITON_PTXAS_PATH"] = "the assembler of torch"


def test_inductors_choices_are_made_at_once():
    settle_triton_environment(GPU)
    assert os.environ["TRITON_PTXAS_PATH"] == "the assembler of torch"
    assert os.environ["TRITON_CACHE_DIR"] == triton_cache_dir(1)


def test_the_folder_of_the_user_stays(tmp_path):
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "mine")
    settle_triton_environment(GPU)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")


def test_nothing_is_settled_without_a_gpu():
    settle_triton_environment(CPU)
    assert not [name for name in os.environ if name.startswith("TRITON_")]


def test_a_version_without_the_choices_is_fine(monkeypatch):
    for name in triton_environment.CHOICES:
        monkeypatch.delattr(compile_tasks, name, raising=False)
    settle_triton_environment(GPU)
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_the_version_of_the_assembler_is_that_of_the_chosen_one(monkeypatch, tmp_path):
    """Torch's own key asks for it before an assembler is chosen."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    from triton.backends.compiler import GPUTarget

    def assembler(arch):
        name = os.environ.get("TRITON_PTXAS_PATH", "the assembler of Triton")
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\necho {name}\n")
        script.chmod(0o755)
        return Namespace(path=str(script), version=name)

    asked = compiler.get_ptxas_version, compiler.CUDABackend.hash
    monkeypatch.setattr(compiler, "get_ptxas", assembler)
    triton_environment._ask_for_the_version_again.cache_clear()
    for question in asked:
        question.cache_clear()
    backend = compiler.CUDABackend(GPUTarget("cuda", 90, 32))
    assert "of Triton" in backend.hash()
    settle_triton_environment(GPU)
    assert "of torch" in backend.hash()
    del os.environ["TRITON_PTXAS_PATH"]
    settle_triton_environment(GPU)  # it is asked once
    assert "of torch" in backend.hash()
    for question in asked:
        question.cache_clear()


class Compiler:
    def hash(self):
        return "what this process asked"


def test_a_worker_takes_the_environment_and_drops_its_own(monkeypatch):
    monkeypatch.setattr(triton_environment, "_compiler", Compiler)
    monkeypatch.setattr(Compiler, "hash", Compiler.hash)  # for its own sake put back afterwards
    os.environ.update({"TRITON_CACHE_DIR": "here", "TRITON_DEBUG": "0"})
    given = TritonEnvironment.of_this_process(GPU)
    assert given.compiler == "what this process asked"
    os.environ.update({"TRITON_CACHE_DIR": "elsewhere", "TRITON_PTXAS_PATH": "other"})
    Compiler.hash = lambda self: "what a worker asked"
    given.take()
    left = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    assert left == {"TRITON_CACHE_DIR": "here", "TRITON_DEBUG": "0"}
    assert Compiler().hash() == "what this process asked"


def test_on_a_cpu_no_compiler_is_asked(monkeypatch):
    monkeypatch.setattr(triton_environment, "_compiler", None)
    assert TritonEnvironment.of_this_process(CPU).compiler == ""
