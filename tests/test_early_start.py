"""Kernels of Inductor that start early wait first, and only where their calls are replayed."""

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel

from stof_compile import early_start
from stof_compile.early_start import EARLY, SETTING, WAIT, kernels_starting_early, with_early_start
from stof_compile.inductor import compile_with_settings, config_patches, is_replayed
from stof_compile.options import StofOptions
from stof_compile.verdict import for_timing

HEAD = """import triton

@triton_heuristics.{kind}(
    size_hints={{'x': {x}, 'r0_': 1024}},
    triton_meta={{{pdl}'device': DeviceProperties(type='{type}', index=0, cc={cc}, major=9)}},
    inductor_meta={{}}
)
@triton.jit
def Placeholder.KERNEL_NAME(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 1024
"""


def code(kind="pointwise", pdl="'launch_pdl': False, ", type="cuda", cc=90, x=1024):
    return HEAD.format(kind=kind, pdl=pdl, type=type, cc=cc, x=x)


@pytest.mark.parametrize("kind", ["pointwise", "reduction", "persistent_reduction"])
@pytest.mark.parametrize("pdl", ["'launch_pdl': False, ", ""])
@pytest.mark.parametrize("cc", [90, 100, 120])
def test_a_kernel_waits_at_its_first_statement(kind, pdl, cc):
    found = with_early_start(code(kind, pdl, cc=cc))
    assert f"XBLOCK : tl.constexpr):\n{WAIT}    xnumel = 1024\n" in found
    assert found.count("'launch_pdl': True") == 1 and "'launch_pdl': False" not in found
    assert found.replace(WAIT, "").count("\n") == code(kind, pdl).count("\n")


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "cooperative_reduction"}, {"kind": "template"}, {"kind": "foreach"},
        {"kind": "split_scan"}, {"kind": "user_autotune"}, {"type": "hip"}, {"cc": 80}, {"cc": 89},
        {"x": 2048},
    ],
    ids=str,
)  # fmt: skip
def test_others_stay_as_they_are(other):
    assert with_early_start(code(**other)) == code(**other)


def test_a_kernel_that_tells_no_size_stays_as_it_is():
    unknown = code().replace("size_hints", "hints")
    assert with_early_start(unknown) == unknown


def test_torch_is_as_it_was_afterwards():
    before = TritonKernel.__dict__["codegen_kernel"]
    with pytest.raises(KeyError), kernels_starting_early():
        assert TritonKernel.__dict__["codegen_kernel"] is not before
        raise KeyError
    assert TritonKernel.__dict__["codegen_kernel"] is before


def test_inductor_takes_the_setting_for_false():
    """Its own waits are fewer."""
    with config.patch({SETTING: EARLY}):
        assert TritonKernel._enable_pdl_codegen() is False


def test_only_replayed_calls_ask_for_it():
    assert SETTING not in config_patches(StofOptions())
    assert SETTING not in config_patches(StofOptions(mode="max-autotune-no-cudagraphs"))
    no_graphs = {"triton.cudagraphs": False}
    for options in (
        StofOptions(mode="reduce-overhead"),
        StofOptions(mode="reduce-overhead", inductor=no_graphs),  # captured by the caller
        StofOptions(inductor={"triton.cudagraphs": True}),
    ):
        assert is_replayed(options) and config_patches(options)[SETTING] == EARLY
        assert config_patches(for_timing(options))[SETTING] == EARLY
    own = StofOptions(mode="reduce-overhead", inductor={SETTING: False})
    assert config_patches(own)[SETTING] is False
    own = StofOptions(mode="reduce-overhead", inductor={SETTING: True})
    assert config_patches(own)[SETTING] == EARLY


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("given", [{}, *({SETTING: on} for on in (False, True, EARLY))], ids=str)
def test_inductor_leaves_no_wait_out(given, everywhere, trains, monkeypatch):
    from torch._inductor import compile_fx

    written = []

    def compiled(gm, inputs, config_patches):
        with config.patch(config_patches or {}):
            written.append(TritonKernel._enable_pdl_codegen())

    told = []
    monkeypatch.setattr(early_start, "warning_once", lambda *said: told.append(said[2]))
    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    with config.patch({SETTING: everywhere}):  # as torch's environment variable has it
        compile_with_settings(gm, [torch.ones(2)], given, trains)
    assert written == [False]
    named = SETTING in given and not (given[SETTING] == EARLY and trains)
    assert told == ([SETTING] if (given[SETTING] if named else everywhere) else [])


@pytest.mark.parametrize("trains", [False, True])
def test_a_graph_with_gradients_does_not(monkeypatch, trains):
    from torch._inductor import compile_fx

    from stof_compile import inductor

    asked = []
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda gm, inputs, config_patches: asked.append(config_patches)
    )
    x = torch.ones(2, requires_grad=trains)
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    inductor.compile_with_inductor(gm, [x], StofOptions(mode="reduce-overhead"))
    assert (SETTING in asked[0]) is not trains


@pytest.mark.parametrize("other", [False, True])
def test_caches_tell_it_from_what_inductor_writes_itself(other, fresh_dynamo):
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_inductor_cache

    def hits(setting):
        def backend(gm, inputs):
            return compile_with_settings(gm, inputs, {SETTING: setting}, trains=False)

        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(8))
        kinds = ("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit")
        return sum(counters[kind][name] for kind, name in kinds)

    with fresh_inductor_cache():
        before = hits(other)
        assert hits(EARLY) == before
        assert hits(EARLY) > before
