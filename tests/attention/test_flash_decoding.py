"""FlashDecoding's call over a paged cache, against attention of each row alone."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import prefixes, seeds
from hypothesis import given, settings
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
    Arrays,
    Rows,
    arrays,
    assert_attends,
    attend_alone,
    attend_each,
    no_plans,  # noqa: F401
    rows_of_tables,
    table,
)

from codec_jax import KVPages, Window
from codec_jax.attention.plan_cache import CallLayout
from codec_jax.flash_decoding import flash_attn_with_kvcache, plans


@pytest.mark.parametrize(("tokens", "causal"), [(1, False), (1, True), (3, True), (3, False)])
@settings(max_examples=15)
@given(rows=rows_of_tables(), seed=seeds)
def test_each_row_attends_to_what_its_blocks_hold(tokens: int, causal: bool, rows: Rows, seed: int) -> None:
    """Rows of length 0 and rows shorter than the query included: what sees no key is 0, with -inf."""
    assert_attends(arrays(seed, tokens), rows, causal)


SINKS = np.asarray([0.5, -1.0, 2.0, 0.0], np.float32)


@pytest.mark.parametrize(
    ("tokens", "given", "alike"),
    [
        (1, {"window_size": (9, -1), "sinks": SINKS}, {"window": 10, "sinks": SINKS}),
        (3, {"window_size": (20, 0), "softcap": 1.5}, {"window": 21, "softcap": 1.5, "causal": True}),
        (3, {"attention_chunk": 16, "causal": True}, {"window": Window(16, chunked=True), "causal": True}),
        (3, {"window_size": (2**40, 0)}, {"causal": True}),
        (3, {"softcap": 2.0, "sinks": SINKS}, {"softcap": 2.0, "sinks": SINKS}),  # tokens as further heads
    ],
    ids=["a window and sinks", "a causal window, a cap", "chunks", "no bound", "a cap and sinks, not causal"],
)
@settings(max_examples=10)
@given(rows=rows_of_tables(), seed=seeds)
def test_windows_caps_and_sinks_are_those_of_flash_attn(
    tokens: int, given: dict[str, Any], alike: dict[str, Any], rows: Rows, seed: int
) -> None:
    some = arrays(seed, tokens)
    out, lse = flash_attn_with_kvcache(*some, **rows._asdict(), return_softmax_lse=True, **given)
    for got, want in zip((out, lse), attend_each(some, rows, **alike), strict=True):
        chex.assert_trees_all_close(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)


def test_calls_of_other_windows_have_plans_of_their_own() -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    for _ in range(2):
        for window_size in ((-1, -1), (9, -1), (10, 0)):
            flash_attn_with_kvcache(*given, **rows._asdict(), window_size=window_size)
    assert plans.info()[:2] == (3, 3)


@pytest.mark.parametrize("shared", [0, 2, WIDTH])
def test_shared_blocks_are_read_once(shared: int) -> None:
    rows = Rows(table(shared), np.asarray([64, 49, 64, 33, 60]))
    assert_attends(arrays(), rows)
    forest, _ = plans.find(*rows, CallLayout(HEADS, KV_HEADS, HEAD_DIM, 1, PAGE, BLOCKS, kv_dtype=FLOAT32))
    assert plans.info().misses == 1
    lists = []
    for blocks, length in zip(*rows, strict=True):
        filled = [min(PAGE, int(length) - first) for first in range(0, int(length), PAGE)]
        lists.append(list(zip(blocks.tolist(), filled, strict=False)))
    assert int(forest.length.sum()) == sum(prefix[-1][1] for prefix in prefixes(lists))


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_rows_in_another_order_give_the_same_numbers(order: list[int]) -> None:
    given, rows = arrays(), Rows(table(2), np.asarray([64, 49, 64, 33, 60]))
    out = flash_attn_with_kvcache(*given, **rows._asdict())
    moved = given._replace(q=given.q[order])
    moved_out = flash_attn_with_kvcache(*moved, block_table=rows[0][order], cache_seqlens=rows[1][order])
    chex.assert_trees_all_close(moved_out, out[np.asarray(order)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rounding"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_half_precision_is_exact_up_to_the_rounding_of_the_output(dtype: Any, rounding: float) -> None:
    given = Arrays(*(jnp.asarray(x, dtype) for x in arrays()))
    rows = Rows(table(2), np.asarray([64, 49, 0, 33, 60]))
    out, lse = flash_attn_with_kvcache(*given, **rows._asdict(), return_softmax_lse=True)
    want_out, want_lse = attend_each(Arrays(*(np.asarray(x, np.float32) for x in given)), rows)
    chex.assert_type([out, lse], [dtype, jnp.float32])
    chex.assert_trees_all_close(np.asarray(out, np.float64), want_out, rtol=2 * rounding, atol=2 * rounding)
    chex.assert_trees_all_close(np.asarray(lse, np.float64), want_lse, rtol=1e-5, atol=1e-5)


def test_softmax_scale_is_the_factor_on_the_scores() -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    out = flash_attn_with_kvcache(*given, **rows._asdict(), softmax_scale=0.3)
    chex.assert_trees_all_close(np.asarray(out, np.float64), attend_each(given, rows, scale=0.3)[0], atol=1e-5)


def test_no_row_with_a_context_gives_zeros_and_no_plan() -> None:
    given = arrays(tokens=2)
    out, lse = flash_attn_with_kvcache(*given, block_table=table(0), cache_seqlens=0, return_softmax_lse=True)
    np.testing.assert_array_equal(out, np.zeros(given.q.shape))
    np.testing.assert_array_equal(lse, np.full((ROWS, HEADS, 2), -np.inf))
    assert flash_attn_with_kvcache(*given, block_table=table(0), cache_seqlens=0).shape == given.q.shape
    assert plans.info().size == 0


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, lambda x: x.tolist()], ids=["numpy", "jax", "list"])
@pytest.mark.parametrize("lens", [None, 37, np.asarray([37, 0, 64, 1, 16])], ids=["all", "one", "each"])
def test_tables_and_lengths_come_in_any_form(convert: Callable, lens: Any) -> None:
    given, blocks = arrays(), table(2)
    passed = convert(lens) if isinstance(lens, np.ndarray) else lens
    out = flash_attn_with_kvcache(*given, block_table=convert(blocks), cache_seqlens=passed)
    rows = Rows(blocks, np.broadcast_to(ROOM if lens is None else lens, ROWS))
    chex.assert_trees_all_close(np.asarray(out, np.float64), attend_each(given, rows)[0], atol=1e-5)


@pytest.mark.parametrize("room", [8, 96, 256])
def test_a_cache_without_block_table_is_consecutive_pages(room: int) -> None:
    given = arrays(blocks=ROWS, page_size=room)
    lens = np.asarray([room, 1, room // 2, 0, room - 1])
    own = Rows(np.arange(ROWS)[:, None], lens)
    out = flash_attn_with_kvcache(*given, cache_seqlens=lens)
    chex.assert_trees_all_close(np.asarray(out, np.float64), attend_each(given, own)[0], atol=1e-5)
    assert plans.info().misses == 1
    flash_attn_with_kvcache(*given, cache_seqlens=lens)
    assert plans.info().misses == 1


def test_rows_with_the_same_cache_batch_idx_read_the_same_cache_once() -> None:
    given, index, lens = arrays(blocks=3, page_size=64), np.asarray([2, 0, 2, 2, 0]), np.asarray([64, 64, 64, 20, 64])
    out = flash_attn_with_kvcache(*given, cache_seqlens=lens, cache_batch_idx=index)
    want, _ = attend_each(given, Rows(index[:, None], lens))
    chex.assert_trees_all_close(np.asarray(out, np.float64), want, atol=1e-5)
    forest, _ = plans.find(index[:, None], lens, CallLayout(HEADS, KV_HEADS, HEAD_DIM, 1, 64, 3, kv_dtype=FLOAT32))
    assert plans.info().misses == 1
    assert int(forest.length.sum()) == 64 + 64 + 20


def test_tokens_are_written_with_kv_pages_first_as_the_refusal_says() -> None:
    given, rows = arrays(), Rows(table(2), np.asarray([40, 48, 33, 50, 63]))
    new = np.random.default_rng(1).normal(size=(2, ROWS, 1, KV_HEADS, HEAD_DIM)).astype(np.float32)
    with pytest.raises(ValueError, match=r"^k: .*KVPages\.write"):
        flash_attn_with_kvcache(*given, **rows._asdict(), k=new[0], v=new[1])
    blocks, lens = rows
    slots = (blocks[np.arange(ROWS), lens // PAGE] * PAGE + lens % PAGE)[:, None]
    pages = KVPages(jnp.asarray(given.k_cache), jnp.asarray(given.v_cache)).write(slots, *new)
    out = flash_attn_with_kvcache(given.q, pages.key, pages.value, block_table=blocks, cache_seqlens=lens + 1)
    for row in range(ROWS):
        held = (x[blocks[row]].reshape(-1, KV_HEADS, HEAD_DIM)[: lens[row]] for x in given[1:])
        want, _ = attend_alone(given.q[row], *map(np.concatenate, zip(held, new[:, row], strict=True)), causal=True)
        chex.assert_trees_all_close(np.asarray(out[row], np.float64), want, atol=1e-5)


def test_queries_and_caches_may_be_traced_and_the_plan_outlives_the_trace() -> None:
    given, rows = arrays(), Rows(table(2), np.asarray([40, 0, 33, 50, 64]))
    out = jax.jit(lambda *given: flash_attn_with_kvcache(*given, **rows._asdict()))(*given)
    chex.assert_trees_all_close(np.asarray(out, np.float64), attend_each(given, rows)[0], atol=1e-5)
    assert_attends(given, rows)
    assert_attends(given, rows._replace(cache_seqlens=np.asarray([41, 0, 34, 51, 64])))
    assert plans.info().misses == 1


@pytest.mark.parametrize("name", ["block_table", "cache_seqlens", "cache_batch_idx"])
def test_tables_lengths_and_indices_that_are_traced_are_refused(name: str) -> None:
    given, options = arrays(), {"block_table": table(2), "cache_seqlens": np.full(ROWS, 50)}
    if name == "cache_batch_idx":
        del options["block_table"]
    traced = options.get(name, np.arange(ROWS))
    with pytest.raises(TypeError, match=rf"^{name}: expected known integers, got a traced array; .*from_block_table"):
        jax.jit(lambda x: flash_attn_with_kvcache(*given, **{**options, name: x}))(traced)
    assert plans.info().size == 0
