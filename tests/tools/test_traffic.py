"""Counted KV traffic against a simulation, token by token."""

from typing import Any

import numpy as np
import pytest
from forests import Tree, ancestry, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import Forest, PagePool, Plan, Window, make_plan
from codec_jax.planning.streams import MIN_WIDE_TOKENS
from codec_jax.traffic import Traffic, count_decode, count_pass

STEPS = 9


def plan_of(forest: Forest, group: int = 1, **options: Any) -> Plan:
    options = {"steps": STEPS, "tile_rows": 8, "num_ctas": 3, "lanes": 1} | options
    return make_plan(forest, num_q_heads=2 * group, num_kv_heads=2, head_dim=16, **options)


def plan_with_wide_streams(forest: Forest, **options: int) -> Plan:
    """Let a pair of tiles share whatever both read, however little it is, if there are two lanes."""
    return plan_of(forest, min_wide_tokens=1, **options)


def paths_and_tiles(
    forest: Forest, rows_per_request: int, tile_rows: int, lanes: int
) -> tuple[dict[int, list[int]], dict[int, set[int]]]:
    """Return the nodes of each request's context, and the tiles that hold a reader of each node.

    With two lanes, tiles 2p and 2p + 1 count as tile 2p for a node that both hold a reader of.
    """
    paths = {r: ancestry(forest.parent, end) for r, end in enumerate(forest.leaf.tolist()) if end >= 0}
    tiles: dict[int, set[int]] = {}
    for request, path in paths.items():
        first = int(forest.row_of_request[request]) * rows_per_request
        for node in path:
            tiles.setdefault(node, set()).update(row // tile_rows for row in range(first, first + rows_per_request))
    if lanes == 2:
        tiles = {
            node: {tile for tile in of_node if tile % 2 == 0 or tile - 1 not in of_node}
            for node, of_node in tiles.items()
        }
    return paths, tiles


def simulate(forest: Forest, group: int, tile_rows: int, lanes: int, new_tokens: list[int]) -> Traffic:
    """Walk through the steps with plain lists: a node is read once by each tile, or pair of tiles, that reads it."""
    length = forest.length.tolist()
    leaf = {r: end for r, end in enumerate(forest.leaf.tolist()) if end >= 0}
    paths, tiles_of_node = paths_and_tiles(forest, group, tile_rows, lanes)
    left, generated, read, unshared = dict(enumerate(new_tokens)), 0, 0, 0
    while any(left[r] > 0 for r in leaf):
        running = [r for r in leaf if left[r] > 0]
        for request in running:
            length[leaf[request]] += 1
            left[request] -= 1
            generated += 1
        read += sum(length[node] * len(tiles) for node, tiles in tiles_of_node.items())
        unshared += sum(length[node] for request in running for node in paths[request])
    return Traffic(generated, read, unshared)


@settings(max_examples=150)
@given(
    tree=trees(max_nodes=12, max_length=40, max_requests=14),
    group=st.sampled_from([1, 2, 3, 8]),
    tile_rows=st.sampled_from([8, 15]),
    lanes=st.sampled_from([1, 2]),
    block_tokens=st.sampled_from([8, 64]),
    counts=st.lists(st.integers(0, STEPS), min_size=16, max_size=16),
)
def test_count_decode_equals_a_simulation_of_its_steps(
    tree: Tree, group: int, tile_rows: int, lanes: int, block_tokens: int, counts: list[int]
) -> None:
    forest = Forest.from_nodes(*tree, page_size=16, request_capacity=16)
    forest, _ = forest.reserve(PagePool.create(200, forest.used_pages), STEPS)
    new_tokens = np.where(forest.active, counts, 0).astype(np.int32)
    sizes = {"group": group, "tile_rows": tile_rows, "lanes": lanes}
    got = count_decode(forest, plan_with_wide_streams(forest, **sizes, block_tokens=block_tokens), new_tokens)
    assert got == simulate(forest, **sizes, new_tokens=new_tokens.tolist())


@settings(max_examples=60)
@given(
    tree=trees(max_nodes=12, max_length=40, max_requests=14),
    group=st.sampled_from([1, 3]),
    query_tokens=st.integers(1, 5),
    lanes=st.sampled_from([1, 2]),
    block_tokens=st.sampled_from([8, 64]),
)
def test_count_pass_counts_every_node_once_for_each_tile_or_pair_of_tiles_that_reads_it(
    tree: Tree, group: int, query_tokens: int, lanes: int, block_tokens: int
) -> None:
    forest = Forest.from_nodes(*tree, page_size=16, request_capacity=16)
    paths, tiles = paths_and_tiles(forest, group * query_tokens, 8, lanes)
    sizes = {"group": group, "query_tokens": query_tokens, "lanes": lanes, "block_tokens": block_tokens}
    got = count_pass(forest, plan_with_wide_streams(forest, **sizes))
    read = sum(tree.length[node] * len(of_node) for node, of_node in tiles.items())
    assert got == Traffic(0, read, sum(tree.length[node] for path in paths.values() for node in path))


def test_a_shared_document_is_counted_once_however_many_read_it() -> None:
    """Four requests with 2 tokens of their own under 100 shared ones, one step: 100 + 4 x 3 against 4 x 103."""
    forest = Forest.from_nodes([-1, 0, 0, 0, 0], [100, 2, 2, 2, 2], [1, 2, 3, 4])
    got = count_decode(forest, plan_of(forest), np.ones(4, np.int32))
    assert got == Traffic(generated_tokens=4, kv_tokens_read=112, kv_tokens_unshared=412)


@pytest.mark.parametrize(
    ("tokens", "lanes", "times"),
    [(MIN_WIDE_TOKENS, 1, 2), (MIN_WIDE_TOKENS, 2, 1), (100, 2, 2)],
    ids=["a tile each", "a pair of tiles", "too short for a pair of tiles"],
)
def test_a_document_whose_readers_need_two_tiles_is_counted_twice_or_once_if_long(
    tokens: int, lanes: int, times: int
) -> None:
    forest = Forest.from_nodes([-1] + [0] * 9, [tokens] + [2] * 9, range(1, 10))
    plan = plan_of(forest, lanes=lanes)
    unshared = 9 * (tokens + 3)
    assert count_decode(forest, plan, np.ones(9, np.int32)) == Traffic(9, times * tokens + 9 * 3, unshared)
    assert count_pass(forest, plan) == Traffic(0, times * tokens + 9 * 2, unshared - 9)


def test_tokens_that_no_query_token_of_a_tile_may_see_are_not_counted() -> None:
    """64 query tokens in tiles of 8: tile i reads pages 0 to i of 8 tokens, and page i + 1 for one more step."""
    forest = Forest.from_nodes([-1], [64], [0], page_size=8)
    got = count_pass(forest, plan_of(forest, query_tokens=64, steps=1))
    assert got == Traffic(0, 8 * (2 + 3 + 4 + 5 + 6 + 7 + 8 + 8), 64)


def test_a_window_leaves_the_pages_that_it_hides_uncounted() -> None:
    """A window of 20 tokens over 200 shared and 4 of their own, pages of 16: token 185, of the page from 176 on."""
    forest = Forest.from_nodes([-1, 0, 0, 0], [200, 4, 4, 4], [1, 2, 3])
    forest, _ = forest.reserve(PagePool.create(64, forest.used_pages), STEPS)
    plan = plan_of(forest, window=20)
    shared = 200 - 176
    assert count_pass(forest, plan) == Traffic(0, shared + 3 * 4, 3 * 20)
    read = sum(shared + sum(4 + min(step, new) for new in (3, 0, 1)) for step in (1, 2, 3))
    assert count_decode(forest, plan, np.asarray([3, 0, 1], np.int32)) == Traffic(4, read, 4 * 20)
    chunked = plan_of(forest, window=Window(100, chunked=True))  # whose last chunk begins where the leaves do
    assert count_pass(forest, chunked) == Traffic(0, 3 * 4, 3 * 4)


def test_a_stopped_request_costs_nothing_more_unshared_while_its_nodes_stay_in_the_plan() -> None:
    forest = Forest.from_nodes([-1, -1], [10, 20], [0, 1])
    got = count_decode(forest, plan_of(forest), np.asarray([1, 3], np.int32))
    assert got == Traffic(
        generated_tokens=4, kv_tokens_read=3 * 11 + (21 + 22 + 23), kv_tokens_unshared=11 + 21 + 22 + 23
    )


@pytest.mark.parametrize("new_tokens", [np.zeros(2, np.int32), np.zeros(2, np.int64)])
def test_no_tokens_cost_nothing(new_tokens: np.ndarray) -> None:
    forest = Forest.from_nodes([-1, -1], [10, 20], [0, 1])
    assert count_decode(forest, plan_of(forest), new_tokens) == Traffic(0, 0, 0)


def test_counts_are_plain_integers_that_do_not_overflow() -> None:
    forest = Forest.from_nodes([-1], [2**30], [0], page_size=2**20)
    got = count_decode(forest, plan_of(forest, block_tokens=2**20), np.asarray([1000], np.int32))
    assert got.kv_tokens_unshared == got.kv_tokens_read == 1000 * 2**30 + 1000 * 1001 // 2
    assert all(type(count) is int for count in vars(got).values())


def test_stretches_of_decoding_add_up() -> None:
    assert Traffic(1, 20, 300) + Traffic(4, 50, 600) == Traffic(5, 70, 900)
    assert Traffic() == Traffic(0, 0, 0)
