"""What a plan lists: every visible row and token once, masks, tiles, segments and their order."""

from collections import Counter

import jax
import numpy as np
import pytest
from costs import cost_model
from forests import trees
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import (
    HEADS,
    Case,
    assert_computes_everything_once,
    cases,
    num_wide,
    pages_of,
    room,
    rows_of,
    used_segments,
    visible,
)

from codec_jax import Forest, PagePool, Window, make_plan
from codec_jax.planning import planner
from codec_jax.planning.cost import HeadLayout
from codec_jax.planning.predict import loads
from pallas_kernels import Tiling


def test_every_visible_row_and_token_meet_once_in_every_kv_head():
    kinds = Counter()

    @settings(max_examples=250)
    @given(cases())
    def check(case):
        plan = case.plan()
        assert plan.is_valid_for(case.forest)
        assert_computes_everything_once(plan, case, case.forest)
        assert plan.arrays.used_rows.tolist() == [sum(of is not None for of in rows_of(plan, case.forest))]
        wide = any(segment.tile0 != segment.tile1 for segment in used_segments(plan))
        kinds["wide segments"] += wide
        kinds["wide segments of several query tokens"] += wide and plan.arrays.query_tokens > 1
        kinds["windows and several query tokens"] += plan.arrays.window is not None and plan.arrays.query_tokens > 1
        kinds["pages in parts"] += plan.arrays.page_tokens < plan.page_size

    check()
    assert min(kinds.values()) > 10


@settings(max_examples=250)
@given(cases(), st.data())
def test_a_plan_stays_exact_while_leaves_grow_by_its_steps(case, data):
    most = room(case.forest, case.options["steps"])
    plan = case.plan()
    count = [data.draw(st.integers(0, int(n))) for n in most]
    grown = case.forest.extend(count)
    assert plan.is_valid_for(grown)
    plan.check(grown)
    assert_computes_everything_once(plan, case, grown)
    full = case.forest.extend(most)
    assert plan.is_valid_for(full)
    assert_computes_everything_once(plan, case, full)


@settings(max_examples=250)
@given(cases())
def test_unmasked_blocks_are_visible_to_all_used_rows_of_their_tiles(case):
    plan = case.plan()
    slots = plan.arrays.block_pages.shape[1]
    for forest in (case.forest, case.forest.extend(room(case.forest, case.options["steps"]))):
        expected, used = visible(plan, case, forest), np.asarray([of is not None for of in rows_of(plan, forest)])
        for segment in used_segments(plan):
            assert segment.begin <= segment.first_masked <= segment.end
            rows = segment.rows(plan)
            pages = list(pages_of(plan, segment.begin, segment.first_masked))
            assert len(pages) == slots * (segment.first_masked - segment.begin)
            tokens = [
                page.number * plan.arrays.page_tokens + token
                for page in pages
                for token in range(plan.arrays.page_tokens)
            ]
            assert expected[rows[used[rows]]][:, tokens].all()


@pytest.mark.parametrize("free_requests", [0, 1, 5])
@pytest.mark.parametrize("query_tokens", [1, 2])
def test_pages_that_all_rows_see_in_full_need_no_mask(query_tokens, free_requests):
    # 256 shared tokens, then 5 of their own for each request: 8 blocks without a mask, one with.
    forest = Forest.from_nodes([-1, 0, 0], [256, 5, 5], [1, 2], page_size=16, request_capacity=2 + free_requests)
    plan = make_plan(forest, **HEADS, num_ctas=1, tile_rows=16, block_tokens=32, query_tokens=query_tokens, lanes=1)
    counts = [
        (segment.first_masked - segment.begin, segment.end - segment.first_masked) for segment in used_segments(plan)
    ]
    assert counts == [(8, 1)] * 2


@settings(max_examples=100)
@given(cases())
def test_masks_are_by_token_where_readers_differ_within_a_block_or_a_page_is_not_full(case):
    plan = case.plan()
    masked = {block for each in used_segments(plan) if each.head == 0 for block in range(each.first_masked, each.end)}
    by_token = 0
    for block in masked:
        pages = list(pages_of(plan, block, block + 1))
        full = all(case.forest.length[page.node] >= page.token + plan.arrays.page_tokens for page in pages)
        same = len(pages) == plan.arrays.block_pages.shape[1] and len({(page.lo, page.hi) for page in pages}) == 1
        by_position = plan.arrays.query_tokens > 1 or plan.arrays.window is not None
        by_token += by_position or not (full and same)
    expected = by_token / len(masked) if masked else 1.0
    assert plan.host.estimates[0].token_masked == pytest.approx(expected)


@settings(max_examples=150)
@given(cases())
def test_a_tile_streams_only_pages_that_its_rows_read_and_each_once(case):
    """Also through wide streams, which hold the pages that both tiles of a pair read, if those are many enough."""
    assume(case.options["policy"] != "invariant")  # where requests part, each has what they share in a block of its own
    plan, most = case.plan(query_tokens=1), room(case.forest, case.options["steps"])
    seen = [visible(plan, case, case.forest.extend(np.minimum(most, grown))) for grown in range(most.max() + 1)]
    read = (
        np.any(seen, axis=0)
        .reshape(plan.arrays.num_tiles, plan.arrays.tile_rows, -1, plan.arrays.page_tokens)
        .any((1, 3))
    )
    found, wide = np.zeros_like(read, int), np.zeros_like(read)
    for segment in used_segments(plan):
        assert (segment.tile1 == segment.tile0) or (segment.tile0 % 2, segment.tile1) == (0, segment.tile0 + 1)
        if segment.head == 0:
            pages = [page.number for page in pages_of(plan, segment.begin, segment.end)]
            for tile in segment.partial_of_tile:
                np.add.at(found[tile], pages, 1)
                wide[tile, pages] |= segment.tile0 != segment.tile1
    # Of what a wide stream holds, one tile of the two may see nothing by its window.
    of_pair = np.concatenate([read[i : i + 2] | read[i : i + 2].any(0) for i in range(0, len(read), 2)])
    np.testing.assert_array_equal(found, np.where(wide, of_pair, read))
    # With a window, what is enough is counted over all tiles that read a node.
    for tile in range(0, plan.arrays.num_tiles - 1, 2) if plan.arrays.window is None else ():
        of_both = read[tile] & read[tile + 1]
        worthwhile = plan.arrays.lanes == 2 and of_both.sum() * plan.arrays.page_tokens >= case.min_wide_tokens
        np.testing.assert_array_equal(wide[tile : tile + 2], [of_both & worthwhile] * 2)


@pytest.mark.parametrize(("lanes", "pages_short", "wide"), [(2, 0, True), (2, 1, False), (1, 0, False)])
@pytest.mark.parametrize("enough", [3072, 512])
def test_a_pair_of_tiles_has_a_wide_stream_if_what_both_read_has_enough_pages(lanes, pages_short, wide, enough):
    # Node 0 is read by the rows of all three tiles, node 2 by those of the second one; the last page has one token.
    length = (enough // 16 - pages_short) * 16 - 15
    forest = Forest.from_nodes([-1, 0, 0, 0], [length, 0, 40, 0], [1] * 4 + [2] * 4 + [3], page_size=16)
    given = {} if enough == 3072 else {"min_wide_tokens": enough}
    heads = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    plan = make_plan(forest, **heads, num_ctas=4, tile_rows=8, lanes=lanes, **given)
    tiles_of_node = {0: set(), 2: set()}
    for segment in used_segments(plan):
        for node in {page.node for page in pages_of(plan, segment.begin, segment.end)}:
            tiles_of_node[node].add((segment.tile0, segment.tile1))
    assert tiles_of_node == {0: {(0, 1), (2, 2)} if wide else {(0, 0), (1, 1), (2, 2)}, 2: {(1, 1)}}


@pytest.mark.parametrize("missing", [0, 1])
def test_no_tiles_share_segments_where_all_of_them_have_little_to_read(missing, monkeypatch):
    """Two tiles read 3200 tokens each, 8 requests 10 of their own, 2 kv heads all of it: 3240 for each thread block."""
    forest = Forest.from_nodes([-1] + [0] * 8, [3200] + [10] * 8, range(1, 9))
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    for counted in ({"wide": 2440 + missing, "again": 0.5}, {"wide": 3240 + missing}):
        tiling = Tiling(num_ctas=4, tile_rows=8, lanes=2, block_tokens=(32, 32), **counted)
        monkeypatch.setattr(planner, "default_tiling", lambda heads, tiling=tiling: tiling)
        assert (num_wide(make_plan(forest, **heads)) > 0) == (not missing)
    assert num_wide(make_plan(forest, **heads, min_wide_tokens=3200)) > 0
    assert num_wide(make_plan(forest, **heads, min_wide_tokens=3216)) == 0


@pytest.mark.parametrize("lanes", [1, 2])
def test_pages_that_no_query_of_a_stream_may_see_yet_are_left_out(lanes):
    # 64 query tokens of one request in tiles of 8: tile i sees pages 0 .. i, and page i + 1 after one more step.
    forest = Forest.from_nodes([-1], [64], [0], page_size=8)
    sizes = {"query_tokens": 64, "num_ctas": 1, "tile_rows": 8, "block_tokens": 8, "lanes": lanes}
    heads = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    case = Case(forest, PagePool.create(8, taken=forest.used_pages), heads | sizes, min_wide_tokens=1)
    plan = case.plan()
    last_tiles = [max(segment.partial_of_tile) for segment in used_segments(plan)]
    assert last_tiles == ([1, 3, 5, 7] if lanes == 2 else list(range(8)))
    assert [segment.end - segment.begin for segment in used_segments(plan)] == [min(tile + 2, 8) for tile in last_tiles]
    assert_computes_everything_once(plan, case, forest)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
@pytest.mark.parametrize("chunked", [False, True])
def test_windows_of_any_integer_are_alike(dtype: type[np.integer], chunked: bool) -> None:
    forest, window = Forest.from_nodes([-1], [100], [0]), Window(dtype(30), chunked=chunked)
    assert repr(window) == repr(Window(30, chunked=chunked))
    plans = [
        make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=8, window=each)
        for each in (window, Window(30, chunked))
    ]
    jax.tree.map(np.testing.assert_array_equal, *(plan.arrays for plan in plans))


@pytest.mark.parametrize("window", [1024, Window(1024, chunked=True)], ids=str)
def test_a_window_over_a_long_context_costs_what_its_own_tokens_cost(window):
    # Six requests of a tile each; 64 pages hold the window, two more its edges, one the steps, and one the own leaf.
    requests, steps, heads = 6, 16, {"num_q_heads": 64, "num_kv_heads": 1, "head_dim": 128}
    forest = Forest.from_nodes([-1, *[0] * requests], [120_000, *[5] * requests], list(range(1, requests + 1)))
    sizes = {"steps": steps, "tile_rows": 64, "num_ctas": 132, "block_tokens": 64, "lanes": 1}
    plan = make_plan(forest, **heads, **sizes, window=window)
    pages = list(pages_of(plan, 0, len(plan.arrays.block_pages)))
    assert len(pages) <= requests * (1024 // 16 + 4)
    # What lies between the edges needs no mask: no more than the first block, and those of the leaf, have one.
    segments = used_segments(plan)
    assert sum(segment.end - segment.first_masked for segment in segments) <= 2 * requests
    short = Forest.from_nodes([-1, *[0] * requests], [1024, *[5] * requests], list(range(1, requests + 1)))
    assert loads(plan).max() <= 1.1 * loads(make_plan(short, **heads, **sizes)).max()


def test_a_shared_node_is_read_as_far_back_as_the_longest_window_of_the_readers_in_a_tile_reaches():
    # Requests of 200, 240, 280 and 320 tokens; two of them make up a tile, so that windows begin at 101 and at 181.
    forest = Forest.from_nodes([-1, 0, 0, 0, 0], [200, 0, 40, 80, 120], [1, 2, 3, 4], page_size=8)
    sizes = {"num_ctas": 1, "tile_rows": 8, "block_tokens": 8, "lanes": 1, "window": 99}
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=1, head_dim=8, **sizes)
    first = {}
    for segment in used_segments(plan):
        shared = [page.token for page in pages_of(plan, segment.begin, segment.end) if page.node == 0]
        whole = [page.token for page in pages_of(plan, segment.begin, segment.first_masked) if page.node == 0]
        first[segment.tile0] = min(shared), min(whole, default=None)
        assert sorted(shared) == list(range(min(shared), 200, 8))
    # All of the first tile see tokens from 142 on, after a step, and no token of node 0 is seen by all of the second.
    assert first == {0: (96, 144), 1: (176, None)}


@pytest.mark.parametrize("short", range(4))
def test_a_wide_stream_masks_what_some_query_of_either_tile_may_not_see_yet(short):
    # Two requests a tile, three query tokens each; those of the short one begin at token 30 of the 32 shared ones.
    length = [32, 40, 40, 40, 40]
    length[1 + short] = 1
    forest = Forest.from_nodes([-1, 0, 0, 0, 0], length, [1, 2, 3, 4], page_size=16)
    options = {"query_tokens": 3, "num_ctas": 1, "tile_rows": 6, "block_tokens": 16, "lanes": 2}
    heads = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    plan = Case(forest, PagePool.create(16, taken=forest.used_pages), heads | options, min_wide_tokens=1).plan()
    (wide,) = (segment for segment in used_segments(plan) if segment.tile0 != segment.tile1)
    assert (wide.first_masked - wide.begin, wide.end - wide.first_masked) == (1, 1)


@settings(max_examples=250)
@given(cases())
def test_segments_partition_the_streams_and_leave_each_tile_consecutive_partials_in_order(case):
    plan = case.plan()
    segments = used_segments(plan)
    assert len(segments) <= len(plan.arrays.segments)
    assert 0.9 * case.options["num_ctas"] <= len(plan.arrays.cta_begin) <= case.options["num_ctas"]
    next_segment = 0
    for first, past, *fields in plan.arrays.cta_begin.tolist():
        assert first == next_segment
        if past > first:
            assert fields == [*segments[first], *plan.arrays.block_pages[segments[first].begin, :, 0]]
        next_segment = past
    assert plan.arrays.cta_ptr.tolist() == [*plan.arrays.cta_begin[:, 0].tolist(), next_segment]

    in_use = np.flatnonzero(
        [any(pages_of(plan, block, block + 1)) for block in range(len(plan.arrays.block_pages))]
    ).tolist()
    owner, blocks_of_heads = {}, [[] for _ in range(plan.heads.num_kv_heads)]
    merged = [[] for _ in range(plan.arrays.num_tiles * plan.heads.num_kv_heads)]
    for segment in sorted(segments, key=lambda segment: segment.begin):
        assert segment.begin < segment.end
        for block in range(segment.begin, segment.end):
            assert owner.setdefault(block, segment[:2]) == segment[:2]
        blocks_of_heads[segment.head] += range(segment.begin, segment.end)
        for tile, partial in segment.partial_of_tile.items():
            merged[tile * plan.heads.num_kv_heads + segment.head].append(partial)
        if segment.tile0 == segment.tile1:
            assert plan.arrays.lanes == 1 or segment.partial1 >= plan.arrays.num_partials
    for blocks in blocks_of_heads:
        assert sorted(blocks) == list(range(len(blocks)))
        # Lanes of a segment have the same number of blocks, of which some may be empty.
        assert in_use == sorted(blocks) or (case.options["policy"] == "invariant" and set(in_use) <= set(blocks))

    assert plan.arrays.merge_ptr.shape == (len(merged) + 1,)
    assert plan.arrays.merge_ptr[0] == 0
    for stream, partials in enumerate(merged):
        assert partials == list(range(plan.arrays.merge_ptr[stream], plan.arrays.merge_ptr[stream + 1]))
    assert plan.arrays.merge_ptr[-1] <= plan.arrays.num_partials


@settings(max_examples=150)
@given(cases())
def test_tiles_know_where_in_the_query_they_begin_if_their_rows_are_consecutive_there(case):
    plan = case.plan()
    requests = np.argsort(case.forest.row_of_request).tolist()
    entries = [
        request * plan.arrays.query_tokens + token for request in requests for token in range(plan.arrays.query_tokens)
    ]
    units, rest = divmod(plan.arrays.tile_rows, plan.heads.group)
    segments = used_segments(plan)
    start_of_tile = {s.tile0: s.query_start0 for s in segments} | {s.tile1: s.query_start1 for s in segments}
    assert all(start_of_tile[s.tile0] == s.query_start0 and start_of_tile[s.tile1] == s.query_start1 for s in segments)
    for tile, start in start_of_tile.items():
        mine = entries[tile * units : (tile + 1) * units]
        together = rest == 0 and mine == list(range(mine[0], mine[0] + len(mine)))
        # A tile that is not full must be at the end of the query too.
        together = together and (len(mine) == units or mine[-1] == len(entries) - 1)
        assert start == (mine[0] if together else -1)


@settings(max_examples=150)
@given(
    trees(max_nodes=5, max_length=8, max_requests=6),
    st.lists(st.integers(0, 200), min_size=5, max_size=5),
    st.sampled_from([2, 7, 16]),
    st.sampled_from([8, 16]),
)
def test_thread_blocks_get_equal_numbers_of_blocks_when_there_is_enough_work(tree, hundreds, num_ctas, tile_rows):
    lengths = [16 * n + length for n, length in zip(hundreds, tree.length, strict=False)]
    forest = Forest.from_nodes(tree.parent, lengths, tree.leaf, page_size=16)
    # A segment costs as much as 1.5 blocks that come from memory.
    model = cost_model(HeadLayout(**HEADS, page_size=16), block_tokens=32, segment=(3.0, 4.0))
    sizes = {"num_ctas": num_ctas, "tile_rows": tile_rows, "block_tokens": 32, "lanes": 1}
    plan = make_plan(forest, **HEADS, **sizes, cost_model=model)
    blocks = plan.arrays.segments[:, 5] - plan.arrays.segments[:, 3]
    loads = np.diff(np.concatenate([[0], np.cumsum(blocks)])[plan.arrays.cta_ptr])
    assume(loads.sum() >= 8 * num_ctas)
    # Masks and the start of a segment cost something too, but less than these.
    slack = 2 + 0.12 * loads.mean() + 2.2 * max(np.diff(plan.arrays.cta_ptr))
    assert abs(loads - loads.mean()).max() <= slack
