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
from stof_compile.attention.trial import input_sets
from stof_compile.budget import Budget
from stof_compile.measure import Timing
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
    monkeypatch.setattr(finals, "make_scenes", lambda problem, generator: [((), (), ())])
    monkeypatch.setattr(finals, "_chain", lambda problem, candidate: candidate)

    def fake(chains, scenes, device, **kwargs):
        took_part[:] = chains
        return [Timing(us, us, us, 3, "fake") for us in times[: len(chains)]]

    monkeypatch.setattr(finals, "time_in_turns", fake)
    return took_part, times


def settle(candidates, seconds=60.0, **changes):
    asked = problem(device="cuda", **changes)
    return finals.settle(asked, candidates, None, Budget(seconds, clock=lambda: 0.0))


def test_one_of_each_kind_takes_part_and_the_fastest_behind_products_wins(turns):
    took_part, times = turns
    times[:] = [50.5, 45.1, 44.0]
    best, told = settle(ALL)
    assert took_part == [NARROW, SQUARE, LIMITED]
    assert best is LIMITED and "44.0 against 50.5 us" in told and "block[64,32" in told


def test_a_gain_within_the_noise_changes_nothing(turns):
    turns[1][:] = [50.0, 49.95, 52.0]
    assert settle(ALL) == (NARROW, "")


@pytest.mark.parametrize(
    ("candidates", "changes"),
    [
        ([NARROW, NARROW_TOO, SLOW], {}),  # one kind within reach
        (ALL, {"training": True}),
        (ALL, {"seconds": 1.0}),
        (ALL, {"q": TensorMeta((64, 64, 1 << 17, D), BY_HEAD, torch.float16)}),
    ],
)
def test_there_are_none(turns, candidates, changes):
    assert settle(candidates, **changes) == (NARROW, "")
    assert turns[0] == []


def test_they_end_where_memory_does(turns, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(finals, "time_in_turns", full)
    assert settle(ALL) == (NARROW, "")


def test_nothing_is_timed_on_a_cpu(turns):
    assert finals.settle(problem(), ALL, None, Budget(60.0)) == (NARROW, "")
    assert turns[0] == []


@pytest.mark.parametrize(
    ("stride", "products"), [(APART, 1), (PACKED, 1), (BY_HEAD, 3)], ids=["apart", "packed", "head"]
)
def test_products_write_what_attention_reads(stride, products, monkeypatch):
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
    scenes = finals.make_scenes(asked, torch.Generator().manual_seed(0))
    assert len(scenes) == input_sets(asked) and len(scenes[0][0]) == products
    out = finals._chain(asked, SQUARE)(*scenes[0])
    expected = result[0].transpose(1, 2).reshape(B * S, H * D).double()
    for weight in scenes[0][2]:
        expected = expected @ weight.double().t()
    assert scenes[0][2][1].shape == (4 * H * D, H * D)
    assert_close(out, expected, torch.float16, scale=4.0)
    (q, k, v), made = seen[0], [x.double() @ w.double().t() for x, w, _ in scenes[0][0]]
    if products == 1:
        wanted = made[0].view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
        assert {t.stride() for t in (q, k, v)} == {PACKED}
    else:
        wanted = [m.flatten().as_strided((B, H, S, D), BY_HEAD) for m in made]
    for found, expected in zip((q, k, v), wanted, strict=True):
        assert_close(found, expected, torch.float16)
        assert 0.5 < found.std() < 2.0  # as large as a trial's


def test_lengths_that_differ_and_grouped_heads_have_products_of_their_own():
    kv = TensorMeta((B, 1, 24, D), (24 * D, 24 * D, D, 1), torch.float16)
    asked = dataclasses.replace(problem(), k=kv, v=kv)
    ((products, extras, rest), *_) = finals.make_scenes(asked, torch.Generator().manual_seed(0))
    assert [tuple(p.x.shape) for p in products] == [
        (B * S, H * D),
        (B * 24, H * D),
        (B * 24, H * D),
    ]
    assert extras == (None, None) and rest[0].shape == (H * D, H * D)
