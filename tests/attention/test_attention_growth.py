"""`forest_attention` while leaves grow under one plan, and under plans that no longer hold."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import PAGES, REQUESTS, Layout, assert_close, attend, attend_alone, attend_each, forest_of
from forests import Tree, contexts, seeds, trees
from hypothesis import given, settings
from plan_cases import (
    num_wide,
)

from codec_jax import Forest, KVPages, PagePool, Plan, PlanError
from codec_jax.attention import forest_attention


@jax.jit
def append_and_attend(
    query: jax.Array, key: jax.Array, value: jax.Array, count: jax.Array, pages: KVPages, forest: Forest, plan: Plan
) -> tuple[jax.Array, KVPages, Forest]:
    """One step: each request with a count appends its last `count` tokens, T at most, and all of them attend."""
    forest = forest.extend(count)
    tokens = key.shape[1]
    new = jnp.arange(tokens)[None] >= tokens - count[:, None]
    slots = jnp.where(new, forest.slots(tokens), jnp.iinfo(jnp.int32).max)
    pages = pages.write(slots, key, value)
    return forest_attention(query, pages.key, pages.value, forest, plan), pages, forest


@pytest.mark.parametrize(("query_tokens", "lanes"), [(1, 1), (3, 1), (3, 2)])
def test_one_plan_and_one_compilation_serve_leaves_that_grow_within_its_steps(query_tokens: int, lanes: int) -> None:
    steps, layout = 6, Layout(query_tokens=query_tokens, page_size=8, tile_rows=8, block_tokens=16, lanes=lanes)
    append_and_attend.clear_cache()
    wide = 0

    @settings(max_examples=8)
    @given(tree=trees(max_nodes=8, max_length=30, max_requests=6), seed=seeds)
    def grow(tree: Tree, seed: int) -> None:
        nonlocal wide
        rng = np.random.default_rng(seed)
        _, key, value = layout.arrays(rng)
        forest = forest_of(tree, layout.page_size)
        forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), steps)
        plan = layout.plan(forest, steps)
        wide += num_wide(plan)
        forest, plan, pages = jax.device_put((forest, plan, KVPages(key, value)))
        # What each request has seen so far, kept apart from pages and slots.
        seen = [
            [list(x.reshape(-1, 2, 64)[context]) for x in (key, value)] for context in contexts(tree, layout.page_size)
        ]
        grown = np.zeros(REQUESTS, int)
        while True:
            most = np.minimum(query_tokens, steps - grown)
            count = rng.integers(0, most + 1)
            count[rng.integers(len(tree.leaf))] = 0
            count[0] = min(1, most[0])
            if not count[0]:
                break
            shape = (REQUESTS, query_tokens, 2, 64)
            query = rng.normal(size=(REQUESTS, query_tokens, 4, 64)).astype(np.float32)
            new = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
            out, pages, forest = append_and_attend(query, *new, count.astype(np.int32), pages, forest, plan)
            for request, both in enumerate(seen):
                for so_far, rows in zip(both, new, strict=True):
                    so_far.extend(rows[request, query_tokens - count[request] :])
                context = (np.reshape(np.asarray(x), (-1, 2, 64)) for x in both)
                assert_close(out[request], attend_alone(query[request], *context).out)
            grown += count

    grow()
    assert (wide > 0) == (lanes == 2)
    assert append_and_attend._cache_size() == 1


@pytest.mark.parametrize(("tokens", "exact"), [(0, True), (3, True), (4, False), (-1, False)])
def test_a_plan_is_exact_from_the_planned_lengths_to_its_last_step(tokens: int, exact: bool) -> None:
    layout, tree = Layout(), Tree([-1, 0, 0], [40, 20, 9], [1, 2])
    forest = forest_of(tree)
    plan = layout.plan(forest, steps=3)
    length = forest.length.copy()
    length[1] += tokens
    forest = replace(forest, length=length)
    arrays = jax.device_put(layout.arrays(np.random.default_rng(0)))
    tree.length[1] += tokens
    out = attend(*arrays, forest, plan)
    if exact:
        assert_close(out, attend_each(*arrays, contexts(tree, 16)).out)
    else:
        assert np.isnan(out).all()
        with pytest.raises(PlanError, match=r"plan: expected lengths within the plan's steps, got .* tokens in node 1"):
            forest_attention(*arrays, forest, plan)


OTHER_FORESTS = {
    "leaf": Tree([-1, 0, 0], [40, 20, 9], [2, 1]),
    "parent": Tree([-1, 0, 1], [40, 20, 9], [1, 2]),
    "pages": Tree([-1, 0, 0], [32, 20, 9], [1, 2]),
}


@pytest.mark.parametrize("changed", OTHER_FORESTS)
def test_a_plan_for_another_forest_is_refused_on_the_host_and_gives_nan_on_the_device(changed: str) -> None:
    layout = Layout()
    plan = layout.plan(forest_of(Tree([-1, 0, 0], [40, 20, 9], [1, 2])))
    other = forest_of(OTHER_FORESTS[changed])
    arrays = layout.arrays(np.random.default_rng(0))
    assert np.isnan(attend(*arrays, other, plan)).all()
    with pytest.raises(PlanError, match="plan: expected a plan for this forest, got one for another"):
        forest_attention(*arrays, other, plan)


def test_a_plan_for_the_same_tree_on_other_pages_gives_nan() -> None:
    layout, tree = Layout(), Tree([-1], [40], [0])
    plan = layout.plan(forest_of(tree))
    moved = forest_of(tree, page_order=np.arange(PAGES)[::-1])
    assert np.isnan(attend(*layout.arrays(np.random.default_rng(0)), moved, plan)).all()


@jax.jit
def extend_and_attend(
    query: jax.Array, key: jax.Array, value: jax.Array, forest: Forest, plan: Plan, times: int
) -> jax.Array:
    forest = jax.lax.fori_loop(0, times, lambda _, x: x.extend(1), jax.tree.map(jnp.asarray, forest))
    return forest_attention(query, key, value, forest, plan)


@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("requests", [2, 8, REQUESTS])
@pytest.mark.parametrize("times", [1, 2, 8, 16, 100])
def test_extending_a_shared_leaf_gives_nan_however_often_and_by_however_many(
    times: int, requests: int, length: int
) -> None:
    layout = Layout()
    forest = forest_of(Tree([-1], [length], [0] * requests))
    plan = layout.plan(forest, steps=100)
    assert np.isnan(extend_and_attend(*layout.arrays(np.random.default_rng(0)), forest, plan, times)).all()


@pytest.mark.parametrize(("times", "exact"), [(2, True), (3, False), (16, False), (18, False)])
def test_extending_past_the_reserved_pages_gives_nan(times: int, exact: bool) -> None:
    layout = Layout()
    forest = forest_of(Tree([-1, 0], [16, 14], [1]))
    plan = layout.plan(forest, steps=100)
    out = extend_and_attend(*layout.arrays(np.random.default_rng(0)), forest, plan, times)
    assert np.isfinite(out).all() if exact else np.isnan(out).all()
