"""Queues of persistent kernels: who shares one, and that all are 0 when nothing runs."""

import threading
from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from stof_compile.kernels import work_queue
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.reference import attention_reference
from stof_compile.kernels.work_queue import new_queue

from stof_compile import masks, sparse_attention
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.masks.block_mask import build_block_mask

HALF, HOPPER = torch.float16, (9, 0)


@pytest.fixture
def begun_anew(monkeypatch):
    """No queue is known yet."""
    monkeypatch.setattr(work_queue, "_numbers", {})
    monkeypatch.setattr(work_queue, "_of_streams", {})


# -- without a GPU --------------------------------------------------------------------------------


class _OnCpu(work_queue._Numbers):
    """Numbers on the CPU."""

    def _make(self, device):
        self.maker = device, threading.get_ident()
        self._all = torch.zeros(3, work_queue._APART, dtype=torch.int32)


@pytest.fixture
def state(monkeypatch, begun_anew):
    """Device 1 as far as queues look at it, with room for three."""
    state = SimpleNamespace(stream=0, captured=False, device=SimpleNamespace(index=1), zeros=0)
    zeros = torch.zeros

    def counted(*size, device=None, **more):
        state.zeros += device is not None
        return zeros(*size, **more)

    monkeypatch.setattr(work_queue, "_Numbers", _OnCpu)
    monkeypatch.setattr(work_queue, "_NUMBERS", 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captured)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda index: (state.stream, index, 1), raising=False
    )
    monkeypatch.setattr(torch, "zeros", counted)
    return state


def test_a_stream_keeps_its_queue(state):
    first = new_queue(state.device)
    assert first.tolist() == [0, 0] and first.dtype == torch.int32
    assert new_queue(state.device) is first
    state.stream = 7
    second = new_queue(state.device)
    assert second.data_ptr() - first.data_ptr() == 32
    state.stream = 0
    assert new_queue(state.device) is first and state.zeros == 0


@pytest.mark.parametrize("stream", [2, 0x7F00A0])
def test_streams_that_are_not_torch_s_own_keep_none(state, stream):
    """Their numbers are addresses, which are given again; 2: another one in each thread."""
    state.stream = stream
    found = [new_queue(state.device) for _ in range(2)]
    assert found[0] is not found[1] and state.zeros == 2 and not work_queue._of_streams


def test_without_memory_a_later_call_tries_again(state, monkeypatch):
    def fails(self, device):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(_OnCpu, "_make", fails)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="none left"):
                new_queue(state.device)
    assert new_queue(state.device).tolist() == [0, 0] and state.zeros == 0


def test_numbers_are_made_once_and_in_another_thread(state):
    new_queue(state.device)
    state.stream = 9
    new_queue(state.device)
    (made,) = work_queue._numbers.values()
    device, thread = made.maker
    assert device == 1 and thread != threading.get_ident()


def test_captured_calls_share_nothing(state):
    of_stream = new_queue(state.device)
    state.captured = True
    found = [of_stream, new_queue(state.device), new_queue(state.device)]
    assert len({queue.data_ptr() for queue in found}) == 3 and state.zeros == 0
    # none is left: one that the graph itself sets to 0
    assert new_queue(state.device).tolist() == [0, 0] and state.zeros == 1
    state.captured = False
    assert new_queue(state.device) is of_stream


def test_nothing_is_made_while_a_stream_is_captured(state):
    state.captured = True
    assert new_queue(state.device).tolist() == [0, 0]
    assert state.zeros == 1 and not work_queue._numbers


def test_streams_without_a_number_left(state):
    for state.stream in (1, 3, 5):
        new_queue(state.device)
    state.stream = 7
    assert new_queue(state.device) is not new_queue(state.device) and state.zeros == 2


# -- on one ---------------------------------------------------------------------------------------


class Call:
    """Attention on a Hopper GPU, with other inputs than another's.

    Args:
        form: programs of a multiprocessor and stages; one program takes two tile rows at a time.
        pieces: of each long row.
    """

    def __init__(self, form, rule="longformer", length=2000, pieces=1):
        device = torch.device("cuda")
        keys = 64 if form[0] > 1 else 128
        spec = {
            "longformer": masks.longformer(window=40, global_tokens=20),
            "causal": masks.causal(),
        }[rule]
        mask = build_block_mask(spec, length, length, (64, keys), batch=2, heads=12, device=device)
        config = honest_config(mask, BlockConfig(64, keys, num_stages=form[1], hopper=form[0]), 24)
        self.config = list(BlockConfig(*config)._replace(pieces=pieces))
        self.arrays = list(mask_arrays(mask, self.config).values())
        self.operands = torch.randn(3, 2, 12, length, 64, device=device, dtype=HALF).unbind()
        keep = mask.to_dense()
        wide = (x.double() for x in self.operands)
        self.expected = attention_reference(*wide, keep, None, None, 0.125, 0.0, True)[0]

    def __call__(self):
        return torch.ops.stof.attention_block(
            *self.operands, *self.arrays, None, None, 0.125, 0.0, 0, [], self.config, False
        )[0]

    def check(self, out):
        assert_close(out, self.expected, HALF)


FORMS = [(4, 2), (3, 3), (1, 2)]
on_hopper = pytest.mark.usefixtures("hopper_gpu")


@pytest.fixture
def hopper_gpu():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")


def all_numbers():
    torch.cuda.synchronize()
    return work_queue._numbers[torch.cuda.current_device()]._all


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("form", FORMS)
def test_gpu_a_launch_leaves_0(form):
    call = Call(form)
    for _ in range(50):
        out = call()
        assert not all_numbers().any()
    call.check(out)
    for _ in range(50):  # and without waiting
        out = call()
    call.check(out)
    assert not all_numbers().any()


@pytest.mark.gpu
@on_hopper
def test_gpu_every_kernel_leaves_0_to_any_other():
    """All on one stream, one behind the other."""
    calls = [*map(Call, FORMS), Call((4, 2), "causal"), Call((4, 2), pieces=3)]
    q, k, v = (x.detach().requires_grad_() for x in calls[0].operands)
    spec = masks.longformer(window=40, global_tokens=20)
    grad = torch.randn_like(q)
    wanted = None
    for _ in range(10):
        found = [call() for call in calls]
        gradients = torch.autograd.grad(sparse_attention(q, k, v, spec), (q, k, v), grad)
        found += [call() for call in calls[::-1]]
        wanted = gradients if wanted is None else wanted
        for one, other in zip(gradients, wanted, strict=True):
            assert torch.equal(one, other)
        for call, out in zip([*calls, *calls[::-1]], found, strict=True):
            call.check(out)
        assert not all_numbers().any()


@pytest.mark.gpu
@on_hopper
def test_gpu_the_first_call_of_all_is_in_a_graph_of_torch(begun_anew):
    """Which looks what is alive in the memory of its graphs."""
    call = Call((4, 2))
    torch._dynamo.reset()
    compiled = torch.compile(lambda: call() * 1.0, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            call.check(compiled())
    assert not all_numbers().any()


@pytest.mark.gpu
@on_hopper
def test_gpu_streams_do_not_disturb_each_other():
    calls = [Call(form) for form in FORMS]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
        torch.cuda.synchronize()
        for call, out in zip(calls, found, strict=True):
            call.check(out)
    assert not all_numbers().any()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("known", [True, False], ids=["numbers", "none yet"])
def test_gpu_graphs_captured_on_one_stream_run_at_once(known, monkeypatch):
    calls = [Call((4, 2)), Call((4, 2), "causal")]
    for call in calls:
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    if not known:
        monkeypatch.setattr(work_queue, "_numbers", {})
        monkeypatch.setattr(work_queue, "_of_streams", {})
    graphs = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call() for _ in range(3)]
        graphs.append((graph, call, outs, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(20):
        for _, _, outs, _ in graphs:
            for out in outs:
                out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, _, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        plain = calls[0]()  # beside both, on a third stream
        torch.cuda.synchronize()
        calls[0].check(plain)
        for _, call, outs, _ in graphs:
            for out in outs:
                call.check(out)
    assert not all_numbers().any()


@pytest.mark.gpu
@on_hopper
def test_gpu_numbers_are_not_of_the_memory_of_a_graph(begun_anew):
    call, pool = Call((4, 2)), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        out = call()
    call.check(out)
    held = [(part["address"], part["total_size"]) for part in pool.snapshot()]
    at = all_numbers().data_ptr()
    assert held and not any(first <= at < first + size for first, size in held)
