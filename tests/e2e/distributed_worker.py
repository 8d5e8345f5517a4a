"""One rank of test_distributed.py: ``python distributed_worker.py case,case rank folder``.

Cases run one after the other in one process, each in a process group of its own: starting a
process takes longer than most of them. Those that tune operators are in fusion_cases.py.
"""

import contextlib
import gc
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import fusion_cases
import torch
import torch.distributed as dist
from models import BATCH, LENGTH, hf_bert
from running import assert_same, masked, without_flex, without_inductor
from split_attention import Block

import stof_compile.backend as backend
from stof_compile import explain, masks

MASK = masks.longformer(4, 2)
QUICK = {"tune_budget_s": 0, "attention": "gather"}


def inputs_of(rank):
    generator = torch.Generator().manual_seed(20 + rank)
    return {"input_ids": torch.randint(2, 90, (BATCH, LENGTH), generator=generator)}


def step(forward, model, inputs):
    """Gradients of one step, full tensors by name."""
    model.zero_grad()
    out = forward(**inputs).last_hidden_state
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.detach(), {n: getattr(g, "full_tensor", g.clone)() for n, g in grads.items()}


def compare(ours, reference):
    assert ours.keys() == reference.keys()
    smallest = 1e-3 * max(g.abs().max() for g in reference.values())
    for name, gradient in reference.items():
        scale = gradient.abs().max().clamp(min=smallest)
        error = (ours[name] - gradient).abs().max() / scale
        assert error <= 3e-4, f"{name}: {error:.1e}"


def check_ddp(rank, folder, mask, bucket_mb, options):
    """Gradients equal those of eager DDP; the ranks take the same kernels."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(hf_bert("sdpa", False)[0], bucket_cap_mb=bucket_mb)
    with masked(mask):
        out, reference = step(model, model, inputs_of(rank))
    options = {"mask": mask, "cache_dir": folder / str(rank), **options}
    fast = torch.compile(model, backend="stof", options=options)
    found, ours = step(fast, model, inputs_of(rank))
    assert_same(found, out)
    compare(ours, reference)
    sites = explain(fast).sites
    assert len(sites) == 2, str(explain(fast))
    kernels = [None, None]
    dist.all_gather_object(kernels, [(s.kernel, s.choice and s.choice.config) for s in sites])
    assert kernels[0] == kernels[1]
    return fast


def ddp(rank, folder):
    check_ddp(rank, folder, None, 25, {"tune_budget_s": 30})


def ddp_mask(rank, folder):
    check_ddp(rank, folder, MASK, 25, {"tune_budget_s": 30})


def ddp_split(rank, folder):
    """Small buckets: DDPOptimizer cuts the graph."""
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 20_000):
        fast = check_ddp(rank, folder, MASK, 0.05, QUICK)
    assert len(explain(fast).graphs) > 1


def fsdp(rank, folder):
    """fully_shard on every layer and the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def build():
        model = hf_bert("sdpa", False)[0]
        for layer in model.encoder.layer:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model = build()
    with masked(MASK):
        out, reference = step(model, model, inputs_of(rank))
    model = build()
    options = {"mask": MASK, **QUICK}
    for layer in model.encoder.layer:
        layer.compile(backend="stof", options=options)
    found, ours = step(model, model, inputs_of(rank))
    assert_same(found, out)
    compare(ours, reference)
    seen = explain(model)
    # equal layers share one compiled graph
    assert {site.status for site in seen.sites} == {"rewritten"}, str(seen)


def tensor_parallel(rank, folder):
    """Column- and row-parallel linear layers: their DTensor weights stay what they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    x = torch.randn(BATCH, LENGTH, 64, generator=torch.Generator().manual_seed(1))
    single = Block()
    with masked(MASK):
        expected = single(x)
        expected.sum().backward()
    mesh = init_device_mesh("cpu", (2,))
    styles = {n: ColwiseParallel() for n in "qkv"} | {"out": RowwiseParallel()}
    model = parallelize_module(Block(), mesh, styles)
    options = {"mask": MASK, **QUICK}
    fast = torch.compile(model, backend="stof", options=options)
    found = fast(x)
    assert_same(found, expected)
    found.sum().backward()
    gradient = model.q.weight.grad.full_tensor()
    assert_same(gradient, single.q.weight.grad, 3e-4)
    assert isinstance(model.q.weight, DTensor)


CASES = {
    "ddp": ddp,
    "ddp-mask": ddp_mask,
    "ddp-split": ddp_split,
    "fsdp": fsdp,
    "tensor-parallel": tensor_parallel,
    **fusion_cases.CASES,
}


def main(cases, rank, folder):
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    gc.freeze()
    backend.compile_with_inductor = without_inductor
    with without_flex():
        run_all([(name, CASES[name]) for name in cases.split(",")], int(rank), Path(folder))
    gc.unfreeze()  # or nanobind reports leaks behind OK


def run_all(cases, rank, folder):
    """Run (name, function) pairs, tell which one runs, and print OK at the end."""
    for name, case in cases:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        run(case, rank, folder / name)
    sys.stdout.write("OK\n")


def run(case, rank, folder):
    folder.mkdir(exist_ok=True)
    torch._dynamo.reset()
    store = dist.FileStore(str(folder / "rendezvous"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        case(rank, folder)
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
