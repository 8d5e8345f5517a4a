"""What the attention benchmark compares: which rows, and which faults of a kernel it sees."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("bench_path")
CPU = torch.device("cpu")
SEQ, BATCH, HEADS = 4160, 2, 3
MASKS = ("causal", "sliding", "longformer", "bigbird", "fixed", "documents", "random")


@pytest.fixture
def cell(bench_path):
    from cases import table2_cell

    return table2_cell(BATCH, SEQ, "longformer", heads=HEADS, head_dim=8, dtype="float32")


@pytest.fixture
def few(bench_path, monkeypatch):
    """Only 256 rows of a plane may be answered."""
    import oracle

    monkeypatch.setattr(oracle, "LIMIT", {"cpu": 256 * SEQ * BATCH * HEADS})
    return oracle


def test_rows_of_every_plane_where_not_all_can_be_answered(few, cell):
    rows = few.choose_rows(cell, 3, CPU)
    assert rows.shape == (BATCH * HEADS, 256)
    assert len({tuple(plane.tolist()) for plane in rows}) == BATCH * HEADS  # drawn for each
    edges = set(few.edge_rows(cell, CPU).tolist())
    assert {0, SEQ - 1, 63, 64, 127, 128, 2079, 2080, 4095, 4096, 4159} <= edges
    assert len(edges) <= 128 and all(edges <= set(plane.tolist()) for plane in rows)
    assert torch.equal(rows, few.choose_rows(cell, 3, CPU))


@pytest.mark.parametrize("mask", MASKS)
def test_edge_rows_lie_in_the_heaviest_and_the_lightest_tiles(mask, few):
    from cases import dense_mask, table2_cell

    cell = table2_cell(1, 1024, mask)
    tiles = dense_mask(cell, CPU).view(16, 64, 16, 64).any(dim=3).any(dim=1).sum(dim=1)
    hit = tiles[torch.unique(few.edge_rows(cell, CPU) // 64)]
    assert (hit.min(), hit.max()) == (tiles.min(), tiles.max())


def test_all_rows_where_they_are_few(cell):
    import oracle
    from cases import GRIDS

    assert oracle.choose_rows(GRIDS["smoke"][-1], 0, CPU) is None
    for long in GRIDS["long"]:  # on a GPU: every row up to 16,384, else about as many elements
        count = oracle.LIMIT["cuda"] // (long.batch * long.heads)
        assert (count >= long.seq**2) == (long.seq == 16384) and count // long.seq > 500


@pytest.mark.parametrize("mask", MASKS)
def test_answers_of_some_rows_are_those_of_all(mask, monkeypatch):
    import oracle
    from cases import dense_mask, keep_rows, make_inputs, table2_cell

    cell = table2_cell(2, 257, mask, heads=2, head_dim=8, dtype="float32")
    keep, rows = dense_mask(cell, CPU), torch.tensor([[0, 256, 77]] * 3 + [[1, 5, 64]])
    assert torch.equal(keep_rows(cell, rows[0]), keep[rows[0]])
    inputs = make_inputs(cell, CPU, torch.Generator().manual_seed(0))
    whole = oracle.answers(cell, inputs, keep, None)
    q, k, v = (t.double() for t in inputs)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    torch.testing.assert_close(whole, exact.flatten(0, 1))
    monkeypatch.setattr(oracle, "STRIP", 2 * 257)  # two rows at a time
    some = oracle.answers(cell, inputs, None, rows)  # too long for a matrix
    torch.testing.assert_close(some, oracle.pick(exact, rows))
    torch.testing.assert_close(some[3], whole[3][rows[3]])


# -- faults ----------------------------------------------------------------------------------------


def nothing(out):
    pass


def one_head_is_another(out):
    out[1, 2] = out[1, 1]


def one_tile_row_is_wrong(out):
    out[:, :, 2048:2112] *= 1.5


def the_last_row_is_forgotten(out):
    out[:, :, -1] = 0


def the_heaviest_rows_are_rough(out):
    # averages of 4,160: small beside those of 129
    out[:, :, :64] *= 1 + 2e-5


def all_is_rough(out):
    out *= 1 + 4e-6  # above the rms of TOLERANCE, below its largest error


def one_element_is_not_written(out):
    out[0, 1, 1001, 3] = float("nan")


def one_element_is_of_an_earlier_call(out):
    out[0, 1, 1001, 3] = 0.25


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (nothing, ""),
        (one_head_is_another, "against fp64"),
        (one_tile_row_is_wrong, "against fp64"),
        (the_last_row_is_forgotten, "against fp64"),
        (the_heaviest_rows_are_rough, "each row over its own size"),
        (all_is_rough, "against fp64"),
        (one_element_is_not_written, "not finite or never written"),
        (one_element_is_of_an_earlier_call, "the average of ones is off by 0.75"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_faults_that_are_seen(fault, words, few, cell):
    from cases import dense_mask, make_inputs

    keep = dense_mask(cell, CPU)
    inputs = make_inputs(cell, CPU, torch.Generator().manual_seed(1))
    rows = few.choose_rows(cell, 1, CPU)
    rows[rows == 1001] = 0  # the element is in a row without an answer

    def attend(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        fault(out)
        return out

    report, wrong = few.check(attend, inputs, rows, few.answers(cell, inputs, keep, rows))
    assert words in wrong and bool(wrong) == bool(words)
    assert "rows without keys" not in wrong
    if fault is nothing:
        assert report.ok and 0 < report.rms_rel < 1e-6


@pytest.mark.parametrize("value", [0.0, 1e-6, 0.5])
def test_rows_without_keys_are_zeros(value, few):
    from cases import Cell, dense_mask, make_inputs

    cell = Cell(1, 512, "random", 0, 0, heads=2, head_dim=8, dtype="float32")
    keep, inputs = dense_mask(cell, CPU), make_inputs(cell, CPU, torch.Generator().manual_seed(1))
    empty = ~keep.any(dim=1)
    assert 0 < int(empty.sum()) < 512

    def attend(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        out[:, :, empty] = value
        return out

    _, wrong = few.check(attend, inputs, None, few.answers(cell, inputs, keep, None), keep=keep)
    assert ("rows without keys are not zero" in wrong) == bool(wrong) == bool(value)


# -- operands in e4m3 -----------------------------------------------------------------------------


def test_rounding_operands_is_timed_only_where_it_is_named(bench_path):
    from cases import GRIDS
    from peers import chosen_variants

    cell, gpu = GRIDS["table2"][0], torch.device("cuda")
    assert not any(v.fp8 for v in chosen_variants(cell, gpu, []))
    (variant,) = chosen_variants(cell, gpu, ["stof_fp8"])
    assert (variant.peer, variant.name, variant.fp8) == ("stof_fp8", "option", True)


def test_what_rounds_is_held_to_what_it_rounded(bench_path):
    """Its errors are told against the operands as they came."""
    import oracle
    from cases import dense_mask, make_inputs, table2_cell
    from stof_compile.kernels.reference import attention_reference, rounded_to_e4m3

    cell = table2_cell(1, 128, "sliding", heads=2, head_dim=16, dtype="float32")
    inputs = make_inputs(cell, CPU, torch.Generator().manual_seed(0))
    keep = dense_mask(cell, CPU)
    exact = oracle.answers(cell, inputs, keep, None)
    rounded = oracle.rounded_answers(cell, inputs, keep, None)

    def attend(q, k, v, factor=1.0):
        operands = (rounded_to_e4m3(x) for x in (q, k, v))
        return (attention_reference(*operands, keep) * factor).float()

    report, wrong = oracle.check(attend, inputs, None, exact, rounded)
    assert not wrong and 0.02 < report.rms_rel < 0.08
    assert "against fp64" in oracle.check(attend, inputs, None, exact)[1]
    spoiled = oracle.check(lambda *given: attend(*given, 1.1), inputs, None, exact, rounded)
    assert "against fp64" in spoiled[1]
