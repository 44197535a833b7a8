"""The cases of every figure, the files that some come from, and the command that measures them."""

import json
from pathlib import Path

import pytest
from forests import ancestry, prefixes
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import attention, figure, sweeps
from benchmarks.inputs import Case, Layout
from benchmarks.sweeps import FIGURES
from benchmarks.traces import BLOCK_TOKENS, Arrival, arrivals, prompts_tree, recorded_trees
from benchmarks.workloads import PAPER, Workload, shared_root
from codec_jax import Forest

WITHOUT_FILE = [name for name in FIGURES if name not in ("recorded", "arrivals")]


# ---------------------------------------------------------------------- cases


@pytest.mark.parametrize("name", WITHOUT_FILE)
def test_cases_are_forests_of_which_every_node_is_read_and_names_tell_them_apart(name):
    cases = FIGURES[name]()
    assert len({case.workload.name for case in cases}) == len(cases) > 4
    for case in cases:
        forest = Forest.from_nodes(*case.workload[1:], page_size=case.layout.page_size)
        assert (forest.row_hi > forest.row_lo)[: len(case.workload.parent)].all()
        assert case.layout.num_q_heads % case.layout.num_kv_heads == 0


def test_every_sweep_of_the_paper_is_in_a_figure():
    drawn = {tuple(map(tuple, case.workload[1:])) for name in WITHOUT_FILE for case in FIGURES[name]()}
    assert [each.name for each in PAPER if tuple(map(tuple, each[1:])) not in drawn] == []


def test_a_place_on_an_axis_is_what_the_axis_says():
    assert all(len(case.workload.leaf) == case.x for case in sweeps.batch())
    assert all(case.x in case.workload.length for case in sweeps.length())
    assert all(case.layout.num_q_heads / case.layout.num_kv_heads == case.x for case in sweeps.variants())
    for case in sweeps.depth():
        assert max(len(ancestry(case.workload.parent, end)) for end in case.workload.leaf) == case.x
    for case in sweeps.ratio():
        length, parent = case.workload.length, case.workload.parent
        contexts = sum(length[node] for end in case.workload.leaf for node in ancestry(parent, end))
        whole = sum(length) if case.series.startswith("shared / unique") else contexts / 16
        assert (length[0] if case.x else 0) / whole == pytest.approx(case.x, abs=0.003)


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


# ---------------------------------------------------------------------- request traces


def request(tokens: int, blocks: list[int]) -> str:
    return json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": blocks})


def test_the_files_that_come_with_the_repository_are_24_cases_each():
    for name in ("recorded", "arrivals"):
        cases = FIGURES[name]()
        assert len(cases) == len({case.workload.name for case in cases}) == 24
    assert max(len(case.workload.leaf) for case in cases) == 64


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


# ---------------------------------------------------------------------- the command


def test_the_command_measures_and_writes_a_figure(tmp_path, monkeypatch, capsys):
    """Of two small cases, on a clock that gives every call the same two kernels."""

    def failing(*_: object) -> dict:
        raise RuntimeError("no cuDNN")

    layout = Layout(num_q_heads=4, num_kv_heads=2, head_dim=16, page_size=8)
    cases = [Case(shared_root(40, requests, 9), layout, "small", requests) for requests in (1, 3)]
    monkeypatch.setitem(FIGURES, "batch", lambda: cases)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr(attention, "kernel_runs", lambda call, repeats: [[("pac", 0.003), ("por", 0.001)]] * repeats)
    monkeypatch.setattr(attention, "wall_time", lambda call: 5.0)
    monkeypatch.setattr(attention, "measure_cudnn", failing)
    out = tmp_path / "batch.json"
    monkeypatch.setattr("sys.argv", ["figure", "batch", "--implementation", "xla", "--json", str(out)])
    figure.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["name"], row["series"], row["x"]) for row in rows] == [
        (case.workload.name, "small", case.x) for case in cases
    ]
    for row in rows:
        assert (row["kernel_us"], row["por_us"], row["launches"]) == (pytest.approx(4.0), pytest.approx(1.0), 2)
        assert row["relative_error"] < 5e-3
        assert (row["cudnn_us"], row["cudnn_error"]) == (None, "RuntimeError: no cuDNN")
    assert rows[1]["unique_bytes"] == (40 + 3 * 9) * 2 * 2 * 2 * 16
    assert "3 requests: 40 shared, 9 each (head size 16, pages of 8) | 4.0 |" in capsys.readouterr().out
    assert not (tmp_path / "batch.part").exists()
