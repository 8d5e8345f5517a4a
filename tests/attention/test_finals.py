"""Finals of attention: who takes part, who wins, and what stands in front of a candidate."""

import dataclasses

import pytest
import torch
from close import assert_close
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks
from stof_compile.attention import finals
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.budget import Budget
from stof_compile.errors import StofUnsupportedError
from stof_compile.measure import Timing, time_in_turns
from stof_compile.plan import Candidate

B, H, S, D = 2, 3, 40, 16
APART = (S * H * D, D, H * D, 1)
PACKED = (S * 3 * H * D, D, 3 * H * D, 1)
BY_HEAD = (H * S * D, S * D, D, 1)


def problem(stride=APART, device="cpu", length=S, **changes):
    meta = TensorMeta((B, H, length, D), stride, torch.float16)
    asked = AttentionProblem(meta, meta, meta, masks.causal(), 0, torch.device(device), 0.25)
    return dataclasses.replace(asked, **changes)


def candidate(us, kernel="block", **config):
    held = tuple(BlockConfig(**config)) if kernel == "block" else ()
    return Candidate(kernel, held, "measured", us, us, us, 1e-4)


NARROW = candidate(17.7, block_k=32, loops=5)
NARROW_TOO = candidate(17.9, block_k=32, loops=4)
SQUARE = candidate(19.1, loops=5)
LIMITED = candidate(19.2, loops=5, registers=128)
SLOW = candidate(40.0, "sdpa")
ALL = [SLOW, LIMITED, NARROW_TOO, SQUARE, NARROW]


@pytest.fixture
def turns(monkeypatch):
    """Finalists get the times of a list instead of being run; returns who took part."""
    took_part, times = [], []
    monkeypatch.setattr(finals, "make_scenes", lambda problem, generator: [()])
    monkeypatch.setattr(finals, "_chain", lambda problem, candidate: candidate)

    def fake(chains, scenes, device, **kwargs):
        assert chains[0] is chains[1]  # a turn that does not count
        took_part[:] = chains[1:]
        return [Timing(us, us, us, 3, "fake") for us in (0.0, *times[: len(took_part)])]

    monkeypatch.setattr(finals, "time_in_turns", fake)
    return took_part, times


def settle(candidates, seconds=60.0, stride=APART, **changes):
    asked = problem(stride, device="cuda", **changes)
    return finals.settle(asked, candidates, None, Budget(seconds, clock=lambda: 0.0))


def test_one_of_each_kind_takes_part_and_the_fastest_within_a_layer_wins(turns):
    took_part, times = turns
    times[:] = [50.5, 45.1, 44.0]
    best, told = settle(ALL)
    assert took_part == [NARROW, SQUARE, LIMITED]
    assert best is LIMITED and "44.0 against 50.5 us" in told and "block[64,32" in told


def test_a_small_gain_changes_nothing(turns):
    turns[1][:] = [50.0, 49.9, 52.0]
    assert settle(ALL) == (NARROW, "")


LONG = [candidate(6000.0, block_k=32), candidate(6001.0)]
CACHE = (64 * H * D, D, H * D, 1)  # a part of longer rows


@pytest.mark.parametrize(
    ("candidates", "changes"),
    [
        ([NARROW, NARROW_TOO, SLOW], {}),  # one kind within reach
        (ALL, {"training": True}),
        (ALL, {"seconds": 2.0}),
        (ALL, {"stride": BY_HEAD}),
        (ALL, {"stride": CACHE}),
        (ALL, {"k": TensorMeta((B, H, 24, D), (24 * H * D, D, H * D, 1), torch.float16)}),
        (ALL, {"q": TensorMeta((B, H, 0, D), (0, D, H * D, 1), torch.float16)}),
    ],
)
def test_there_are_none(turns, candidates, changes):
    assert settle(candidates, **changes) == (NARROW, "")
    assert turns[0] == []


def test_none_of_long_calls_and_none_that_take_much_memory(turns):
    assert settle(LONG) == (LONG[0], "")
    width, length = 128 * 256, 512
    wide = TensorMeta((1, 128, length, 256), (length * width, 256, width, 1), torch.float16)
    assert settle(ALL, q=wide, k=wide, v=wide) == (NARROW, "")
    assert turns[0] == []


@pytest.mark.parametrize("part", ["make_scenes", "_chain", "time_in_turns"])
@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, RuntimeError, StofUnsupportedError])
def test_the_trials_decide_where_finals_fail(turns, part, failure, monkeypatch):
    def fails(*args, **kwargs):
        raise failure("here")

    monkeypatch.setattr(finals, part, fails)
    assert settle(ALL) == (NARROW, "")


def test_nothing_is_timed_on_a_cpu(turns):
    assert finals.settle(problem(), ALL, None, Budget(60.0)) == (NARROW, "")
    assert turns[0] == []


@pytest.mark.parametrize("stride", [APART, PACKED], ids=["apart", "packed"])
@pytest.mark.parametrize("kv_heads", [H, 1])
def test_products_write_what_attention_reads(stride, kv_heads, monkeypatch):
    """On a CPU with the reference as the candidate: views are q, k and v of the product."""
    seen, result = [], []

    class Call:
        buffers = ()

        @staticmethod
        def run(q, k, v, keep, bias, buffers):
            seen.append((q, k, v))
            result.append(attention_reference(q, k, v, scale=0.25))
            return result[-1]

    monkeypatch.setattr(finals, "bind_kernel", lambda *asked: Call)
    asked = problem(stride)
    widths = [H * D, kv_heads * D, kv_heads * D]
    metas = []
    for heads, width in zip((H, kv_heads, kv_heads), widths, strict=True):
        pitch = width if stride is APART else sum(widths)
        metas.append(TensorMeta((B, heads, S, D), (S * pitch, D, pitch, 1), torch.float16))
    asked = dataclasses.replace(asked, q=metas[0], k=metas[1], v=metas[2])
    scenes = finals.make_scenes(asked, torch.Generator().manual_seed(0))
    assert len(scenes) == 4
    x, weight, extras, rest = scenes[0]
    assert extras == (None, None) and rest[1].shape == (4 * H * D, H * D)
    out = finals._chain(asked, SQUARE)(*scenes[0])
    expected = result[0].transpose(1, 2).reshape(B * S, H * D).double()
    for behind in rest:
        expected = expected @ behind.double().t()
    assert_close(out, expected, torch.float16, scale=4.0)
    made = (x.double() @ weight.double().t()).view(B, S, sum(widths))
    parts = made.split(widths, -1)
    for found, part in zip(seen[0], parts, strict=True):
        heads = part.shape[-1] // D
        assert found.stride() == (S * sum(widths), D, sum(widths), 1)
        assert_close(found, part.view(B, S, heads, D).transpose(1, 2), torch.float16)
        assert 0.5 < found.std() < 2.0  # as large as a trial's


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [False, True])
def test_finals_on_a_gpu(padding, monkeypatch):
    """They run, with the candidates that a BERT layer of 8 x 512 has."""
    times = []

    def recorded(*args, **kwargs):
        times.extend(time_in_turns(*args, **kwargs))
        return times

    monkeypatch.setattr(finals, "time_in_turns", recorded)
    meta = TensorMeta((8, 12, 512, 64), (512 * 768, 64, 768, 1), torch.float16)
    rule = masks.bigbird(22, 22, 0.1)
    asked = AttentionProblem(
        meta, meta, meta, rule, 0, torch.device("cuda"), 0.125, padding=padding
    )
    held = [NARROW, SQUARE, LIMITED]
    best, _ = finals.settle(asked, held, torch.Generator("cuda").manual_seed(0), Budget(60.0))
    assert best in held and len(times) == 4 and all(30 < t.median_us < 500 for t in times)
