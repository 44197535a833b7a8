from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from costs import cost_model
from forests import ancestry, page_sizes, trees
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from codec_jax import Forest, PagePool, Plan, PlanError, make_plan, streams
from codec_jax.cost import Layout

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
TILING = {"num_ctas": 3, "tile_rows": 8, "block_tokens": 32}


class Case(NamedTuple):
    """A forest, its pool, the arguments of `make_plan` for it, and what makes a wide stream worth its costs."""

    forest: Forest
    pool: PagePool
    options: dict
    least_wide_tokens: int

    def plan(self, **options) -> Plan:
        return make_plan(self.forest, **{**self.options, "least_wide_tokens": self.least_wide_tokens, **options})


@st.composite
def cases(draw):
    """Forests fresh from `from_nodes`, and forests whose nodes and requests are numbered anyhow after edits."""
    tree = draw(trees(max_nodes=8, max_length=40, max_requests=6))
    page_size = draw(page_sizes)
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=len(tree.leaf) + draw(st.integers(0, 3)))
    pool = PagePool.create(len(forest.used_pages) + 96, taken=forest.used_pages)
    steps = draw(st.sampled_from([1, 2, 9]))
    if draw(st.booleans()):
        requests = st.lists(st.integers(0, len(tree.leaf) - 1), min_size=1, max_size=2)
        forest, pool = forest.retire(pool, draw(requests))
        if forest.active.any():
            free = int((~forest.active).sum())
            sources = draw(st.lists(st.sampled_from(np.flatnonzero(forest.active).tolist()), max_size=free))
            forest, pool = forest.fork(sources)[0].reserve(pool, 3)
            forest = forest.extend(3)
    if draw(st.booleans()):
        forest, pool = forest.reserve(pool, steps)
    group, num_kv_heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (4, 1), (3, 2)]))
    options = {
        "num_q_heads": group * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 8,
        "steps": steps,
        "query_tokens": draw(st.sampled_from([1, 1, 2, 3, 5])),
        "num_ctas": draw(st.sampled_from([1, 2, 7, 16])),
        "tile_rows": draw(st.sampled_from([5, 8, 16, 24, 63])),
        "block_tokens": draw(st.sampled_from([1, 16, 32, 48, 128])),
        "lanes": draw(st.sampled_from([1, 2, 2])),
        "policy": draw(st.sampled_from(["aligned", "aligned", "paper", 1, 3])),
    }
    return Case(forest, pool, options, draw(st.sampled_from([1, 1, 60])))


def room(forest, steps):
    """Tokens that each request may append, `steps` at most: those of its own leaf's pages."""
    count = np.zeros(forest.request_capacity, int)
    for request in np.flatnonzero(forest.active):
        leaf = forest.leaf[request]
        reads = [leaf in ancestry(forest.parent, int(end)) for end in forest.leaf]
        if sum(reads) == 1:
            count[request] = min(steps, forest.page_count[leaf] * forest.page_size - forest.length[leaf])
    return count


class Segment(NamedTuple):
    tile: int
    other_tile: int
    head: int
    lo: int
    masked: int
    hi: int
    partial: int
    other_partial: int
    unit: int
    other_unit: int

    @property
    def partial_of_tile(self) -> dict[int, int]:
        """The partial that the segment leaves for its tile, or for each of its two."""
        return {self.other_tile: self.other_partial, self.tile: self.partial}

    def rows(self, plan: Plan) -> np.ndarray:
        """The packed rows of its tiles, one tile after the other."""
        return np.concatenate([np.arange(plan.tile_rows) + t * plan.tile_rows for t in sorted(self.partial_of_tile)])


class Page(NamedTuple):
    """A page of a block: its readers are rows [lo, hi) of the segment."""

    number: int
    node: int
    token: int
    lo: int
    hi: int


def used_segments(plan):
    return [Segment(*fields) for fields in plan.segments[: plan.cta_ptr[-1]].tolist()]


def pages_of(plan, lo, hi) -> Iterator[Page]:
    """The pages in the slots of blocks [lo, hi) that are in use."""
    for number, node, token, readers in plan.pages[lo:hi].reshape(-1, 4).tolist():
        if readers:
            yield Page(number, node, token, readers % 2**16, readers // 2**16)


def rows_of(plan, forest):
    """(request, query token) of every packed row; None where no request in use has the row."""
    rows = [None] * (plan.num_tiles * plan.tile_rows)
    for request in np.flatnonzero(forest.active).tolist():
        first = int(forest.query_order[request]) * plan.query_tokens * plan.group
        for token in range(plan.query_tokens):
            for member in range(plan.group):
                rows[first + token * plan.group + member] = (request, token)
    return rows


def visible(plan, case, forest):
    """Which packed row must see which token slot, from the contexts: bool [rows, token slots]."""
    out = np.zeros((plan.num_tiles * plan.tile_rows, case.pool.num_pages * forest.page_size), bool)
    for row, of in enumerate(rows_of(plan, forest)):
        if of is not None:
            request, token = of
            context = forest.context_slots(request)
            out[row, context[: max(0, len(context) - plan.query_tokens + token + 1)]] = True
    return out


def visits(plan, case, forest):
    """How often the plan computes each (packed row, kv head, token slot), thread block by thread block."""
    rows = rows_of(plan, forest)
    positions = np.full(len(rows), -1)
    for row, of in enumerate(rows):
        if of is not None:
            positions[row] = len(forest.context_slots(of[0])) - plan.query_tokens + of[1]
    above = {
        node: sum(int(forest.length[n]) for n in ancestry(forest.parent, int(forest.parent[node])))
        for node in np.unique(plan.pages[..., 1])
    }
    segments = used_segments(plan)
    out = np.zeros((len(rows), plan.num_kv_heads, case.pool.num_pages * forest.page_size), int)
    for cta in range(len(plan.cta_ptr) - 1):
        for segment in segments[plan.cta_ptr[cta] : plan.cta_ptr[cta + 1]]:
            of_segment = segment.rows(plan)
            for page in pages_of(plan, segment.lo, segment.hi):
                assert 0 <= page.lo < page.hi <= len(of_segment)
                tokens = np.arange(max(0, min(plan.slot_tokens, int(forest.length[page.node]) - page.token)))
                readers = of_segment[page.lo : page.hi]
                seen = np.ones((len(readers), len(tokens)), bool)
                if plan.query_tokens > 1:
                    seen = above[page.node] + page.token + tokens <= positions[readers, None]
                out[readers[:, None], segment.head, page.number * plan.slot_tokens + tokens] += seen
    return out


def assert_computes_everything_once(plan, case, forest):
    expected = visible(plan, case, forest)
    np.testing.assert_array_equal(visits(plan, case, forest), np.repeat(expected[:, None], plan.num_kv_heads, 1))


def test_every_visible_row_and_token_meet_once_in_every_kv_head():
    kinds = Counter()

    @settings(max_examples=250)
    @given(cases())
    def check(case):
        plan = case.plan()
        assert plan.is_exact_for(case.forest)
        assert_computes_everything_once(plan, case, case.forest)
        assert plan.used_rows.tolist() == [sum(of is not None for of in rows_of(plan, case.forest))]
        wide = any(segment.tile != segment.other_tile for segment in used_segments(plan))
        kinds["wide segments"] += wide
        kinds["wide segments of several query tokens"] += wide and plan.query_tokens > 1
        kinds["pages in parts"] += plan.slot_tokens < plan.page_size

    check()
    assert min(kinds.values()) > 20


@settings(max_examples=250)
@given(cases(), st.data())
def test_a_plan_stays_exact_while_leaves_grow_by_its_steps(case, data):
    most = room(case.forest, case.options["steps"])
    plan = case.plan()
    count = [data.draw(st.integers(0, int(n))) for n in most]
    grown = case.forest.extend(count)
    assert plan.is_exact_for(grown)
    plan.check(grown)
    assert_computes_everything_once(plan, case, grown)
    full = case.forest.extend(most)
    assert plan.is_exact_for(full)
    assert_computes_everything_once(plan, case, full)


@settings(max_examples=250)
@given(cases())
def test_unmasked_blocks_are_visible_to_all_used_rows_of_their_tiles(case):
    plan = case.plan()
    slots = plan.pages.shape[1]
    for forest in (case.forest, case.forest.extend(room(case.forest, case.options["steps"]))):
        expected, used = visible(plan, case, forest), np.asarray([of is not None for of in rows_of(plan, forest)])
        for segment in used_segments(plan):
            assert segment.lo <= segment.masked <= segment.hi
            rows = segment.rows(plan)
            pages = list(pages_of(plan, segment.lo, segment.masked))
            assert len(pages) == slots * (segment.masked - segment.lo)
            tokens = [page.number * plan.slot_tokens + token for page in pages for token in range(plan.slot_tokens)]
            assert expected[rows[used[rows]]][:, tokens].all()


@pytest.mark.parametrize("free_requests", [0, 1, 5])
@pytest.mark.parametrize("query_tokens", [1, 2])
def test_pages_that_all_rows_see_in_full_need_no_mask(query_tokens, free_requests):
    # 256 shared tokens, then 5 of their own for each request: 8 blocks without a mask, one with.
    forest = Forest.from_nodes([-1, 0, 0], [256, 5, 5], [1, 2], page_size=16, request_capacity=2 + free_requests)
    plan = make_plan(forest, **HEADS, num_ctas=1, tile_rows=16, block_tokens=32, query_tokens=query_tokens, lanes=1)
    counts = [(segment.masked - segment.lo, segment.hi - segment.masked) for segment in used_segments(plan)]
    assert counts == [(8, 1)] * 2


@settings(max_examples=100)
@given(cases())
def test_masks_are_by_token_where_readers_differ_within_a_block_or_a_page_is_not_full(case):
    plan = case.plan()
    masked = {block for each in used_segments(plan) if each.head == 0 for block in range(each.masked, each.hi)}
    by_token = 0
    for block in masked:
        pages = list(pages_of(plan, block, block + 1))
        full = all(case.forest.length[page.node] >= page.token + plan.slot_tokens for page in pages)
        same = len(pages) == plan.pages.shape[1] and len({(page.lo, page.hi) for page in pages}) == 1
        by_token += plan.query_tokens > 1 or not (full and same)
    expected = by_token / len(masked) if masked else 1.0
    assert plan.shares[1] == pytest.approx(1000 * expected, abs=0.51)


@settings(max_examples=150)
@given(cases())
def test_a_tile_streams_only_pages_that_its_rows_read_and_each_once(case):
    """Also through wide streams, which hold the pages that both tiles of a pair read, if those are many enough."""
    plan = case.plan(query_tokens=1)
    full = case.forest.extend(room(case.forest, case.options["steps"]))
    read = visible(plan, case, full).reshape(plan.num_tiles, plan.tile_rows, -1, plan.slot_tokens).any((1, 3))
    found, wide = np.zeros_like(read, int), np.zeros_like(read)
    for segment in used_segments(plan):
        assert (segment.other_tile == segment.tile) or (segment.tile % 2, segment.other_tile) == (0, segment.tile + 1)
        if segment.head == 0:
            pages = [page.number for page in pages_of(plan, segment.lo, segment.hi)]
            for tile in segment.partial_of_tile:
                np.add.at(found[tile], pages, 1)
                wide[tile, pages] |= segment.tile != segment.other_tile
    np.testing.assert_array_equal(found, read)
    for tile in range(0, plan.num_tiles - 1, 2):
        of_both = read[tile] & read[tile + 1]
        worthwhile = plan.lanes == 2 and of_both.sum() * plan.slot_tokens >= case.least_wide_tokens
        np.testing.assert_array_equal(wide[tile : tile + 2], [of_both & worthwhile] * 2)


@pytest.mark.parametrize(("lanes", "pages_short", "wide"), [(2, 0, True), (2, 1, False), (1, 0, False)])
def test_a_pair_of_tiles_has_a_wide_stream_if_what_both_read_has_enough_pages(lanes, pages_short, wide):
    # Node 0 is read by the rows of all three tiles, node 2 by those of the second one; the last page has one token.
    length = (streams.LEAST_WIDE_TOKENS // 16 - pages_short) * 16 - 15
    forest = Forest.from_nodes([-1, 0, 0, 0], [length, 0, 40, 0], [1] * 4 + [2] * 4 + [3], page_size=16)
    plan = make_plan(forest, num_q_heads=2, num_kv_heads=1, head_dim=8, num_ctas=1, tile_rows=8, lanes=lanes)
    tiles_of_node = {0: [], 2: []}
    for segment in used_segments(plan):
        for node in {page.node for page in pages_of(plan, segment.lo, segment.hi)}:
            tiles_of_node[node].append((segment.tile, segment.other_tile))
    assert tiles_of_node == {0: [(0, 1), (2, 2)] if wide else [(0, 0), (1, 1), (2, 2)], 2: [(1, 1)]}


@pytest.mark.parametrize("lanes", [1, 2])
def test_pages_that_no_query_of_a_stream_may_see_yet_are_left_out(lanes):
    # 64 query tokens of one request in tiles of 8: tile i sees pages 0 .. i, and page i + 1 after one more step.
    forest = Forest.from_nodes([-1], [64], [0], page_size=8)
    sizes = {"query_tokens": 64, "num_ctas": 1, "tile_rows": 8, "block_tokens": 8, "lanes": lanes}
    heads = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    case = Case(forest, PagePool.create(8, taken=forest.used_pages), heads | sizes, least_wide_tokens=1)
    plan = case.plan()
    last_tiles = [max(segment.partial_of_tile) for segment in used_segments(plan)]
    assert last_tiles == ([1, 3, 5, 7] if lanes == 2 else list(range(8)))
    assert [segment.hi - segment.lo for segment in used_segments(plan)] == [min(tile + 2, 8) for tile in last_tiles]
    assert_computes_everything_once(plan, case, forest)


@pytest.mark.parametrize("short", range(4))
def test_a_wide_stream_masks_what_some_query_of_either_tile_may_not_see_yet(short):
    # Two requests a tile, three query tokens each; those of the short one begin at token 30 of the 32 shared ones.
    length = [32, 40, 40, 40, 40]
    length[1 + short] = 1
    forest = Forest.from_nodes([-1, 0, 0, 0, 0], length, [1, 2, 3, 4], page_size=16)
    options = {"query_tokens": 3, "num_ctas": 1, "tile_rows": 6, "block_tokens": 16, "lanes": 2}
    heads = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    plan = Case(forest, PagePool.create(16, taken=forest.used_pages), heads | options, least_wide_tokens=1).plan()
    (wide,) = (segment for segment in used_segments(plan) if segment.tile != segment.other_tile)
    assert (wide.masked - wide.lo, wide.hi - wide.masked) == (1, 1)


@settings(max_examples=250)
@given(cases())
def test_segments_partition_the_streams_and_leave_each_tile_consecutive_partials_in_order(case):
    plan = case.plan()
    segments = used_segments(plan)
    assert len(segments) <= len(plan.segments)
    assert 0.9 * case.options["num_ctas"] <= len(plan.runs) <= case.options["num_ctas"]
    next_segment = 0
    for first, past, *fields in plan.runs.tolist():
        assert first == next_segment
        if past > first:
            assert fields == [*segments[first], *plan.pages[segments[first].lo, :, 0]]
        next_segment = past
    assert plan.cta_ptr.tolist() == [*plan.runs[:, 0].tolist(), next_segment]

    in_use = np.flatnonzero([any(pages_of(plan, block, block + 1)) for block in range(len(plan.pages))]).tolist()
    owner, blocks_of_heads = {}, [[] for _ in range(plan.num_kv_heads)]
    merged = [[] for _ in range(plan.num_tiles * plan.num_kv_heads)]
    for segment in segments:
        assert segment.lo < segment.hi
        for block in range(segment.lo, segment.hi):
            assert owner.setdefault(block, segment[:2]) == segment[:2]
        blocks_of_heads[segment.head] += range(segment.lo, segment.hi)
        for tile, partial in segment.partial_of_tile.items():
            merged[tile * plan.num_kv_heads + segment.head].append(partial)
        if segment.tile == segment.other_tile:
            assert plan.lanes == 1 or segment.other_partial >= plan.num_partials
    for blocks in blocks_of_heads:
        assert sorted(blocks) == in_use

    assert plan.merge_ptr.shape == (len(merged) + 1,)
    assert plan.merge_ptr[0] == 0
    for stream, partials in enumerate(merged):
        assert partials == list(range(plan.merge_ptr[stream], plan.merge_ptr[stream + 1]))
    assert plan.merge_ptr[-1] <= plan.num_partials


@settings(max_examples=150)
@given(cases())
def test_tiles_know_where_in_the_query_they_begin_if_their_rows_are_consecutive_there(case):
    plan = case.plan()
    requests = np.argsort(case.forest.query_order).tolist()
    entries = [request * plan.query_tokens + token for request in requests for token in range(plan.query_tokens)]
    units, rest = divmod(plan.tile_rows, plan.group)
    for tile in range(plan.num_tiles):
        mine = entries[tile * units : (tile + 1) * units]
        together = rest == 0 and mine == list(range(mine[0], mine[0] + len(mine)))
        # A tile that is not full must be at the end of the query too.
        together = together and (len(mine) == units or mine[-1] == len(entries) - 1)
        assert plan.tile_unit[tile] == (mine[0] if together else -1)
    for segment in used_segments(plan):
        assert (segment.unit, segment.other_unit) == tuple(plan.tile_unit[[segment.tile, segment.other_tile]])


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
    model = cost_model(Layout(**HEADS, page_size=16), block_tokens=32, segment=2.0, merge=1.0)
    sizes = {"num_ctas": num_ctas, "tile_rows": tile_rows, "block_tokens": 32, "lanes": 1}
    plan = make_plan(forest, **HEADS, **sizes, cost_model=model)
    blocks = plan.segments[:, 5] - plan.segments[:, 3]
    loads = np.diff(np.concatenate([[0], np.cumsum(blocks)])[plan.cta_ptr])
    assume(loads.sum() >= 8 * num_ctas)
    # Masks and the start of a segment cost something too, but less than these.
    slack = 2 + 0.12 * loads.mean() + 2.2 * max(np.diff(plan.cta_ptr))
    assert abs(loads - loads.mean()).max() <= slack


@settings(max_examples=20)
@given(cases())
def test_plans_are_deterministic_int32_and_leave_the_forest_alone(case):
    before = [np.copy(leaf) for leaf in jax.tree.leaves(case.forest)]
    plan = case.plan()
    again = case._replace(forest=jax.tree.map(np.copy, case.forest)).plan()
    assert jax.tree.structure(plan) == jax.tree.structure(again)
    for left, right in zip(jax.tree.leaves(plan), jax.tree.leaves(again), strict=True):
        assert left.dtype == np.int32
        np.testing.assert_array_equal(left, right)
    for old, new in zip(before, jax.tree.leaves(case.forest), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("page_size", "block_tokens", "slot_tokens", "slots"),
    [
        (16, 16, 16, 1),
        (16, 48, 16, 3),
        (16, 256, 16, 16),
        (8, 128, 8, 16),
        (24, 128, 8, 16),
        (256, 128, 128, 1),
        (144, 128, 16, 8),
        (48, 32, 16, 2),
        # No parts of 8 tokens or more fill these: whole pages, at least one.
        (16, 1, 16, 1),
        (16, 31, 16, 1),
    ],
)
def test_blocks_hold_block_tokens_in_whole_pages_or_in_parts_of_longer_ones(
    page_size, block_tokens, slot_tokens, slots
):
    forest = Forest.from_nodes([-1], [300], [0], page_size=page_size)
    plan = make_plan(forest, **HEADS, num_ctas=1, tile_rows=8, block_tokens=block_tokens)
    assert (plan.slot_tokens, plan.pages.shape[1]) == (slot_tokens, slots)
    assert [segment.hi - segment.lo for segment in used_segments(plan)] == [-(-300 // (slot_tokens * slots))] * 2


def test_the_sizes_that_are_not_given_suit_the_device():
    forest = Forest.from_nodes([-1], [100], [0], page_size=16)
    plan = make_plan(forest, **HEADS)
    assert plan.tile_rows % 8 == 0
    assert plan.is_exact_for(forest)


def test_changing_trees_of_one_bucket_share_shapes_and_one_compilation():
    @jax.jit
    def step(forest, plan):
        return plan.is_exact_for(forest), forest.extend(1).request_length, plan.pages.sum()

    forest = Forest.from_nodes([-1, 0], [20, 3], [1, 1, 0], page_size=8, request_capacity=6, node_capacity=24)
    pool = PagePool.create(64, taken=forest.used_pages)
    shapes = set()

    def run(forest):
        plan = make_plan(forest, **HEADS, **TILING, steps=4, block_capacity=32)
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves((forest, plan))))
        assert step(forest, plan)[0]

    for _ in range(2):
        forest, pool = forest.reserve(pool, 4)
        run(forest)
        forest = forest.extend(4)
        run(forest)
        oldest = np.flatnonzero(forest.active)[:2]
        forest, _ = forest.fork(oldest)
        forest, pool = forest.reserve(pool, 4)
        run(forest)
        forest, pool = forest.retire(pool, oldest)
        run(forest)
    assert len(shapes) == 1
    assert step._cache_size() == 1


def test_block_capacity_pads_and_a_plan_that_needs_more_gets_the_next_bucket():
    forest = Forest.from_nodes([-1], [160], [0], page_size=16)
    sizes = {
        capacity: make_plan(forest, **HEADS, num_ctas=2, tile_rows=8, block_tokens=16, block_capacity=capacity)
        for capacity in (0, 9, 10, 57)
    }
    assert sizes[10].pages.shape[0] == 10
    assert sizes[57].pages.shape[0] == 57
    assert sizes[0].pages.shape == sizes[9].pages.shape
    assert sizes[0].pages.shape[0] >= 10
    assert not sizes[57].pages[10:].any()


@pytest.mark.parametrize("length", [0, 5])
def test_a_plan_without_work_keeps_the_shapes_that_its_capacity_asks_for(length):
    forest = Forest.from_nodes([-1], [length], [0], page_size=16)
    pool = PagePool.create(4, taken=forest.used_pages)
    working = make_plan(Forest.from_nodes([-1], [5], [0], page_size=16), **HEADS, **TILING, block_capacity=48)
    idle_forest = forest.retire(pool, [0])[0] if length else forest
    idle = make_plan(idle_forest, **HEADS, **TILING, block_capacity=48)
    assert [a.shape for a in jax.tree.leaves(idle)] == [a.shape for a in jax.tree.leaves(working)]
    assert not idle.runs[:, :2].any()
    assert not idle.merge_ptr.any()
    assert idle.is_exact_for(idle_forest)


FOREST = Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=16, request_capacity=4)
PLAN = make_plan(FOREST, **HEADS, **TILING, steps=4)


def test_a_plan_fits_its_forest_for_its_steps_on_host_and_under_jit():
    exact = jax.jit(lambda forest, plan: plan.is_exact_for(forest))
    for tokens in range(5):
        grown = FOREST.extend(tokens)
        PLAN.check(grown)
        assert PLAN.is_exact_for(grown)
        assert exact(grown, PLAN)
    shorter = Forest.from_nodes([-1, 0, 0], [19, 3, 5], [1, 2], page_size=16, request_capacity=4)
    assert shorter.structure == FOREST.structure
    for other in (FOREST.extend(5), FOREST.extend([5, 0, 0, 0]), FOREST.extend([0, 9, 0, 0]), shorter):
        assert not PLAN.is_exact_for(other)
        assert not exact(other, PLAN)


@pytest.mark.parametrize(
    ("forest", "message"),
    [
        (FOREST.fork([0])[0], r"plan: expected a plan for this forest, got one for another"),
        (FOREST.extend([5, 0, 0, 0]), r"plan: expected lengths.*got 8 tokens in node 1, .* 3 to 7"),
        (
            Forest.from_nodes([-1, 0, 0], [19, 3, 5], [1, 2], page_size=16, request_capacity=4),
            r"plan: expected lengths.*got 19 tokens in node 0, .* 20 to 20",
        ),
        (
            Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=32, request_capacity=4),
            r"plan: expected a plan for page_size = 32, .* got one for 16",
        ),
        (
            Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=16, request_capacity=5),
            r"plan: expected a plan for request_capacity = 5, .* got one for 4",
        ),
        (
            Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=16, request_capacity=4, node_capacity=129),
            r"plan: expected a plan for node_capacity = 129, .* got one for 12",
        ),
    ],
    ids=["forked", "past its steps", "shorter", "page size", "request capacity", "node capacity"],
)
def test_checking_a_plan_against_another_forest_raises(forest, message):
    with pytest.raises(PlanError, match=message):
        PLAN.check(forest)


def test_capacities_show_on_the_device_too_and_structure_does_not():
    on_device = jax.tree.map(jnp.asarray, FOREST.fork([0])[0])
    PLAN.check(on_device)
    assert not PLAN.is_exact_for(on_device)
    other = Forest.from_nodes([-1], [20], [0], page_size=32)
    with pytest.raises(PlanError, match=r"plan: expected a plan for page_size = 32"):
        PLAN.check(jax.tree.map(jnp.asarray, other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: value}, rf"{name}: expected a positive number, got {value}")
            for name in ("num_q_heads", "num_kv_heads", "head_dim", "steps", "query_tokens")
            for value in (0, -1)
        ),
        *(
            ({name: 0}, rf"{name}: expected a positive number, got 0")
            for name in ("num_ctas", "tile_rows", "block_tokens", "lanes", "least_wide_tokens")
        ),
        ({"num_q_heads": 5}, r"num_q_heads: expected a multiple of num_kv_heads = 2, got 5"),
        ({"lanes": 3}, r"lanes: expected 1 or 2, got 3"),
        ({"lanes": 1, "tile_rows": 2**15}, r"tile_rows: expected at most 32767, got 32768"),
        ({"lanes": 2, "tile_rows": 2**14}, r"tile_rows: expected at most 16383, got 16384"),
    ],
)
def test_make_plan_names_the_bad_argument(change, message):
    with pytest.raises(ValueError, match=message):
        make_plan(FOREST, **{**HEADS, **TILING, **change})


def test_planning_for_a_forest_on_a_device_raises():
    with pytest.raises(TypeError, match=r"forest: expected NumPy arrays, got arrays on a device"):
        make_plan(jax.tree.map(jnp.asarray, FOREST), **HEADS)
