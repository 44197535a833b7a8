"""Pages that a window hides from everybody go back to the pool, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, seeds, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import Forest, KVPages, PagePool, Window, make_plan
from codec_jax.attention import forest_attention
from codec_jax.forest.tree import GONE
from pallas_kernels.plan_format import Page

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@given(trees(), st.sampled_from([1, 7, 20, 64]), st.booleans(), seeds)
@settings(max_examples=40, deadline=None)
def test_exactly_what_nobody_sees_is_given_back(tree: Tree, tokens: int, chunked: bool, seed: int) -> None:
    forest, window = Forest.from_nodes(*tree, page_size=8), Window(tokens, chunked)
    pool = PagePool.create(len(forest.used_pages) + 3, forest.used_pages)
    after, freed = forest.forget(pool, window)
    unread = sum(len(forest.pages_of(node)) for node in np.flatnonzero(forest.readers == 0))  # those stay
    kept = unread
    for node in np.flatnonzero(forest.readers):
        readers = [request for request in np.flatnonzero(forest.active) if node in forest.path(request)]
        last = [int(forest.request_length[request]) - 1 for request in readers]
        first = min(at // tokens * tokens if chunked else at - tokens + 1 for at in last)
        for number, (page, was) in enumerate(zip(after.pages_of(node), forest.pages_of(node), strict=True)):
            is_seen = first < int(forest.start[node]) + 8 * (number + 1)
            assert page == (was if is_seen else GONE)
            kept += is_seen
    assert freed.num_free == pool.num_pages - kept
    assert len(after.used_pages) == kept
    np.testing.assert_array_equal(after.request_length, forest.request_length)
    again, same = after.forget(freed, window)
    assert same.num_free == freed.num_free
    assert again.structure_hash == after.structure_hash
    requests = np.random.default_rng(seed).permutation(np.flatnonzero(forest.active))
    for request in requests:
        after, freed = after.retire(freed, [request])
    assert freed.num_free == pool.num_pages - unread


@given(trees(), st.sampled_from([1, 20, 64]), st.integers(0, 40), st.sampled_from([1, 5]), st.data())
@settings(max_examples=80, deadline=None)
def test_plans_after_edits_list_no_page_that_was_given_back(
    tree: Tree, tokens: int, wider: int, query_tokens: int, data: st.DataObject
) -> None:
    """Where a child became part of its node, pages that are there may lie before some that are gone."""
    forest = Forest.from_nodes(*tree, page_size=8)
    pool = PagePool.create(len(forest.used_pages) + 3, forest.used_pages)
    forest, pool = forest.forget(pool, Window(tokens))
    retired = data.draw(st.lists(st.sampled_from(np.flatnonzero(forest.active).tolist()), unique=True))
    forest, pool = forest.retire(pool, retired)
    options = {"window": tokens + wider, "query_tokens": query_tokens, "block_tokens": 16}
    read = forest.readers > 0
    if (forest.forgotten > forest.hidden_by(Window(tokens + wider), query_tokens))[read].any():
        with pytest.raises(ValueError, match=r"window: expected one that hides what `Forest.forget` gave back"):
            make_plan(forest, **HEADS, **options)
        return
    plan = make_plan(forest, **HEADS, **options)
    pages = plan.arrays.block_pages.reshape(-1, 4)
    assert (pages[pages[:, Page._fields.index("readers")] != 0, Page._fields.index("page_id")] >= 0).all()


def test_a_child_that_became_part_of_a_node_keeps_what_was_given_back_known() -> None:
    forest = Forest.from_nodes([-1, 0, 0], [1008, 1008, 16], [1, 2], node_capacity=8, page_capacity=256)
    forest, pool = forest.forget(PagePool.create(256, forest.used_pages), Window(96))
    forest, _ = forest.retire(pool, [1])
    assert forest.forgotten[forest.path(0)[0]] == 1920
    with pytest.raises(ValueError, match=r"window: expected one that hides what `Forest.forget` gave back"):
        make_plan(forest, **HEADS, window=150)


def test_what_was_given_back_of_nodes_that_a_view_does_not_read_is_no_matter() -> None:
    forest = Forest.from_nodes([-1, 0, 0], [1000, 20, 200], [1, 2])
    forest, _ = forest.forget(PagePool.create(100, forest.used_pages), Window(64))
    for requests in ([0], [1], [0, 1]):
        make_plan(forest.only(requests), **HEADS, window=64).check(forest.only(requests))


def test_a_pool_for_the_window_lasts_for_ten_windows_of_growth() -> None:
    """K and V of three requests with a common beginning, by the definition, in float64."""
    window, rng = Window(24), np.random.default_rng(0)
    forest = Forest.from_nodes([-1, 0, 0, 0], [40, 3, 9, 0], [1, 2, 3], page_size=8, page_capacity=256)
    pool = PagePool.create(26, forest.used_pages)
    texts = [[(tuple(rng.normal(size=(2, 2, 16)))) for _ in range(40)]]
    texts += [[*texts[0], *(tuple(rng.normal(size=(2, 2, 16))) for _ in range(n))] for n in (3, 9, 0)]
    texts = texts[1:]
    pages = KVPages.zeros(26, 8, 2, 16, jnp.float32)
    for request in range(3):
        key, value = (np.stack([token[i] for token in texts[request]])[None] for i in (0, 1))
        pages = pages.write(forest.context_slots(request)[None], key, value)
    step = jax.jit(forest_attention)
    free = []
    for _ in range(10 * 24 // 8):
        forest, pool = forest.forget(pool, window)
        forest, pool = forest.reserve(pool, 8)
        plan = make_plan(forest, **HEADS, window=window, steps=8, num_ctas=3, block_capacity=64)
        free.append(pool.num_free)
        for _ in range(8):
            forest = forest.extend()
            key, value = rng.normal(size=(2, 3, 1, 2, 16))
            pages = pages.write(forest.slots(), key, value)
            for request in range(3):
                texts[request].append((key[request, 0], value[request, 0]))
            query = rng.normal(size=(3, 1, 4, 16)).astype(np.float32)
            out = step(query, pages.key, pages.value, forest, plan)
        for request, text in enumerate(texts):
            keys, values = (np.stack([token[i] for token in text[-24:]]).repeat(2, axis=1) for i in (0, 1))
            scores = np.einsum("nh,snh->ns", query[request, 0], keys) / 4
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            want = np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), values)
            np.testing.assert_allclose(out[request, 0], want, atol=1e-5)
    assert len(set(free[5:])) == 1
    assert len(texts[0]) > 40 + 10 * 24


def test_a_plan_that_needs_what_was_given_back_is_refused() -> None:
    forest = Forest.from_nodes([-1, 0], [100, 5], [1])
    forest, _ = forest.forget(PagePool.create(8, forest.used_pages), Window(30))
    make_plan(forest, **HEADS, window=20)
    for window in (None, Window(60)):
        with pytest.raises(ValueError, match=r"window: expected one that hides what `Forest.forget` gave back, got"):
            make_plan(forest, **HEADS, window=window)
    with pytest.raises(TypeError, match="window: expected a Window, got int"):
        forest.forget(PagePool.create(8), 30)  # type: ignore[arg-type]
