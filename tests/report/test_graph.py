"""What the report reads from the text of a graph: operations, lines, groups, layers, places."""

import pytest

from stof_compile.report.fold import find_repeats, fold
from stof_compile.report.graph import Source, in_package, lacks_its_end, read_graph
from stof_compile.report.groups import TEMPLATE_OPS, find_groups, with_plans
from stof_compile.report.layout import layout


@pytest.fixture
def graphs(record):
    return [read_graph(stage, record.graphs[stage]) for stage in ("normalized", "rewritten")]


def test_operations_with_kind_shape_line_and_what_they_read(graphs):
    before, _ = graphs
    assert before.counts["linear"] == 3 and before.counts["view"] == 3
    ops = {op.name: op for op in before.ops}
    assert ops["sum_1"].kind == "add" and ops["sum_1"].reads == ("norm_0", "a_1")
    assert ops["norm_2"].shape == "f16[1, 4, 8]"
    assert str(ops["norm_2"].source) == "/home/me/model.py:12 in forward"
    assert ops["norm_2"].source.code == "x = self.norm(x + a)"
    assert ops["mask"].kind == "ge"
    assert ops["q_0"].reads == ()  # parameters and inputs are no operations
    assert ops["q_0"].code.endswith("l_w_, None)")


def test_an_operator_with_several_results_has_the_shape_of_the_first(graphs):
    ops = {op.name: op for op in graphs[1].ops}
    assert ops["attention_block_1"].shape == "f16[1, 4, 8]"


def test_places_in_packages_are_short():
    place = "/home/me/.venv/lib/python3.12/site-packages/transformers/models/bert.py"
    source = Source(place, 7, "forward", "y = f(x)")
    assert source.short == "transformers/models/bert.py:7 in forward"
    assert str(source) == f"{place}:7 in forward"
    assert in_package("/home/me/model.py:3 in forward") == "/home/me/model.py:3 in forward"


@pytest.mark.parametrize("text", ["def f(: ...", "n = 1", "", "\0"])
def test_a_text_that_is_no_graph_gives_a_remark(text):
    graph = read_graph("captured", text)
    assert not graph.ops and "captured.py" in graph.remark


def test_a_graph_is_whole_up_to_its_return(record):
    text = record.graphs["normalized"]
    inner = text.replace("class", "    class").replace("\n", "\n    ")
    for whole in (text, f"{text}\n{inner}", text.replace("l_w_", "<any object at 0x7f>"),
                  "class G:\n    def forward(self):\n        return None"):  # fmt: skip
        assert not lacks_its_end(whole)
    assert lacks_its_end("# captured graph\n") == "line 1 is the last one: '# captured graph'"
    assert lacks_its_end("") == "it is empty"
    assert lacks_its_end(text.rstrip()[:-1]).endswith("'return (norm_2,'")


def test_groups_are_what_vanished(graphs, record):
    sites = [(s.name, s.kernel) for s in record.sites if s.status == "rewritten"]
    groups = with_plans(find_groups(*graphs), record.chains, sites)
    kinds = [group.op.kind for group in groups]
    assert kinds == ["stof.attention_block", "stof.fused_norm"] * 3
    assert groups[0].members == ("arange", "mask", "a_0")  # its mask is computed no more
    assert groups[2].members == ("a_1",)
    assert [group.members for group in groups[1::2]] == [
        (f"sum_{i}", f"norm_{i}") for i in range(3)
    ]
    assert groups[2].site == "encoder.layer.1"
    assert groups[1].segment is not None and groups[1].segment.template == "triton_norm"
    assert groups[0].segment is None


def test_a_segment_with_other_settings_is_not_taken_for_it(graphs, record):
    chain = record.chains[0]
    other = chain.segments[2].__class__(2, 4, "triton_norm", (("num_warps", 8), ("rows", 16)))
    chains = [chain.__class__(**{**vars(chain), "segments": (*chain.segments[:2], other)})]
    assert all(g.segment is None for g in with_plans(find_groups(*graphs), chains, []))


def test_every_template_has_its_operator():
    from stof_compile.templates import TEMPLATES

    assert set(TEMPLATE_OPS) == {template.name for template in TEMPLATES}


def test_layers_are_drawn_once(graphs):
    before, after = graphs
    folded = fold(before)
    (repeat,) = folded.repeats_shown
    assert (repeat.period, repeat.count) == (4, 3)
    assert [node.label for node in folded.nodes] == [
        "arange", "ge", "linear", "scaled_dot_product_attention", "add", "layer_norm",
    ]  # fmt: skip
    assert folded.left_out == 3
    assert {(2, 3), (1, 3), (3, 4), (4, 5)} <= set(folded.edges)  # through the view
    known = {op.name for op in before.ops}
    assert len(fold(after, known).nodes) == 3


def test_written_out_lines_become_one_node():
    text = "class G:\n    def forward(self, x):\n        # File: a.py:1 in f, code: gelu(x)\n"
    text += "        y = torch.arange(4)\n" + "".join(
        f"        n{i} = {'y' if i == 0 else f'n{i - 1}'} * 2\n" for i in range(5)
    )
    folded = fold(read_graph("rewritten", text), {"y"})
    assert [node.label for node in folded.nodes] == ["arange", "5 ops of one line"]
    assert folded.edges == ((0, 1),)


@pytest.mark.parametrize(
    "text, found",
    [
        ("abcabcabcabc", [(0, 3, 4)]),
        ("xyabcdabcdabcdz", [(2, 4, 3)]),
        ("abcdabcd" + "xyzwxyzwxyzw", [(0, 4, 2), (8, 4, 3)]),  # encoder and decoder
        ("abcdefgh", []),
        ("aab", []),  # too little to save
        ("", []),
    ],
)
def test_repeats(text, found):
    assert [(r.start, r.period, r.count) for r in find_repeats(text)] == found


def test_nothing_overlaps_in_a_picture(graphs):
    for graph in graphs:
        folded = fold(graph)
        picture = layout(folded)
        boxes = picture.boxes
        for i, a in enumerate(boxes):
            assert a.x >= 0 and a.x + a.width <= picture.width
            assert a.y >= 0 and a.y + a.height <= picture.height
            for b in boxes[:i]:
                apart = a.x + a.width <= b.x or b.x + b.width <= a.x
                assert apart or a.y + a.height <= b.y or b.y + b.height <= a.y
        for start, stop in folded.edges:
            assert boxes[start].y < boxes[stop].y
        (frame,) = picture.frames
        inside = [b for b, n in zip(boxes, folded.nodes, strict=True) if n.repeat >= 0]
        assert all(frame.y < b.y and b.y + b.height < frame.y + frame.height for b in inside)


def test_a_graph_without_operations_has_a_picture():
    assert layout(fold(read_graph("captured", "n = 1"))).boxes == ()


def test_what_makes_a_mask_stands_above_its_reader_not_at_the_top():
    text = "class GraphModule(torch.nn.Module):\n    def forward(self, x):\n"
    for line in ("n = torch.arange(4)", "a = torch.exp(x)", "b = torch.sin(a)", "c = torch.cos(b)"):
        text += f"        {line}\n"
    folded = fold(read_graph("captured", text + "        d = torch.add(c, n)\n"))
    boxes = layout(folded).boxes
    height = {node.label: box.y for node, box in zip(folded.nodes, boxes, strict=True)}
    assert height["exp"] < height["sin"] < height["arange"] == height["cos"] < height["add"]
