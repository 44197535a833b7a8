"""`flash_attn_with_kvcache` against attention of each row alone, and the plans that it keeps."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import prefixes
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import KVPages, flash_decoding
from codec_jax.flash_decoding import flash_attn_with_kvcache, plans
from codec_jax.plan_cache import STEPS, Layout, PlanCache

ROWS, WIDTH, PAGE, BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 5, 4, 16, 48, 4, 2, 64
ROOM = WIDTH * PAGE
seeds = st.integers(0, 2**32 - 1)

# What upstream takes, with its defaults: flash-attn 2.8 and 3, after q, k_cache and v_cache.
UPSTREAM = {
    "k": None,
    "v": None,
    "qv": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "page_table": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k_new": None,
    "max_seqlen_q": None,
    "rotary_seqlens": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "scheduler_metadata": None,
    "alibi_slopes": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "return_softmax_lse": False,
}


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    plans.clear()
    yield
    plans.clear()


class Arrays(NamedTuple):
    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray


class Rows(NamedTuple):
    block_table: np.ndarray
    cache_seqlens: np.ndarray


def arrays(seed: int = 0, tokens: int = 1, blocks: int = BLOCKS, page_size: int = PAGE) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = (ROWS, tokens, HEADS, HEAD_DIM), *[(blocks, page_size, KV_HEADS, HEAD_DIM)] * 2
    return Arrays(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))


def attend_alone(
    q: np.ndarray, key: np.ndarray, value: np.ndarray, causal: bool, scale: float = HEAD_DIM**-0.5
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q [T, N, H] over key and value [S, K, H] in float64, and its log-sum-exp [N, T]."""
    q, key, value = (np.asarray(x, np.float64) for x in (q, key, value))
    out, lse = np.zeros(q.shape), np.full(q.shape[1::-1], -np.inf)
    for t, head in np.ndindex(q.shape[:2]):
        seen = len(key) - len(q) + t + 1 if causal else len(key)
        if seen > 0:
            kv_head = head * key.shape[1] // q.shape[1]
            scores = key[:seen, kv_head] @ q[t, head] * scale
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ value[:seen, kv_head] / weights.sum()
            lse[head, t] = scores.max() + np.log(weights.sum())
    return out, lse


def attend_each(
    given: Arrays, rows: Rows, causal: bool = False, scale: float = HEAD_DIM**-0.5
) -> tuple[np.ndarray, np.ndarray]:
    """`attend_alone` for each row over a contiguous copy of what its blocks hold."""
    results = []
    for q, blocks, length in zip(given.q, rows.block_table, rows.cache_seqlens, strict=True):
        used = blocks[: -(-length // given.k_cache.shape[1])]
        key, value = (x[used].reshape(-1, *x.shape[2:])[:length] for x in (given.k_cache, given.v_cache))
        results.append(attend_alone(q, key, value, causal, scale))
    return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])


def assert_attends(given: Arrays, rows: Rows, causal: bool = False, **options: Any) -> None:
    out, lse = flash_attn_with_kvcache(*given, **rows._asdict(), causal=causal, return_softmax_lse=True, **options)
    want_out, want_lse = attend_each(given, rows, causal)
    chex.assert_shape([out, lse], [want_out.shape, want_lse.shape])
    chex.assert_type(lse, jnp.float32)
    for got, want in ((out, want_out), (lse, want_lse)):
        chex.assert_trees_all_close(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)


def table(shared: int, seed: int = 0) -> np.ndarray:
    """Rows that share their first blocks, the others their own, in no order."""
    blocks = np.random.default_rng(seed).permutation(BLOCKS).astype(np.int32)
    rows = blocks[: ROWS * WIDTH].reshape(ROWS, WIDTH)
    rows[:, :shared] = rows[0, :shared]
    return rows


@st.composite
def rows_of_tables(draw: st.DrawFn) -> Rows:
    """Rows that share the heads of others, in any order, down to inside a block; anything past their lengths."""
    fresh = iter(draw(st.permutations(range(BLOCKS))))
    listed: list[list[int]] = []
    for row in range(ROWS):
        head = listed[draw(st.integers(0, row - 1))][: draw(st.integers(0, WIDTH))] if row else []
        listed.append(head + [next(fresh) for _ in range(WIDTH - len(head))])
    lens = np.asarray([draw(st.integers(0, ROOM) | st.sampled_from([0, 16, 17, 48])) for _ in range(ROWS)])
    order = draw(st.permutations(range(ROWS)))
    blocks = np.asarray([listed[row] for row in order])
    past = np.arange(WIDTH) >= -(-lens // PAGE)[:, None]
    rubbish = draw(st.sampled_from([-1, 0, 7, 10**6]))
    keep = draw(st.booleans())
    return Rows(np.where(past & (not keep), rubbish, blocks).astype(np.int32), lens)


# --- Against attention of each row alone ----------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "causal"), [(1, False), (1, True), (3, True), (3, False)])
@settings(max_examples=15)
@given(rows=rows_of_tables(), seed=seeds)
def test_each_row_attends_to_what_its_blocks_hold(tokens: int, causal: bool, rows: Rows, seed: int) -> None:
    """Rows of length 0 and rows shorter than the query included: what sees no key is 0, with -inf."""
    assert_attends(arrays(seed, tokens), rows, causal)


@pytest.mark.parametrize("shared", [0, 2, WIDTH])
def test_shared_blocks_are_read_once(shared: int) -> None:
    rows = Rows(table(shared), np.asarray([64, 49, 64, 33, 60]))
    assert_attends(arrays(), rows)
    forest, _ = plans.find(*rows, Layout(HEADS, KV_HEADS, HEAD_DIM, 1, PAGE, BLOCKS))
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
    forest, _ = plans.find(index[:, None], lens, Layout(HEADS, KV_HEADS, HEAD_DIM, 1, 64, 3))
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


# --- The plans that are kept ----------------------------------------------------------------------------------


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
    forest, _ = plans.find(
        blocks, np.full(ROWS, 2 * page_size), Layout(HEADS, KV_HEADS, HEAD_DIM, 1, page_size, BLOCKS)
    )
    assert 0 <= int(forest.pages.min()) <= int(forest.pages.max()) < BLOCKS
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
    cache, layout, lens = PlanCache(2), Layout(HEADS, KV_HEADS, HEAD_DIM, 1, PAGE, BLOCKS), np.full(ROWS, 50)
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
        _, plan = cache.find(table(2), lens, Layout(heads, KV_HEADS, HEAD_DIM, 1, PAGE, BLOCKS))
        assert plan.num_q_heads == heads
    assert cache.info().misses == 2


def test_a_cache_of_no_plans_is_refused() -> None:
    with pytest.raises(ValueError, match="max_size: expected a positive number, got 0"):
        PlanCache(0)


# --- Inside jax.jit -------------------------------------------------------------------------------------------


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


# --- Arguments ------------------------------------------------------------------------------------------------


def test_every_argument_of_flash_attn_may_have_its_default() -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    out = flash_attn_with_kvcache(*given, **{**UPSTREAM, **rows._asdict()})
    chex.assert_trees_all_close(np.asarray(out, np.float64), attend_each(given, rows)[0], atol=1e-5)


@pytest.mark.parametrize(
    "hint",
    [
        {"num_splits": 3},
        {"pack_gqa": True},
        {"sm_margin": 8},
        {"scheduler_metadata": np.zeros(3)},
        {"max_seqlen_q": 1},
        {"rotary_interleaved": False},
    ],
    ids=lambda hint: next(iter(hint)),
)
def test_arguments_that_say_how_to_compute_are_ignored(hint: dict[str, Any]) -> None:
    assert_attends(arrays(), Rows(table(2), np.full(ROWS, 50)), **hint)


REFUSED = {
    "k": np.zeros((ROWS, 1, KV_HEADS, HEAD_DIM)),
    "v": np.zeros((ROWS, 1, KV_HEADS, HEAD_DIM)),
    "qv": np.zeros((ROWS, 1, HEADS, HEAD_DIM)),
    "rotary_cos": np.zeros((64, 16)),
    "rotary_sin": np.zeros((64, 16)),
    "rotary_seqlens": np.zeros(ROWS, np.int32),
    "cache_leftpad": np.zeros(ROWS, np.int32),
    "page_table": np.zeros((ROWS, 1), np.int32),
    "cu_seqlens_q": np.arange(ROWS + 1),
    "cu_seqlens_k_new": np.arange(ROWS + 1),
    "q_descale": np.ones((ROWS, 1)),
    "k_descale": np.ones((ROWS, 1)),
    "v_descale": np.ones((ROWS, 1)),
    "alibi_slopes": np.zeros(HEADS),
    "window_size": (-1, 0),
    "attention_chunk": 128,
    "softcap": 30.0,
}


def test_every_argument_of_flash_attn_is_honoured_ignored_or_refused() -> None:
    honoured = {"cache_seqlens", "cache_batch_idx", "block_table", "softmax_scale", "causal", "return_softmax_lse"}
    ignored = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "max_seqlen_q", "rotary_interleaved"}
    assert honoured | ignored | REFUSED.keys() == UPSTREAM.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name_with_the_way_out(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got .*; \w+"):
        flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlens=50, **{name: REFUSED[name]})


def test_an_argument_that_flash_attn_does_not_have_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocktable'"):
        flash_attn_with_kvcache(*arrays(), blocktable=table(2))


WRONG = {
    "q without heads": ({"q": np.zeros((ROWS, HEADS, HEAD_DIM), np.float32)}, r"^q: expected \[batch, seqlen_q"),
    "q of integers": ({"q": np.zeros((ROWS, 1, HEADS, HEAD_DIM), np.int32)}, r"^q: expected float32.*got int32"),
    "another head size": ({"k_cache": np.zeros((BLOCKS, PAGE, 2, 32), np.float32)}, r"^k_cache: expected .*, 64\]"),
    "kv heads that do not divide": (
        {"k_cache": np.zeros((BLOCKS, PAGE, 3, HEAD_DIM), np.float32)},
        r"^k_cache: expected .*a divisor of 4, got shape \(48, 16, 3, 64\)",
    ),
    "caches of integers": (
        {name: np.zeros((BLOCKS, PAGE, KV_HEADS, HEAD_DIM), np.int8) for name in ("k_cache", "v_cache")},
        r"^k_cache: expected float32.*got int8",
    ),
    "a value head size of its own": (
        {"v_cache": np.zeros((BLOCKS, PAGE, KV_HEADS, 32), np.float32)},
        r"^v_cache: expected float32 of shape .* like k_cache, got float32 of shape \(48, 16, 2, 32\)",
    ),
    "pages of 12 tokens": (
        {name: np.zeros((BLOCKS, 12, KV_HEADS, HEAD_DIM), np.float32) for name in ("k_cache", "v_cache")},
        r"^k_cache: expected a page_block_size that is a multiple of 8, got 12",
    ),
    "room for 12 tokens": (
        {
            **{name: np.zeros((ROWS, 12, KV_HEADS, HEAD_DIM), np.float32) for name in ("k_cache", "v_cache")},
            "block_table": None,
            "cache_seqlens": 12,
        },
        r"^k_cache: expected room for a multiple of 8 tokens where there is no block_table, got 12; make",
    ),
    "fewer rows than queries": (
        {
            **{name: np.zeros((3, 64, KV_HEADS, HEAD_DIM), np.float32) for name in ("k_cache", "v_cache")},
            "block_table": None,
        },
        r"^cache_batch_idx: expected one of the 3 rows of k_cache for each of the 5 rows of q",
    ),
    "an index of no row": (
        {"block_table": None, "cache_seqlens": 8, "cache_batch_idx": [0, 1, 2, 3, BLOCKS]},
        r"^cache_batch_idx: expected one of the 48 rows of k_cache .*got \[0, 1, 2, 3, 48\]",
    ),
    "an index below 0": (
        {"block_table": None, "cache_seqlens": 8, "cache_batch_idx": [0, 1, 2, 3, -1]},
        r"^cache_batch_idx: expected one of the 48 rows of k_cache .*got \[0, 1, 2, 3, -1\]",
    ),
    "indices beside a table": (
        {"cache_batch_idx": np.arange(ROWS)},
        r"^cache_batch_idx: expected None with a block_table; reorder the rows",
    ),
    "a table of other rows": ({"block_table": table(2)[:3]}, r"^block_table: expected integers of shape \[5, max_bl"),
    "a table of floats": ({"block_table": table(2) * 1.0}, r"^block_table: expected integers .*got float64"),
    "a block below 0": (
        {"block_table": np.where(table(2) == table(2)[2, 3], -1, table(2))},
        r"^block_table: expected page ids, got block_table\[2, 3\] = -1",
    ),
    "a block past the cache": (
        {"block_table": np.where(table(2) == table(2)[2, 3], BLOCKS, table(2))},
        r"^block_table: expected block ids below 48, which is what k_cache has, got 48",
    ),
    "lengths of other rows": ({"cache_seqlens": [1, 2]}, r"^cache_seqlens: expected an integer, or one for each of"),
    "a length of floats": ({"cache_seqlens": 3.0}, r"^cache_seqlens: expected an integer.*got float64"),
    "a length past the table": (
        {"cache_seqlens": [64, 64, 65, 64, 64]},
        r"^cache_seqlens: expected lengths in \[0, 64\], .*got 65 for row 2",
    ),
    "a length below 0": ({"cache_seqlens": -1}, r"^cache_seqlens: expected lengths in \[0, 64\], .*got -1 for row 0"),
    "a scale that is not finite": ({"softmax_scale": np.inf}, r"^softmax_scale: expected a finite number, got inf"),
    "an unknown implementation": ({"implementation": "cuda"}, r"^implementation: expected 'mosaic', 'xla' or None"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    changes, message = WRONG[case]
    arguments = {**arrays()._asdict(), "block_table": table(2), "cache_seqlens": ROOM, **changes}
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**arguments)


def test_a_refused_table_leaves_the_plans_as_they_were() -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    assert_attends(given, rows)
    before = plans.info()
    with pytest.raises(ValueError, match=r"^block_table: "):
        flash_attn_with_kvcache(*given, block_table=rows.block_table + BLOCKS, cache_seqlens=50)
    assert plans.info() == before
