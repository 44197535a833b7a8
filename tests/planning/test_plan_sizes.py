"""Sizes and capacities of plans, and which forests a plan holds for."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import ancestry, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import HEADS, TILING, cases, used_segments

from codec_jax import CostModel, Forest, PagePool, PlanError, make_plan, replan
from codec_jax.planning.cost import HeadLayout
from codec_jax.planning.streams import count_kv_tokens


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
    assert (plan.arrays.page_tokens, plan.arrays.block_pages.shape[1]) == (slot_tokens, slots)
    assert [segment.end - segment.begin for segment in used_segments(plan)] == [-(-300 // (slot_tokens * slots))] * 2


def test_the_sizes_that_are_not_given_suit_the_device():
    forest = Forest.from_nodes([-1], [100], [0], page_size=16)
    plan = make_plan(forest, **HEADS)
    assert plan.arrays.tile_rows % 8 == 0
    assert plan.is_valid_for(forest)


@settings(max_examples=50)
@given(trees(), st.integers(1, 7), st.sampled_from([3, 8, 64]))
def test_tokens_count_once_for_every_tile_that_reads_them(tree, rows_per_request, tile_rows):
    forest = Forest.from_nodes(*tree, page_size=16, request_capacity=len(tree.leaf) + 2)
    expected = set()
    for row, request in enumerate(forest.request_of_row[: len(tree.leaf)]):
        tiles = {(row * rows_per_request + i) // tile_rows for i in range(rows_per_request)}
        expected |= {(tile, node) for tile in tiles for node in ancestry(tree.parent, tree.leaf[request])}
    once, again = count_kv_tokens(forest, rows_per_request, tile_rows)
    assert once == sum(tree.length[node] for node in {node for _, node in expected})
    assert once + again == sum(tree.length[node] for _, node in expected)


@pytest.mark.parametrize(
    ("root", "requests", "length"),
    # With 8 kv heads on 132 thread blocks, 67,584 tokens are 4096 for each and 8448 are 512. 17 requests are two tiles.
    [(67_583, 16, "short"), (67_584, 16, "long"), (8447, 17, "short"), (8448, 17, "long"), (0, 17, "short")],
)
def test_blocks_are_long_on_a_gpu_for_4096_tokens_a_thread_block_or_512_that_two_tiles_read(
    monkeypatch, root, requests, length
):
    device = SimpleNamespace(platform="gpu", core_count=132, compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    forest = Forest.from_nodes([-1], [root], [0] * requests, page_size=16)
    costs = CostModel.roofline(HeadLayout(32, 8, 128, 16))
    plan = make_plan(forest, num_q_heads=32, num_kv_heads=8, head_dim=128, cost_model=costs)
    assert plan.arrays.block_tokens == {"short": 64, "long": 128}[length]


def test_all_thread_blocks_work_where_arithmetic_decides_and_a_plan_made_again_has_as_many(monkeypatch):
    device = SimpleNamespace(platform="gpu", core_count=132, compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    few, many = (
        Forest.from_nodes([-1], [16_384], [0] * requests, page_size=16, request_capacity=256) for requests in (8, 256)
    )
    heads = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 128}
    heads |= {"cost_model": CostModel.roofline(HeadLayout(64, 8, 128, 16)), "block_capacity": 8192}
    plans = [make_plan(forest, **heads) for forest in (few, many)]
    # Heads are cut alike by 16 thread blocks for each, or pairs of heads by 33.
    assert [plan.num_ctas for plan in plans] == [128, 132]
    assert [np.count_nonzero(np.diff(plan.arrays.cta_ptr)) for plan in plans] == [128, 132]
    for plan, other in zip(plans, (many, few), strict=True):
        again = replan(plan, other)
        assert again.num_ctas == plan.num_ctas
        assert [leaf.shape for leaf in jax.tree.leaves(again)] == [leaf.shape for leaf in jax.tree.leaves(plan)]


def test_changing_trees_of_one_bucket_share_shapes_and_one_compilation():
    @jax.jit
    def step(forest, plan):
        return plan.is_valid_for(forest), forest.extend(1).request_length, plan.arrays.block_pages.sum()

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
    assert sizes[10].arrays.block_pages.shape[0] == 10
    assert sizes[57].arrays.block_pages.shape[0] == 57
    assert sizes[0].arrays.block_pages.shape[0] >= 10
    assert sizes[9].arrays.block_pages.shape[0] >= 10
    assert not sizes[57].arrays.block_pages[10:].any()


@pytest.mark.parametrize("steps", [32, 2**31 - 24, 2**31 - 1, 2**40])
def test_more_steps_than_pages_hold_are_as_many_as_they_hold(steps):
    forest = Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2])
    forest, _ = forest.reserve(PagePool.create(64, forest.used_pages), 32)
    sizes = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8, "query_tokens": 2, "num_ctas": 4}
    jax.tree.map(
        np.testing.assert_array_equal,
        make_plan(forest, **sizes, steps=64),
        make_plan(forest, **sizes, steps=steps + 32),
    )


@pytest.mark.parametrize("length", [0, 5])
def test_a_plan_without_work_keeps_the_shapes_that_its_capacity_asks_for(length):
    forest = Forest.from_nodes([-1], [length], [0], page_size=16)
    pool = PagePool.create(4, taken=forest.used_pages)
    working = make_plan(Forest.from_nodes([-1], [5], [0], page_size=16), **HEADS, **TILING, block_capacity=48)
    idle_forest = forest.retire(pool, [0])[0] if length else forest
    idle = make_plan(idle_forest, **HEADS, **TILING, block_capacity=48)
    assert [a.shape for a in jax.tree.leaves(idle)] == [a.shape for a in jax.tree.leaves(working)]
    assert not idle.arrays.cta_begin[:, :2].any()
    assert not idle.arrays.merge_ptr.any()
    assert idle.is_valid_for(idle_forest)


FOREST = Forest.from_nodes([-1, 0, 0], [20, 3, 5], [1, 2], page_size=16, request_capacity=4)
PLAN = make_plan(FOREST, **HEADS, **TILING, steps=4)


def test_a_plan_fits_its_forest_for_its_steps_on_host_and_under_jit():
    exact = jax.jit(lambda forest, plan: plan.is_valid_for(forest))
    for tokens in range(5):
        grown = FOREST.extend(tokens)
        PLAN.check(grown)
        assert PLAN.is_valid_for(grown)
        assert exact(grown, PLAN)
    shorter = Forest.from_nodes([-1, 0, 0], [19, 3, 5], [1, 2], page_size=16, request_capacity=4)
    assert shorter.structure_hash == FOREST.structure_hash
    for other in (FOREST.extend(5), FOREST.extend([5, 0, 0, 0]), FOREST.extend([0, 9, 0, 0]), shorter):
        assert not PLAN.is_valid_for(other)
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
            r"plan: expected a plan for node_capacity = 129, .* got one for 48",
        ),
    ],
    ids=["forked", "past its steps", "shorter", "page size", "request capacity", "node capacity"],
)
def test_checking_a_plan_against_another_forest_raises(forest, message):
    with pytest.raises(PlanError, match=message):
        PLAN.check(forest)


@pytest.mark.parametrize(
    ("grow", "message"),
    [
        (lambda forest: forest.fork([0])[0], r"plan: expected a plan for this forest, got one for another"),
        (lambda forest: forest.extend(5), r"got 8 tokens in node 1, .* 3 to 7"),
        (lambda forest: jax.device_put(forest).extend(jnp.int32(99)), r"got an extend that had no room in node 1"),
    ],
    ids=["forked", "past its steps", "without room"],
)
def test_a_check_says_why_a_step_gave_nan_also_of_arrays_on_a_device(grow, message):
    forest, plan = jax.device_put((grow(FOREST), PLAN))
    assert not plan.is_valid_for(forest)
    with pytest.raises(PlanError, match=message):
        plan.check(forest)


def test_capacities_show_on_the_device_too_and_structure_does_not():
    on_device = jax.tree.map(jnp.asarray, FOREST.fork([0])[0])
    PLAN.check_shapes(on_device)
    assert not PLAN.is_valid_for(on_device)
    other = Forest.from_nodes([-1], [20], [0], page_size=32)
    with pytest.raises(PlanError, match=r"plan: expected a plan for page_size = 32"):
        PLAN.check_shapes(jax.tree.map(jnp.asarray, other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: value}, rf"{name}: expected an integer of at least 1, got {value}")
            for name in ("num_q_heads", "num_kv_heads", "head_dim", "steps", "query_tokens")
            for value in (0, -1)
        ),
        *(
            ({name: 0}, rf"{name}: expected an integer of at least 1, got 0")
            for name in ("num_ctas", "tile_rows", "block_tokens", "lanes", "min_wide_tokens")
        ),
        ({"num_q_heads": 5}, r"num_q_heads: expected a multiple of num_kv_heads = 2, .*got 5"),
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
