"""Benchmarks as far as they show without a GPU: workloads, counts, clocks, the reference, counters and rows."""

import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import attend_alone
from forests import ancestry

from benchmarks import attention, ceilings, counters, timing, turns
from benchmarks import rows as rows_module
from benchmarks.inputs import (
    MAX_RELATIVE_ERROR,
    Case,
    Layout,
    check,
    make_inputs,
    planned_call,
    reference,
    with_room,
)
from benchmarks.rows import measured_before
from benchmarks.workloads import PAPER, PROBE, SHAPES, degenerate, flat, k_ary, shared_root
from codec_jax import Forest

SMALL = Layout(num_q_heads=8, num_kv_heads=2, head_dim=16, page_size=8)


# ---------------------------------------------------------------------- workloads and counts


def test_somebody_reads_every_node_of_a_workload_and_names_tell_them_apart():
    workloads = PROBE + PAPER + SHAPES
    assert len({workload.name for workload in workloads}) == len(workloads)
    for workload in workloads:
        read = {node for end in workload.leaf for node in ancestry(workload.parent, end)}
        assert read == set(range(len(workload.parent)))
        assert len(workload.length) == len(workload.parent)


@pytest.mark.parametrize(
    ("workload", "unique", "total", "roofline_us"),
    [
        # Bytes: 4096 for each of the unique tokens, and q and out of 4 x 32 x 128 values of 2 bytes.
        (shared_root(120_000, 4, 2048), 128_192, 4 * 122_048, (128_192 * 4096 + 4 * 4 * 4096) / 4.52e6),
        # Products: 4 operations for each of 32 x 128 values and each token of a context.
        (shared_root(120_000, 64, 16), 121_024, 64 * 120_016, 64 * 120_016 * 4 * 4096 / 700e6),
    ],
)
def test_the_roofline_is_the_longer_of_reading_once_and_multiplying(workload, unique, total, roofline_us):
    row = attention.bounds(workload, Forest.from_nodes(*workload[1:]), Layout())
    assert (row["unique_tokens"], row["total_tokens"]) == (unique, total)
    assert row["roofline_us"] == pytest.approx(roofline_us, rel=1e-9)


def test_the_roofline_of_a_gpu_that_was_not_measured_is_refused(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H20")
    monkeypatch.setattr(ceilings.jax, "devices", lambda: [gpu])
    with pytest.raises(ValueError, match=r"got NVIDIA H20; measure it with `python -m benchmarks\.ceilings`"):
        ceilings.ceilings()
    gpu.device_kind = "NVIDIA H200"
    assert ceilings.ceilings() == (4.52e6, 700e6)


# ---------------------------------------------------------------------- clocks


class FakeDevice:
    """Keeps the kernels that ran, each with its milliseconds, and reports them as the profiler does."""

    def __init__(self, flush: list[str]) -> None:
        self.flush, self.ran = [(name, 0.1) for name in flush], []

    def measure(self, call: Callable, *, aggregate: bool, iterations: int = 1) -> Callable:
        def profiled() -> tuple[None, list]:
            runs = []
            for _ in range(iterations + 1):  # the first one warms up
                self.ran.clear()
                call()
                runs.append(list(self.ran))
            return None, runs[1:] if iterations > 1 else runs[1] or None

        return profiled


@pytest.fixture(params=[["max"], ["max", "max of max"]], ids=["one kernel", "two kernels"])
def device(request, monkeypatch) -> Iterator[FakeDevice]:
    fake = FakeDevice(request.param)
    monkeypatch.setattr(timing.profiler, "measure", fake.measure)
    monkeypatch.setattr(timing, "read", lambda _: fake.ran.extend(fake.flush))
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 4)
    timing.flush_kernels.cache_clear()
    yield fake
    timing.flush_kernels.cache_clear()


def test_the_time_of_a_call_is_the_median_sum_of_its_kernels_without_those_of_the_flush(device):
    ms = iter([9.0, 0.004, 0.002, 0.003])  # the first run warms up
    # A kernel may have the name of one of the flush.
    us, launches = timing.kernel_time(lambda: device.ran.extend([("max", next(ms)), ("other", 0.001)]), 3)
    assert us == pytest.approx(4.0)
    assert launches == 2


def test_kernels_are_not_counted_unless_the_flush_comes_first(device):
    count = iter(range(100))

    def late() -> None:
        if next(count):
            device.ran.insert(0, ("mine", 0.001))

    with pytest.raises(RuntimeError, match=r"call: expected kernels after those of the flush, .* got \('mine', 'max'"):
        timing.kernel_time(late, 3)
    with pytest.raises(RuntimeError, match="call: expected kernels after those of the flush"):
        timing.kernel_time(lambda: None, 3)


def test_a_flush_reads_four_times_the_cache_of_an_h200_and_writes_a_number():
    junk = jax.eval_shape(lambda: timing.Flushed(lambda: None).junk)
    used = timing.read.lower(junk).compile().memory_analysis()
    assert used.argument_size_in_bytes >= 4 * 60e6
    assert used.output_size_in_bytes == 4
    assert used.alias_size_in_bytes == 0
    # Its result is that of reading, or XLA would leave it out.
    assert timing.read(jnp.array([3, 7, 5])) == 7


# ---------------------------------------------------------------------- the reference


@pytest.fixture(scope="module")
def unequal() -> attention.Inputs:
    return make_inputs(degenerate(4, 21), SMALL)


def test_the_reference_is_attention_of_every_request_over_its_own_context(unequal):
    query, key, value = (np.asarray(x, np.float64) for x in unequal[1:])
    for request, out in enumerate(reference(unequal)):
        slots = unequal.forest.context_slots(request)
        own = (x.reshape(-1, *x.shape[2:])[slots] for x in (key, value))
        np.testing.assert_allclose(out, attend_alone(query[request], *own).out[0], atol=2e-6)


def test_our_call_passes_the_check_and_one_over_another_forest_does_not(unequal):
    expected = reference(unequal)
    out = planned_call(unequal, SMALL, "xla")[0]()
    assert 0 < check(out, expected) < MAX_RELATIVE_ERROR
    with pytest.raises(ValueError, match="relative error"):
        check(out[::-1], expected)
    many = np.random.default_rng(0).normal(size=(50, 4, 8)).astype(np.float32)
    wrong = np.where(np.arange(50)[:, None, None] == 31, np.nan, many)
    with pytest.raises(ValueError, match="relative error"):
        check(wrong, many)


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
            check(planned_call(each, SMALL, "xla")[0](), reference(inputs))
    assert len(programs) == 4  # KV, queries, the reference, and attention


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


def test_counters_are_summed_over_the_kernels_of_each_case_and_no_kernels_are_no_count():
    assert counters.totals(REPORT) == [FIRST, None, THIRD]
    for report in ("", "==ERROR== no permission", '"ID","Kernel Name"\n"",""\n'):
        assert counters.totals(report) == []


def test_what_fails_or_is_lost_under_ncu_says_why(monkeypatch):
    """The process fails on the second case and ends within the fourth."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked, failed, caller = command[-3:]
        assert caller == "mosaic"
        assert [each["workload"][0] for each in json.loads(Path(asked).read_text())] == [each.name for each in SHAPES]
        Path(failed).write_text(json.dumps({1: "ValueError: out of luck"}))
        return SimpleNamespace(stdout=REPORT, stderr="==ERROR==  the process\nended")

    monkeypatch.setattr(counters.subprocess, "run", run)
    lost = "ncu gave no counters: ==ERROR== the process ended"
    counted = counters.read_counters([Case(workload) for workload in SHAPES], "mosaic")
    assert counted == [FIRST, "ValueError: out of luck", THIRD, lost]


# ---------------------------------------------------------------------- rows


def asked(path: Path, resume: bool = False, implementation: str | None = "mosaic") -> SimpleNamespace:
    return SimpleNamespace(json=path, resume=resume, implementation=implementation)


def measured(case: Case, peers: None) -> dict:
    if case.workload.name.startswith("no sharing"):
        raise RuntimeError("out of luck\nand more")
    if case.layout.page_size == 32:
        raise KeyboardInterrupt
    return {"kernel_us": 2.0, "roofline_us": 1.0, "cudnn_us": None, "cudnn_error": "ValueError: too large"}


def test_a_workload_that_fails_keeps_its_place_and_rows_outlive_the_run(tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text("the last result")
    layouts = [Layout(), Layout(64, 4), Layout(page_size=64), Layout(page_size=32)]
    workloads = [k_ary(2, 2, 8), flat(1, 8), k_ary(2, 3, 8), k_ary(2, 2, 8)]
    cases = [Case(workload, layout, "depths", 7) for workload, layout in zip(workloads, layouts, strict=True)]
    with pytest.raises(KeyboardInterrupt):
        attention.measure_all(cases, measured, [], asked(path))
    assert path.read_text() == "the last result"
    rows = json.loads((tmp_path / "out.part").read_text())["rows"]
    assert [(row["name"], row["kernel_us"]) for row in rows] == [
        (workload.name, us) for workload, us in zip(workloads[:3], [2.0, None, 2.0], strict=True)
    ]
    assert rows[1]["error"] == "RuntimeError: out of luck"
    assert [(row["heads"], row["page_size"]) for row in rows] == [("32/8", 16), ("64/4", 16), ("32/8", 64)]
    assert {(row["series"], row["x"], row["versions"]["jax"]) for row in rows} == {("depths", 7, jax.__version__)}
    shown = capsys.readouterr().out
    assert all(said in shown for said in ("kernel_us 2", "cudnn_error: ValueError: too large", "out of luck"))


def test_a_resumed_run_measures_what_is_missing_has_failed_or_was_measured_elsewhere(tmp_path, monkeypatch):
    seen: list[Case] = []

    def run(cases: list[Case], resume: bool) -> list[dict]:
        seen.clear()
        measure = lambda case, peers: seen.append(case) or measured(case, peers)  # noqa: E731
        return attention.measure_all(cases, measure, [], asked(path, resume))

    path, cases = tmp_path / "out.json", [Case(k_ary(2, 2, 8)), Case(flat(1, 8)), Case(k_ary(2, 3, 8))]
    rows = run(cases[:2], resume=False)
    monkeypatch.setattr(rows_module, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: date(2026, 1, 2))))
    again = run(cases, resume=True)
    assert seen == cases[1:]
    assert again[0] == rows[0]
    assert again[2]["date"] == "2026-01-02"
    draft = tmp_path / "out.part"
    draft.write_text(json.dumps({"rows": [row | {"device": "another"} for row in again]}))
    run(cases, resume=True)
    assert seen == cases
    run(cases, resume=False)
    assert seen == cases


def test_rows_of_another_implementation_or_of_other_flags_are_measured_again(tmp_path, monkeypatch):
    def run(implementation: str | None) -> dict:
        asked_for = asked(tmp_path / "out.json", resume=True, implementation=implementation)
        (row,) = attention.measure_all([Case(k_ary(2, 2, 8))], lambda *_: {"kernel_us": next(times)}, [], asked_for)
        return row

    times = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert [run(each)["kernel_us"] for each in ("mosaic", "xla", "xla", None)] == [1.0, 2.0, 2.0, 3.0]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert run(None)["kernel_us"] == 4.0
    (tmp_path / "out.part").write_text(json.dumps({"rows": [flagged := run(None)]}))
    monkeypatch.delenv("XLA_FLAGS")
    times = iter([5.0])
    assert flagged["kernel_us"] == 4.0
    assert run(None)["kernel_us"] == 5.0


def test_a_resumed_run_that_is_interrupted_or_asked_for_less_loses_no_row(tmp_path):
    def interrupted(case: Case, peers: None) -> None:
        raise KeyboardInterrupt

    def drafted() -> list[dict]:
        return json.loads((tmp_path / "out.part").read_text())["rows"]

    path, layout = tmp_path / "out.json", Layout(page_size=64)
    cases = [Case(k_ary(2, 2, 8)), Case(flat(1, 8)), Case(k_ary(2, 3, 8)), Case(k_ary(2, 2, 8), layout)]
    first, _, third, fourth = attention.measure_all(cases, measured, [], asked(path))
    with pytest.raises(KeyboardInterrupt):
        attention.measure_all(cases, interrupted, [], asked(path, resume=True))
    assert drafted() == [first, third, fourth]
    some = attention.measure_all(cases[2:3], interrupted, [], asked(path, resume=True))
    assert drafted() == [third, first, fourth]
    rows_module.publish(path, some)
    assert json.loads(path.read_text())["rows"] == some == [third]
    assert drafted() == [first, fourth]
    rows_module.publish(path, attention.measure_all([cases[0], cases[3]], interrupted, [], asked(path, resume=True)))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.json"]


def test_a_draft_is_whole_when_the_disk_is_full(tmp_path, monkeypatch):
    written = Path.write_text

    def full(path: Path, text: str) -> None:
        written(path, text[:20])
        raise OSError("no space left")

    def rows() -> Iterator[dict]:
        yield {"name": "first"}
        monkeypatch.setattr(Path, "write_text", full)
        yield {"name": "second"}

    with pytest.raises(OSError, match="no space left"):
        rows_module.collect(rows(), tmp_path / "out.json")
    assert measured_before(tmp_path / "out.json", resume=True) == [{"name": "first"}]


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
