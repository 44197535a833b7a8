"""benchmarks.ablation: its rows, with the xla path in the place of the kernels."""

import json
import sys

import jax
import pytest

from benchmarks import ablation
from benchmarks.inputs import Layout
from benchmarks.workloads import PAPER, k_ary

TREE = k_ary(2, 3, 100)._replace(name="binary")
LAYOUT = Layout(4, 2, 16, 16)


@pytest.fixture
def on_cpu(monkeypatch):
    """Small forests, the xla path, and times that tell the variants apart by their number of segments."""
    measure, plans = ablation.measure, []

    def planned_call(*args):
        plans.append(planned(*args))
        return plans[-1]

    planned = ablation.planned_call
    monkeypatch.setattr(ablation, "planned_call", planned_call)
    monkeypatch.setattr(ablation, "measure", lambda *args: measure(*args, "xla"))
    monkeypatch.setattr(ablation, "kernel_time", lambda call, repeats: (float(plans[-1][1].arrays.cta_ptr[-1]), 2))
    monkeypatch.setattr(ablation, "Layout", lambda: LAYOUT)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name, value in {"DEEP": [TREE], "FIXED_FORESTS": [TREE], "PAPER": [TREE], "FIXED": [1, 2]}.items():
        monkeypatch.setattr(ablation, name, value)


def test_every_forest_and_variant_has_a_row_and_all_are_checked(on_cpu, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["ablation", "--json", str(path), "--part", "sharing", "fixed"])
    ablation.main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["part"], row["variant"]) for row in rows] == [
        *(("sharing", variant) for variant in ("neither", "tree only", "division only", "both")),
        *(("fixed", variant) for variant in ("1 slice", "2 slices", "aligned")),
    ]
    for row in rows:
        assert row["relative_error"] < 5e-3
        assert row["predicted_us"] > 0
        assert row["makespan_over_mean"] >= 1
        # Unshared, all four requests read 3 nodes of 100 tokens; in the tree, there are 7 nodes.
        tokens = 1200 if row["variant"] in ("neither", "division only") else 700
        assert row["kv_bytes"] == tokens * LAYOUT.kv_token_bytes
    # One tile and two kv heads.
    segments = {row["variant"]: row["segments"] for row in rows}
    assert (segments["neither"], segments["tree only"], segments["2 slices"]) == (2, 2, 4)
    assert segments["both"] > 2


def test_a_variant_that_fails_keeps_its_row_and_the_last_result(on_cpu, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text("as it was")
    monkeypatch.setattr(sys, "argv", ["ablation", "--json", str(path), "--part", "fixed"])
    planned = ablation.planned_call

    def fail(inputs, layout, implementation, policy):
        if policy == 2:
            raise ValueError("too many slices\nand more")
        return planned(inputs, layout, implementation, policy)

    monkeypatch.setattr(ablation, "planned_call", fail)
    with pytest.raises(SystemExit, match=r"failed: binary, 2 slices\. The rows are in .*rows.part"):
        ablation.main()
    rows = json.loads((tmp_path / "rows.part").read_text())["rows"]
    assert [row.get("error") for row in rows] == [None, "ValueError: too many slices", None]
    assert path.read_text() == "as it was"

    # Resumed, it measures only what has failed.
    asked: list = []
    monkeypatch.setattr(ablation, "planned_call", lambda *args: asked.append(args[-1]) or planned(*args))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    ablation.main()
    assert asked == [2]
    assert json.loads(path.read_text())["rows"][::2] == rows[::2]


def test_the_papers_sweeps_and_recorded_trees_are_what_is_measured():
    predicted = [case.workload for case in ablation.cases_of("predicted")]
    assert [case.workload for case in ablation.cases_of("policies")] == predicted[: len(PAPER)] == PAPER
    assert [len(workload.leaf) for workload in predicted[len(PAPER) :]] == [10] * 6 + [91] * 18
