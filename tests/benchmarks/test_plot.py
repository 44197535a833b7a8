"""Drawings: what stands where, which numbers are written, and that nothing overlaps or is lost."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from benchmarks import crossover, plot, report, sweeps
from benchmarks.pages import PAGES

CONDITIONS = {"device": "NVIDIA H200", "heads": "32/8", "head_dim": 128, "page_size": 16, "date": "2026-01-02"}


def written(axes: Axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def points(axes: Axes) -> dict[str, list[list[float]]]:
    return {
        each.get_label(): each.get_offsets().data.tolist() for each in axes.collections if each.get_label()[0] != "_"
    }


def times(**us: float | None) -> dict:
    return CONDITIONS | {"roofline_us": 1.0, "kernel_us": 2.0} | us


def test_a_line_of_markers_is_times_over_the_roofline_with_ours_and_the_next_best_written():
    first = times(name="one", cudnn_us=7.0, flashinfer_decode_us=3.0)
    rows = [first, times(name="two", roofline_us=2.0, kernel_us=3.01, cudnn_us=None), {"name": "failed"}]
    (axes,) = plot.times(rows, PAGES["paper"]).axes
    assert points(axes) == {
        "cuDNN over copies": [[7.0, 0.0], [pytest.approx(math.nan, nan_ok=True), 1.0]],
        "FlashInfer decode": [[3.0, 0.0], [pytest.approx(math.nan, nan_ok=True), 1.0]],
        "codec_jax": [[2.0, 0.0], [1.505, 1.0]],
    }
    assert [each.get_text() for each in axes.get_yticklabels()] == ["one", "two"]
    assert written(axes)[1:3] == ["2.0", "3.1"]
    assert written(axes)[4:] == ["1.50×", "–×"]


def test_curves_have_gaps_and_their_last_values_written():
    rows = [times(series="s", x=x, kernel_us=us, cudnn_us=2 * us) for x, us in ((4, 8.0), (1, 2.0), (2, 4.01))]
    rows[2]["cudnn_us"] = None
    (axes,) = plot.times(rows, PAGES["batch"]).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["codec_jax"].get_xdata()) == [1, 2, 4]
    assert list(lines["codec_jax"].get_ydata()) == [2.0, 4.01, 8.0]
    assert list(lines["cuDNN over copies"].get_ydata()) == pytest.approx([4.0, math.nan, 16.0], nan_ok=True)
    assert set(lines) == {"codec_jax", "cuDNN over copies", "roofline"}
    assert written(axes) == ["2", "5", "8", "16"]
    assert all(text.get_annotation_clip() is False for text in axes.texts)  # or those pushed out of the axes get lost
    assert axes.get_xlabel() == "requests"
    (axes,) = plot.times(rows, PAGES["recorded"]).axes  # trees that have nothing to do with each other
    assert {line.get_linestyle() for line in axes.lines} == {"None"}


def test_decode_steps_are_bars_of_parts_and_gaps_on_one_scale():
    def step(variant: str, requests: int, **us: float | None) -> dict:
        case = {"model": "m", "requests": requests, "document_tokens": 1000, "variant": variant, "floor_us": 2000.0}
        return case | us | CONDITIONS

    parts = {"attention_us": 1000.0, "products_us": 2000.0, "other_us": 500.0, "kernel_us": 3500.0}
    rows = [
        step("shared", 16, wall_us=4510.0, **parts),
        step("unshared", 16, wall_us=9590.0, **(parts | {"attention_us": 6000.0, "kernel_us": 8500.0})),
        step("cudnn", 16, wall_us=None),
        step("shared", 64, wall_us=3400.0, **parts),
    ]
    (axes,) = plot.decoding(rows, PAGES["decoding"]).axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars[:4] == [(0.0, 1.0), (1.0, 2.0), (3.0, 0.5), (3.5, pytest.approx(1.01))]
    assert bars[4:8] == [(0.0, 6.0), (6.0, 2.0), (8.0, 0.5), (8.5, pytest.approx(1.09))]
    assert bars[-1][1] == 0.0  # calls overlap: no gap is less than none
    first, *shown = written(axes)
    assert first.startswith("16 requests over 1,000 tokens")
    assert (shown[0], shown[1], shown[3]) == ("4.6 ms", "9.5 ms", "3.4 ms")
    # Experts are a part where there are some, and models are named where there are several.
    mixed = rows[0] | {"model": "n", "experts_us": 250.0, "wall_us": 4000.0, "kernel_us": 3750.0}
    (axes,) = plot.decoding([rows[0], mixed], PAGES["decoding"]).axes
    assert [bar.get_width() for bar in axes.patches][5:] == [1.0, 2.0, 0.25, 0.5, 0.25]
    assert written(axes)[0].startswith("m, 16 requests")


def test_of_vllms_ways_the_faster_is_a_bar_below_ours():
    def step(variant: str, wall_us: float, **us: float) -> dict:
        case = {"model": "m", "requests": 16, "document_tokens": 1000, "variant": variant, "wall_us": wall_us}
        return case | us | CONDITIONS

    parts = {"attention_us": 1000.0, "products_us": 2000.0, "other_us": 500.0, "kernel_us": 3500.0}
    rows = [
        step("vLLM", 9000.0, **parts),
        step("shared", 4000.0, floor_us=2000.0, **parts),
        step("vLLM, cascade", 6009.0),
        step("vLLM, cascade", 7009.0, **(parts | {"attention_us": 2000.0, "kernel_us": 4500.0})),
    ]
    (axes,) = plot.decoding_vllm(rows, PAGES["decoding_vllm"]).axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0, 0.5, 0.5, 2.0, 2.0, 0.5, pytest.approx(1.509)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["codec_jax, shared", "vLLM, cascade"]
    assert [each for each in written(axes) if "ms" in each][1:] == ["4.0 ms", "6.0 ms"]


def test_a_map_shows_every_cell_that_was_measured_and_nothing_is_drawn_of_nothing():
    rows = [
        times(series=case.series, x=case.x, requests=len(case.workload.leaf), kernel_us=1.0, unshared_us=3.219)
        for case in crossover.grid([1, 4], [256])
    ]
    rows[0]["unshared_us"] = None
    charts = plot.crossover(rows, PAGES["crossover"]).axes
    assert [len(written(axes)) for axes in charts] == [34, 35]
    assert {text for axes in charts for text in written(axes)} == {"3.21"}
    for draw in (plot.times, plot.traffic, plot.decoding, plot.ablation, plot.crossover):
        with pytest.raises(ValueError, match=r"rows: expected at least one with \w+ to draw, got none"):
            draw([{"part": "fixed", "name": "failed", "kernel_us": None}], PAGES["paper"])


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if page.drawn])
def test_drawings_of_the_committed_results_are_whole_opaque_and_say_what_is_better(name):
    rows = PAGES[name].rows(report.loader(report.ROOT))
    canvas = getattr(plot, PAGES[name].table)(rows, PAGES[name])
    canvas.draw_without_rendering()
    assert canvas.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
    title, better, conditions = (text.get_text() for text in canvas.texts)
    assert title == PAGES[name].title
    assert "better" in better or "pays" in better
    assert conditions.startswith(("NVIDIA H", "AMD", "Intel"))
    for text in (*canvas.texts, *canvas.legends, *(text for axes in canvas.axes for text in axes.texts)):
        box = text.get_window_extent()
        assert canvas.bbox.x0 <= box.x0
        assert box.x1 <= canvas.bbox.x1
    for axes in canvas.axes:
        box = axes.get_tightbbox()
        assert all(not each.get_window_extent().overlaps(box) for each in (*canvas.legends, *canvas.texts))


def test_the_command_draws_the_same_whenever_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cases = sweeps.depth()
    rows = [times(name=case.workload.name, series=case.series, x=case.x) for case in cases]
    (tmp_path / "depth.json").write_text(json.dumps({"rows": rows}))
    for name in ("one.svg", "two.svg"):
        arguments = ["--json", str(tmp_path / "depth.json"), "--out", str(tmp_path / name), "--figure", "depth"]
        monkeypatch.setattr("sys.argv", ["plot", *arguments])
        plot.main()
    text = (tmp_path / "one.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text == (tmp_path / "two.svg").read_text()
    for series in {case.series for case in cases}:
        assert report.plain(series) in text


def test_a_page_without_a_drawing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("sys.argv", ["plot", "--json", "rows.json", "--out", "out.svg", "--figure", "latent"])
    with pytest.raises(SystemExit):
        plot.main()
    said = capsys.readouterr().err
    assert "argument --figure: invalid choice: 'latent'" in said
    assert "layouts" in said  # which is not drawn on its page, but can be
