"""Traffic by hardware counters and the crossover to plain decode, as far as they show without a GPU."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, counters, crossover, traffic
from benchmarks.inputs import MOST_RELATIVE_ERROR, Case, Layout, attention_call, check, make_inputs, reference
from benchmarks.workloads import PAPER, PROBE, SHAPES, flat, shared_root

SMALL = Layout(num_q_heads=8, num_kv_heads=2, head_dim=16, page_size=8)


# ---------------------------------------------------------------------- traffic


def test_forests_whose_traffic_is_counted_are_larger_than_the_cache_and_of_every_kind():
    chosen = traffic.larger_than_the_cache(PROBE + PAPER)
    assert len(chosen) > 20
    assert len(traffic.larger_than_the_cache(traffic.KINDS)) == len(traffic.KINDS)
    assert len(traffic.larger_than_the_cache(SHAPES)) == len(SHAPES)
    small = [each for each in PROBE + PAPER if each not in [case.workload for case in chosen]]
    assert max(sum(each.length) for each in small) * 4096 <= 60 * 2**20


CASES = [Case(shared_root(100, 2, 10)), Case(flat(1, 50))]


@pytest.fixture
def counted(monkeypatch) -> list[dict]:
    """Rows of two forests: the cascade fails on the second."""

    def read(cases: list[Case], caller: str) -> list[dict[str, int] | str]:
        scale = {"mosaic": 1, "flashinfer_decode": 3, "flashinfer_cascade": 2}[caller]
        tokens = [scale * sum(case.workload.length) for case in cases]
        counts = [{"dram_read_bytes": 4096 * n, "dram_written_bytes": 0, "l2_to_sm_bytes": 8192 * n} for n in tokens]
        return [
            "ncu gave no counters" if scale == 2 and n == 100 else count
            for n, count in zip(tokens, counts, strict=True)
        ]

    monkeypatch.setattr(traffic, "read_counters", read)
    return traffic.measured(CASES, list(counters.CONFIGURATIONS), [], [])


def test_counts_of_ours_and_the_peers_stand_beside_the_unique_bytes(counted):
    first, second = counted
    assert (first["unique_bytes"], first["unshared_bytes"]) == (120 * 4096, 220 * 4096)
    assert first["dram_read_bytes"] == 120 * 4096
    assert first["flashinfer_decode_l2_to_sm_bytes"] == 3 * 120 * 8192
    assert second["flashinfer_cascade_dram_read_bytes"] is None
    assert second["flashinfer_cascade_error"] == "ncu gave no counters"
    assert "error" not in second


def test_what_was_counted_before_is_not_counted_again(counted, monkeypatch):
    asked = []

    def read(cases: list[Case], caller: str) -> list[str]:
        asked.extend(cases)
        return ["out of luck"] * len(cases)

    monkeypatch.setattr(traffic, "read_counters", read)
    first, second = traffic.measured(CASES, [], [], counted[:1])
    assert first == counted[0]
    assert (second["name"], second["dram_read_bytes"], second["error"]) == ("no sharing, 1 x 50", None, "out of luck")
    assert asked == CASES[1:]


def test_without_ncu_the_rows_say_so(monkeypatch):
    def missing(*_: object) -> None:
        raise FileNotFoundError("ncu")

    monkeypatch.setattr(traffic, "read_counters", missing)
    assert [row["error"] for row in traffic.measured(CASES, [], [], [])] == ["FileNotFoundError: ncu"] * 2


def test_a_summary_of_traffic_leaves_out_what_was_not_counted(counted):
    assert traffic.line(counted[1]).split("   ")[-1] == "flashinfer_cascade: ncu gave no counters"
    said = traffic.summary([*counted, {"name": "failed", "dram_read_bytes": None}])
    for line in (
        "2 of 3 forests counted",
        "1.000 x the unique KV bytes, 1.000 x at most",
        "dram_read_bytes of flashinfer_decode: 3.00 x ours, 3.00 x at most",
        "l2_to_sm_bytes of flashinfer_cascade: 2.00 x ours, 2.00 x at most",
    ):
        assert line in said.split("\n")


def test_a_call_is_checked_before_it_is_counted(monkeypatch):
    case = Case(shared_root(40, 2, 10), SMALL)
    assert counters.prepare(case, "xla")().shape == (2, 1, 8, 16)
    wrong = lambda inputs, layout, caller: (lambda: jnp.zeros((2, 1, 8, 16)), 0)  # noqa: E731
    monkeypatch.setattr(counters, "attention_call", wrong)
    with pytest.raises(ValueError, match="relative error"):
        counters.prepare(case, "xla")


# ---------------------------------------------------------------------- the crossover


@pytest.mark.parametrize("quick", [True, False])
def test_the_grid_goes_from_no_sharing_to_much_in_every_group(quick):
    cases = crossover.grid([1, 8], [256, 2048], quick)
    assert len({(case.series, case.x, len(case.workload.leaf)) for case in cases}) == len(cases)
    for case in cases:
        group, own = map(int, re.fullmatch(r"group (\d+), (\d+) own", case.series).groups())
        assert case.layout.num_q_heads == group * case.layout.num_kv_heads == 32
        nodes = [case.x] * bool(case.x) + [own] * len(case.workload.leaf)
        assert case.workload.length == nodes
    assert {case.x for case in cases} >= {0, 2048, 32_768}
    assert {len(case.workload.leaf) for case in cases} >= {1, 8, 64}


def test_plain_decode_is_the_fastest_of_what_was_measured():
    row = {"name": "n", "series": "s", "kernel_us": 10.0, "unshared_us": 30.0, "cudnn_us": 20.0}
    assert crossover.gain(row) == 2.0
    assert crossover.gain(row | {"cudnn_us": None}) == 3.0
    assert crossover.gain(row | {"flashinfer_decode_us": 5.0}) == 0.5
    assert crossover.gain(row | {"kernel_us": None}) is None
    assert crossover.gain({"name": "n", "kernel_us": 10.0, "cudnn_us": None}) is None
    rows = [row, row | {"cudnn_us": 9.8}, row | {"cudnn_us": 9.7, "name": "worse"}, row | {"kernel_us": None}]
    assert crossover.summary(rows).split("\n") == [
        "3 of 4 cells measured, 1 more than 3% behind plain decode",
        "  0.970 x plain decode's speed: worse; s",
    ]


def test_decoding_without_sharing_is_checked_like_ours(monkeypatch):
    """Our kernels are held to the same reference on the unshared forest."""
    inputs = make_inputs(shared_root(40, 3, 10), SMALL)
    seen = {}

    def measured(inputs: attention.Inputs, layout: Layout, expected: np.ndarray, *rest: object) -> dict:
        out, kv_bytes = attention_call(inputs, layout, "xla")
        seen["bytes"] = kv_bytes
        return {"kernel_us": 3.0, "relative_error": check(out(), expected)}

    monkeypatch.setattr(crossover, "measure_ours", measured)
    row = crossover.measure_unshared(inputs, SMALL, reference(inputs), 2)
    assert row["unshared_us"] == 3.0
    assert 0 < row["unshared_relative_error"] < MOST_RELATIVE_ERROR
    # Every request reads the 40 tokens that all share: 2 kv heads, K and V of 16 values of 2 bytes.
    assert seen["bytes"] == 3 * 50 * 2 * 2 * 16 * 2


def test_a_map_shows_every_cell_that_was_measured(tmp_path):
    common = {"head_dim": 128, "dtype": "bfloat16", "page_size": 16, "date": "2026-01-02", "device": "NVIDIA H200"}
    rows = [
        {"series": case.series, "x": case.x, "requests": len(case.workload.leaf), "kernel_us": 1.0, "unshared_us": 3.21}
        | common
        | {"heads": f"32/{case.layout.num_kv_heads}"}
        for case in crossover.grid([1, 4], [256], quick=True)
    ]
    rows[0]["unshared_us"] = None
    crossover.draw(rows, tmp_path / "one.svg")
    crossover.draw(rows[::-1], tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text.count(">3.21<") == len(rows) - 1
    for shown in ("group 1, 256 own", "group 4, 256 own", "32768", "NVIDIA H200"):
        assert shown in text
    assert "q heads" not in text
    assert (tmp_path / "two.svg").read_text().count(">3.21<") == len(rows) - 1
    with pytest.raises(ValueError, match="at least one cell"):
        crossover.draw([row | {"kernel_us": None} for row in rows], tmp_path / "none.svg")


def test_a_cell_has_ours_and_plain_decode_or_the_reasons(monkeypatch):
    monkeypatch.setattr(attention, "kernel_runs", lambda call, repeats: [[("a kernel", 0.004)]] * repeats)
    monkeypatch.setattr(attention, "wall_time", lambda call: 5.0)

    def failing(*_: object) -> dict:
        raise RuntimeError("no cuDNN")

    monkeypatch.setattr(crossover, "measure_cudnn", failing)
    row = crossover.measure(Case(shared_root(40, 3, 10), SMALL, "s", 40), 2, None)
    assert row["kernel_us"] == pytest.approx(4.0)
    assert row["implementation"] is None
    assert (row["unique_tokens"], row["requests"]) == (70, 3)
    assert row["unshared_us"] is row["cudnn_us"] is None
    # The kernels serve no heads of 16.
    assert "'mosaic' cannot serve" in row["unshared_error"]
    assert row["cudnn_error"] == "RuntimeError: no cuDNN"
    assert "error" not in row
