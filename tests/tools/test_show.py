"""What people are shown of forests and plans."""

import re

import jax
import numpy as np
import pytest
from costs import cost_model
from forests import Tree, readers, trees
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import degenerate, k_ary, random_lengths, shared_root
from codec_jax import CostModel, Forest, PagePool, make_plan, show
from codec_jax.planning.cost import HeadLayout
from codec_jax.planning.predict import loads


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
forest: 5 requests, 6 nodes; free slots: 3 requests, 90 nodes
1,033 tokens in 68 pages of 16; without sharing 5,035 tokens, 4.87x
├─ node 0: 1,000 tokens, 63 pages, 5 readers; request 2 ends here
│  ├─ node 1: 0 tokens, 0 pages, 2 readers
│  │  ├─ node 3: 1 token, 1 page, 1 reader; request 0 ends here
│  │  └─ node 2: 20 tokens, 2 pages, 1 reader; request 1 ends here
│  └─ node 4: 7 tokens, 1 page, 2 readers; requests 3-4 end here
└─ node 5: 5 tokens, 1 page, 0 readers
"""
    )


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
    if hidden := re.search(rf"⋮ {NUMBER} more nodes? below", line):
        return number(hidden)
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
    model = cost_model(HeadLayout(4, 2, 16, 8), block_tokens=16, segment=(1.0, 1.25))
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16, cost_model=model, **sizes)
    # Two blocks of the root, and one of both leaves whose mask costs less than the wait, for each of two heads.
    # Two segments a head make 8 us: the first takes 4 of them, which is one and a half blocks, rounded up.
    assert (
        shown(plan)
        == """\
plan: 4 q heads, 2 kv heads, head size 16, 1 query token, 1 tile of 16 rows, blocks of 16 tokens
for each kv head: 0 wide streams, 1 narrow; 45 KV tokens read, 45 unique, 1.00x
in all: 4 segments, 4 partials, 0 wide and 6 narrow blocks; 2 of both are masked
load of 4 thread blocks: mean 4.0, min 3.0, max 5.0, 1.250x the mean, in microseconds

thread blocks  mean █, max ░                       min    mean     max  segments    wide  narrow  masked
0              ██████████████████████████████      5.0     5.0     5.0         1       0       2       0
1              ██████████████████████████████      5.0     5.0     5.0         1       0       2       0
2              ██████████████████                  3.0     3.0     3.0         1       0       1       1
3              ██████████████████                  3.0     3.0     3.0         1       0       1       1
"""
    )


@pytest.mark.parametrize(
    ("leaf_blocks", "waiting"),
    # All wait for memory, as there is nothing else to do meanwhile. Of short leaves half of the wait shows at least.
    [(50, None), (20, None), (1, 0.5)],
)
def test_a_pair_that_reads_alone_waits_for_memory_as_narrow_streams_do(leaf_blocks, waiting, shown):
    # A tile for each of two requests: the pair reads the root.
    forest = Forest.from_nodes([-1, 0, 0], [128 * 128, leaf_blocks * 128, leaf_blocks * 128], [1, 2])
    sizes = {"tile_rows": 8, "block_tokens": 128, "lanes": 2}
    model = cost_model(HeadLayout(16, 2, 16, 16))
    plan = make_plan(forest, num_q_heads=16, num_kv_heads=2, head_dim=16, num_ctas=1, cost_model=model, **sizes)
    wide, narrow = (2.0, 2.0) if waiting is None else (1.8 + waiting * (2.5 - 1.8), 1.0 + waiting * (2.0 - 1.0))
    expected = 2 * (128 * wide + 2 * leaf_blocks * narrow + 3 * 3.0 + 4 * 0.5)
    np.testing.assert_allclose(loads(plan), [expected], rtol=1e-6)
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
    # Long nodes make wide streams; memory decides however many blocks are masked, so that costs add up.
    forest = Forest.from_nodes(tree.parent, [n * repeat // 8 for n in tree.length], tree.leaf, page_size=8)
    sizes = {"tile_rows": 8, "block_tokens": 64, "lanes": lanes, "query_tokens": tokens}
    model = cost_model(HeadLayout(4, 2, 16, 8), wide=(2.0, 1.5))
    sizes |= {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "cost_model": model}
    one, many = make_plan(forest, num_ctas=1, **sizes), make_plan(forest, num_ctas=ctas, policy=policy, **sizes)
    load = loads(many)
    assert load.shape == (ctas,)
    further = int(many.arrays.cta_ptr[-1] - one.arrays.cta_ptr[-1]) * 3.0
    further += int(many.arrays.merge_ptr[-1] - one.arrays.merge_ptr[-1]) * 0.5
    np.testing.assert_allclose(load.sum(), loads(one)[0] + further)
    assert ((load > 0) == (np.diff(many.arrays.cta_ptr) > 0)).all()


@pytest.mark.parametrize(
    "workload", [shared_root(120_000, 64, 2048), shared_root(120_000, 1024, 2048)], ids=lambda each: each.name
)
def test_large_plans_are_balanced_by_the_loads_that_are_shown(workload, shown):
    model = CostModel.shipped("NVIDIA H200", HeadLayout(32, 8, 128, 16))
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "cost_model": model}
    plan = make_plan(Forest.from_nodes(*workload[1:]), **sizes, num_ctas=132, tile_rows=64, block_tokens=128, lanes=2)
    load = loads(plan)
    assert load.max() < 1.03 * load.mean()
    lines = shown(plan).splitlines()
    assert len(lines) <= 60
    assert f"mean {load.mean():.1f}, min {load.min():.1f}, max {load.max():.1f}" in lines[3]
    table = [line.split() for line in lines[6:]]
    sums = [sum(int(row[column].replace(",", "")) for row in table) for column in (-4, -3, -2, -1)]
    numbers = [int(n.replace(",", "")) for n in re.findall(NUMBER, lines[2])]
    assert sums == [numbers[0], *numbers[2:]]
    ranges = [row[0].split("-") for row in table]
    assert [cta for r in ranges for cta in range(int(r[0]), int(r[-1]) + 1)] == list(range(len(load)))
    # Whole table: the min, the mean and the max of all.
    assert min(float(row[-7]) for row in table) == pytest.approx(load.min(), abs=0.06)
    assert max(float(row[-5]) for row in table) == pytest.approx(load.max(), abs=0.06)


def test_a_plan_without_work_is_shown(shown):
    text = shown(make_plan(Forest.from_nodes([-1], [0], [0]), num_q_heads=1, num_kv_heads=1, head_dim=8, num_ctas=2))
    assert "0 segments, 0 partials" in text
    assert "load of 2 thread blocks: mean 0.0, min 0.0, max 0.0, in microseconds" in text


def test_forests_and_plans_on_a_device_look_the_same(shown):
    forest = Forest.from_nodes([-1, 0, 0], [32, 8, 8], [1, 2])
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16)
    for x in (forest, plan):
        assert shown(jax.device_put(x)) == shown(x)


def test_nothing_else_is_shown():
    with pytest.raises(TypeError, match=r"x: expected a Forest or a Plan, got list"):
        show([1])


def test_a_plan_for_several_devices_is_shown_by_its_slowest(shown):
    forest, pool = Forest.from_nodes([-1, 0, 0], [3000, 20, 500], [1, 2]).spread(512, devices=2)
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16, homes=pool.homes)
    most = [loads(plan.local(device)).max() for device in (0, 1)]
    lines = shown(plan).splitlines()
    assert lines[0].startswith(f"plan for 2 devices: the longest load of each is {most[0]:.1f}, {most[1]:.1f} ")
    # Two requests of 4 q heads, 16 numbers of 2 bytes and two of 4; half of the heads are the other device's.
    assert f"{2 * 4 * (16 * 2 + 2 * 4) // 2} bytes" in lines[1]
    assert lines[2:] == shown(plan.local(int(np.argmax(most)))).splitlines()
