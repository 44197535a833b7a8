"""`forest_attention` against attention of each request alone over its own gathered K and V."""

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from attending import (
    ENTRIES,
    PAGES,
    REQUESTS,
    SOME_TREES,
    Layout,
    assert_close,
    attend,
    attend_alone,
    attend_each,
    every_layout,
    forest_of,
    jax_nn_attention,
    jitted,
    slots_of,
    with_residuals,
)
from forests import SECTIONS, Tree, contexts, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    num_wide,
)

from codec_jax import Forest
from codec_jax.partial import Partial, pac, por


@every_layout
def test_attention_and_residuals_are_those_of_each_request_alone(layout: Layout) -> None:
    """Any forest, on scattered pages, with free request slots, and with requests shorter than the query."""
    wide = 0

    @settings(max_examples=12)
    @given(tree=SOME_TREES, seed=seeds)
    def check(tree: Tree, seed: int) -> None:
        nonlocal wide
        rng = np.random.default_rng(seed)
        query, key, value = layout.arrays(rng)
        page_order = rng.permutation(PAGES)
        forest = forest_of(tree, layout.page_size, page_order)
        plan = layout.plan(forest)
        wide += num_wide(plan)
        out, (row_max, row_sum) = with_residuals(query, key, value, forest, plan)
        want = attend_each(query, key, value, slots_of(tree, layout.page_size, page_order))
        chex.assert_shape(out, query.shape)
        chex.assert_type([out, row_max, row_sum], jnp.float32)
        assert_close(out, want.out)
        assert_close(row_max, want.max)
        assert_close(row_sum, want.sum, atol=1e-4)
        # Of arrays of NumPy: of JAX's, each number of requests would be a program.
        of_unused = (np.asarray(x)[len(tree.leaf) :] for x in (out, row_max, row_sum))
        for got, nothing in zip(of_unused, (0.0, -np.inf, 0.0), strict=True):
            np.testing.assert_array_equal(got, nothing)

    check()
    assert (wide > 0) == (layout.lanes == 2)


@pytest.mark.parametrize("query_tokens", [1, 4])
@settings(max_examples=15)
@given(tree=SOME_TREES, seed=seeds)
def test_attention_equals_jax_nn_dot_product_attention(query_tokens: int, tree: Tree, seed: int) -> None:
    layout = Layout(query_tokens=query_tokens)
    query, key, value = layout.arrays(np.random.default_rng(seed))
    forest = forest_of(tree, layout.page_size)
    slots = np.zeros((REQUESTS, 512), np.int32)
    visible = np.zeros((REQUESTS, query_tokens, 512), bool)
    for request, context in enumerate(contexts(tree, layout.page_size)):
        slots[request, : len(context)] = context
        for t in range(query_tokens):
            visible[request, t, : max(0, len(context) - query_tokens + t + 1)] = True
    gathered = (x.reshape(-1, *x.shape[2:])[slots] for x in (key, value))
    want = jax_nn_attention(query, *gathered, mask=visible[:, None])
    want = np.where(visible.any(-1)[..., None, None], want, 0.0)
    assert_close(attend(query, key, value, forest, layout.plan(forest)), want)


@pytest.mark.parametrize(
    ("dtype", "rounding", "query_tokens"),
    [(jnp.bfloat16, 2**-8, 1), (jnp.float16, 2**-11, 3)],
    ids=["bfloat16", "float16"],
)
def test_half_precision_is_exact_up_to_the_rounding_of_the_output(
    dtype: Any, rounding: float, query_tokens: int
) -> None:
    layout = Layout(query_tokens=query_tokens)
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(x, dtype) for x in layout.arrays(rng))
    forest = forest_of(SECTIONS)
    out, (row_max, row_sum) = with_residuals(query, key, value, forest, layout.plan(forest))
    want = attend_each(*(np.asarray(x, np.float32) for x in (query, key, value)), contexts(SECTIONS, 16))
    chex.assert_type([out, row_max, row_sum], [dtype, jnp.float32, jnp.float32])
    chex.assert_trees_all_close(np.asarray(out, np.float64), want.out, rtol=2 * rounding, atol=2 * rounding)
    assert_close(row_max, want.max)
    assert_close(row_sum, want.sum, atol=1e-4)


@settings(max_examples=15)
@given(data=st.data(), seed=seeds)
def test_rows_of_a_block_table_read_their_own_pages(data: st.DataObject, seed: int) -> None:
    """Rows share pages in any physical order, also pages that one of them fills further than the other."""
    layout, page_size, width = Layout(), 16, 6
    rng = np.random.default_rng(seed)
    free_pages = iter(rng.permutation(PAGES))
    table = np.full((REQUESTS, width), -1)
    lengths = np.zeros(REQUESTS, np.int64)
    for row in range(REQUESTS):
        source = data.draw(st.integers(0, max(row - 1, 0)))
        shared = data.draw(st.integers(0, -(-int(lengths[source]) // page_size)))
        least = (shared - 1) * page_size + 1 if shared else int(row == 0)
        lengths[row] = data.draw(st.integers(least, width * page_size))
        pages = -(-lengths[row] // page_size)
        table[row, :shared] = table[source, :shared]
        table[row, shared:pages] = [next(free_pages) for _ in range(pages - shared)]
    query, key, value = layout.arrays(rng)
    forest = Forest.from_block_table(table, lengths, page_size, node_capacity=64, page_capacity=ENTRIES)
    token = np.arange(width * page_size)
    slots = [
        (row[token // page_size] * page_size + token % page_size)[:n].tolist()
        for row, n in zip(table, lengths, strict=True)
    ]
    assert_close(attend(query, key, value, forest, layout.plan(forest)), attend_each(query, key, value, slots).out)


@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_scale_is_the_factor_on_the_scores(scale: float) -> None:
    layout, forest = Layout(), forest_of(SECTIONS)
    query, key, value = layout.arrays(np.random.default_rng(0))
    out, (row_max, row_sum) = jitted(scale=scale, return_residuals=True)(query, key, value, forest, layout.plan(forest))
    want = attend_each(query, key, value, contexts(SECTIONS, 16), scale)
    # Scores have a standard deviation of 8 |scale|, and an error in proportion.
    assert_close(out, want.out, atol=1e-5 * max(1.0, 8 * abs(scale)))
    assert_close(row_max, want.max)
    assert_close(row_sum, want.sum, atol=1e-3)


def test_what_no_request_reads_does_not_matter() -> None:
    """Huge numbers in free pages, in the pages of unread nodes, and behind the last token of a page."""
    layout = Layout(query_tokens=2)
    tree = Tree(parent=[-1, 0, 0], length=[20, 30, 40], leaf=[0, 1])  # nobody reads node 2
    forest = forest_of(tree)
    query, key, value = layout.arrays(np.random.default_rng(0))
    read = sorted({slot for context in contexts(tree, 16) for slot in context})
    unread = np.ones(PAGES * 16, bool)
    unread[read] = False
    huge = np.finfo(np.float32).max
    for pages in (key, value):
        pages.reshape(-1, *pages.shape[2:])[unread] = huge * np.where(np.arange(64) % 2, 1, -1).astype(np.float32)
    out = attend(query, key, value, forest, layout.plan(forest))
    assert_close(out, attend_each(query, key, value, contexts(tree, 16)).out)


def test_a_forest_without_any_token_attends_to_nothing() -> None:
    layout, tree = Layout(), Tree([-1, 0], [0, 0], [1, 0])
    forest = forest_of(tree)
    out, (row_max, row_sum) = with_residuals(*layout.arrays(np.random.default_rng(0)), forest, layout.plan(forest))
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_array_equal(row_max, -np.inf)
    np.testing.assert_array_equal(row_sum, 0.0)


def test_residuals_let_further_tokens_be_merged() -> None:
    """Attention over the forest, merged with PAC over tokens from elsewhere, is attention over both."""
    layout, forest, extra = Layout(), forest_of(SECTIONS), 9
    rng = np.random.default_rng(0)
    query, key, value = layout.arrays(rng)
    more_key, more_value = (rng.normal(size=(REQUESTS, extra, 2, 64)).astype(np.float32) for _ in range(2))
    out, residuals = with_residuals(query, key, value, forest, layout.plan(forest))

    # [B, T, N, ...] both: q head n reads kv head n // 2.
    by_head = [np.repeat(np.moveaxis(x, 1, 2), 2, axis=1)[:, None] for x in (more_key, more_value)]
    further = pac(query[..., None, :], *by_head, np.ones((1, extra), bool), 0.125)
    merged = por(
        Partial(out, *residuals),
        Partial(*(x[..., 0] if x.ndim == 4 else x[..., 0, :] for x in (further.out, further.max, further.sum))),
    )

    for request, context in enumerate(contexts(SECTIONS, 16)):
        union = (
            np.concatenate([x.reshape(-1, 2, 64)[context], more[request]])
            for x, more in ((key, more_key), (value, more_value))
        )
        want = attend_alone(query[request], *union)
        assert_close(merged.out[request], want.out)
        assert_close(merged.max[request], want.max)
        assert_close(merged.sum[request], want.sum, atol=1e-4)


def test_one_compilation_serves_all_forests_of_the_same_capacities() -> None:
    layout, attend_once = Layout(), jitted()
    arrays = layout.arrays(np.random.default_rng(0))
    for tree in (SECTIONS, Tree([-1], [1], [0]), Tree([-1], [0], [0]), Tree([-1] * 8, [50] * 8, list(range(8)))):
        forest = forest_of(tree)
        assert_close(attend_once(*arrays, forest, layout.plan(forest)), attend_each(*arrays, contexts(tree, 16)).out)
    assert attend_once._cache_size() == 1
