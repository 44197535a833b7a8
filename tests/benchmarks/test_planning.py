"""The rows of benchmarks.planning, on small forests."""

import json

import pytest

from benchmarks import planning
from benchmarks.workloads import Workload

TINY = [Workload("120000 shared, tiny", [-1, 0, 0], [300, 20, 30], [1, 2]), Workload("one", [-1], [500], [0])]


def test_rows_of_plans_are_written(tmp_path, monkeypatch):
    rows_file = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["planning", "--json", str(rows_file)])
    for name, value in {"FORESTS": TINY, "MIN_CALLS": 3, "MIN_SECONDS": 0}.items():
        monkeypatch.setattr(planning, name, value)
    planning.main()
    rows = json.loads(rows_file.read_text())["rows"]
    assert [row["name"] for row in rows] == [each.name for each in TINY]
    for row, workload in zip(rows, TINY, strict=True):
        assert (row["requests"], row["nodes"]) == (len(workload.leaf), len(workload.parent))
        # K and V of a token are 4096 bytes; query and output of a request 4 x 4096.
        roofline_us = (sum(workload.length) + 4 * len(workload.leaf)) * 4096 / 4.52e6
        assert row["attention_us"] == pytest.approx(16 * 36 * roofline_us)
        assert 0 < row["min_plan_us"] <= row["plan_us"]
        assert row["calls"] == 3
        # One tile and at least one block for each of 8 kv heads; 128 thread blocks share them.
        assert row["segments"] >= 8
        assert 1 <= row["max_over_mean_load"]["aligned"] < row["max_over_mean_load"]["1"]
        assert row["max_over_mean_load"]["1"] == pytest.approx(128 / 8)  # whole streams: a thread block for each head
        assert (row["num_ctas"], row["tile_rows"], row["block_tokens"], row["lanes"]) == (128, 64, 128, 2)
        assert (row["heads"], row["head_dim"], row["page_size"]) == ("32/8", 128, 16)
        assert row["device"] not in ("", "cpu")
        assert {"python", "jax", "numpy"} <= set(row["versions"])
