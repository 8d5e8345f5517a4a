"""Projections in the record of a graph that is kept without its fused operators."""

from stof_compile.forms import _left_apart
from stof_compile.plan import PackPlan


def test_what_the_kept_graph_has_not_packed_is_not_called_packed():
    pack = PackPlan(True, (96, 96), "measured", 2.0, 1.0, "packing is faster", nbytes=4096)
    told = _left_apart(pack)
    assert not told.packed and told.nbytes == 0 and told.packed_us == 1.0
    assert told.reason == "packing is faster; the graph that was kept leaves them apart"
    assert _left_apart(told) == told
