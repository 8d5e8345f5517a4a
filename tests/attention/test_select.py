"""Selection: Equation 1, the measured choice under a fake timer, the store, forced kernels."""

import pytest
import torch

from stof_compile import masks
from stof_compile.attention import select
from stof_compile.attention.decision_table import packs_well
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.select import choose, paper_choice
from stof_compile.budget import Budget
from stof_compile.errors import StofOptionError
from stof_compile.options import StofOptions
from stof_compile.plan import Candidate, Plan, PlanFile
from stof_compile.store import Store


def problem(spec=None, length=64, **kwargs):
    meta = TensorMeta((1, 2, length, 16), (2 * length * 16, 16, 32, 1), torch.float32)
    return AttentionProblem(meta, meta, meta, spec, 0, torch.device("cpu"), 0.25, **kwargs)


@pytest.mark.parametrize("length", [64, 128, 256, 512, 1024])
@pytest.mark.parametrize("name", ["causal", "sliding", "longformer", "bigbird"])
def test_equation_1_takes_block_for_the_masks_of_table_2(name, length):
    width = int(length**0.5)
    rules = {
        "causal": masks.causal(),
        "sliding": masks.sliding_window(width),
        "longformer": masks.longformer(width, width),
        "bigbird": masks.bigbird(width, width, 0.1),
    }
    assert paper_choice(rules[name], length, length)[0] == "block"


def test_equation_1_takes_row_for_short_and_for_very_narrow_masks():
    assert paper_choice(masks.causal(), 16, 16)[0] == "row"
    assert paper_choice(masks.sliding_window(16, causal=True), 1024, 1024)[0] == "row"
    assert paper_choice(masks.sliding_window(16), 2048, 2048)[0] == "row"
    kernel, threshold = paper_choice(masks.sliding_window(32), 4096, 4096)
    assert kernel == "block"
    assert threshold == pytest.approx(0.0007, abs=1e-4)


@pytest.fixture
def timer(monkeypatch):
    """Replace measuring by a table of microseconds; returns the list of what was measured."""
    measured = []
    times = {"sdpa": 100.0, "flex": 40.0, "gather": 60.0}

    def fake(problem, kernel, config, generator):
        measured.append(kernel)
        return Candidate(
            kernel, config, "measured", times[kernel], times[kernel], times[kernel], 1e-6
        )

    monkeypatch.setattr(select, "measure_candidate", fake)
    fake.times, fake.measured = times, measured
    return fake


def test_the_fastest_measured_kernel_wins_and_is_kept(timer, tmp_path):
    store, options = Store(tmp_path, "here"), StofOptions()
    first = choose(problem(masks.sliding_window(4)), options, store, Budget(60))
    assert (first.kernel, first.source) == ("flex", "measured")
    assert sorted(timer.measured) == ["flex", "gather", "sdpa"]
    again = choose(problem(masks.sliding_window(4)), options, store, Budget(60))
    assert (again.kernel, again.source) == ("flex", "store")
    assert len(timer.measured) == 3


def test_a_choice_made_while_memory_was_short_is_not_kept(timer, monkeypatch, tmp_path):
    def short(problem, kernel, config, generator):
        if kernel == "flex":
            return Candidate(
                kernel, config, "failed", reason="OutOfMemoryError: CUDA out of memory"
            )
        return timer(problem, kernel, config, generator)

    monkeypatch.setattr(select, "measure_candidate", short)
    store, options = Store(tmp_path, "here"), StofOptions()
    given = problem(masks.sliding_window(4))
    assert choose(given, options, store, Budget(60)).kernel == "gather"
    monkeypatch.setattr(select, "measure_candidate", timer)
    assert choose(given, options, store, Budget(60)).kernel == "flex"


def test_sdpa_wins_when_it_is_faster(timer, tmp_path):
    timer.times["sdpa"] = 1.0
    assert (
        choose(problem(masks.causal()), StofOptions(), Store(tmp_path, "here"), Budget(60)).kernel
        == "sdpa"
    )


def test_a_spent_budget_keeps_what_was_measured_and_stores_nothing(timer, tmp_path):
    now = iter([0.0, 0.0, 5.0, 20.0, 30.0, 40.0])
    store = Store(tmp_path, "here")
    plan = choose(
        problem(masks.sliding_window(4)),
        StofOptions(),
        store,
        Budget(10.0, clock=lambda: next(now)),
    )
    assert plan.source == "measured"
    assert [c.status for c in plan.candidates].count("predicted") == 1
    assert store.get("attention", problem(masks.sliding_window(4)).key) is None


def tiles_worth_timing(monkeypatch, spec, length, head_dim=64):
    pytest.importorskip("triton")
    from stof_compile.attention.decision_table import plausible_configs

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    heads = 12
    strides = (length * heads * head_dim, head_dim, heads * head_dim, 1)
    meta = TensorMeta((8, heads, length, head_dim), strides, torch.float16)
    asked = AttentionProblem(meta, meta, meta, spec, 0, torch.device("cpu"), 0.125)
    portable = [config for config in plausible_configs(asked, "block") if not config[9]]
    assert portable[0][:2] == (64, 64)
    return {config[:2] for config in portable}


def test_narrow_tiles_are_timed_where_they_hold_much_less_of_the_mask(monkeypatch):
    window = masks.sliding_window(22)  # two thirds: 128 of 192 keys a tile row
    assert (64, 32) in tiles_worth_timing(monkeypatch, window, 512)
    assert (64, 32) in tiles_worth_timing(monkeypatch, masks.bigbird(22, 22, 0.1), 512)
    # 192 keys a tile row in either
    assert (64, 32) not in tiles_worth_timing(monkeypatch, masks.sliding_window(45), 2048)
    assert (64, 32) not in tiles_worth_timing(monkeypatch, masks.causal(), 512)


def test_tall_tiles_are_timed_where_they_hold_little_more_of_the_mask(monkeypatch):
    assert (128, 128) in tiles_worth_timing(monkeypatch, masks.causal(), 2048, head_dim=128)
    narrow = tiles_worth_timing(monkeypatch, masks.sliding_window(22), 2048, head_dim=128)
    assert all(block_q <= 64 for block_q, _ in narrow)


def test_slow_tile_sizes_are_measured_once(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    configs = {
        "block": [(64, 64, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4)],
        "sdpa": [()],
        "row": [],
    }
    monkeypatch.setitem(select.KERNELS, "cpu", ("block", "row", "sdpa"))
    monkeypatch.setattr(select, "plausible_configs", lambda problem, kernel: configs[kernel])
    monkeypatch.setattr(select, "decide", lambda problem: ("block", (64, 64, 4, 3), "table"))
    measured = []

    def fake(problem, kernel, config, generator):
        measured.append(config)
        us = {(): 90.0, 64: 10.0, 128: 18.0}[config[0] if config else ()] - len(measured)
        return Candidate(kernel, config, "measured", us, us, us, 1e-6)

    monkeypatch.setattr(select, "measure_candidate", fake)
    plan = choose(problem(masks.causal()), StofOptions(), Store(tmp_path, "here"), Budget(60))
    assert measured == [(64, 64, 4, 3), (), (128, 128, 8, 3), (64, 64, 4, 4)]
    assert plan.config == (64, 64, 4, 4)
    (skipped,) = (c for c in plan.candidates if c.status == "predicted")
    assert skipped.config == (128, 128, 8, 4) and "tile sizes took" in skipped.reason
    assert plan.source == "measured" and Store(tmp_path, "here").get(
        "attention", problem(masks.causal()).key
    )


def test_budget_zero_asks_the_table(timer):
    plan = choose(problem(masks.sliding_window(4)), StofOptions(tune_budget_s=0), None, Budget(0))
    assert plan.source == "table"
    assert timer.measured == []


def test_a_plan_wins_over_everything(timer, tmp_path):
    p = problem(masks.sliding_window(4))
    made = choose(p, StofOptions(attention="gather"), None, Budget(0))
    text = PlanFile.of([Plan("here", {p.key: made}, graph="g")]).to_json()
    again = PlanFile.from_json(text).for_graph("g")
    replayed = choose(p, StofOptions(), Store(tmp_path, "here"), Budget(60), again)
    assert (replayed.kernel, replayed.source) == ("gather", "plan")
    assert timer.measured == []


def test_forcing_a_kernel_the_device_lacks_is_an_option_error():
    with pytest.raises(StofOptionError, match=r"attention='row' has no kernel for device 'cpu'"):
        choose(problem(masks.causal()), StofOptions(attention="row"), None, Budget(0))


def test_the_key_sees_statistics_not_contents():
    one = problem(masks.sliding_window(4, causal=True))
    assert one.key == problem(masks.sliding_window(4, causal=True)).key
    assert one.key != problem(masks.sliding_window(8, causal=True)).key
    assert one.key != problem(masks.sliding_window(4, causal=True), padding=True).key


@pytest.mark.parametrize("loops", [1, 2, 6, 7])
def test_a_stored_config_promises_nothing_the_mask_does_not_keep(loops):
    pytest.importorskip("triton")
    from stof_compile.attention.call import honest_config

    config = (16, 16, 4, 2, loops, 0, 1, 0, 0)
    scattered = masks.build_block_mask(
        masks.causal() | masks.random_blocks(0.5, block=16), 64, 64, 16
    )
    assert scattered.has_part and scattered.has_full and not scattered.is_band
    assert honest_config(scattered, config, 1)[4] == 3
    band = masks.build_block_mask(masks.sliding_window(4), 64, 64, 16)
    assert honest_config(band, config, 1)[4] == (3 if loops == 2 else loops)


def test_equation_1_takes_masks_that_differ_by_head():
    spec = masks.per_head([masks.causal(), masks.sliding_window(4)])
    plan = choose(problem(spec), StofOptions(attention="paper"), None, Budget(0))
    assert plan.source == "paper"


def test_the_gate_counts_rows_from_the_offset():
    """A tensor mask of 32 queries that stand at 32..63 of 64 keys, as behind a cache."""
    queries = TensorMeta((1, 2, 32, 16), (1024, 16, 32, 1), torch.float32)
    keys = TensorMeta((1, 2, 64, 16), (2048, 16, 32, 1), torch.float32)
    spec = masks.from_tensor(torch.rand(32, 64, generator=torch.Generator().manual_seed(0)) < 0.5)
    spec = spec.bind(32, 64, 32)
    held = AttentionProblem(queries, keys, keys, spec, 32, torch.device("cpu"), 0.25)
    generator = torch.Generator().manual_seed(0)
    assert select.measure_candidate(held, "sdpa", (), generator).status == "measured"


# -- gathering on a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 4, 16, 40])
def test_few_queries_are_compared_with_tiles_of_as_few(q_len):
    keep = torch.rand(q_len, 1024, generator=torch.Generator().manual_seed(0)) < 0.9
    query, key = (
        TensorMeta((1, 2, length, 16), (2 * length * 16, 16, 32, 1), torch.float32)
        for length in (q_len, 1024)
    )
    asked = AttentionProblem(
        query, key, key, masks.from_tensor(keep), 0, torch.device("cpu"), 0.125
    )
    assert not any(packs_well(asked, (rows, 64)) for rows in (16, 32, 64))


def test_keys_tell_masks_apart_that_pack_differently(monkeypatch):
    """Their tiles are alike, one column here and one for each row there."""

    def on_host(self, tile):
        return masks.build_block_mask(self.spec, self.q_len, self.k_len, tile)

    monkeypatch.setattr(AttentionProblem, "block_mask", on_host)
    meta = TensorMeta((1, 2, 1024, 64), (2 * 1024 * 64, 64, 128, 1), torch.float16)

    def asked(spec, **facts):
        return AttentionProblem(meta, meta, meta, spec, 0, torch.device("cuda"), 0.125, **facts)

    columns = masks.rule(lambda b, h, q, k: k % 64 == 5)
    one, two = asked(masks.dilated(16, 64)), asked(columns)
    assert one.statistics == two.statistics and one.key != two.key
    assert not packs_well(one, (64, 64)) and packs_well(two, (64, 64))
    # where nothing can be gathered the numbers are not asked for
    one, two = (asked(spec, training=True) for spec in (masks.dilated(16, 64), columns))
    assert one.key == two.key
