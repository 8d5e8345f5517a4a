"""Imports what cells need; ``cell_process.py`` forks them from a process that imported this.

No import may start CUDA, which does not survive a fork: where one did, cells begin as ordinary
processes instead, and say so. What cannot be imported here fails in the cell that needs it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from cell_process import cuda_started

# where it reaches the whole group, the one that started cells ends them: it sees by the server
# whether they run. The server ends with it.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
STARTED = dict(os.environ)  # before libraries add to it
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with it torch.cuda.is_available() starts no CUDA
COMPILERS = (
    "torch",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.triton",
    "torch._dynamo.backends.inductor",
    "torch._functorch.aot_autograd",
    "triton.compiler",
    "networkx",
    "scipy.stats",
)
CELLS = (
    "worker",
    "accuracy",
    "attention",
    "density",
    "e2e",
    "maskbuild",
    "operators",
    "overhead",
    "passes",
    "sweep",
    "tuning",
    "stof_compile.backend",
    "stof_compile.explanation",
    "stof_compile.attention.functional",
)
MODELS = (
    "transformers.modeling_utils",
    "transformers.models.bert.modeling_bert",
    "transformers.models.distilbert.modeling_distilbert",
    "transformers.models.gpt2.modeling_gpt2",
)


def load(names: Sequence[str]) -> None:
    """Import modules of packages that are there; what fails is told and left to the cells."""
    for name in names:
        if find_spec(name.split(".")[0]) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as failure:  # the cell that needs it fails by itself, in its own words
            print(f"not imported ahead: {name}: {failure!r}", file=sys.stderr, flush=True)


def can_load_models() -> bool:
    """Whether transformers starts no CUDA when it is imported.

    It imports torchao where that is installed, which asks the GPU what it can do.
    """
    import torch

    return torch.version.cuda is None or find_spec("torchao") is None


os.environ.setdefault(NVML, "1")
load((*COMPILERS, *CELLS))  # STOF before transformers, as in a process of its own
if can_load_models():
    load(MODELS)
if NVML not in STARTED:
    del os.environ[NVML]
CUDA_STARTED = cuda_started()
