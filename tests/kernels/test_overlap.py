"""Launches that overlap: the wait is in the code, the attribute reaches the launch."""

import copy

import pytest
import torch
from compiling import needs
from inductor_code import as_inductor_writes
from linear_compiling import compile_launch, record, record_all
from stof_compile.kernels import (
    gated_linear,
    linear,
    linear_chain,
    linear_norm,
    overlap,
    rope_linear,
)
from stof_compile.kernels.gated_linear import GatedLinearConfig
from stof_compile.kernels.linear_chain import LinearChainConfig
from stof_compile.kernels.linear_norm import FULL_ROW, LinearNormConfig
from torch._subclasses import FakeTensorMode

from stof_compile import kernel_facts
from stof_compile.kernel_facts import remembered_kernel_facts, with_launch_attribute

HEAD = (
    "@triton_heuristics.user_autotune(\n configs=[{{'PDL': {}}}],\n triton_meta={{'device': 0}})\n"
)
BODY = """@triton.jit
def kernel(x, PDL: tl.constexpr = False):
    start_after_previous(PDL)
    triton_meta={}
"""


def test_the_attribute_is_passed_on_where_a_kernel_waits():
    assert "triton_meta={'launch_pdl': True, 'device'" in with_launch_attribute(
        HEAD.format(True) + BODY
    )
    users_own = HEAD.format(True) + BODY.replace("start_after_previous", "something")
    for other in (HEAD.format(False) + BODY, BODY, users_own, "extern_kernels", ""):
        assert with_launch_attribute(other) == other


def test_inductor_writes_it():
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    before = PythonWrapperCodegen.define_kernel
    with remembered_kernel_facts():
        written = as_inductor_writes(HEAD.format(True) + BODY)
        assert overlap._traced.get()
    assert PythonWrapperCodegen.define_kernel is before and not overlap._traced.get()
    assert "'launch_pdl': True" in written
    with remembered_kernel_facts(trains=True):
        assert not overlap._traced.get()


def test_torch_is_asked_about_the_kernel_that_does_not_wait(monkeypatch):
    from types import SimpleNamespace

    from torch._higher_order_ops import triton_kernel_wrap

    (name,) = (n for n in kernel_facts.EFFECTS if hasattr(triton_kernel_wrap, n))
    asked = []
    monkeypatch.setattr(
        triton_kernel_wrap, name, lambda kernel, kwargs, more: asked.append(kwargs["PDL"]) or []
    )
    monkeypatch.setattr(kernel_facts, "_known", {})

    def fn():
        pass

    fn.__module__ = "stof_compile.kernels.norm_kernel"
    with remembered_kernel_facts():
        getattr(triton_kernel_wrap, name)(SimpleNamespace(fn=fn), {"PDL": True}, {})
    assert asked == [False]


def launches():
    def half(*shape):
        return torch.empty(*shape, dtype=torch.float16, device="cuda")

    with FakeTensorMode():
        x, w, vector = half(128, 768), half(768, 768), half(768)
        for residual, activation, splits in ((None, "gelu", 1), (x, "", 3)):
            config = [32, 32, 128, 4, 4, 8, splits, 0, 0]
            operands = (x, w, vector, residual, None, activation, config)
            yield record(linear, "fused_linear_forward", *operands)
        gated = (x, w, w, None, None, "silu", GatedLinearConfig())
        yield record(gated_linear, "fused_gated_linear_forward", *gated)
        chain = (x, w, vector, "gelu", w, vector, x, LinearChainConfig())
        yield record(linear_chain, "fused_linear_chain_forward", *chain)
        table = half(128, 64)
        rope = (x, w, None, table, table, 64, 512, [64, 64, 64, 4, 3, 8, 1, 0, 0])
        yield record(rope_linear, "fused_rope_linear_forward", *rope)
        norm = (x, w, vector, x, vector, vector, "layer_norm", 1e-5)
        yield record_all(linear_norm, "linear_norm_forward", *norm, LinearNormConfig())[0]
        rows = LinearNormConfig(FULL_ROW, 16, block_k=32, num_warps=8)
        yield record(linear_norm, "linear_norm_forward", *norm, rows)


@pytest.mark.compile_only
@pytest.mark.parametrize("target", [80, 90, 100])
def test_the_wait_costs_nothing_but_itself(target):
    for launch in launches():
        launch.arguments["PDL"] = target >= 90
        compiled = compile_launch(launch, target)
        assert needs(compiled, target).spill_bytes == 0
        text = compiled.asm["ptx"]
        for instruction in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
            assert (instruction in text) == (target >= 90)
        if target >= 90:
            wait = text.index("griddepcontrol.wait")
            assert "ld.global" not in text[:wait] and "st.global" not in text[:wait]
            assert "cp.async" not in text[:wait]
            assert "prefetch.global.L2" in text[:wait]


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="launches overlap on Hopper and newer",
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [1, 128, 4096])
def test_gpu_a_chain_of_kernels_is_the_same(rows):
    import stof_compile.backend  # noqa: F401

    torch.manual_seed(rows)
    x = torch.randn(rows, 768, device="cuda", dtype=torch.float16)
    weights = torch.randn(4, 768, 768, device="cuda", dtype=torch.float16) / 28
    bias = torch.randn(768, device="cuda", dtype=torch.float16)
    configs = ([32, 32, 128, 4, 4, 8, 1, 0, 0], [32, 64, 128, 4, 4, 8, 3, 0, 0])

    def chain(between=lambda: None):
        h = x
        for layer in range(24):
            w = weights[layer % 4]
            if layer % 3 == 2:
                y = torch.ops.stof.hopper_linear(h, w, bias, h, "gelu", [128, 128, 4, 8])
            else:
                config = configs[layer % 3]
                y = torch.ops.stof.fused_linear(h, w, bias, None, None, "gelu", config)
            between()
            h = torch.ops.stof.fused_norm(y, bias, h, bias, bias, "layer_norm", 1e-5, [1, 4])
            between()
        return h

    wanted = chain(torch.cuda.synchronize)  # nothing is left that a kernel could overlap with
    torch.testing.assert_close(chain(), wanted, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_gpu_inductor_launches_with_it(mode, tmp_path):
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)
            self.norm = torch.nn.LayerNorm(256)

        def forward(self, x):
            return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))

    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), Block()).half().cuda().eval()
    x = torch.randn(64, 256, device="cuda", dtype=torch.float16)
    options = {"tune_budget_s": 0.0, "cache_dir": str(tmp_path)} | ({"mode": mode} if mode else {})
    with torch.no_grad(), fresh_inductor_cache():
        wanted = copy.deepcopy(model).double()(x.double())
        fast = torch.compile(model, backend="stof", options=options)
        found, code = run_and_get_code(fast, x)
        for _ in range(3):
            torch.testing.assert_close(fast(x).double(), wanted, rtol=2e-2, atol=2e-2)
    assert "'launch_pdl': True" in "".join(code)
    assert "clone" not in "".join(code)  # torch knows that only the results are written
    assert found.shape == x.shape
