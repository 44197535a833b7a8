"""What people are shown of forests and plans, and the rows and the picture of benchmarks.planning."""

import json
import re
import sys

import jax
import numpy as np
import pytest
from costs import cost_model
from forests import Tree, readers, trees
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import planning
from benchmarks.inputs import Layout as Heads
from benchmarks.workloads import Workload, degenerate, k_ary, random_lengths, shared_root
from codec_jax import Forest, PagePool, Plan, make_plan, show
from codec_jax import schedule as costs
from codec_jax.cost import Layout


@pytest.fixture
def shown(capsys):
    def text(x):
        assert show(x) is None
        return capsys.readouterr().out

    return text


# ---------------------------------------------------------------------- forests


def test_a_forest_is_shown_as_a_tree(shown):
    forest = Forest.from_nodes([-1, 0, 1, 1, 0, -1], [1000, 0, 20, 1, 7, 5], [3, 2, 0, 4, 4], request_capacity=8)
    assert (
        shown(forest)
        == """\
forest: 5 requests, 6 nodes; free slots: 3 requests, 18 nodes
1,033 tokens in 68 pages of 16; without sharing 5,035 tokens, 4.87x
├─ node 0: 1,000 tokens, 63 pages, 5 readers; request 2 ends here
│  ├─ node 1: 0 tokens, 0 pages, 2 readers
│  │  ├─ node 3: 1 token, 1 page, 1 reader; request 0 ends here
│  │  └─ node 2: 20 tokens, 2 pages, 1 reader; request 1 ends here
│  └─ node 4: 7 tokens, 1 page, 2 readers; requests 3-4 end here
└─ node 5: 5 tokens, 1 page, 0 readers
"""
    )


def test_chains_and_siblings_that_look_the_same_share_lines(shown):
    # A chain of 5, then three pairs of a node and its child, and three leaves of which one ends two requests.
    parent = [-1, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 4, 4, 4]
    length = [16] * 5 + [8] * 3 + [4] * 3 + [2] * 3
    forest = Forest.from_nodes(parent, length, [8, 11, 9, 12, 10, 12, 13])
    assert (
        shown(forest)
        == """\
forest: 7 requests, 14 nodes; free slots: 0 requests, 18 nodes
122 tokens in 14 pages of 16; without sharing 604 tokens, 4.95x
└─ nodes 0 to 4, a chain of 5: 80 tokens, 5 pages, 7 readers
   ├─ node 5: 8 tokens, 1 page, 1 reader
   │  └─ node 8: 4 tokens, 1 page, 1 reader; request 0 ends here
   ├─ ⋮ 2 like node 5 with 4 nodes: 24 tokens, 4 pages, requests 2, 4
   ├─ node 11: 2 tokens, 1 page, 1 reader; request 1 ends here
   ├─ node 12: 2 tokens, 1 page, 2 readers; requests 3, 5 end here
   └─ node 13: 2 tokens, 1 page, 1 reader; request 6 ends here
"""
    )


def test_a_chain_ends_where_a_request_does(shown):
    text = shown(Forest.from_nodes([-1, 0, 1, 2, 3, 4, 5, 6], [8] * 8, [3, 7]))
    assert "└─ nodes 0 to 3, a chain of 4: 32 tokens, 4 pages, 2 readers; request 0 ends here\n" in text
    assert "└─ nodes 4 to 7, a chain of 4: 32 tokens, 4 pages, 1 reader; request 1 ends here\n" in text


def test_siblings_without_room_are_counted_and_their_scattered_requests_too(shown):
    # Requests alternate between two roots whose children all differ.
    parent = [-1, -1] + [0, 1] * 100
    text = shown(Forest.from_nodes(parent, [8, 8, *range(1, 201)], range(2, 202), page_size=8))
    rest = [line for line in text.splitlines() if "⋮" in line]
    assert [line[:5] for line in rest] == ["│  └─", "   └─"]
    assert all(line.endswith(" requests") for line in rest)
    hidden = [int(re.search(r"(\d+) more nodes below", line)[1]) for line in rest]
    # Both roots get their share of the lines.
    assert abs(hidden[0] - hidden[1]) <= 2
    assert sum(hidden) == 200 - text.count(" ends here")


def test_a_forest_that_fits_60_lines_is_shown_whole(shown):
    text = shown(Forest.from_nodes([-1, -1] + [0] * 28 + [1] * 28, range(58), range(58)))
    assert len(text.splitlines()) == 60
    assert "⋮" not in text


def test_what_is_near_a_root_is_shown_first(shown):
    text = shown(Forest.from_nodes(*random_lengths(2, 11)[1:]))
    assert all(f"─ node {node}: " in text for node in range(15))


NUMBER = r"(\d[\d,]*)"


def number(match: re.Match) -> int:
    return int(match[1].replace(",", ""))


def nodes_of(line: str) -> int:
    """How many nodes a line stands for."""
    for pattern in (rf"a chain of {NUMBER}", rf"like node \d+ with {NUMBER} nodes", rf"⋮ {NUMBER} (like|more)"):
        found = re.search(pattern, line)
        if found:
            return number(found)
    assert re.search(r"─ node \d+:", line)
    return 1


def check_tree(text: str, tree: Tree) -> None:
    header, sharing, *lines = text.splitlines()
    assert len(lines) + 2 <= 60
    assert sum(nodes_of(line) for line in lines) == len(tree.parent)
    for name, expected in (
        ("token", sum(tree.length)),
        ("page", sum(-(-length // 16) for length in tree.length)),
    ):
        assert sum(number(re.search(rf"{NUMBER} {name}s?\b", line)) for line in lines) == expected
        assert number(re.search(rf"{NUMBER} {name}s?\b", sharing)) == expected
    assert number(re.search(rf"{NUMBER} nodes?;", header)) == len(tree.parent)
    # Lines of single nodes.
    who = readers(tree) if len(tree.parent) < 300 else None
    for line in lines:
        single = re.search(rf"─ node (\d+): .* {NUMBER} readers?(?:; requests? ([\d, -]+) ends? here)?$", line)
        if single and who:
            node = int(single[1])
            assert int(single[2].replace(",", "")) == len(who[node])
            ranges = [part.split("-") for part in (single[3] or "").split(", ") if part]
            ending = [request for r in ranges for request in range(int(r[0]), int(r[-1]) + 1)]
            if "requests end here" not in line:
                assert ending == [request for request, end in enumerate(tree.leaf) if end == node]


@given(tree=st.one_of(trees(), trees(max_nodes=70, max_length=3, max_requests=40)))
def test_every_node_token_and_page_is_in_exactly_one_of_at_most_60_lines(tree):
    with pytest.MonkeyPatch.context() as patched:
        printed: list[str] = []
        patched.setattr("builtins.print", printed.append)
        show(Forest.from_nodes(*tree, request_capacity=len(tree.leaf) + 2))
    check_tree(printed[0], tree)


@pytest.mark.parametrize(
    "workload",
    [k_ary(4, 6, 256), random_lengths(2, 11), degenerate(2000, 16), k_ary(1, 3000, 16), k_ary(1500, 2, 16)],
    ids=lambda workload: workload.name,
)
def test_large_forests_are_shortened(workload, shown):
    check_tree(shown(Forest.from_nodes(*workload[1:])), Tree(*workload[1:]))


def test_slots_of_retired_nodes_and_requests_are_free(shown):
    forest = Forest.from_nodes([-1, 0, 0], [16, 8, 8], [1, 2])
    retired, _ = forest.retire(PagePool.create(8, taken=forest.used_pages), [0, 1])
    free = f"free slots: 2 requests, {forest.node_capacity} nodes"
    assert shown(retired).splitlines() == [
        f"forest: 0 requests, 0 nodes; {free}",
        "0 tokens in 0 pages of 16; without sharing 0 tokens",
    ]


# ---------------------------------------------------------------------- plans


def test_a_plan_is_shown_with_the_load_of_its_thread_blocks(shown):
    forest = Forest.from_nodes([-1, 0, 0], [32, 5, 8], [1, 2], page_size=8)
    sizes = {"num_ctas": 4, "tile_rows": 16, "block_tokens": 16, "lanes": 1}
    # A block of 16 tokens takes 2 us from memory, all of which is waited for, and a segment 1 us.
    model = cost_model(Layout(4, 2, 16, 8), block_tokens=16, segment=0.75, merge=0.25)
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16, cost_model=model, **sizes)
    # Two blocks of the root, and one of both leaves whose mask costs less than the wait, for each of two heads.
    # Two segments a head make 8 us: the first takes 4 of them, which is one and a half blocks, rounded up.
    assert (
        shown(plan)
        == """\
plan: 4 q heads, 2 kv heads, head size 16, 1 query token, 1 tile of 16 rows, blocks of 16 tokens
for each kv head: 0 wide streams, 1 narrow; 45 KV tokens read, 45 unique, 1.00x
in all: 4 segments, 4 partials, 0 wide and 6 narrow blocks; 2 of both are masked
load of 4 thread blocks: mean 4.0, least 3.0, most 5.0, 1.250x the mean, in microseconds

thread blocks  mean █, most ░                    least    mean    most  segments    wide  narrow  masked
0              ██████████████████████████████      5.0     5.0     5.0         1       0       2       0
1              ██████████████████████████████      5.0     5.0     5.0         1       0       2       0
2              ██████████████████                  3.0     3.0     3.0         1       0       1       1
3              ██████████████████                  3.0     3.0     3.0         1       0       1       1
"""
    )


@pytest.mark.parametrize(
    "leaf_blocks",
    [1, 50],
)
def test_a_pair_that_reads_alone_waits_for_memory_as_narrow_streams_do(leaf_blocks, shown):
    # A tile for each of two requests: the pair reads the root.
    forest = Forest.from_nodes([-1, 0, 0], [128 * 128, leaf_blocks * 128, leaf_blocks * 128], [1, 2])
    sizes = {"tile_rows": 8, "block_tokens": 128, "lanes": 2}
    model = cost_model(Layout(16, 2, 16, 16))
    plan = make_plan(forest, num_q_heads=16, num_kv_heads=2, head_dim=16, num_ctas=1, cost_model=model, **sizes)
    # All wait for memory, as there is nothing else to do meanwhile.
    expected = 2 * (128 * 2.0 + 2 * leaf_blocks * 2.0 + 3 * 3.0 + 4 * 0.5)
    np.testing.assert_allclose(costs.loads(plan), [expected], rtol=1e-6)
    text = shown(plan)
    read = 128 * (128 + 2 * leaf_blocks)
    assert f"1 wide stream, 2 narrow; {read:,} KV tokens read, {read:,} unique, 1.00x" in text
    assert f"256 wide and {4 * leaf_blocks:,} narrow blocks; 0 of both are masked" in text


@given(
    trees(max_length=100),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 5, 30]),
    st.sampled_from([1, 2]),
    st.sampled_from([8, 4096]),
    st.sampled_from(["aligned", "paper", 3]),
)
def test_thread_blocks_share_the_load_of_one_and_pay_for_every_further_segment(
    tree, tokens, ctas, lanes, repeat, policy
):
    # Long nodes make wide streams.
    forest = Forest.from_nodes(tree.parent, [n * repeat // 8 for n in tree.length], tree.leaf, page_size=8)
    sizes = {"tile_rows": 8, "block_tokens": 64, "lanes": lanes, "query_tokens": tokens}
    sizes |= {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "cost_model": cost_model(Layout(4, 2, 16, 8))}
    one, many = make_plan(forest, num_ctas=1, **sizes), make_plan(forest, num_ctas=ctas, policy=policy, **sizes)
    load = costs.loads(many)
    assert load.shape == (ctas,)
    further = int(many.cta_ptr[-1] - one.cta_ptr[-1]) * 3.0 + int(many.merge_ptr[-1] - one.merge_ptr[-1]) * 0.5
    np.testing.assert_allclose(load.sum(), costs.loads(one)[0] + further)
    assert ((load > 0) == (np.diff(many.cta_ptr) > 0)).all()


@pytest.mark.parametrize("workload", [planning.MANY_QUESTIONS, planning.MANY_REQUESTS], ids=lambda each: each.name)
def test_large_plans_are_balanced_by_the_loads_that_are_shown(workload, shown):
    layout = planning.Layout()
    plan = planning.planning_call(planning.forest_of(workload, layout), layout)()
    load = costs.loads(plan)
    assert load.max() < 1.03 * load.mean()
    lines = shown(plan).splitlines()
    assert len(lines) <= 60
    assert f"mean {load.mean():.1f}, least {load.min():.1f}, most {load.max():.1f}" in lines[3]
    table = [line.split() for line in lines[6:]]
    sums = [sum(int(row[column].replace(",", "")) for row in table) for column in (-4, -3, -2, -1)]
    numbers = [int(n.replace(",", "")) for n in re.findall(NUMBER, lines[2])]
    assert sums == [numbers[0], *numbers[2:]]
    ranges = [row[0].split("-") for row in table]
    assert [cta for r in ranges for cta in range(int(r[0]), int(r[-1]) + 1)] == list(range(len(load)))
    # Whole table: the least, the mean and the most of all.
    assert min(float(row[-7]) for row in table) == pytest.approx(load.min(), abs=0.06)
    assert max(float(row[-5]) for row in table) == pytest.approx(load.max(), abs=0.06)


def test_a_plan_without_work_is_shown(shown):
    text = shown(make_plan(Forest.from_nodes([-1], [0], [0]), num_q_heads=1, num_kv_heads=1, head_dim=8, num_ctas=2))
    assert "0 segments, 0 partials" in text
    assert "load of 2 thread blocks: mean 0.0, least 0.0, most 0.0, in microseconds" in text


def test_forests_and_plans_on_a_device_look_the_same(shown):
    forest = Forest.from_nodes([-1, 0, 0], [32, 8, 8], [1, 2])
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16)
    for x in (forest, plan):
        assert shown(jax.device_put(x)) == shown(x)


def test_nothing_else_is_shown():
    with pytest.raises(TypeError, match=r"x: expected a Forest or a Plan, got list"):
        show([1])


# ---------------------------------------------------------------------- benchmarks.planning


TINY = [Workload("tiny", [-1, 0, 0], [300, 20, 30], [1, 2]), Workload("one", [-1], [50], [0])]


def test_rows_and_a_picture_of_plans_are_written(tmp_path, monkeypatch):
    files = tmp_path / "rows.json", tmp_path / "loads.svg"
    monkeypatch.setattr(sys, "argv", ["planning", "--quick", "--json", str(files[0]), "--plot", str(files[1])])
    for name, value in {
        "FORESTS": [*TINY, Workload("third", [-1], [9], [0])],
        "DRAWN": TINY,
        "LEAST_CALLS": 3,
        "LEAST_SECONDS": 0,
    }.items():
        monkeypatch.setattr(planning, name, value)
    planning.main()
    rows = json.loads(files[0].read_text())["rows"]
    assert [row["name"] for row in rows] == ["tiny", "one"]
    for row, workload in zip(rows, TINY, strict=True):
        assert (row["requests"], row["nodes"]) == (len(workload.leaf), len(workload.parent))
        assert row["roofline_us"] > sum(workload.length) * 4096 / 4.52e6  # K and V of a token are 4096 bytes
        assert 0 < row["least_plan_us"] <= row["plan_us"]
        assert row["calls"] == 3
        assert row["replan_us"] > 0
        assert not row["replan_extends"]  # so little work would not be balanced
        assert row["copy_us"] > 0
        assert row["packed_copy_us"] > 0
        assert row["costs"]
        # One tile and at least one block for each of 8 kv heads; 132 thread blocks share them.
        assert row["segments"] >= 8
        assert 0 < row["mean_load"] <= row["most_load"]
        assert (row["num_ctas"], row["tile_rows"], row["block_tokens"], row["lanes"]) == (132, 64, 128, 2)
        assert (row["heads"], row["head_dim"], row["page_size"]) == ("32/8", 128, 16)
        assert row["device"]
        assert row["device"] != "cpu"
        assert {"python", "jax", "numpy"} <= set(row["versions"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
    picture = files[1].read_text()
    for workload in TINY:
        assert f"{workload.name}: most" in picture


@pytest.mark.parametrize(("own", "extends"), [(2048, True), (20, False)])
def test_whether_a_plan_is_extended_is_what_replanning_does(own, extends):
    forest = planning.forest_of(shared_root(32_768, 4, own) if extends else TINY[0], Heads())
    call, extended = planning.replanning_call(forest, Heads())
    assert extended == extends
    assert isinstance(call(), Plan)


def test_a_picture_depends_on_the_loads_alone(tmp_path):
    load = {name: np.arange(1.0, 4.0) for name in ("a", "b", "c")}
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for file in files:
        planning.draw(load, file)
    assert files[0].read_text() == files[1].read_text()
    assert files[0].read_text().count("most 1.500") == 3
