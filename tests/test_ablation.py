"""benchmarks.ablation: its rows, with the xla path in the place of the kernels."""

import json
import sys

import jax
import pytest

from benchmarks import ablation
from benchmarks.inputs import Layout, make_inputs, reference
from benchmarks.workloads import PAPER, Workload, k_ary

TREE = k_ary(2, 3, 100)._replace(name="binary")
LAYOUT = Layout(4, 2, 16, 16)


@pytest.fixture
def on_cpu(monkeypatch):
    """Small forests, the xla path, and times that tell the variants apart by their number of segments."""
    measure, plans = ablation.measure_variant, []

    def planned_call(*args):
        plans.append(planned(*args))
        return plans[-1]

    planned = ablation.planned_call
    monkeypatch.setattr(ablation, "planned_call", planned_call)
    monkeypatch.setattr(ablation, "measure_variant", lambda *args: measure(*args, "xla"))
    monkeypatch.setattr(ablation, "kernel_time", lambda call, repeats: (float(plans[-1][1].cta_ptr[-1]), 2))
    monkeypatch.setattr(ablation, "Layout", lambda: LAYOUT)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name, value in {"DEEP": [TREE], "FIXED_FORESTS": [TREE], "PAPER": [TREE], "FIXED": [1, 2]}.items():
        monkeypatch.setattr(ablation, name, value)


def test_every_forest_and_variant_has_a_row_and_all_are_checked(on_cpu, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["ablation", "--json", str(path), "--part", "sharing", "fixed"])
    ablation.main()
    rows = json.loads(path.read_text())["rows"]
    got = {(row["part"], row["name"], row["variant"]) for row in rows}
    assert got == {
        *(("sharing", "binary", v) for v in ("neither", "tree only", "division only", "both")),
        *(("fixed", "binary", v) for v in ("1 slice", "2 slices", "aligned")),
    }
    assert len(rows) == len(got)
    for row in rows:
        assert row["relative_error"] < 5e-3
        assert row["predicted_us"] > 0
        assert row["makespan_over_mean"] >= 1
    by_variant = {row["variant"]: row for row in rows if row["part"] == "sharing" and row["name"] == "binary"}
    # Unshared, all four requests read 3 nodes of 100 tokens; in the tree, there are 7 nodes.
    assert (
        by_variant["neither"]["kv_bytes"] == by_variant["division only"]["kv_bytes"] == 12 * 100 * LAYOUT.kv_token_bytes
    )
    assert by_variant["both"]["kv_bytes"] == by_variant["tree only"]["kv_bytes"] == 7 * 100 * LAYOUT.kv_token_bytes
    # One tile and two kv heads.
    assert by_variant["neither"]["segments"] == by_variant["tree only"]["segments"] == 2
    assert by_variant["both"]["segments"] > 2
    out = capsys.readouterr().out
    ratio = 2 / by_variant["both"]["segments"]
    assert f"sharing: tree only takes {ratio:.3f} x the default over 1 forests" in out
    assert "fixed: predictions are" in out


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
    resumed = json.loads(path.read_text())["rows"]
    assert [row["variant"] for row in resumed] == [row["variant"] for row in rows]
    assert (resumed[0], resumed[2]) == (rows[0], rows[2])


@pytest.mark.parametrize("shared", [True, False])
def test_variants_differ_in_what_they_share_and_how_they_divide(shared, on_cpu):
    inputs = make_inputs(Workload("w", [-1, 0, 0], [4096, 64, 64], [1, 2]), LAYOUT)
    variant = ablation.Variant("v", policy=3, shared=shared)
    row = ablation.measure_variant(variant, inputs, LAYOUT, reference(inputs))
    assert row["kv_bytes"] == LAYOUT.kv_token_bytes * (4096 + 128 if shared else 2 * (4096 + 64))
    assert row["segments"] == 3 * LAYOUT.num_kv_heads


def test_the_papers_sweeps_and_deep_trees_are_what_is_measured():
    cases = ablation.cases_of("policies")
    assert [case.workload for case in cases] == PAPER
    assert all([variant.policy for variant in case.variants] == ["aligned", "paper"] for case in cases)
    cases = ablation.cases_of("predicted")
    assert [case.workload for case in cases[: len(PAPER)]] == PAPER
    assert [len(case.workload.leaf) for case in cases[len(PAPER) :]] == [10] * 6 + [91] * 18  # recorded trees
    assert all(case.variants == [ablation.DEFAULT] for case in cases)
    for workload in ablation.DEEP:
        depth = {-1: 0}
        for node, parent in enumerate(workload.parent):
            depth[node] = depth[parent] + workload.length[node]
        assert max(depth[leaf] for leaf in workload.leaf) == 200_000


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablation", "--json", "rows.json"])
    with pytest.raises(SystemExit):
        ablation.main()
    assert "expected a GPU" in capsys.readouterr().err
