"""Drawings of memory traffic, decode steps, ablation and planning: what stands where."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import charts, report

CONDITIONS = {
    "device": "NVIDIA H200",
    "heads": "32/8",
    "head_dim": 128,
    "page_size": 16,
    "dtype": "bfloat16",
    "date": "2026-01-02",
}
COUNTS = {"unique_bytes": 100, "unshared_bytes": 800, "dram_read_bytes": 110, "l2_to_sm_bytes": 200} | CONDITIONS


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """Canvases in place of files."""
    canvases: list[Figure] = []
    monkeypatch.setattr(charts, "save", lambda canvas, out: canvases.append(canvas))
    return canvases


def test_traffic_is_drawn_over_the_unique_bytes(drawn):
    rows = [COUNTS | {"name": "one"}, COUNTS | {"name": "two", "dram_read_bytes": 150}, {"name": "failed"}]
    charts.traffic(rows, Path("out.svg"))
    axes = drawn[0].axes[0]
    points = {each.get_label(): each.get_offsets().data.tolist() for each in axes.collections}
    assert points == {
        "every request's own context": [[8.0, 0.0], [8.0, 1.0]],
        "codec_jax, L2 to SMs": [[2.0, 0.0], [2.0, 1.0]],
        "codec_jax, device memory": [[1.1, 0.0], [1.5, 1.0]],
    }
    assert [each.get_text() for each in axes.get_yticklabels()] == ["one", "two"]


def test_traffic_of_peers_is_what_multiprocessors_were_sent(drawn):
    peers = {"flashinfer_decode_l2_to_sm_bytes": 900, "flashinfer_cascade_l2_to_sm_bytes": 250}
    charts.traffic([COUNTS | peers | {"name": "one"}], Path("out.svg"))
    points = {each.get_label().split(",")[0]: each.get_offsets().data.tolist() for each in drawn[0].axes[0].collections}
    assert points == {
        "FlashInfer decode": [[9.0, 0.0]],
        "FlashInfer cascade": [[2.5, 0.0]],
        "codec_jax": [[2.0, 0.0]],
    }


def step(variant: str, requests: int, **times: float | None) -> dict:
    """Return a row of a decode step."""
    case = {"model": "m", "requests": requests, "document_tokens": 1000, "variant": variant, "floor_us": 2000.0}
    return case | times | CONDITIONS


def test_a_decode_step_is_a_bar_of_its_parts_and_gaps(drawn):
    parts = {"attention_us": 1000.0, "products_us": 2000.0, "other_us": 500.0, "kernel_us": 3500.0}
    rows = [
        step("shared", 16, wall_us=4500.0, **parts),
        step("unshared", 16, wall_us=9500.0, **(parts | {"attention_us": 6000.0, "kernel_us": 8500.0})),
        step("cudnn", 16, wall_us=None),
        step("shared", 64, wall_us=3400.0, **parts),
    ]
    charts.decoding(rows, Path("out.svg"))
    first, second = drawn[0].axes
    bars = [[(bar.get_x(), bar.get_width()) for bar in first.patches if round(bar.get_y() + 0.35) == i] for i in (0, 1)]
    assert bars == [
        [(0.0, 1.0), (1.0, 2.0), (3.0, 0.5), (3.5, 1.0)],
        [(0.0, 6.0), (6.0, 2.0), (8.0, 0.5), (8.5, 1.0)],
    ]
    assert [each.get_text() for each in first.get_yticklabels()] == ["shared", "unshared"]
    assert [line.get_xdata()[0] for line in first.lines] == [2.0]
    assert [bar.get_width() for bar in second.patches][-1] == 0.0  # calls overlap: no gap is less than none
    assert "64 requests over 1000 tokens" in second.get_title()


def test_ablation_is_drawn_over_the_default_and_in_milliseconds(drawn):
    times = {"1 slice": 90.0, "2 slices": 45.0, "aligned": 30.0}
    rows = [{"part": "fixed", "name": "tree", "variant": name, "kernel_us": us} for name, us in times.items()]
    apart = [("tree", "neither", 4000.0), ("tree", "both", 500.0), ("chain", "neither", 2000.0)]
    rows += [{"part": "sharing", "name": name, "variant": variant, "kernel_us": us} for name, variant, us in apart]
    rows.append({"part": "policies", "name": "tree", "variant": "paper", "kernel_us": 1.0})
    charts.ablation([row | CONDITIONS for row in rows], Path("out.svg"))
    fixed, sharing = drawn[0].axes
    line = fixed.lines[0]
    assert (line.get_label(), list(line.get_xdata()), list(line.get_ydata())) == ("tree", [1, 2], [3.0, 1.5])
    assert [bar.get_width() for bar in sharing.patches] == [4.0, 0.5, 2.0]
    places = [bar.get_y() + 0.35 for bar in sharing.patches]
    assert places == pytest.approx([0, 1, 3])  # forests stand apart
    assert [each.get_text() for each in sharing.get_yticklabels()] == ["neither", "both", "neither"]


def test_planning_is_drawn_by_batch_size(drawn):
    row = {"plan_us": 1000.0, "replan_us": 500.0, "roofline_us": 100.0} | CONDITIONS
    rows = [row | {"name": charts.BATCHES[i].name, "plan_us": 1000.0 * (i + 1)} for i in (3, 0)]
    charts.planning([row | {"name": "another forest"}, *rows], Path("out.svg"))
    alone, share = drawn[0].axes
    assert [list(line.get_xdata()) for line in (*alone.lines, *share.lines)] == [[1, 8]] * 4
    assert [list(line.get_ydata()) for line in alone.lines] == [[1.0, 4.0], [0.5, 0.5]]
    # Of 16 tokens in 36 layers at 100 us.
    assert share.lines[0].get_ydata() == pytest.approx([100 / 57.6, 400 / 57.6])


@pytest.mark.parametrize("draw", [charts.traffic, charts.decoding, charts.ablation, charts.planning])
def test_nothing_is_drawn_where_nothing_was_measured(draw, tmp_path):
    with pytest.raises(ValueError, match=r"rows: expected at least one with .* to draw in .*none.svg, got none"):
        draw([{"part": "fixed", "name": "failed", "kernel_us": None}], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


@pytest.mark.parametrize("name", ["traffic", "traffic_peers", "decoding", "ablation", "planning"])
def test_the_committed_results_can_be_drawn_and_are_drawn_the_same_again(name, tmp_path):
    rows = report.load(report.SOURCES[name].stems, report.RESULTS)
    draw = getattr(charts, name.partition("_")[0])
    for file in ("one.svg", "two.svg"):
        draw(json.loads(json.dumps(rows)), tmp_path / file)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
