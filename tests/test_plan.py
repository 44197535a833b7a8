from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import ancestry, page_sizes, trees
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from codec_jax import Forest, PagePool, Plan, PlanError, make_plan

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
TILING = {"num_ctas": 3, "tile_rows": 8, "block_tokens": 32}


class Case(NamedTuple):
    """A forest, its pool, and the arguments of `make_plan` for it."""

    forest: Forest
    pool: PagePool
    options: dict

    def plan(self, **options) -> Plan:
        return make_plan(self.forest, **{**self.options, **options})


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
        "tile_rows": draw(st.sampled_from([8, 16, 24, 64])),
        "block_tokens": draw(st.sampled_from([1, 16, 32, 48, 128])),
    }
    return Case(forest, pool, options)


def room(forest, steps):
    """Tokens that each request may append, `steps` at most: those of its own leaf's pages."""
    count = np.zeros(forest.request_capacity, int)
    for request in np.flatnonzero(forest.active):
        leaf = forest.leaf[request]
        reads = [leaf in ancestry(forest.parent, int(end)) for end in forest.leaf]
        if sum(reads) == 1:
            count[request] = min(steps, forest.page_count[leaf] * forest.page_size - forest.length[leaf])
    return count


def used_segments(plan):
    return range(int(plan.cta_ptr[-1]))


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
    rows, page_size = rows_of(plan, forest), forest.page_size
    positions = np.full(len(rows), -1)
    for row, of in enumerate(rows):
        if of is not None:
            positions[row] = len(forest.context_slots(of[0])) - plan.query_tokens + of[1]
    above = {
        node: sum(int(forest.length[n]) for n in ancestry(forest.parent, int(forest.parent[node])))
        for node in np.unique(plan.page_node)
    }
    out = np.zeros((len(rows), plan.num_kv_heads, case.pool.num_pages * page_size), int)
    for cta in range(len(plan.cta_ptr) - 1):
        for segment in range(plan.cta_ptr[cta], plan.cta_ptr[cta + 1]):
            tile, head = int(plan.segment_tile[segment]), int(plan.segment_head[segment])
            for block in range(plan.segment_lo[segment], plan.segment_hi[segment]):
                for slot in range(plan.page_id.shape[1]):
                    node, first = int(plan.page_node[block, slot]), int(plan.page_token[block, slot])
                    tokens = np.arange(max(0, min(page_size, int(forest.length[node]) - first)))
                    lo, hi = (tile * plan.tile_rows + int(x[block, slot]) for x in (plan.page_lo, plan.page_hi))
                    seen = np.ones((max(0, hi - lo), len(tokens)), bool)
                    if plan.query_tokens > 1:
                        seen = above[node] + first + tokens <= positions[lo:hi, None]
                    slots = plan.page_id[block, slot] * page_size + tokens
                    out[lo:hi, head, slots] += seen
    return out


def assert_computes_everything_once(plan, case, forest):
    expected = visible(plan, case, forest)
    np.testing.assert_array_equal(visits(plan, case, forest), np.repeat(expected[:, None], plan.num_kv_heads, 1))


@settings(deadline=None, max_examples=250)
@given(cases())
def test_every_visible_row_and_token_meet_once_in_every_kv_head(case):
    plan = case.plan()
    assert plan.is_exact_for(case.forest)
    assert_computes_everything_once(plan, case, case.forest)


@settings(deadline=None, max_examples=250)
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


@settings(deadline=None, max_examples=250)
@given(cases())
def test_unmasked_blocks_are_visible_to_all_used_rows_of_their_tile(case):
    plan = case.plan()
    for forest in (case.forest, case.forest.extend(room(case.forest, case.options["steps"]))):
        expected, used = visible(plan, case, forest), [of is not None for of in rows_of(plan, forest)]
        for segment in used_segments(plan):
            assert plan.segment_lo[segment] <= plan.segment_masked[segment] <= plan.segment_hi[segment]
            first = plan.segment_tile[segment] * plan.tile_rows
            rows = first + np.flatnonzero(used[first : first + plan.tile_rows])
            for block in range(plan.segment_lo[segment], plan.segment_masked[segment]):
                assert (plan.page_hi[block] > plan.page_lo[block]).all()
                slots = plan.page_id[block][:, None] * forest.page_size + np.arange(forest.page_size)
                assert expected[rows[:, None], slots.reshape(-1)].all()


@pytest.mark.parametrize("free_requests", [0, 1, 5])
@pytest.mark.parametrize("query_tokens", [1, 2])
def test_pages_that_all_rows_see_in_full_need_no_mask(query_tokens, free_requests):
    # 256 shared tokens, then 5 of their own for each request: 8 blocks without a mask, one with.
    forest = Forest.from_nodes([-1, 0, 0], [256, 5, 5], [1, 2], page_size=16, request_capacity=2 + free_requests)
    plan = make_plan(forest, **HEADS, num_ctas=1, tile_rows=16, block_tokens=32, query_tokens=query_tokens)
    assert len(used_segments(plan)) == 2
    for segment in used_segments(plan):
        assert plan.segment_masked[segment] - plan.segment_lo[segment] == 8
        assert plan.segment_hi[segment] - plan.segment_masked[segment] == 1


@settings(deadline=None, max_examples=150)
@given(cases())
def test_a_tile_streams_only_pages_that_its_rows_read_and_each_once(case):
    plan = case.plan(query_tokens=1)
    full = case.forest.extend(room(case.forest, case.options["steps"]))
    read = visible(plan, case, full).reshape(plan.num_tiles, plan.tile_rows, -1, full.page_size).any((1, 3))
    found = np.zeros_like(read, int)
    for segment in used_segments(plan):
        if plan.segment_head[segment] == 0:
            blocks = slice(plan.segment_lo[segment], plan.segment_hi[segment])
            used = plan.page_hi[blocks] > plan.page_lo[blocks]
            np.add.at(found[plan.segment_tile[segment]], plan.page_id[blocks][used], 1)
    np.testing.assert_array_equal(found, read)


def test_pages_that_no_query_of_a_tile_may_see_yet_are_left_out():
    # 64 query tokens of one request in tiles of 8: tile i sees pages 0 .. i, and page i + 1 after one more step.
    forest = Forest.from_nodes([-1], [64], [0], page_size=8)
    plan = make_plan(
        forest,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=8,
        query_tokens=64,
        num_ctas=1,
        tile_rows=8,
        block_tokens=8,
    )
    blocks = plan.segment_hi - plan.segment_lo
    for segment in used_segments(plan):
        assert blocks[segment] <= plan.segment_tile[segment] + 2


@settings(deadline=None, max_examples=250)
@given(cases())
def test_segments_partition_the_streams_and_merge_lists_hold_each_once_in_order(case):
    plan = case.plan()
    assert plan.cta_ptr.shape == (case.options["num_ctas"] + 1,)
    assert plan.cta_ptr[0] == 0
    assert (np.diff(plan.cta_ptr) >= 0).all()
    segments = used_segments(plan)
    assert len(segments) <= len(plan.segment_tile)

    in_use = (plan.page_hi > plan.page_lo).any(axis=1)
    streams = plan.num_tiles * plan.num_kv_heads
    assert plan.merge_ptr.shape == (streams + 1,)
    assert plan.merge_ptr[0] == 0
    merged, blocks_of_heads = [], [[] for _ in range(plan.num_kv_heads)]
    for stream in range(streams):
        tile, head = divmod(stream, plan.num_kv_heads)
        members = plan.merge_segment[plan.merge_ptr[stream] : plan.merge_ptr[stream + 1]].tolist()
        blocks = []
        for segment in members:
            assert (plan.segment_tile[segment], plan.segment_head[segment]) == (tile, head)
            assert plan.segment_lo[segment] < plan.segment_hi[segment]
            blocks += range(plan.segment_lo[segment], plan.segment_hi[segment])
        assert blocks == sorted(blocks)
        merged += members
        blocks_of_heads[head] += blocks
    assert sorted(merged) == list(segments)
    for blocks in blocks_of_heads:
        assert sorted(blocks) == np.flatnonzero(in_use).tolist()


@settings(deadline=None, max_examples=150)
@given(
    trees(max_nodes=5, max_length=8, max_requests=6),
    st.lists(st.integers(0, 200), min_size=5, max_size=5),
    st.sampled_from([2, 7, 16]),
    st.sampled_from([8, 16]),
)
def test_thread_blocks_get_equal_numbers_of_blocks_when_there_is_enough_work(tree, hundreds, num_ctas, tile_rows):
    lengths = [16 * n + length for n, length in zip(hundreds, tree.length, strict=False)]
    forest = Forest.from_nodes(tree.parent, lengths, tree.leaf, page_size=16)
    plan = make_plan(forest, **HEADS, num_ctas=num_ctas, tile_rows=tile_rows, block_tokens=32)
    loads = np.asarray(
        [
            sum(plan.segment_hi[s] - plan.segment_lo[s] for s in range(plan.cta_ptr[c], plan.cta_ptr[c + 1]))
            for c in range(num_ctas)
        ]
    )
    assume(loads.sum() >= 8 * num_ctas)
    # Masks and the start of a stream cost something too, but less than these.
    streams = plan.num_tiles * plan.num_kv_heads
    slack = 2 + 0.12 * loads.mean() + 0.6 * min(streams, max(np.diff(plan.cta_ptr)))
    assert abs(loads - loads.mean()).max() <= slack


@settings(deadline=None, max_examples=20)
@given(cases())
def test_plans_are_deterministic_int32_and_leave_the_forest_alone(case):
    before = [np.copy(leaf) for leaf in jax.tree.leaves(case.forest)]
    plan = case.plan()
    copy = jax.tree.map(np.copy, case.forest)
    again = make_plan(copy, **case.options)
    assert jax.tree.structure(plan) == jax.tree.structure(again)
    for left, right in zip(jax.tree.leaves(plan), jax.tree.leaves(again), strict=True):
        assert left.dtype == np.int32
        np.testing.assert_array_equal(left, right)
    for old, new in zip(before, jax.tree.leaves(case.forest), strict=True):
        np.testing.assert_array_equal(old, new)


def test_slots_of_a_block_hold_block_tokens_rounded_down_to_whole_pages():
    forest = Forest.from_nodes([-1], [100], [0], page_size=16)
    for block_tokens, slots in ((1, 1), (16, 1), (31, 1), (48, 3), (256, 16)):
        plan = make_plan(forest, **HEADS, num_ctas=1, tile_rows=8, block_tokens=block_tokens)
        assert plan.page_id.shape[1] == slots
        assert sum(plan.segment_hi - plan.segment_lo) == 2 * -(-7 // slots)


def test_the_sizes_that_are_not_given_suit_the_device():
    forest = Forest.from_nodes([-1], [100], [0], page_size=16)
    plan = make_plan(forest, **HEADS)
    assert plan.tile_rows % 8 == 0
    assert plan.is_exact_for(forest)


def test_changing_trees_of_one_bucket_share_shapes_and_one_compilation():
    @jax.jit
    def step(forest, plan):
        return plan.is_exact_for(forest), forest.extend(1).request_length, plan.page_id.sum()

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
    assert sizes[10].page_id.shape[0] == 10
    assert sizes[57].page_id.shape[0] == 57
    assert sizes[0].page_id.shape == sizes[9].page_id.shape
    assert sizes[0].page_id.shape[0] >= 10
    assert not sizes[57].page_hi[10:].any()


@pytest.mark.parametrize("length", [0, 5])
def test_a_plan_without_work_keeps_the_shapes_that_its_capacity_asks_for(length):
    forest = Forest.from_nodes([-1], [length], [0], page_size=16)
    pool = PagePool.create(4, taken=forest.used_pages)
    working = make_plan(Forest.from_nodes([-1], [5], [0], page_size=16), **HEADS, **TILING, block_capacity=48)
    idle_forest = forest.retire(pool, [0])[0] if length else forest
    idle = make_plan(idle_forest, **HEADS, **TILING, block_capacity=48)
    assert [a.shape for a in jax.tree.leaves(idle)] == [a.shape for a in jax.tree.leaves(working)]
    assert not idle.cta_ptr.any()
    assert not idle.merge_ptr.any()
    assert idle.is_exact_for(idle_forest)


FOREST = Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=16, request_capacity=4, node_capacity=8)
PLAN = make_plan(FOREST, **HEADS, **TILING, steps=4)


def test_a_plan_fits_its_forest_for_its_steps_on_host_and_under_jit():
    exact = jax.jit(lambda forest, plan: plan.is_exact_for(forest))
    for tokens in range(5):
        grown = FOREST.extend(tokens)
        PLAN.check(grown)
        assert PLAN.is_exact_for(grown)
        assert exact(grown, PLAN)
    shorter = Forest.from_nodes([-1, 0, 0], [19, 3, 5], [1, 2], page_size=16, request_capacity=4, node_capacity=8)
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
            Forest.from_nodes([-1, 0, 0], [19, 3, 5], [1, 2], page_size=16, request_capacity=4, node_capacity=8),
            r"plan: expected lengths.*got 19 tokens in node 0, .* 20 to 20",
        ),
        (
            Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=32, request_capacity=4, node_capacity=8),
            r"plan: expected a plan for page_size = 32, .* got one for 16",
        ),
        (
            Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=16, request_capacity=5, node_capacity=8),
            r"plan: expected a plan for request_capacity = 5, .* got one for 4",
        ),
        (
            Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=16, request_capacity=4, node_capacity=9),
            r"plan: expected a plan for node_capacity = 9, .* got one for 8",
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
            for name in ("num_ctas", "tile_rows", "block_tokens")
        ),
        ({"num_q_heads": 5}, r"num_q_heads: expected a multiple of num_kv_heads = 2, got 5"),
        ({"tile_rows": 12}, r"tile_rows: expected a multiple of 8, got 12"),
    ],
)
def test_make_plan_names_the_bad_argument(change, message):
    with pytest.raises(ValueError, match=message):
        make_plan(FOREST, **{**HEADS, **TILING, **change})


def test_planning_for_a_forest_on_a_device_raises():
    with pytest.raises(TypeError, match=r"forest: expected NumPy arrays, got arrays on a device"):
        make_plan(jax.tree.map(jnp.asarray, FOREST), **HEADS)
