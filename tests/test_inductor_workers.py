"""Inductor's processes are made ready for kernels of ours while STOF's passes run."""

import sys
from concurrent.futures import Future
from dataclasses import replace

import pytest
from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool

from stof_compile.device import DeviceFacts
from stof_compile.inductor_workers import JOB, make_workers_ready
from stof_compile.options import StofOptions

H200 = DeviceFacts("cuda", "NVIDIA H200", "cuda 13.0", (9, 0), "sm_90", 132, 232448, 0, 0)
MI300 = replace(H200, runtime="rocm 7.0", arch="gfx942", capability=(9, 4))
CPU = DeviceFacts("cpu", "cpu", "cpu", None, "AVX512", 2, 0, 0, 0)


@pytest.fixture
def jobs(monkeypatch):
    """What is given to a pool of three processes that is still starting."""
    given = []

    class Pool:
        def submit(self, *job):
            given.append(job)
            return Future()

    def asked():
        AsyncCompile._ready_future = Future()
        return False

    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", asked)
    monkeypatch.setattr(AsyncCompile, "process_pool", lambda: Pool())
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 3)
    return given


@pytest.mark.parametrize(("device", "arch"), [(H200, 90), (MI300, None)], ids=["cuda", "rocm"])
def test_each_process_has_a_job(jobs, device, arch):
    make_workers_ready(device, StofOptions())
    assert jobs == [(exec, JOB.format(arch=arch), {})] * 3


def test_a_cpu_asks_for_none(jobs):
    make_workers_ready(CPU, StofOptions())
    assert not jobs and AsyncCompile._ready_future is None


def test_nor_does_a_compile_that_wants_no_processes(jobs):
    make_workers_ready(H200, StofOptions(inductor={"compile_threads": 1}))
    assert not jobs and AsyncCompile._ready_future is None


def test_no_pool_no_job(jobs, monkeypatch):
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: False)
    make_workers_ready(H200, StofOptions())
    assert not jobs


def test_a_process_has_imported_what_a_kernel_asks_for():
    pytest.importorskip("triton.backends.nvidia.compiler")
    pool = SubprocPool(1)
    try:
        assert pool.submit(exec, JOB.format(arch=90), {}).result(120) is None
        imported = "{'stof_compile.register_limit'} <= set(__import__('sys').modules)"
        assert pool.submit(eval, imported).result(60)
    finally:
        pool.shutdown()


def test_a_process_without_this_package_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "stof_compile.inductor_workers", None)
    exec(JOB.format(arch=90), {})
