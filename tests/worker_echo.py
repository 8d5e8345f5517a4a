"""Pools of workers that answer without compiling, and jobs for them."""

import os
from pathlib import Path
from unittest.mock import patch

import torch

from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec
from stof_compile.search.compile_pool import CompilePool, Job
from stof_compile.triton_environment import TritonEnvironment

HERE = Path(__file__).parent


def pool_of(module, workers=1, folder=HERE, *, cuda=False):
    """A pool whose workers are a module of a folder."""
    with patch.dict(os.environ, PYTHONPATH=str(folder)):
        return CompilePool(workers, module, cuda=cuda)


def echo_pool(workers=1):
    """A pool of workers that know templates called "fits" and "slow", and one that is "stuck"."""
    return pool_of("echo_worker", workers)


SPEC = TensorSpec((4, 4), (4, 1), torch.float32, "cpu")
RECIPE = Recipe((SPEC,), (Step("exp", (Ref("operand", 0),), (4, 4), torch.float32),))


def job(template):
    return Job(RECIPE, template, (("warps", 4),), "cpu", TritonEnvironment(()))
