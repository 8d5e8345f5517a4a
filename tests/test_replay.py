"""Lasting replays and bursts of a CUDA device, with its parts played by ours."""

import time
from contextlib import nullcontext

import pytest
import torch

from stof_compile.replay import BURST_S, BURSTS, PAUSE_S, time_in_bursts, time_under_load


class PlayedCuda:
    """CUDA's parts played by ours: time passes in calls, and a graph repeats its calls."""

    def __init__(self, monkeypatch):
        self.now_ms, self.played, self.capturing, self.slow = 0.0, [], [], lambda name: 1
        cuda = self

        class Stream(nullcontext):
            def wait_stream(self, other):
                pass

            def synchronize(self):
                pass

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                self.at = cuda.now_ms

            def elapsed_time(self, later):
                return later.at - self.at

        class Graph:
            def capture_begin(self, capture_error_mode):
                self.calls = []
                cuda.capturing.append(self)

            def capture_end(self):
                cuda.capturing.remove(self)

            def replay(self):
                name = self.calls[0][0]
                cuda.now_ms += sum(ms for _, ms in self.calls) * cuda.slow(name)
                cuda.played.append(name)

        parts = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "current_stream": Stream}
        parts |= {"stream": lambda s: s, "synchronize": Stream}
        for name, part in parts.items():
            monkeypatch.setattr(torch.cuda, name, part)

    def function(self, name, ms):
        def call(x):
            if self.capturing:
                self.capturing[0].calls.append((name, ms))
            else:
                self.now_ms += ms

        return call

    def raising(self, error):
        """A function that cannot be captured."""

        def call(x):
            if self.capturing:
                raise error

        return call


def test_turns_under_load_have_no_pause_and_a_first_half_that_does_not_count(monkeypatch):
    cuda = PlayedCuda(monkeypatch)
    # the clock is another's at first
    cuda.slow = lambda name: 2 if cuda.played[-5:].count(name) < 5 else 1
    fns = [cuda.function("a", 0.05), cuda.function("b", 0.125)]
    one, two = time_under_load(fns, [(1,), (2,)], 0.01, 3)
    assert one == pytest.approx([50.0] * 15) and two == pytest.approx([125.0] * 15)
    # there, back, and there again, behind what warms up
    assert "".join(cuda.played[-60:]) == "".join(name * 10 for name in "abbaab")
    assert set(cuda.played[-160:-60]) == {"a"}
    fails = cuda.raising(RuntimeError("operation not permitted"))
    assert time_under_load([*fns, fails], [(1,)], 0.01, 3) is None
    with pytest.raises(KeyboardInterrupt):
        time_under_load([*fns, cuda.raising(KeyboardInterrupt)], [(1,)], 0.01, 3)
    assert not cuda.capturing


def test_bursts_begin_after_a_pause_with_a_replay_that_does_not_count(monkeypatch):
    cuda = PlayedCuda(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda s: cuda.played.append(s))

    def slow(name):  # the first replay behind a pause, and from the 40th on for want of power
        since = cuda.played[::-1].index(PAUSE_S) if PAUSE_S in cuda.played else 1
        return 2 if since == 0 or since >= 40 else 1

    cuda.slow = slow
    taken = time_in_bursts(cuda.function("a", 0.05), [(1,), (2,)])
    replays = round(BURST_S * 1e3 / 0.5)
    assert taken == pytest.approx([50.0] * (BURSTS * (replays - 1)))
    assert cuda.played[-BURSTS * (replays + 1) :] == BURSTS * [PAUSE_S, *"a" * replays]
    assert time_in_bursts(cuda.raising(RuntimeError("no")), [(1,)]) is None
    cuda.slow = lambda name: 1
    # of a replay as long as a burst one counts; two that outlast the full clock are no burst
    assert time_in_bursts(cuda.function("a", 14.0), [(1,)]) == pytest.approx([14e3] * BURSTS)
    assert time_in_bursts(cuda.function("a", 16.0), [(1,)]) is None
    assert time_in_bursts(cuda.function("a", 6.0), [(1,), (2,), (3,)]) is None


def test_what_a_function_raises_by_itself_is_not_left_out(monkeypatch):
    cuda = PlayedCuda(monkeypatch)

    def fails(x):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        time_in_bursts(fails, [(1,)])
    assert not cuda.capturing
