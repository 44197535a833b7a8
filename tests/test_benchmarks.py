"""Benchmarks as far as they show without a GPU: workloads, counts, clocks, the reference, tables, rows and plots."""

import json
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, ancestry, contexts, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import attention, counters, peers, plot, timing, tune
from benchmarks.inputs import MOST_RELATIVE_ERROR, Case, Layout, attention_call, check, make_inputs, reference
from benchmarks.peers import PEERS, PageTable, Peers, level_tables, request_table
from benchmarks.workloads import PAPER, PROBE, SHAPES, Workload, degenerate, flat, k_ary, shared_root
from codec_jax import Forest, make_plan
from pallas_kernels.config import LARGE_TOKENS, Config, config_for, config_of

SMALL = Layout(num_q_heads=8, num_kv_heads=2, head_dim=16, page_size=8)


# ---------------------------------------------------------------------- workloads and counts


def test_names_of_workloads_tell_them_apart():
    names = [workload.name for workload in PROBE + PAPER + SHAPES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("workload", PROBE + PAPER + SHAPES, ids=lambda workload: workload.name)
def test_somebody_reads_every_node_of_a_workload(workload):
    read = {node for end in workload.leaf for node in ancestry(workload.parent, end)}
    assert read == set(range(len(workload.parent)))
    assert len(workload.length) == len(workload.parent)


@pytest.mark.parametrize("workload", SHAPES[:2], ids=lambda workload: workload.name)
def test_many_requests_read_deep_trees_of_small_nodes(workload):
    assert len(workload.leaf) == 1024
    assert (min(workload.length), max(workload.length)) == (16, 256)
    assert max(len(ancestry(workload.parent, end)) for end in workload.leaf) > 10


@pytest.mark.parametrize(
    ("workload", "roofline_us"),
    [
        # Bytes: 120,000 + 4 x 2048 tokens of 4096 bytes each, and q and out of 4 x 32 x 128 values of 2 bytes.
        (shared_root(120_000, 4, 2048), (128_192 * 4096 + 4 * 4 * 4096) / 4.52e6),
        # Products: 64 contexts of 120,016 tokens, 4 operations for each of 32 x 128 values.
        (shared_root(120_000, 64, 16), 64 * 120_016 * 4 * 4096 / 700e6),
    ],
    ids=["memory", "arithmetic"],
)
def test_the_roofline_is_the_longer_of_reading_once_and_multiplying(workload, roofline_us):
    forest = Forest.from_nodes(*workload[1:], node_capacity=len(workload.parent))
    query = np.broadcast_to(np.zeros((), np.float16), (len(workload.leaf), 1, 32, 128))
    row = attention.bounds(workload, attention.Inputs(forest, query, query, query), Layout())
    assert row["roofline_us"] == pytest.approx(roofline_us, rel=1e-9)
    assert row["unique_tokens"] == sum(workload.length)
    assert row["total_tokens"] == sum(
        workload.length[n] for end in workload.leaf for n in ancestry(workload.parent, end)
    )


def test_the_bytes_of_a_plan_are_those_of_every_node_once_while_its_readers_fit_a_tile():
    workload = Workload("", [-1, 0, 0], [21, 5, 8], [1, 2])
    _, kv_bytes = attention_call(make_inputs(workload, SMALL), SMALL, "xla")
    # K and V, 2 kv heads of 16 values of 2 bytes.
    assert kv_bytes == (21 + 5 + 8) * 2 * 2 * 16 * 2


# ---------------------------------------------------------------------- clocks


class FakeDevice:
    """Keeps the kernels that ran, each with its milliseconds, and reports them as the profiler does."""

    def __init__(self, flush: list[tuple[str, float]]) -> None:
        self.flush, self.ran = flush, []

    def launch(self, *kernels: tuple[str, float]) -> None:
        self.ran += kernels

    def measure(self, call: Callable, *, aggregate: bool, iterations: int = 1) -> Callable:
        assert not aggregate

        def profiled() -> tuple[object, list]:
            call()
            runs = []
            for _ in range(iterations):
                self.ran.clear()
                result = call()
                runs.append(list(self.ran))
            return result, runs if iterations > 1 else runs[0] or None

        return profiled


@pytest.fixture(params=[["max"], ["max", "max of max"]], ids=["one kernel", "two kernels"])
def device(request, monkeypatch) -> Iterator[FakeDevice]:
    fake = FakeDevice([(name, 0.1) for name in request.param])
    monkeypatch.setattr(timing.profiler, "measure", fake.measure)
    monkeypatch.setattr(timing, "read", lambda _: fake.launch(*fake.flush))
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 4)
    timing.flush_kernels.cache_clear()
    yield fake
    timing.flush_kernels.cache_clear()


def test_the_time_of_a_call_is_the_median_sum_of_its_kernels_without_those_of_the_flush(device):
    ms = iter([9.0, 0.004, 0.002, 0.003])  # the first run warms up
    # A kernel may have the name of one of the flush.
    us, launches = timing.kernel_time(lambda: device.launch(("max", next(ms)), ("other", 0.001)), 3)
    assert us == pytest.approx(4.0)
    assert launches == 2


def test_kernels_are_not_counted_unless_the_flush_comes_first(device):
    count = iter(range(100))

    def late() -> None:
        if next(count):
            device.ran.insert(0, ("mine", 0.001))

    with pytest.raises(RuntimeError, match=r"call: expected kernels after those of the flush, .* got \('mine', 'max'"):
        timing.kernel_time(late, 3)


def test_a_call_without_kernels_has_no_time(device):
    with pytest.raises(RuntimeError, match="call: expected kernels after those of the flush"):
        timing.kernel_time(lambda: None, 3)
    device.flush.clear()
    timing.flush_kernels.cache_clear()
    with pytest.raises(RuntimeError, match="CUPTI"):
        timing.kernel_time(lambda: None, 3)


def test_one_repeat_is_no_median():
    with pytest.raises(ValueError, match="repeats: expected at least 2, got 1"):
        timing.kernel_time(lambda: None, 1)


def test_a_flush_reads_four_times_the_cache_of_an_h200_and_writes_a_number():
    junk = jax.eval_shape(lambda: timing.Flushed(lambda: None).junk)
    used = timing.read.lower(junk).compile().memory_analysis()
    assert used.argument_size_in_bytes >= 4 * 60e6
    assert used.output_size_in_bytes == 4
    assert used.alias_size_in_bytes == 0
    # What it reads may not change what it does, or XLA would leave it out.
    assert timing.read(jnp.array([3, 7, 5])) == 7


# ---------------------------------------------------------------------- tuning


@pytest.mark.parametrize("forests", [tune.FORESTS[: tune.QUICK], tune.FORESTS], ids=["quick", "all"])
def test_forests_that_are_tuned_on_use_both_tables_and_every_kind_of_tile(forests):
    layout, tables, kinds = Layout(), set(), set()
    for workload in forests:
        forest = Forest.from_nodes(*workload[1:], node_capacity=len(workload.parent))
        heads = {"num_q_heads": layout.num_q_heads, "num_kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim}
        plan = make_plan(forest, **heads, num_ctas=132, tile_rows=64, lanes=2)
        tables.add(tune.table_of(sum(workload.length), layout, num_ctas=132))
        kinds.add((plan.num_tiles > 1, bool((plan.segments[:, 0] != plan.segments[:, 1]).any())))
    assert tables == set(tune.TABLES)
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("unique_tokens", [1000, 5 * LARGE_TOKENS])
def test_a_forest_is_tuned_for_the_table_that_serves_it(unique_tokens):
    # 8 kv heads on 20 thread blocks, which make LARGE begin at 2.5 times as many tokens.
    table = tune.table_of(unique_tokens, Layout(), num_ctas=20)
    assert config_for(128, unique_tokens * 8 / 20) == tune.TABLES[table][128]


@pytest.mark.parametrize("table", tune.TABLES)
@pytest.mark.parametrize("head_dim", tune.HEAD_DIMS)
def test_the_configs_that_are_tried_include_the_one_in_force(table, head_dim):
    assert tune.TABLES[table][head_dim] in tune.candidates(head_dim)


def test_rings_that_cannot_fit_are_not_tried():
    # K and V, 128 tokens of 256 values of 2 bytes: 128 KiB a stage.
    assert {config.block_tokens for config in tune.candidates(256)} == {64}
    assert max(config.stages for config in tune.candidates(256)) == 3


@pytest.fixture(params=tune.TABLES)
def swept(request) -> tuple[list[dict], str]:
    """Rows of two forests: 2 stages of 64 tokens are the fastest on the first and fail on the second."""
    rows = []
    for name, slower, roofline_us in (("first", 1.0, 1.0), ("second", 2.0, 0.5)):

        def measure(name: str = name, slower: float = slower) -> dict:
            config = config_for(128, 0.0)
            if (name, config) == ("second", Config(64, 2)):
                raise ValueError("too much shared memory\nand more")
            return {"kernel_us": slower * (config.stages + config.block_tokens / 64)}

        common = {"name": name, "roofline_us": roofline_us, "head_dim": 128, "table": request.param}
        rows += [common | row for row in tune.sweep(128, measure)]
    return rows, request.param


def test_every_config_is_measured_while_planning_and_kernels_find_it():
    def found() -> dict:
        config = config_for(128, 0.0)
        assert config_for(128, 1e9) == config_of(128, config.block_tokens) == config
        assert config_for(64, 0.0) == before["SMALL"][64]
        return {"kernel_us": 1.0}

    def interrupted() -> dict:
        raise KeyboardInterrupt

    before = {name: dict(table) for name, table in tune.TABLES.items()}
    rows = tune.sweep(128, found)
    assert [row.get("error") for row in rows] == [None] * len(rows)
    assert [Config(row["block_tokens"], row["stages"]) for row in rows] == tune.candidates(128)
    with pytest.raises(KeyboardInterrupt):
        tune.sweep(128, interrupted)
    assert before == tune.TABLES


def test_a_config_that_does_not_compile_keeps_its_row_and_cannot_be_the_best(swept):
    rows, table = swept
    assert len(rows) == 2 * len(tune.candidates(128))
    failed = [row for row in rows if row["kernel_us"] is None]
    assert [(row["name"], row["block_tokens"], row["stages"]) for row in failed] == [("second", 64, 2)]
    assert failed[0]["error"] == "ValueError: too much shared memory"
    assert tune.best(rows, 128, table) == Config(64, 3)
    assert tune.best([row | {"kernel_us": None} for row in rows], 128, table) is None


def test_a_report_shows_times_scores_failures_and_the_best(swept):
    rows, table = swept
    lines = tune.report(rows, 128, table).split("\n")
    shown = {tuple(line.split()[:2]): line.split()[2:] for line in lines[2:-1]}
    # 4 x roofline on the first forest, 16 x on the second.
    assert shown["64", "3"] == ["4.0", "8.0", "8.000"]
    assert shown["128", "3"] == ["5.0", "10.0", "10.000"]
    assert shown["64", "2"][:3] == ["3.0", "-", "ValueError:"]
    assert lines[-1] == f"best: {Config(64, 3)}, at present {tune.TABLES[table][128]}"


# ---------------------------------------------------------------------- the reference


def dense(inputs: attention.Inputs, request: int) -> np.ndarray:
    """Attention of one request in float64."""
    slots = inputs.forest.context_slots(request)
    query, key, value = (np.asarray(x, np.float64) for x in inputs[1:])
    key, value = (x.reshape(-1, *x.shape[2:])[slots] for x in (key, value))
    group = query.shape[2] // key.shape[1]
    key, value = (np.repeat(x, group, axis=1) for x in (key, value))
    scores = np.einsum("nh,snh->ns", query[request, 0], key) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("ns,snh->nh", weights / weights.sum(1, keepdims=True), value)


@pytest.fixture(scope="module")
def unequal() -> attention.Inputs:
    return make_inputs(degenerate(4, 21), SMALL)


def test_the_reference_is_attention_of_every_request_over_its_own_context(unequal):
    got = reference(unequal)
    for request in range(4):
        np.testing.assert_allclose(got[request], dense(unequal, request), atol=2e-6)


def test_our_call_passes_the_check_and_one_over_another_forest_does_not(unequal):
    expected = reference(unequal)
    out = attention_call(unequal, SMALL, "xla")[0]()
    assert 0 < check(out, expected) < MOST_RELATIVE_ERROR
    with pytest.raises(ValueError, match="relative error"):
        check(out[::-1], expected)


@pytest.mark.parametrize("wrong", [0.0, np.nan, np.inf])
def test_one_wrong_request_among_many_fails_the_check(wrong):
    expected = np.random.default_rng(0).normal(size=(50, 4, 8)).astype(np.float32)
    out = expected.copy()
    out[31] = wrong
    with pytest.raises(ValueError, match="relative error"):
        check(out, expected)


def test_inputs_are_the_same_whenever_they_are_drawn(unequal):
    again = make_inputs(degenerate(4, 21), SMALL)
    assert all((a == b).all() for a, b in zip(unequal[1:], again[1:], strict=True))


# ---------------------------------------------------------------------- the peers


def entry_slots(table: PageTable, entry: int) -> list[int]:
    """The token slots that a paged kernel reads for an entry."""
    pages = table.pages[table.page_ptr[entry] : table.page_ptr[entry + 1]]
    slots = [int(page) * table.page_size + i for page in pages for i in range(table.page_size)]
    return slots[: max(len(pages) - 1, 0) * table.page_size + int(table.last_page_tokens[entry])]


@settings(max_examples=80)
@given(tree=trees(max_nodes=12, max_length=40, max_requests=10), page_size=st.sampled_from([8, 16]))
def test_a_request_table_lists_every_context_in_order(tree: Tree, page_size: int) -> None:
    forest = Forest.from_nodes(*tree, page_size=page_size)
    table = request_table(forest)
    np.testing.assert_array_equal(table.row_ptr, np.arange(len(tree.leaf) + 1))
    expected = contexts(tree, page_size)
    for row, request in enumerate(forest.request_of_row):
        assert entry_slots(table, row) == expected[request]


@pytest.mark.parametrize(("root", "page_size"), [(64, 32), (48, 16), (50, 2), (51, 1)])
def test_a_request_table_has_the_largest_pages_that_shared_nodes_fill(root, page_size):
    forest = Forest.from_nodes([-1, 0, 0], [root, 3, 70], [1, 2], page_size=32)
    assert request_table(forest).page_size == page_size


@settings(max_examples=80)
@given(tree=trees(max_nodes=12, max_length=40, max_requests=10))
def test_level_tables_together_list_every_context_once(tree: Tree) -> None:
    forest = Forest.from_nodes(*tree, page_size=8)
    got: list[list[int]] = [[] for _ in tree.leaf]
    for table in level_tables(forest):
        assert table.page_size == 8
        assert (np.diff(table.row_ptr) > 0).all()
        assert (table.row_ptr[0], table.row_ptr[-1]) == (0, len(tree.leaf))
        for entry in range(len(table.row_ptr) - 1):
            for row in range(table.row_ptr[entry], table.row_ptr[entry + 1]):
                got[row] += entry_slots(table, entry)
    expected = contexts(tree, 8)
    assert got == [expected[request] for request in forest.request_of_row]


def test_a_level_table_holds_what_is_shared_once():
    first, second = level_tables(Forest.from_nodes([-1, 0, 0, 0], [40, 8, 8, 8], [1, 2, 3], page_size=8))
    assert (first.row_ptr.tolist(), len(first.pages)) == ([0, 3], 5)
    assert (second.row_ptr.tolist(), len(second.pages)) == ([0, 1, 2, 3], 3)


def end_the_process(status: int, names: tuple[str, ...]) -> None:
    os._exit(status)


def test_a_peer_that_cannot_run_or_ends_its_process_is_reported_with_the_reason(monkeypatch):
    arguments = (flat(1, 20), SMALL, np.ones((1, 8, 16), np.float32), 1)
    running = Peers()
    with monkeypatch.context() as patched:
        patched.setattr(peers, "measure", end_the_process)
        crashed = running.measure(1)
    without_gpu = running.measure(*arguments)
    running.close()
    for peer in PEERS:
        assert crashed[f"{peer}_us"] is without_gpu[f"{peer}_us"] is None
        assert crashed[f"{peer}_error"].startswith("BrokenProcessPool")
        assert "BrokenProcessPool" not in without_gpu[f"{peer}_error"]
        assert "Error: " in without_gpu[f"{peer}_error"]


# ---------------------------------------------------------------------- counters


def test_counters_are_summed_over_kernels():
    report = """==WARNING== Note: Running with unmodified GPU clocks.
==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","sm__cycles.max","dram__bytes_write.sum","l1tex__m_xbar2l1tex_read_bytes.sum"
"","","byte","byte","byte","byte"
"0","loop_gather_fusion","265,728","6,656","64","270,656"
"1","body_mosaic_gpu_kernel","1,078,742,784","22,957,312","1,024","1,085,045,088"
"""
    assert counters.total(report) == {
        "dram_read_bytes": 1_079_008_512,
        "dram_written_bytes": 1088,
        "l2_to_sm_bytes": 1_085_315_744,
    }


@pytest.mark.parametrize("report", ["", "==ERROR== no permission", '"ID","Kernel Name"\n"",""\n'])
def test_a_report_without_kernels_is_no_count_of_zero(report):
    with pytest.raises(KeyError, match="no kernels"):
        counters.total(report)


# ---------------------------------------------------------------------- rows


def measured(case: Case) -> dict:
    if case.workload.name.startswith("no sharing"):
        raise RuntimeError("out of luck\nand more")
    return {"kernel_us": 2.0, "roofline_us": 1.0, "unique_tokens": 10, "cudnn_us": None, "cudnn_error": "too large"}


def test_a_workload_that_fails_keeps_its_place_and_the_others(tmp_path):
    workloads = [k_ary(2, 2, 8), flat(1, 8), k_ary(2, 3, 8)]
    layouts = [Layout(), Layout(64, 4), Layout(page_size=64)]
    cases = [Case(workload, layout, "depths", 7) for workload, layout in zip(workloads, layouts, strict=True)]
    rows = attention.collect(cases, measured, tmp_path / "out.json", "numpy")
    assert [row["name"] for row in rows] == [workload.name for workload in workloads]
    assert [row["kernel_us"] for row in rows] == [2.0, None, 2.0]
    assert rows[1]["error"] == "RuntimeError: out of luck"
    assert [(row["heads"], row["page_size"]) for row in rows] == [("32/8", 16), ("64/4", 16), ("32/8", 64)]
    assert [(row["series"], row["x"]) for row in rows] == [("depths", 7)] * 3
    assert {row["versions"]["numpy"] for row in rows} == {np.__version__}
    assert json.loads((tmp_path / "out.part").read_text())["rows"] == rows


def test_rows_outlive_the_run_and_the_last_result_stays(tmp_path):
    def interrupted(case: Case) -> dict:
        if case.workload.name.startswith("no sharing"):
            raise KeyboardInterrupt
        return measured(case)

    path = tmp_path / "out.json"
    path.write_text("the last result")
    with pytest.raises(KeyboardInterrupt):
        attention.collect([Case(k_ary(2, 2, 8)), Case(flat(1, 8))], interrupted, path)
    assert [row["kernel_us"] for row in json.loads((tmp_path / "out.part").read_text())["rows"]] == [2.0]
    assert path.read_text() == "the last result"


def test_the_summary_is_of_geometric_means():
    rows = [
        {"kernel_us": 2.0, "roofline_us": 1.0, "unique_bytes": 10**8, "cudnn_us": 1.0},
        {"kernel_us": 8.0, "roofline_us": 1.0, "unique_bytes": 10**8, "cudnn_us": 16.0},
        {"kernel_us": 9.0, "roofline_us": 1.0, "unique_bytes": 1000, "cudnn_us": None, "flashinfer_decode_us": 18.0},
        {"kernel_us": 4.0, "roofline_us": 1.5, "unique_bytes": 2000, "cudnn_us": 16.0, "flashinfer_decode_us": 2.0},
        {"kernel_us": None, "error": "none"},
    ]
    assert attention.summary(rows).split("\n") == [
        "4 of 5 workloads measured",
        "4.000 x roofline over 2 forests of 100 MB and more, 8.000 x at most",
        "at most 8.0 us over the roofline on 2 forests under 32 MB",
        "1.59 x faster than cudnn over 3 forests, 0.50 x at least",
        "1.00 x faster than flashinfer_decode over 2 forests, 0.50 x at least",
        "1.00 x faster than the best peer over 4 forests, 0.50 x at least",
    ]


# ---------------------------------------------------------------------- the plot


def test_a_plot_shows_every_forest_and_the_peers_that_were_measured(tmp_path):
    common = {"heads": "32/8", "head_dim": 128, "dtype": "bfloat16", "page_size": 16, "date": "2026-01-02"}
    rows = [
        {"name": "first", "roofline_us": 1.0, "kernel_us": 1.5, "cudnn_us": 7.0, "device": "NVIDIA H200"} | common,
        {"name": "second", "roofline_us": 1.0, "kernel_us": 1.2, "cudnn_us": None, "device": "NVIDIA H200"} | common,
        {"name": "third", "kernel_us": None, "error": "none", "device": "NVIDIA H200"} | common,
    ]
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for file in files:
        plot.draw(rows, file)
    text = files[0].read_text()
    for shown in ("first", "second", "codec_jax", "cuDNN, unshared", "NVIDIA H200", "head size 128"):
        assert f"{shown}" in text
    for absent in ("third", "FlashInfer"):
        assert absent not in text
    assert text == files[1].read_text()
