"""Benchmarks as far as they show without a GPU: workloads, counts, clocks, the reference, tables, rows and plots."""

import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import ancestry

from benchmarks import attention, ceilings, counters, plot, timing, turns
from benchmarks import rows as rows_module
from benchmarks.inputs import (
    MOST_RELATIVE_ERROR,
    Case,
    Layout,
    attention_call,
    check,
    check_room,
    make_inputs,
    reference,
    with_room,
)
from benchmarks.rows import measured_before
from benchmarks.workloads import PAPER, PROBE, SHAPES, Workload, degenerate, flat, k_ary, shared_root
from codec_jax import Forest

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
    row = attention.bounds(workload, forest, Layout())
    assert row["roofline_us"] == pytest.approx(roofline_us, rel=1e-9)
    assert row["unique_tokens"] == sum(workload.length)
    assert row["total_tokens"] == sum(
        workload.length[n] for end in workload.leaf for n in ancestry(workload.parent, end)
    )


def test_the_roofline_of_a_gpu_that_was_not_measured_is_refused(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H20")
    monkeypatch.setattr(ceilings.jax, "devices", lambda: [gpu])
    with pytest.raises(ValueError, match=r"got NVIDIA H20; measure it with `python -m benchmarks\.ceilings`"):
        ceilings.ceilings()
    gpu.device_kind = "NVIDIA H200"
    assert ceilings.ceilings() == (4.52e6, 700e6)


def test_ceilings_are_bytes_read_and_operations_of_a_product_over_the_time_of_their_kernels(monkeypatch):
    def kernel_time(call: Callable, repeats: int) -> tuple[float, int]:
        call()
        return float(next(times)), 1

    times = iter([2.0, 4.0])
    monkeypatch.setattr(ceilings, "kernel_time", kernel_time)
    row = ceilings.measure(1024, 8)
    assert (row["read_bytes_per_us"], row["flops_per_us"]) == (512.0, 2 * 8**3 / 4)


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


def test_what_does_not_fit_the_limit_is_refused_without_a_wait(monkeypatch):
    memory = {"bytes_limit": 12_000_000_000, "bytes_in_use": 2_000_000_000}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: memory)])
    check_room(10e9)
    with pytest.raises(MemoryError, match=r"expected 10\.1 GB of room on the device, got 10\.0 GB; XLA_PYTHON_CLIENT"):
        check_room(10.1e9)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: None)])
    check_room(1e15)  # a CPU does not say


def test_forests_of_about_one_size_run_the_same_programs(monkeypatch):
    programs, compiled = [], turns.compiled

    def compile_(call: Callable, *arguments: object, tuned: bool) -> jax.stages.Compiled:
        programs.append(call)
        return compiled(call, *arguments, tuned=tuned)

    turns._compiled_for.cache_clear()
    monkeypatch.setattr(turns, "compiled", compile_)
    for workload in (k_ary(2, 3, 40), degenerate(4, 21)):
        inputs = make_inputs(workload, SMALL)
        unshared = inputs._replace(forest=with_room(inputs.forest.unshared()))
        for each in (inputs, unshared):
            check(attention_call(each, SMALL, "xla")[0](), reference(inputs))
    assert len(programs) == 4  # KV, queries, the reference, and attention


def test_inputs_are_the_same_whenever_they_are_drawn(unequal):
    again = make_inputs(degenerate(4, 21), SMALL)
    assert all((a == b).all() for a, b in zip(unequal[1:], again[1:], strict=True))


# ---------------------------------------------------------------------- counters


REPORT = """==WARNING== Note: Running with unmodified GPU clocks.
==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","sm__cycles.max","dram__bytes_write.sum","l1tex__m_xbar2l1tex_read_bytes.sum"
"","","byte","byte","byte","byte"
"0","wrapped_atan2","32","100","0","64"
"1","loop_gather_fusion","265,728","6,656","64","270,656"
"2","body_mosaic_gpu_kernel","1,078,742,784","22,957,312","1,024","1,085,045,088"
"3","wrapped_atan2","32","100","0","64"
"4","wrapped_atan2","32","100","0","64"
"5","body_mosaic_gpu_kernel","1,000","22,957,312","2","3,000"
"6","wrapped_atan2","32","100","0","64"
"7","of a case that did not end","1","1","1","1"
"""
FIRST = {"dram_read_bytes": 1_079_008_512, "dram_written_bytes": 1088, "l2_to_sm_bytes": 1_085_315_744}
THIRD = {"dram_read_bytes": 1000, "dram_written_bytes": 2, "l2_to_sm_bytes": 3000}


def test_counters_are_summed_over_the_kernels_of_each_case():
    assert counters.totals(REPORT) == [FIRST, None, THIRD]


@pytest.mark.parametrize("report", ["", "==ERROR== no permission", '"ID","Kernel Name"\n"",""\n'])
def test_a_report_without_kernels_is_no_count_of_zero(report):
    assert counters.totals(report) == []


def ncu(reports: list[str], failed_case: int | None = None) -> tuple[Callable, list[list[str]]]:
    """Take ncu's place: a process that gives one report after the other, and the cases that it was asked for."""
    asked_for = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked, failed, caller = command[-3:]
        assert caller == "mosaic"
        asked_for.append([each["workload"][0] for each in json.loads(Path(asked).read_text())])
        if failed_case is not None:
            Path(failed).write_text(json.dumps({failed_case: "ValueError: out of luck"}))
        return SimpleNamespace(stdout=reports[len(asked_for) - 1], stderr="==ERROR==  the process\nended")

    return run, asked_for


NAMES = [workload.name for workload in SHAPES]
ONE = "".join(REPORT.splitlines(keepends=True)[2:8])  # a report of the first case alone


def test_a_case_that_is_lost_is_counted_again_by_itself(monkeypatch):
    """The first process fails on the second case and ends within the fourth; the second one ends at once."""
    run, asked_for = ncu([REPORT, "", ONE], failed_case=1)
    monkeypatch.setattr(counters.subprocess, "run", run)
    got = counters.read_counters([Case(workload) for workload in SHAPES], "mosaic")
    assert got == [FIRST, "ValueError: out of luck", THIRD, FIRST]
    assert asked_for == [NAMES, NAMES[3:], NAMES[3:]]


def test_a_case_that_is_always_lost_says_why(monkeypatch):
    run, asked_for = ncu([""] * 3)
    monkeypatch.setattr(counters.subprocess, "run", run)
    got = counters.read_counters([Case(workload) for workload in SHAPES], "mosaic")
    assert got == ["ncu gave no counters: ==ERROR== the process ended"] * len(SHAPES)
    assert asked_for == [NAMES, NAMES[:1], NAMES[:1]]  # the others are not tried in vain
    monkeypatch.setattr(attention, "read_counters", lambda *_: got[:1])
    with pytest.raises(RuntimeError, match="ncu gave no counters"):
        attention.count(Case(SHAPES[0]), "mosaic")
    monkeypatch.setattr(attention, "read_counters", lambda *_: [FIRST])
    assert attention.count(Case(SHAPES[0]), "mosaic") == FIRST


def test_last_words_are_no_counts():
    assert counters.last_words(REPORT, "").startswith("==WARNING==")
    assert counters.last_words(REPORT, "").endswith("Connected to process 1")


# ---------------------------------------------------------------------- rows


def measured(case: Case) -> dict:
    if case.workload.name.startswith("no sharing"):
        raise RuntimeError("out of luck\nand more")
    return {
        "kernel_us": 2.0,
        "roofline_us": 1.0,
        "unique_tokens": 10,
        "cudnn_us": None,
        "cudnn_error": "ValueError: too large",
    }


def test_a_workload_that_fails_keeps_its_place_and_the_others(tmp_path):
    workloads = [k_ary(2, 2, 8), flat(1, 8), k_ary(2, 3, 8)]
    layouts = [Layout(), Layout(64, 4), Layout(page_size=64)]
    cases = [Case(workload, layout, "depths", 7) for workload, layout in zip(workloads, layouts, strict=True)]
    rows = attention.collect(cases, measured, tmp_path / "out.json", [], "numpy")
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
        attention.collect([Case(k_ary(2, 2, 8)), Case(flat(1, 8))], interrupted, path, [])
    assert [row["kernel_us"] for row in json.loads((tmp_path / "out.part").read_text())["rows"]] == [2.0]
    assert path.read_text() == "the last result"


def test_a_resumed_run_measures_what_is_missing_has_failed_or_was_measured_elsewhere(tmp_path, monkeypatch):
    path, asked = tmp_path / "out.json", []

    def measure(case: Case) -> dict:
        asked.append(case)
        return measured(case)

    cases = [Case(k_ary(2, 2, 8)), Case(flat(1, 8)), Case(k_ary(2, 2, 8), Layout(page_size=64))]
    rows = attention.collect(cases, measure, path, [])
    assert measured_before(path, resume=False) == []
    monkeypatch.setattr(rows_module, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: date(2026, 1, 2))))
    more, asked = [*cases, Case(k_ary(2, 3, 8))], []
    again = attention.collect(more, measure, path, measured_before(path, resume=True))
    assert asked == [cases[1], more[3]]
    assert again[::2] == rows[::2]
    assert again[3]["date"] == "2026-01-02"
    asked = []
    elsewhere = [row | {"device": "another"} for row in measured_before(path, resume=True)]
    attention.collect(more, measure, path, elsewhere)
    assert asked == more


def test_a_resumed_run_measures_again_where_a_peer_has_failed(tmp_path):
    whole = {"kernel_us": 2.0, "relative_error": 1e-3, "cudnn_us": 3.0, "cudnn_relative_error": 2e-3}
    failed = whole | {"cudnn_us": None, "cudnn_error": "OutOfMemoryError: no room"}
    impossible = whole | {"cudnn_us": None, "cudnn_error": "ValueError: expected at most 60 GB"}
    refused, out_of_room = "ValueError: no kernel", "OutOfMemoryError: no room"
    peer = {"flashinfer_decode_us": 5.0, "flashinfer_decode_configurations": {"a": 5.0, "b": refused}}
    # Whatever another configuration took, this one may be faster.
    lacking = whole | peer | {"flashinfer_decode_configurations": {"a": 5.0, "b": out_of_room}}
    none = {"flash_attention_us": None, "flash_attention_error": f"a: {refused}; b: {refused}"}
    nowhere = whole | none | {"flash_attention_configurations": {"a": refused, "b": refused}}
    ours = whole | {"kernel_us": None, "error": "ValueError: wrong"}
    rows = [whole, failed, impossible, whole | peer, lacking, nowhere, ours]
    (tmp_path / "out.part").write_text(json.dumps({"rows": rows}))
    assert measured_before(tmp_path / "out.json", resume=True) == [whole, impossible, whole | peer, nowhere]


@pytest.mark.parametrize("draft", ["", "[]", '{"rows": 3}'])
def test_a_damaged_draft_is_not_resumed(tmp_path, draft):
    (tmp_path / "out.part").write_text(draft)
    with pytest.raises(ValueError, match=r"out\.part: expected rows of an interrupted run; remove it to begin anew"):
        measured_before(tmp_path / "out.json", resume=True)


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
