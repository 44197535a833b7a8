"""Plans that are made again: as exact as a new plan, of the same shapes, by the same costs."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from costs import cost_model
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import HEADS, assert_computes_everything_once, cases, room

from codec_jax import Forest, OutOfPagesError, PagePool, PlanError, Window, make_plan, replan
from codec_jax.planning.cost import HeadLayout


@settings(max_examples=100)
@given(cases(), st.data())
def test_a_plan_that_is_made_again_computes_everything_once_for_its_steps(case, data):
    steps, plan, forest, pool = case.options["steps"], case.plan(), case.forest, case.pool
    for _ in range(data.draw(st.integers(1, 3))):
        counts = [data.draw(st.integers(0, int(n))) for n in room(forest, steps)]
        try:
            forest, pool = forest.extend(counts).reserve(pool, steps)
        except OutOfPagesError:
            break
        plan = replan(plan, forest, steps=steps)
        now = case._replace(forest=forest, pool=pool)
        for grown in (forest, forest.extend(room(forest, steps))):
            plan.check(grown)
            assert_computes_everything_once(plan, now, grown)


def test_it_has_the_shapes_sizes_and_costs_of_the_plan_before():
    model = cost_model(HeadLayout(**HEADS, page_size=16))
    forest = Forest.from_nodes([-1, 0, 0], [300, 20, 30], [1, 2], request_capacity=4)
    pool = PagePool.create(64, forest.used_pages)
    given = {"num_ctas": 7, "tile_rows": 8, "block_tokens": 48, "lanes": 2, "block_capacity": 96, "query_tokens": 2}
    given |= {"window": Window(50, chunked=True)}
    given |= {"min_wide_tokens": 1, "policy": "paper", "cost_model": model, "value_head_dim": 4}
    plan = make_plan(forest, **HEADS, **given, steps=3)
    forest, pool = forest.fork([0])[0].reserve(pool, 90)
    forest = forest.extend(70)
    again = replan(plan, forest, steps=5)
    chex.assert_trees_all_equal(again, make_plan(forest, **HEADS, **given, steps=5))
    assert again.cost_model is model
    assert jax.tree.structure(again) == jax.tree.structure(plan)
    assert [leaf.shape for leaf in jax.tree.leaves(again)] == [leaf.shape for leaf in jax.tree.leaves(plan)]


@given(st.integers(1, 216), st.sampled_from([1, 2, 8, 12, 20, 32]), st.sampled_from(["aligned", "invariant"]))
@settings(max_examples=60, deadline=None)
def test_thread_blocks_that_a_division_left_out_are_asked_for_again(num_ctas, kv_heads, policy):
    forest = Forest.from_nodes([-1, 0, 0], [1000, 20, 5], [1, 2])
    options = {"num_q_heads": kv_heads, "num_kv_heads": kv_heads, "head_dim": 64, "policy": policy}
    plan = make_plan(forest, **options, num_ctas=num_ctas)
    for again in (replan(plan, forest), replan(replan(plan, forest), forest)):
        chex.assert_trees_all_equal(again, plan)
        assert again.num_ctas == plan.num_ctas <= num_ctas


def test_costs_that_are_measured_anew_compile_nothing():
    model = cost_model(HeadLayout(**HEADS, page_size=16))
    forest = Forest.from_nodes([-1, 0, 0], [300, 20, 30], [1, 2])
    valid = jax.jit(lambda plan, forest: plan.is_valid_for(forest))
    for date in ("2026-01-01", "2026-01-02"):
        assert valid(make_plan(forest, **HEADS, cost_model=replace(model, date=date)), forest)
    assert valid._cache_size() == 1


def test_a_forest_on_a_device_and_something_else_than_a_plan_are_refused():
    forest = Forest.from_nodes([-1], [40], [0])
    plan = make_plan(forest, **HEADS)
    with pytest.raises(TypeError, match=r"forest: expected NumPy arrays"):
        replan(plan, jax.device_put(forest))
    with pytest.raises(ValueError, match=r"steps: expected an integer of at least 1, got 0"):
        replan(plan, forest, steps=0)
    for name, capacity in {"page_size": 8, "request_capacity": 2, "node_capacity": 3}.items():
        other = Forest.from_nodes([-1], [40], [0], **{name: capacity})
        with pytest.raises(PlanError, match=rf"^plan: expected a plan for {name} = {capacity}, which the forest has"):
            replan(plan, other)
    with pytest.raises(TypeError, match=r"subset: expected a PageSubset, got int"):
        replan(plan, forest, subset=3)
    with pytest.raises(TypeError, match=r"plan: expected a Plan, got Forest"):
        replan(forest, plan)
    with pytest.raises(TypeError, match=r"forest: expected a Forest, got ndarray"):
        replan(plan, np.zeros(3))
