"""A limit of registers reaches Triton: in eager launches, in Inductor's code and its options."""

import contextlib
import pickle
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from compiling import attention_constants, compile_source, needs, signature_of, with_defaults
from inductor_code import as_inductor_writes
from linear_compiling import record
from stof_compile.kernels import attention_blockwise, blockwise_kernel, overlap
from stof_compile.kernels.overlap import OverlappingKernel
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.wrapper import (
    user_defined_triton_kernel_transitive_closure_source_code as closure,
)
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._library.triton import set_wrap_triton_enabled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stof_compile import kernel_facts, masks, register_limit
from stof_compile.kernel_facts import with_launch_attribute, with_register_limit

HEAD = """
import triton
from torch._inductor.runtime import triton_heuristics

@triton_heuristics.user_autotune(
    configs=[{'num_warps': 4}],
    triton_meta={'device': 0, 'constants': {'PDL': True, 'REGISTERS': LIMIT}},
)
"""
BODY = """@triton.jit
def kernel(x, PDL: tl.constexpr = False, REGISTERS: tl.constexpr = 0):
    start_after_previous(PDL)
    triton_meta={'REGISTERS': 7}
"""


def code(limit):
    return HEAD.replace("LIMIT", str(limit)) + BODY


def test_code_with_a_limit_asks_for_it():
    written = with_register_limit(with_launch_attribute(code(128)))
    assert "triton_meta={'maxnreg': 128, 'launch_pdl': True, 'device'" in written
    assert "@limited_autotune(" in written and kernel_facts.AUTOTUNE not in written
    assert written.endswith(BODY)
    compile(written, "code", "exec")


@pytest.mark.parametrize(
    "other",
    [
        code(0),
        code(128).replace("start_after_previous", "something"),  # a user's own
        code(128).replace("user_autotune", "pointwise"),
        BODY,
        "extern_kernels",
        "",
    ],
)
def test_other_code_stays_as_it_is(other):
    assert with_register_limit(other) == other


def test_inductor_writes_it():
    with kernel_facts.remembered_kernel_facts():
        written = as_inductor_writes(code(128))
    assert "'maxnreg': 128" in written and "'launch_pdl': True" in written


@pytest.mark.parametrize("there", [True, False])
def test_the_code_runs_without_this_package(monkeypatch, there):
    calls = []

    def stands_in(name):
        return lambda **named: lambda function: calls.append((name, named["triton_meta"]))

    monkeypatch.setattr(triton_heuristics, "user_autotune", stands_in("torch's"))
    if there:
        monkeypatch.setattr(register_limit, "user_autotune", stands_in("ours"))
    else:
        monkeypatch.setitem(sys.modules, "stof_compile.register_limit", None)
    source = with_register_limit(code(96)).partition("@triton.jit")[0] + "def kernel(): pass\n"
    exec(source, {})
    ((name, meta),) = calls
    assert name == ("ours" if there else "torch's") and meta["maxnreg"] == 96


def tuner_of(decorator, meta):
    @triton.jit
    def nothing(x, REGISTERS: tl.constexpr):
        pass

    properties = DeviceProperties("cuda", 0, 132, 90, major=9)
    meta = {"signature": {"x": "*fp32"}, "constants": {"REGISTERS": 128}, "configs": [{}], **meta}
    return decorator(
        configs=[{"num_warps": 4, "num_stages": 2}],
        triton_meta={**meta, "device": properties},
        inductor_meta={"kernel_name": "nothing"},
        filename=__file__,
        custom_kernel=True,
    )(nothing)


def options_of(tuner):
    (config,) = tuner.configs
    return tuner._create_compile_options(config, tuner._create_compile_meta(config))


def test_triton_is_given_the_limit():
    plain = options_of(tuner_of(triton_heuristics.user_autotune, {"maxnreg": 128}))
    assert "maxnreg" not in plain  # else torch has an option of its own by now
    limited = tuner_of(register_limit.user_autotune, {"maxnreg": 128})
    assert options_of(limited) == {**plain, "maxnreg": 128}
    assert options_of(tuner_of(register_limit.user_autotune, {})) == plain


def test_a_limited_kernel_comes_back_from_a_compile_process():
    limited = tuner_of(register_limit.user_autotune, {"maxnreg": 128})
    limited.prepare_for_pickle()
    again = pickle.loads(pickle.dumps(limited))
    assert type(again) is register_limit.LimitedAutotuner
    assert again.triton_meta["maxnreg"] == 128


def test_a_torch_made_otherwise_compiles_without_it(monkeypatch):
    monkeypatch.delattr(triton_heuristics.CachingAutotuner, "_create_compile_options")
    tuner = tuner_of(register_limit.user_autotune, {"maxnreg": 128})
    assert type(tuner) is triton_heuristics.CachingAutotuner


@pytest.mark.parametrize(("asked", "hip", "given"), [(128, None, 128), (0, None, 0), (128, "7", 0)])
def test_eager_launches_have_the_limit(monkeypatch, asked, hip, given):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **named: launched.append(named)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(overlap, "_overlaps", lambda device: True)
    with set_wrap_triton_enabled(False):  # as when no trace is taken
        OverlappingKernel(Kernel(), torch.device("cuda", 0))[(1,)](1, REGISTERS=asked)
    (named,) = launched
    assert named.pop("maxnreg", 0) == given
    assert named == {"REGISTERS": asked, "PDL": True, "launch_pdl": True}


@pytest.mark.parametrize("opened", [True, False])
def test_a_trace_has_the_limit_where_somebody_passes_it_on(monkeypatch, opened):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **named: launched.append(named)

    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(overlap, "_overlaps", lambda device: True)
    with overlap.overlap_in_traces() if opened else contextlib.nullcontext():
        OverlappingKernel(Kernel(), torch.device("cuda", 0))[(1,)](1, REGISTERS=128)
    assert launched == [{"REGISTERS": 128 if opened else 0, "PDL": opened}]


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({}, 128),
        ({"band": [-22, 22, 22, 22, 1 << 30]}, 128),
        ({"length": 120}, 128),
        ({"length": 120, "band": [-22, 22, 22, 22, 1 << 30]}, 0),
        ({"key_keep": torch.ones(1, 128, dtype=torch.bool)}, 0),
        ({"bias": torch.zeros(1, 1, 1, 128, dtype=torch.float16)}, 0),
        ({"softcap": 30.0}, 0),
        ({"return_lse": True}, 0),
    ],
)
def test_the_launcher_leaves_it_out_where_it_would_spill(change, limit):
    how = {"length": 128, "key_keep": None, "bias": None, "softcap": 0.0, "band": []}
    how |= {"return_lse": False, **change}
    q = torch.zeros(1, 2, how["length"], 64, dtype=torch.float16)
    spec = masks.bigbird(window=22, global_tokens=22, random_fill=0.1)
    mask = masks.build_block_mask(spec, how["length"], how["length"], 64)
    config = attention_blockwise.BlockConfig(loops=5, registers=128)
    launch = record(
        attention_blockwise, "attention_block_forward", q, q, q, mask.tensors, how["key_keep"],
        how["bias"], 0.125, how["softcap"], 0, how["band"], config, how["return_lse"],
    )  # fmt: skip
    assert launch.arguments["REGISTERS"] == limit


@pytest.mark.compile_only
@pytest.mark.parametrize("limit", [0, 128])
def test_the_block_kernel_in_inductors_code(limit):
    """Under a header like torch's, loaded as in its processes that compile."""
    kernel = blockwise_kernel.attention_block_kernel
    constants = attention_constants(64, 64, 64, EVEN_Q=True, EVEN_K=True, HEAVY_FIRST=True)
    constants |= {"LOOPS": 5, "PREFETCH": False, "PDL": True, "REGISTERS": limit}
    constants = with_defaults(kernel, constants)
    signature, aligned = signature_of(kernel, "fp16", constants)
    meta = {
        "signature": signature,
        "device": DeviceProperties("cuda", 0, 132, 90, major=9),
        "constants": constants,
        "configs": [aligned],
    }
    head = (
        "@triton_heuristics.user_autotune(\n"
        "    configs=[{'num_warps': 4, 'num_stages': 3}],\n"
        "    inductor_meta={'kernel_name': 'attention_block_kernel_0'},\n"
        f"    triton_meta={meta!r},\n"
        "    filename=__file__,\n    custom_kernel=True,\n)\n@triton.jit\n"
    )
    written = TritonKernel.gen_common_triton_imports() + head + closure(kernel)
    written = with_register_limit(with_launch_attribute(written))
    tuner = PyCodeCache.load(written).attention_block_kernel
    (chosen,) = tuner.configs
    made = tuner._create_compile_meta(chosen)
    options = tuner._create_compile_options(chosen, made)
    assert options.get("maxnreg", 0) == limit and options["launch_pdl"]
    source = ASTSource(tuner.fn, made["signature"], made["constants"], made["configs"][0])
    found = needs(compile_source(source, GPUTarget("cuda", 90, 32), options), 90)
    assert found.spill_bytes == 0
    assert (found.registers <= 128) == bool(limit)
