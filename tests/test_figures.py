"""The cases of every figure, the files that some come from, and the charts that are drawn of them."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from forests import ancestry, prefixes
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import attention, figure, plot, sweeps
from benchmarks.inputs import Case, Layout
from benchmarks.sweeps import FIGURES, ends_of_charts
from benchmarks.traces import BLOCK_TOKENS, Arrival, arrivals, prompts_tree, read_trace, recorded_trees
from benchmarks.workloads import PAPER, Workload, shared_root
from codec_jax import Forest

ON_AN_AXIS = {name: each for name, each in FIGURES.items() if each.file is None and each.axis}
WITHOUT_FILE = {name: each for name, each in FIGURES.items() if each.file is None}


def total_tokens(workload: Workload) -> int:
    return sum(workload.length[node] for end in workload.leaf for node in ancestry(workload.parent, end))


# ---------------------------------------------------------------------- cases


@pytest.mark.parametrize("name", WITHOUT_FILE)
def test_cases_are_forests_of_which_every_node_is_read_and_names_tell_them_apart(name):
    cases = FIGURES[name].cases()
    assert len({case.workload.name for case in cases}) == len(cases) > 4
    for case in cases:
        forest = Forest.from_nodes(*case.workload[1:], page_size=case.layout.page_size)
        assert (forest.row_hi > forest.row_lo)[: len(case.workload.parent)].all()
        assert case.layout.num_q_heads % case.layout.num_kv_heads == 0


def test_every_sweep_of_the_paper_is_in_a_figure():
    drawn = {tuple(map(tuple, case.workload[1:])) for f in WITHOUT_FILE.values() for case in f.cases()}
    assert [each.name for each in PAPER if tuple(map(tuple, each[1:])) not in drawn] == []


@pytest.mark.parametrize("name", ON_AN_AXIS)
def test_charts_have_several_places_in_order_and_quick_takes_the_ends(name):
    cases = FIGURES[name].cases()
    charts: dict[str, list[float]] = {}
    for case in cases:
        charts.setdefault(case.series, []).append(case.x)
    for places in charts.values():
        assert places == sorted(set(places))
        assert len(places) >= 4
    ends = [(series, x) for series, places in charts.items() for x in (places[0], places[-1])]
    assert [(case.series, case.x) for case in ends_of_charts(cases)] == ends


def test_a_place_on_an_axis_is_what_the_axis_says():
    for case in sweeps.batch():
        assert len(case.workload.leaf) == case.x
    for case in sweeps.depth():
        assert max(len(ancestry(case.workload.parent, end)) for end in case.workload.leaf) == case.x
    for case in sweeps.length():
        assert case.x in case.workload.length
    for case in sweeps.variants():
        assert case.layout.num_q_heads / case.layout.num_kv_heads == case.x
    of_unique, of_context = (
        [case for case in sweeps.ratio() if case.series.startswith(start)]
        for start in ("shared / unique", "shared / context")
    )
    for case in of_unique:
        assert case.workload.length[0] / sum(case.workload.length) == pytest.approx(case.x, abs=0.003)
    for case in of_context:
        shared = 0 if case.x == 0 else case.workload.length[0]
        assert shared / (total_tokens(case.workload) / 16) == pytest.approx(case.x, abs=0.003)


def test_variants_go_from_multi_head_to_multi_query():
    kv_heads = {case.layout.num_kv_heads for case in sweeps.variants()}
    assert kv_heads == {32, 16, 8, 4, 2, 1}


# ---------------------------------------------------------------------- recorded trees


def write_trees(path: Path, *trees: object) -> Path:
    path.write_text(json.dumps({"trees": trees}))
    return path


def test_recorded_trees_are_spaced_from_the_smallest_to_the_largest(tmp_path):
    trees = [{"parent": [-1, 0], "length": [size, 1], "leaf": [1, 0]} for size in range(100, 0, -1)]
    cases = recorded_trees(write_trees(tmp_path / "trees.json", *trees))
    assert len(cases) == 24
    places = [case.x for case in cases]
    assert (places[0], places[-1]) == (2, 101)
    assert places == sorted(places)
    assert cases[0].workload == Workload("tree 99: 2 requests, 2 tokens", [-1, 0], [1, 1], [1, 0])
    few = recorded_trees(write_trees(tmp_path / "few.json", *trees[:3]))
    assert [case.x for case in few] == [99, 100, 101]


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        (
            {"parent": [-1, 2, 0], "length": [1, 1, 1], "leaf": [1]},
            r"trees\[1\]: parent: expected -1 or an earlier node",
        ),
        (
            {"parent": [-1, 0], "length": [1], "leaf": [1]},
            r"trees\[1\]: expected a length .* for each of 2 nodes, got 1",
        ),
        ({"parent": [-1, 0], "length": [1, -1], "leaf": [1]}, r"trees\[1\]: expected a length of 0 or more"),
        ({"parent": [-1, 0], "length": [1, 1], "leaf": [2]}, r"trees\[1\]: leaf: expected nodes below 2"),
        ({"parent": [-1, 0], "length": [1, 1], "leaf": []}, r"trees\[1\]: leaf: expected a list of integers, got \[\]"),
        ({"parent": [-1, 0], "length": [1, 1.5], "leaf": [1]}, r"trees\[1\]: length: expected a list of integers"),
        ({"parent": [-1]}, r"trees\[1\]: length: expected a list of integers, got None"),
        (3, r"trees\[1\]: parent: expected a list of integers, got None"),
    ],
)
def test_a_bad_tree_is_named_with_what_is_wrong(tmp_path, tree, error):
    path = write_trees(tmp_path / "trees.json", {"parent": [-1], "length": [1], "leaf": [0]}, tree)
    with pytest.raises(ValueError, match=error):
        recorded_trees(path)


@pytest.mark.parametrize("text", ["", "[]", '{"tree": []}', '{"trees": 3}', '{"trees": []}', "\udcff"])
def test_a_file_without_trees_is_refused(tmp_path, text):
    path = tmp_path / "trees.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"trees\.json: expected"):
        recorded_trees(path)


# ---------------------------------------------------------------------- request traces


def request(tokens: int, blocks: list[int]) -> str:
    return json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": blocks})


def test_a_trace_is_read_in_order_without_empty_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{request(600, [0, 1])}\n\n{request(512, [0])}\r\n")
    assert read_trace(path) == [Arrival(600, [0, 1]), Arrival(512, [0])]


def test_all_bad_lines_of_a_trace_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        request(600, [0, 1]),
        request(600, [0, 1])[:-9],
        request(600, [0]),
        request(0, []),
        "[1]",
        request(600, [0, -1]),
    ]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl: line 2: .*; line 3: .*; and 1 more$") as caught:
        read_trace(path)
    for said in (
        "line 3: hash_ids: expected one for each 512 of 600 tokens, 2, got 1",
        "line 4: input_length: expected a positive integer, got 0",
        "line 5: expected a JSON object, got [1]",
        "line 6: hash_ids: expected a list of integers from 0 on, got [0, -1]",
    ):
        assert said in str(caught.value)
    assert "line 1:" not in str(caught.value)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.sampled_from([1, 100, 511, 512])),
        min_size=1,
        max_size=8,
    )
)
def test_prompts_share_what_their_blocks_share(prompts: list[tuple[list[int], int]]) -> None:
    requests = [Arrival((len(blocks) - 1) * BLOCK_TOKENS + last, blocks) for blocks, last in prompts]
    tree = prompts_tree("", requests)
    for end, arrival in zip(tree.leaf, requests, strict=True):
        assert sum(tree.length[node] for node in ancestry(tree.parent, end)) == arrival.tokens
    # Every distinct prefix of whole blocks is stored once, and a last block by its tokens.
    lists = [[*((block, BLOCK_TOKENS) for block in blocks[:-1]), (blocks[-1], last)] for blocks, last in prompts]
    assert sum(tree.length) == sum(prefix[-1][1] for prefix in prefixes(lists))


def test_batches_of_a_trace_are_neighbours_and_sorting_by_prefix_shares_more(tmp_path):
    path = tmp_path / "trace.jsonl"
    # Request i belongs to conversation i % 10 and has two blocks of it, and one of its own.
    path.write_text("\n".join(request(1500, [i % 10, 10 + i % 10, 100 + i]) for i in range(100)))
    cases = {case.workload.name: case.workload for case in arrivals(path)}
    assert len(cases) == 24
    assert [len(cases[f"as they arrive, 0 to {size - 1}"].leaf) for size in (16, 32, 64)] == [16, 32, 64]
    own = 1500 - 2 * BLOCK_TOKENS
    assert sum(cases["as they arrive, 84 to 99"].length) == 10 * 2 * BLOCK_TOKENS + 16 * own
    assert sum(cases["sorted by prefix, 84 to 99"].length) == 2 * 2 * BLOCK_TOKENS + 16 * own


def test_a_trace_shorter_than_a_batch_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([request(5, [0])] * 63))
    with pytest.raises(ValueError, match="expected at least 64 requests, got 63"):
        arrivals(path)


# ---------------------------------------------------------------------- the command and the charts


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["batch", "--file", "x"], "--file: expected none for batch"),
        (["recorded"], "expected a GPU"),
        (["recorded", "--file", "absent.json"], "absent.json"),
        (["arrivals", "--file", "absent.jsonl"], "absent.jsonl"),
        (["batch"], "expected a GPU"),
    ],
)
def test_the_command_says_what_it_lacks(tmp_path, monkeypatch, capsys, arguments, error):
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["figure", *arguments, "--json", str(out)])
    monkeypatch.setattr(attention.jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit):
        figure.main()
    assert error in capsys.readouterr().err
    assert not out.exists()


def rows_of(cases: list[Case], **times: float | None) -> list[dict]:
    common = {"device": "NVIDIA H200", "heads": "32/8", "head_dim": 128, "dtype": "bfloat16", "page_size": 16}
    common |= {"date": "2026-01-02", "roofline_us": 1.0, "kernel_us": 2.0}
    place = [{"name": case.workload.name, "series": case.series, "x": case.x} for case in cases]
    return [row | common | times for row in place]


def test_charts_show_every_series_its_axis_and_the_peers_that_were_measured(tmp_path):
    rows = rows_of(sweeps.depth(), cudnn_us=None, flashinfer_decode_us=9.0)
    rows[0]["flashinfer_decode_us"] = None
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for file in files:
        plot.draw(rows, file, FIGURES["depth"])
    text = files[0].read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for shown in ("2-ary, 1024 a node", "degenerate, 4096 a node", "levels", "FlashInfer decode", "roofline", "H200"):
        assert shown in text
    for absent in ("cuDNN", "cascade"):
        assert absent not in text
    assert text == files[1].read_text()


@pytest.mark.parametrize("charts", [0, 1, 2, 3, 5])
def test_title_and_legend_are_on_the_canvas_beside_the_charts(charts, monkeypatch, tmp_path):
    canvases = []
    monkeypatch.setattr(plot, "save", lambda canvas, _: canvases.append(canvas))
    times = {"cudnn_us": 3.0, "flashinfer_decode_us": 9.0, "flashinfer_cascade_us": 4.0}
    rows = rows_of([*sweeps.depth()][:5], **times)
    if charts:
        rows = [row | {"series": f"chart {i}", "x": x} for i in range(charts) for x, row in enumerate(rows)]
    else:
        rows = [{field: value for field, value in row.items() if field != "series"} for row in rows]
    plot.draw(rows, tmp_path / "out.svg", FIGURES["depth"])
    canvas = canvases[0]
    canvas.draw_without_rendering()
    legend = canvas.legends[0].get_window_extent()
    assert canvas.legends[0].get_title().get_text() == FIGURES["depth"].title
    assert canvas.bbox.containsx(legend.x0)
    assert canvas.bbox.containsx(legend.x1)
    assert canvas.bbox.containsy(legend.y1)
    for axes in canvas.axes:
        assert not legend.overlaps(axes.get_tightbbox())


def test_labels_that_would_touch_are_left_out():
    assert plot.tick_labels([1024, 2048, 32_768, 50_000, 65_536], True) == ["1024", "2048", "32768", "", "65536"]
    assert plot.tick_labels([0, 0.25, 0.5, 0.9, 0.97], False) == ["0", "0.25", "0.5", "", "0.97"]


def test_nothing_is_drawn_of_rows_without_a_roofline(tmp_path):
    with pytest.raises(ValueError, match="expected at least one with a roofline"):
        plot.draw([{"name": "failed", "kernel_us": None}], tmp_path / "out.svg")
    assert not (tmp_path / "out.svg").exists()


def test_models_have_the_heads_of_their_names():
    layouts = {re.split(":", case.workload.name)[0]: case.layout for case in sweeps.models()}
    assert layouts["Qwen3 14B"] == Layout(40, 8, 128)
    assert layouts["Qwen3 32B, Llama 3 70B"] == Layout(64, 8, 128)


@pytest.fixture
def small_figure(monkeypatch) -> list[Case]:
    """A figure of two small cases, on a clock that gives every call the same two kernels."""
    layout = Layout(num_q_heads=4, num_kv_heads=2, head_dim=16, page_size=8)
    cases = [Case(shared_root(40, requests, 9), layout, "small", requests) for requests in (1, 3)]
    monkeypatch.setitem(FIGURES, "batch", FIGURES["batch"]._replace(cases=lambda: cases))
    monkeypatch.setattr(figure, "require_gpu", lambda parser: None)
    monkeypatch.setattr(attention, "kernel_runs", lambda call, repeats: [[("pac", 0.003), ("por", 0.001)]] * repeats)
    monkeypatch.setattr(attention, "wall_time", lambda call: 5.0)
    monkeypatch.setattr(attention, "measure_cudnn", failing)
    return cases


def failing(*_: object) -> dict:
    raise RuntimeError("no cuDNN")


def test_the_command_measures_writes_and_draws_a_figure(tmp_path, monkeypatch, capsys, small_figure):
    out, drawing = tmp_path / "batch.json", tmp_path / "batch.svg"
    command = ["figure", "batch", "--implementation", "xla", "--json", str(out), "--plot", str(drawing)]
    monkeypatch.setattr("sys.argv", command)
    figure.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["name"], row["series"], row["x"]) for row in rows] == [
        ("40 shared, 1 x 9", "small", 1),
        ("40 shared, 3 x 9", "small", 3),
    ]
    for row in rows:
        assert (row["kernel_us"], row["por_us"], row["launches"]) == (pytest.approx(4.0), pytest.approx(1.0), 2)
        assert row["relative_error"] < 5e-3
        assert row["cudnn_us"] is None
        assert row["cudnn_error"] == "RuntimeError: no cuDNN"
    assert rows[1]["unique_bytes"] == (40 + 3 * 9) * 2 * 2 * 2 * 16
    assert "small" in drawing.read_text()
    assert "2 of 2 workloads measured" in capsys.readouterr().out
    assert not (tmp_path / "batch.part").exists()


def test_a_figure_that_is_not_whole_is_not_published(tmp_path, monkeypatch, small_figure):
    out = tmp_path / "batch.json"
    out.write_text("the last result")
    monkeypatch.setattr("sys.argv", ["figure", "batch", "--implementation", "mosaic", "--json", str(out)])
    with pytest.raises(SystemExit, match="failed: 40 shared, 1 x 9; 40 shared, 3 x 9"):
        figure.main()
    assert out.read_text() == "the last result"
    rows = json.loads((tmp_path / "batch.part").read_text())["rows"]
    assert all("'mosaic' cannot serve" in row["error"] for row in rows)
