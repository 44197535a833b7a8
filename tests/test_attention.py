"""`forest_attention` against attention of each request alone over its own gathered K and V."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, contexts, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import Forest, KVPages, PagePool, Plan, PlanError, make_plan, streams
from codec_jax.attention import forest_attention
from codec_jax.partial import Partial, pac, por

# Capacities that all forests here share, so that each layout below compiles once.
REQUESTS, NODES, ENTRIES, PAGES = 10, 128, 128, 128
SOME_TREES = trees(max_nodes=10, max_length=50, max_requests=8)
seeds = st.integers(0, 2**32 - 1)

# A document with two sections; four requests, one of them twice in the same place, in an order that is not depth first.
TREE = Tree(parent=[-1, 0, 0, 1], length=[70, 20, 33, 5], leaf=[3, 2, 1, 3])


class Layout(NamedTuple):
    """Head layout, query tokens, and how the plan cuts the work: what one compiled step serves."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    query_tokens: int = 1
    page_size: int = 16
    tile_rows: int = 16
    num_ctas: int = 5
    block_tokens: int = 64
    lanes: int = 1

    def plan(self, forest: Forest, steps: int = 1) -> Plan:
        rows = forest.request_capacity * self.query_tokens * self.num_q_heads // self.num_kv_heads
        parts = self.page_size // 8 if self.page_size > self.block_tokens else 1  # of a page, at most
        return make_plan(
            forest,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            steps=steps,
            query_tokens=self.query_tokens,
            num_ctas=self.num_ctas,
            tile_rows=self.tile_rows,
            block_tokens=self.block_tokens,
            lanes=self.lanes,
            block_capacity=-(-rows // self.tile_rows) * ENTRIES * parts,  # every tile reads every page
        )

    def arrays(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A query and pages full of numbers; what no request reads is huge."""
        query = rng.normal(size=(REQUESTS, self.query_tokens, self.num_q_heads, self.head_dim))
        shape = (PAGES, self.page_size, self.num_kv_heads, self.head_dim)
        return tuple(x.astype(np.float32) for x in (query, rng.normal(size=shape), rng.normal(size=shape)))


LAYOUTS = {
    "decoding with grouped heads": Layout(4, 2, 64),
    "one request per tile row": Layout(3, 3, 64, num_ctas=7),
    "all heads share K and V": Layout(4, 1, 64, tile_rows=8, block_tokens=16),
    "four heads per kv head": Layout(8, 2, 128, tile_rows=64, num_ctas=3, block_tokens=512),
    "wide heads, one thread block": Layout(2, 1, 256, num_ctas=1, page_size=8, block_tokens=1),
    "odd head size, many thread blocks": Layout(6, 3, 80, num_ctas=40, page_size=24, block_tokens=100),
    "two query tokens": Layout(4, 2, 64, query_tokens=2, page_size=8, tile_rows=8),
    "three query tokens": Layout(6, 3, 80, query_tokens=3, page_size=32, tile_rows=64, num_ctas=1),
    "four query tokens": Layout(4, 4, 64, query_tokens=4, num_ctas=33, block_tokens=16),
    "five query tokens": Layout(4, 1, 128, query_tokens=5, page_size=8, num_ctas=9, block_tokens=24),
    "pairs of tiles and a single one": Layout(4, 2, 64, tile_rows=8, num_ctas=7, lanes=2),
    "pairs of tiles, pages in parts": Layout(4, 1, 64, tile_rows=8, page_size=32, block_tokens=16, lanes=2),
    "pairs of tiles of 63 rows": Layout(6, 2, 80, query_tokens=5, tile_rows=63, block_tokens=48, lanes=2),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.fixture(scope="module", autouse=True)
def _wide_streams() -> Iterator[None]:
    """Let pairs of tiles share even the little that small forests have for both."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(streams, "LEAST_WIDE_TOKENS", 24)
        yield


def num_wide(plan: Plan) -> int:
    """Count the segments of two tiles."""
    segments = plan.segments[: plan.cta_ptr[-1]]
    return int((segments[:, 0] != segments[:, 1]).sum())


class Reference(NamedTuple):
    out: np.ndarray
    max: np.ndarray
    sum: np.ndarray


def attend_alone(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float | None = None) -> Reference:
    """Causal attention in float64 of the last T tokens of one context: query [T, N, H], key and value [S, K, H]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    tokens, heads, head_dim = query.shape
    context, kv_heads, _ = key.shape
    out, row_max, row_sum = np.zeros(query.shape), np.full((tokens, heads), -np.inf), np.zeros((tokens, heads))
    for t in range(tokens):
        visible = context - tokens + t + 1
        for head in range(heads):
            if visible <= 0:
                continue
            kv_head = head // (heads // kv_heads)
            scores = key[:visible, kv_head] @ query[t, head] * (head_dim**-0.5 if scale is None else scale)
            weights = np.exp(scores - scores.max())
            row_max[t, head], row_sum[t, head] = scores.max(), weights.sum()
            out[t, head] = weights @ value[:visible, kv_head] / weights.sum()
    return Reference(out, row_max, row_sum)


def attend_each(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    slots: list[list[int]],
    scale: float | None = None,
) -> Reference:
    """`attend_alone` for each request over the token slots that it reads; free request slots read nothing."""
    key, value = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (key_pages, value_pages))
    rows = slots + [[]] * (len(query) - len(slots))
    return Reference(
        *map(
            np.stack,
            zip(*(attend_alone(q, key[s], value[s], scale) for q, s in zip(query, rows, strict=True)), strict=True),
        )
    )


def forest_of(tree: Tree, page_size: int = 16, page_order: np.ndarray | None = None) -> Forest:
    """The tree in arrays of the capacities above, on scattered pages if an order is given."""
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=REQUESTS, node_capacity=NODES)
    entries = forest.used_pages if page_order is None else page_order[forest.used_pages]
    return forest.rebuild(entries=entries.astype(np.int32), entry_capacity=ENTRIES)


def slots_of(tree: Tree, page_size: int, page_order: np.ndarray) -> list[list[int]]:
    """The token slots that each request reads when the pages are in the given order."""
    return [
        [int(page_order[slot // page_size]) * page_size + slot % page_size for slot in context]
        for context in contexts(tree, page_size)
    ]


def jitted(**options: Any) -> Callable:
    return jax.jit(partial(forest_attention, **options))


with_residuals = jitted(return_residuals=True)
attend = jitted()
jax_nn_attention = jax.jit(partial(jax.nn.dot_product_attention, implementation="xla"))


def assert_close(got: Any, want: np.ndarray, atol: float = 1e-5) -> None:
    chex.assert_trees_all_close(np.asarray(got, np.float64), want, rtol=1e-5, atol=atol)


# --- Against attention of each request alone ------------------------------------------------------------------


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
        unused = slice(len(tree.leaf), None)
        np.testing.assert_array_equal(out[unused], 0.0)
        np.testing.assert_array_equal(row_max[unused], -np.inf)
        np.testing.assert_array_equal(row_sum[unused], 0.0)

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
    forest = forest_of(TREE)
    out, (row_max, row_sum) = with_residuals(query, key, value, forest, layout.plan(forest))
    want = attend_each(*(np.asarray(x, np.float32) for x in (query, key, value)), contexts(TREE, 16))
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
    forest = Forest.from_block_table(table, lengths, page_size).rebuild(node_capacity=64, entry_capacity=ENTRIES)
    token = np.arange(width * page_size)
    slots = [
        (row[token // page_size] * page_size + token % page_size)[:n].tolist()
        for row, n in zip(table, lengths, strict=True)
    ]
    assert_close(attend(query, key, value, forest, layout.plan(forest)), attend_each(query, key, value, slots).out)


@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_scale_is_the_factor_on_the_scores(scale: float) -> None:
    layout, forest = Layout(), forest_of(TREE)
    query, key, value = layout.arrays(np.random.default_rng(0))
    out, (row_max, row_sum) = jitted(scale=scale, return_residuals=True)(query, key, value, forest, layout.plan(forest))
    want = attend_each(query, key, value, contexts(TREE, 16), scale)
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
    layout, forest, extra = Layout(), forest_of(TREE), 9
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

    for request, context in enumerate(contexts(TREE, 16)):
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
    for tree in (TREE, Tree([-1], [1], [0]), Tree([-1], [0], [0]), Tree([-1] * 8, [50] * 8, list(range(8)))):
        forest = forest_of(tree)
        assert_close(attend_once(*arrays, forest, layout.plan(forest)), attend_each(*arrays, contexts(tree, 16)).out)
    assert attend_once._cache_size() == 1


# --- Growing leaves under one plan ------------------------------------------------------------------------------


@jax.jit
def append_and_attend(
    query: jax.Array, key: jax.Array, value: jax.Array, count: jax.Array, pages: KVPages, forest: Forest, plan: Plan
) -> tuple[jax.Array, KVPages, Forest]:
    """One step: each request with a count appends its last `count` tokens, T at most, and all of them attend."""
    forest = forest.extend(count)
    tokens = key.shape[1]
    new = jnp.arange(tokens) >= tokens - count[:, None]
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


# --- Arguments that do not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mosaic", "triton", "nonsense", "XLA", ""])
def test_an_implementation_that_cannot_serve_is_refused_by_name(name: str) -> None:
    layout, forest = Layout(), forest_of(TREE)
    arguments = (*layout.arrays(np.random.default_rng(0)), forest, layout.plan(forest))
    with pytest.raises(ValueError, match=f"^implementation: .*'{name}'"):
        forest_attention(*arguments, implementation=name)
    with pytest.raises(ValueError, match=f"^implementation: .*'{name}'"):
        jitted(implementation=name)(*arguments)


def test_arrays_of_the_host_serve_as_well() -> None:
    layout, forest = Layout(), forest_of(TREE)
    arrays = layout.arrays(np.random.default_rng(0))
    want = attend_each(*arrays, contexts(TREE, 16)).out
    assert_close(forest_attention(*arrays, forest, layout.plan(forest)), want)
    assert_close(jax.jit(lambda *rest: forest_attention(*arrays, *rest))(forest, layout.plan(forest)), want)


def test_xla_may_be_named() -> None:
    layout, forest = Layout(), forest_of(TREE)
    arrays = layout.arrays(np.random.default_rng(0))
    out = jitted(implementation="xla")(*arrays, forest, layout.plan(forest))
    assert_close(out, attend_each(*arrays, contexts(TREE, 16)).out)


# What fits: a query [10, 1, 4, 64], and pages [128, 16, 2, 64] of which the forest uses 11.
FITTING = {"query": (REQUESTS, 1, 4, 64), "key": (PAGES, 16, 2, 64), "value": (PAGES, 16, 2, 64)}
MISFITS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of another batch": ({"query": (9, 1, 4, 64)}, ValueError, r"^query: .*B = 10.*\(9, 1, 4, 64\)"),
    "query without tokens": ({"query": (10, 0, 4, 64)}, ValueError, r"^query: .*\(10, 0, 4, 64\)"),
    "query of three axes": ({"query": (10, 4, 64)}, ValueError, r"^query: .*\[B, T, N, H\].*\(10, 4, 64\)"),
    "integer query": ({"query": jnp.int32}, ValueError, "^query: .*bfloat16.*int32"),
    "pages of another size": ({"pages": (128, 8, 2, 64)}, ValueError, r"^key_pages: .*16, K, 64\].*8, 2, 64"),
    "pages of another head size": ({"pages": (128, 16, 2, 32)}, ValueError, r"^key_pages: .*K, 64\].*2, 32"),
    "pages of three axes": ({"pages": (2048, 2, 64)}, ValueError, r"^key_pages: .*\(2048, 2, 64\)"),
    "too few pages": ({"pages": (10, 16, 2, 64)}, ValueError, r"^key_pages: .*at least 11 pages.*got 10"),
    "integer pages": ({"pages": jnp.int8}, ValueError, "^key_pages: .*bfloat16.*int8"),
    "fewer value pages": ({"value": (127, 16, 2, 64)}, ValueError, r"^value_pages: .*\(128, .*\(127, "),
    "values of another dtype": ({"value": jnp.bfloat16}, ValueError, "^value_pages: .*float32.*bfloat16"),
    "other q heads": ({"query": (10, 1, 8, 64)}, PlanError, r"^plan: .*= \(1, 8, 2, 64\).*\(1, 4, 2, 64\)"),
    "other kv heads": ({"pages": (128, 16, 4, 64)}, PlanError, r"^plan: .*= \(1, 4, 4, 64\).*\(1, 4, 2, 64\)"),
    "other head size": (
        {"query": (10, 1, 4, 32), "pages": (128, 16, 2, 32)}, PlanError, r"^plan: .*= \(1, 4, 2, 32\).*\(1, 4, 2, 64\)"
    ),
    "other query tokens": ({"query": (10, 2, 4, 64)}, PlanError, r"^plan: .*= \(2, 4, 2, 64\).*\(1, 4, 2, 64\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_arrays_that_do_not_fit_are_refused_by_name(case: str) -> None:
    changes, error, message = MISFITS[case]
    if "pages" in changes:
        changes = {**changes, "key": changes["pages"], "value": changes["pages"]}
    arrays = []
    for name, shape in FITTING.items():
        change = changes.get(name, shape)
        shape, dtype = (change, jnp.float32) if isinstance(change, tuple) else (shape, change)
        arrays.append(jax.ShapeDtypeStruct(shape, dtype))
    forest = forest_of(TREE)
    plan = Layout().plan(forest)
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda *arrays: forest_attention(*arrays, forest, plan), *arrays)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    layout, forest = Layout(), forest_of(TREE)
    with pytest.raises(ValueError, match=f"^scale: .*{scale}"):
        forest_attention(*layout.arrays(np.random.default_rng(0)), forest, layout.plan(forest), scale=scale)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("page_size", {"page_size": 8}),
        ("request_capacity", {"request_capacity": REQUESTS + 1}),
        ("node_capacity", {"node_capacity": NODES + 1}),
    ],
)
def test_a_plan_for_other_capacities_is_refused_also_under_jit(name: str, options: dict[str, int]) -> None:
    layout, forest = Layout(), forest_of(TREE)
    other = Forest.from_nodes(
        *TREE, **{"page_size": 16, "request_capacity": REQUESTS, "node_capacity": NODES, **options}
    )
    with pytest.raises(PlanError, match=f"plan: expected a plan for {name} = "):
        attend(*layout.arrays(np.random.default_rng(0)), forest, layout.plan(other))
