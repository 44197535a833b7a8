"""The plans that FlashDecoding's call keeps, by the content of tables and lengths."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import (
    BLOCKS,
    FLOAT32,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    ROOM,
    ROWS,
    WIDTH,
    Rows,
    arrays,
    assert_attends,
    no_plans,  # noqa: F401
    table,
)

from codec_jax.attention import flash_decoding
from codec_jax.attention.plan_cache import STEPS, CallLayout, PlanCache
from codec_jax.flash_decoding import flash_attn_with_kvcache, plans


@settings(max_examples=20)
@given(data=st.data(), shared=st.integers(0, 2), just_in_time=st.booleans())
def test_rows_that_grow_stay_exact_whatever_the_table_listed_ahead(
    data: st.DataObject, shared: int, just_in_time: bool
) -> None:
    given, blocks, step_sizes = arrays(), table(shared), st.sampled_from([0, 1, 1, 1, 7, 16])
    lens = np.asarray([data.draw(st.integers(0, ROOM)) for _ in range(ROWS)])
    rubbish = data.draw(st.sampled_from([-1, 0, int(blocks[0, 0]), BLOCKS]))
    for _ in range(5):
        past = np.arange(WIDTH) >= -(-lens // PAGE)[:, None]
        assert_attends(given, Rows(np.where(past & just_in_time, rubbish, blocks), lens))
        lens = np.minimum(lens + [data.draw(step_sizes) for _ in range(ROWS)], ROOM)


def test_the_same_content_is_planned_once_and_changed_content_anew() -> None:
    given, rows = arrays(), Rows(table(2), np.asarray([40, 40, 33, 50, 64]))
    for _ in range(3):
        assert_attends(given, Rows(*(x.copy() for x in rows)))
    assert plans.info() == (2, 1, 1, plans.max_size)
    other = rows.block_table.copy()
    other[1, 2] = next(iter(set(range(BLOCKS)) - set(other.ravel().tolist())))
    assert_attends(given, rows._replace(block_table=other))
    assert plans.info().misses == 2
    assert_attends(given, rows)
    assert plans.info() == (3, 2, 2, plans.max_size)


@pytest.mark.parametrize("name", ["block_table", "cache_seqlens"])
def test_what_the_caller_changes_in_place_is_changed_content(name: str) -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    assert_attends(given, rows)
    if name == "block_table":
        rows.block_table[0, 1] = rows.block_table[1, 3]
    else:
        rows.cache_seqlens[2] = 7
    assert_attends(given, rows)
    assert plans.info().misses == 2


def test_entries_past_the_lengths_are_not_content() -> None:
    given, rows = arrays(), Rows(table(2), np.asarray([33, 20, 33, 48, 33]))
    assert_attends(given, rows)
    other = rows.block_table.copy()
    other[1, 2] = other[:, 3] = -1
    assert_attends(given, rows._replace(block_table=other))
    assert_attends(given, rows._replace(block_table=other[:, :3]))
    assert plans.info().misses == 1


@pytest.mark.parametrize("missing", [-1, BLOCKS])
def test_a_row_that_grows_into_a_block_that_does_not_exist_is_refused(missing: int) -> None:
    """Whatever the entry after it says."""
    page_size = STEPS // 2
    given, blocks = arrays(page_size=page_size), table(1)
    blocks[3, 2] = missing
    layout = CallLayout(HEADS, KV_HEADS, HEAD_DIM, 1, page_size, BLOCKS, kv_dtype=FLOAT32)
    forest, _ = plans.find(blocks, np.full(ROWS, 2 * page_size), layout)
    assert 0 <= int(forest.page_ids.min()) <= int(forest.page_ids.max()) < BLOCKS
    assert_attends(given, Rows(blocks, np.full(ROWS, 2 * page_size)))
    assert plans.info().misses == 1
    with pytest.raises(ValueError, match=rf"^block_table: expected .*{missing}"):
        flash_attn_with_kvcache(*given, block_table=blocks, cache_seqlens=2 * page_size + 1)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_plan_lasts_for_steps_where_the_table_lists_pages_ahead(ahead: bool) -> None:
    given, blocks, first = arrays(), table(2), 40
    assert STEPS == PAGE
    for grown in range(STEPS + 1):
        past = np.arange(WIDTH) >= -(-(first + grown) // PAGE)
        assert_attends(given, Rows(np.where(past & (not ahead), -1, blocks), np.full(ROWS, first + grown)))
    # Without pages ahead, the ninth token goes to a block that was not listed when the plan was made.
    assert plans.info().misses == (1 if ahead else 2)
    assert_attends(given, Rows(blocks, np.full(ROWS, first + STEPS + 1)))
    assert plans.info().misses == 2


def test_growing_rows_compile_nothing_while_the_plan_lasts() -> None:
    given, blocks = arrays(), table(2)
    flash_attn_with_kvcache(*given, block_table=blocks, cache_seqlens=41)
    compiled = flash_decoding._attend._cache_size()
    for length in range(42, 41 + STEPS):
        flash_attn_with_kvcache(*given, block_table=blocks, cache_seqlens=length)
    assert flash_decoding._attend._cache_size() == compiled


def test_a_shorter_context_than_planned_for_is_planned_anew() -> None:
    given, blocks = arrays(), table(2)
    assert_attends(given, Rows(blocks, np.full(ROWS, 50)))
    assert_attends(given, Rows(blocks, np.full(ROWS, 49)))
    assert plans.info().misses == 2


def test_the_least_recently_used_plan_goes_first() -> None:
    cache, layout, lens = PlanCache(2), CallLayout(HEADS, KV_HEADS, HEAD_DIM, 1, PAGE, BLOCKS), np.full(ROWS, 50)
    tables = [table(2, seed) for seed in range(3)]
    for seed in (0, 1, 0, 2):  # 1 is the least recently used when 2 comes
        cache.find(tables[seed], lens, layout)
    assert cache.info() == (1, 3, 2, 2)
    cache.find(tables[0], lens, layout)
    assert cache.info() == (2, 3, 2, 2)
    cache.find(tables[1], lens, layout)
    assert cache.info() == (2, 4, 2, 2)
    cache.clear()
    assert cache.info() == (0, 0, 0, 2)


def test_another_number_of_rows_is_another_plan() -> None:
    given, rows = arrays(), Rows(table(WIDTH), np.full(ROWS, 50))
    assert_attends(given, rows)
    assert_attends(given._replace(q=given.q[:1]), Rows(*(x[:1] for x in rows)))
    assert plans.info().misses == 2


def test_each_head_layout_has_its_own_plan() -> None:
    cache, lens = PlanCache(), np.full(ROWS, 50)
    for heads in (4, 8):
        _, plan = cache.find(table(2), lens, CallLayout(heads, KV_HEADS, HEAD_DIM, 1, PAGE, BLOCKS))
        assert plan.heads.num_q_heads == heads
    assert cache.info().misses == 2


def test_caches_of_two_dtypes_have_a_plan_each_which_is_for_it() -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    caches = [[jnp.asarray(x, dtype) for x in given[1:]] for dtype in (jnp.float8_e4m3fn, jnp.bfloat16)]
    for _ in range(2):
        for cache in caches:
            flash_attn_with_kvcache(given.q, *cache, **rows._asdict())
    assert plans.info()[:2] == (2, 2)
    for cache in caches:
        layout = CallLayout(HEADS, KV_HEADS, HEAD_DIM, 1, PAGE, BLOCKS, kv_dtype=cache[0].dtype)
        assert plans.find(*rows, layout)[1].heads.kv_dtype == cache[0].dtype
    assert plans.info()[:2] == (4, 2)


def test_a_cache_of_no_plans_is_refused() -> None:
    with pytest.raises(ValueError, match="max_size: expected an integer of at least 1, got 0"):
        PlanCache(0)
