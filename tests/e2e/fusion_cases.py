"""Cases of distributed_worker.py in which one rank tunes operators and the other follows."""

import functools
import time
from unittest import mock

import torch
import torch.distributed as dist
from models import hf_bert
from running import assert_same, without_inductor
from split_attention import Block
from torch_templates import AnyRecipe, templates_win

import stof_compile.backend as backend
import stof_compile.verdict as verdict
from stof_compile import explain, fuse, rank_plan
from stof_compile.measure import Timing


def winners(rank):
    """Each rank would keep another form of the graph."""

    def time_forms(fns, sets, device, **how):
        for fn in fns:
            fn(*sets[0])
        times = [1.0, 2.0, 3.0] if rank == 0 else [3.0, 1.0, 2.0]
        return [Timing(us, us, us, 3, "clock") for us in times[: len(fns)]]

    return time_forms


def told(fast):
    """What a rank runs: the rewritten graph, with all configs."""
    return [record.graphs["rewritten"] for record in explain(fast).graphs]


def gathered(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def compiled(rank, folder, **options):
    model, inputs = hf_bert("sdpa", False, layers=1)
    model.eval()
    options = {"cache_dir": folder / str(rank), "tune_budget_s": 30, **options}
    fast = torch.compile(model, backend="stof", dynamic=False, options=options)
    with torch.no_grad():
        assert_same(fast(**inputs), model(**inputs))
    return fast


def alike(rank, folder):
    """Both run what one of them has measured; the verdict is part of it."""
    with templates_win() as timed:
        fast = compiled(rank, folder)
    both = gathered(told(fast))
    assert both[0] == both[1], both
    notes = gathered(explain(fast).notes)
    followed = [any("are followed" in note for note in given) for given in notes]
    assert sorted(followed) == [False, True], notes
    assert bool(timed) != followed[rank]
    decider = followed.index(False)
    verdicts = [note for note in notes[decider] if note.startswith("whole graph")]
    assert verdicts and ("kept: fused" in verdicts[0]) == (decider == 0), verdicts
    assert ("stof_test.recipe" in both[0][0]) == (decider == 0)


def graphs_of_their_own(rank, folder):
    """Ranks with different graphs, as in a pipeline, wait for nobody."""
    started = time.monotonic()
    with templates_win() as timed:
        model, inputs = hf_bert("sdpa", False, layers=1)
        inputs = {name: value[:, : 8 + rank] for name, value in inputs.items()}
        options = {"cache_dir": folder / str(rank)}
        fast = torch.compile(model.eval(), backend="stof", dynamic=False, options=options)
        if rank == 0:  # never compiles what rank 1 does
            with torch.no_grad():
                fast(**inputs)
            assert timed
        dist.barrier()
        if rank == 1:
            with torch.no_grad():
                fast(**inputs)
            assert timed
    assert time.monotonic() - started < 100


def too_slow(rank, folder):
    """A rank that gets no answer in time leaves the operators to Inductor, and goes on."""
    patience_s, rank_plan.COMPILE_S = rank_plan.COMPILE_S, 0.0
    first = backend._decided_here

    def slow(*given):
        time.sleep(6.0)
        return first(*given)

    backend._decided_here = slow
    with templates_win() as timed:
        fast = compiled(rank, folder, tune_budget_s=0.5)
    backend._decided_here, rank_plan.COMPILE_S = first, patience_s
    left = gathered([note for note in explain(fast).notes if "was not ready in time" in note])
    assert sorted(map(len, left)) == [0, 1], left
    assert not (left[rank] and timed)


def failing(rank, folder):
    """Where the tuning rank fails nobody waits for it."""
    first = backend._decided_here

    def broken(*given):
        raise KeyboardInterrupt

    backend._decided_here = broken
    failed = False
    try:
        fast = compiled(rank, folder, tune_budget_s=60)
    except KeyboardInterrupt:
        failed = True
    backend._decided_here = first
    assert sorted(gathered(failed)) == [False, True]
    if not failed:
        assert any("failed, or was not ready" in note for note in explain(fast).notes)


def tensor_parallel(rank, folder):
    """Weights that are spread over ranks: nothing of the graph is run for timing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    styles = {n: ColwiseParallel() for n in "qkv"} | {"out": RowwiseParallel()}
    with torch.no_grad(), templates_win() as timed:
        expected = Block()(x)
        model = parallelize_module(Block(), init_device_mesh("cpu", (2,)), styles)
        options = {"cache_dir": folder / str(rank), "tune_budget_s": 30}
        fast = torch.compile(model, backend="stof", options=options)
        assert_same(fast(x), expected)
    assert timed == []
    assert any("spread over ranks" in note for note in explain(fast).notes), explain(fast).notes
    both = gathered(told(fast))
    assert both[0] == both[1], both


def with_templates(case):
    """Run a case with templates of torch operations and invented times."""

    @functools.wraps(case)
    def run(rank, folder):
        with (
            mock.patch.object(verdict, "compile_with_inductor", without_inductor),
            mock.patch.object(verdict, "time_in_turns", winners(rank)),
            mock.patch.object(fuse, "TEMPLATES", (AnyRecipe(),)),
        ):
            case(rank, folder)

    return run


CASES = {
    "operators-alike": with_templates(alike),
    "operators-graphs-of-their-own": with_templates(graphs_of_their_own),
    "operators-too-slow": with_templates(too_slow),
    "operators-failing": with_templates(failing),
    "operators-tensor-parallel": with_templates(tensor_parallel),
}
