"""The kernels on a Hopper GPU, held to float64 attention of each request alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, renumbered, seeds, trees
from hypothesis import given, settings
from kernel_calls import (
    CONFIGS,
    PADDED_CONFIGS,
    PAGES,
    SIX,
    TREE,
    Arrays,
    Exact,
    Heads,
    attend,
    attend_mosaic,
    check,
    grown,
    plan_of,
)
from plan_cases import num_wide, used_segments

from codec_jax import DraftTrees, Forest, KVPages, PagePool, Window, make_plan
from codec_jax.attention import forest_attention
from codec_jax.forest import NO_SLOT
from pallas_kernels.packing import TILE_ROWS


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "query_tokens", "page_size", "block_tokens"),
    [
        (Heads(32, 8, 128), 1, 16, 128),
        (Heads(32, 8, 128), 1, 16, 64),
        (Heads(16, 1, 128), 1, 8, 128),
        (Heads(6, 3, 64), 33, 24, 128),
        (Heads(28, 4, 128), 5, 48, 128),
        (Heads(28, 4, 128), 5, 48, 64),
        (Heads(8, 4, 256), 16, 32, 64),
        (Heads(32, 32, 96), 1, 16, 128),
        (Heads(28, 4, 96), 5, 48, 64),
        (Heads(32, 8, 112), 33, 8, 128),
    ],
    ids=str,
)
def test_random_forests_equal_dense_attention(
    heads: Heads, query_tokens: int, page_size: int, block_tokens: int
) -> None:
    """On scattered pages, with free request slots, and with requests shorter than the query."""
    wide = 0

    @settings(max_examples=25)
    @given(trees(max_nodes=10, max_length=150, max_requests=8), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        nonlocal wide
        forest = grown(tree, page_size, seed, request_capacity=10)
        if not forest.request_length.any():
            return
        plan = plan_of(forest, heads, query_tokens=query_tokens, block_tokens=block_tokens)
        wide += num_wide(plan)
        check(Arrays.random(forest, heads, jnp.bfloat16, seed, query_tokens), forest, plan)

    check_one()
    several_tiles = 10 * query_tokens * heads.q // heads.kv > 2 * TILE_ROWS
    assert (wide > 0) == several_tiles


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize(
    ("heads", "query_tokens", "requests"),
    [(Heads(32, 8, 128), 1, 6), (Heads(32, 8, 128), 5, 45), (Heads(16, 2, 64), 1, 45), (Heads(8, 4, 256), 3, 20)],
    ids=str,
)
def test_pages_of_one_byte(heads: Heads, query_tokens: int, requests: int, kv_dtype: Any) -> None:
    lengths = np.random.default_rng(0).integers(0, 200, requests)
    forest = Forest.from_nodes([-1] + [0] * requests, [5000, *lengths], np.arange(requests) + 1)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages=1000, kv_dtype=kv_dtype)
    scales = jnp.linspace(0.3, 2.0, heads.kv), jnp.linspace(1.7, 0.01, heads.kv)
    check(arrays, forest, plan, requests=(0, 1, requests - 1), scales=scales)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        *((Heads(32, 8, 128), page_size) for page_size in (8, 16, 24, 32, 48, 64, 128, 256)),
        *((Heads(8, 8, 64), page_size) for page_size in (8, 64, 256)),
        *((Heads(8, 4, 256), page_size) for page_size in (16, 48, 128)),
        *((Heads(32, 32, 128), page_size) for page_size in (16, 256)),
        *((Heads(16, 8, 128), page_size) for page_size in (32, 64)),
        *((Heads(64, 8, 128), page_size) for page_size in (8, 128)),
        *((Heads(16, 1, 128), page_size) for page_size in (16, 64)),
        *((Heads(28, 4, 128), page_size) for page_size in (24, 64)),
        *((Heads(6, 3, 64), page_size) for page_size in (16, 32)),
        *((Heads(71, 1, 64), page_size) for page_size in (16, 48)),
        *((Heads(32, 8, 96), page_size) for page_size in (8, 16, 24, 64, 256)),
        *((Heads(32, 32, size), page_size) for size, page_size in ((80, 16), (96, 128), (112, 8))),
        *((Heads(7, 1, size), 16) for size in range(72, 128, 8)),
        *((Heads(28, 4, size), 24) for size in (80, 96, 112)),
        *((Heads(71, 1, size), 48) for size in (80, 96, 112)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_layouts_equal_dense_attention(heads: Heads, page_size: int, dtype: Any) -> None:
    forest = grown(TREE, page_size, seed=0, request_capacity=9)
    check(Arrays.random(forest, heads, dtype, seed=1), forest, plan_of(forest, heads))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize(("heads", "block_tokens"), CONFIGS + PADDED_CONFIGS)
@pytest.mark.parametrize("query_tokens", [1, 3])
def test_every_config_and_the_same_plan_on_xla_equal_dense_attention(
    heads: Heads, block_tokens: int, query_tokens: int, implementation: str
) -> None:
    forest = grown(TREE, request_capacity=9)
    plan = plan_of(forest, heads, query_tokens=query_tokens, block_tokens=block_tokens)
    check(Arrays.random(forest, heads, jnp.bfloat16, 1, query_tokens), forest, plan, implementation=implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("heads", [Heads(16, 2, 64), Heads(9, 3, 128), Heads(71, 1, 64)], ids=str)
@pytest.mark.parametrize("num_ctas", [1, 3, 132])
def test_many_requests_in_any_order_on_any_number_of_thread_blocks(heads: Heads, num_ctas: int, order: str) -> None:
    leaf = list(range(1, 101))
    if order == "scattered":
        np.random.default_rng(0).shuffle(leaf)
    forest = Forest.from_nodes([-1] + [0] * 50 + [1] * 50, [200, *range(100)], leaf)
    plan = plan_of(forest, heads, num_ctas=num_ctas)
    if heads.q < 71:  # whose units are parts of a group
        assert any(segment.query_start0 >= 0 for segment in used_segments(plan)) == (order == "consecutive")
    check(Arrays.random(forest, heads, jnp.bfloat16, 2, num_pages=512), forest, plan, requests=range(0, 100, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 2, 5, 33])
@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("leaf_length", [4, 150])
def test_wide_segments_equal_dense_attention(query_tokens: int, order: str, leaf_length: int) -> None:
    """A root that many tiles share; the last tokens of requests with short leaves lie in the root, too."""
    heads, requests, rng = Heads(32, 8, 128), 45, np.random.default_rng(0)
    leaf = rng.permutation(requests) + 1 if order == "scattered" else np.arange(requests) + 1
    lengths = rng.integers(0, leaf_length, requests)
    forest = Forest.from_nodes([-1] + [0] * requests, [9000, *lengths], leaf, request_capacity=48)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    assert 0 < num_wide(plan) < plan.arrays.cta_ptr[-1]
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages=1100)
    check(arrays, forest, plan, requests=(0, 1, 15, 16, 31, 44))


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [2, 5, 33])
def test_leaves_shorter_than_the_query_and_requests_shorter_than_it(query_tokens: int) -> None:
    tree = Tree([-1, 0, 0, 1, -1, 4], [60, 1, 40, 2, 3, 129], [3, 2, 1, 3, 5, 4, 0])
    heads, forest = Heads(32, 8, 128), grown(tree, request_capacity=9)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    check(Arrays.random(forest, heads, jnp.float16, 3, query_tokens), forest, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 3])
def test_one_plan_serves_leaves_that_grow(query_tokens: int) -> None:
    heads = Heads(32, 8, 128)
    forest = Forest.from_nodes([-1] + [0] * 20, [100, *range(20)], list(range(1, 21)), request_capacity=22)
    forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), 40)
    plan = plan_of(forest, heads, steps=40, query_tokens=query_tokens)
    assert num_wide(plan) or query_tokens == 1
    for step in range(4):
        check(Arrays.random(forest, heads, jnp.bfloat16, step, query_tokens), forest, plan)
        forest = forest.extend(np.random.default_rng(step).integers(0, 14, 22)) if step < 3 else forest


SINKS = np.linspace(-4, 4, 32, dtype=np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 5])
@pytest.mark.parametrize("window", [100, 700, Window(500, chunked=True)], ids=str)
@pytest.mark.parametrize(("heads", "block_tokens"), CONFIGS + PADDED_CONFIGS)
def test_windows_equal_dense_attention_while_leaves_grow(
    heads: Heads, block_tokens: int, window: Window | int, query_tokens: int
) -> None:
    forest = Forest.from_nodes([-1] + [0] * 20, [900, *range(0, 200, 10)], list(range(1, 21)), request_capacity=22)
    forest, _ = forest.reserve(PagePool.create(PAGES * 2, forest.used_pages), 40)
    plan = plan_of(forest, heads, steps=40, query_tokens=query_tokens, block_tokens=block_tokens, window=window)
    for step in range(2):
        arrays = Arrays.random(forest, heads, jnp.bfloat16, step, query_tokens, num_pages=2 * PAGES)
        check(arrays, forest, plan, softcap=20.0 if step else None, sinks=SINKS)
        forest = forest.extend(np.random.default_rng(step).integers(0, 40, 22)) if step == 0 else forest


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("softcap", "scale"), [(50.0, 1.0), (30.0, 20.0), (0.01, 1.0)])
def test_capped_scores_are_as_exact_as_others(softcap: float, scale: float, dtype: Any) -> None:
    """Of scores far below the cap, about it, and so far above it that tanh is 1."""
    heads, forest = Heads(32, 8, 128), grown(TREE, request_capacity=9)
    check(Arrays.random(forest, heads, dtype, 1), forest, plan_of(forest, heads), softcap=softcap, scale=scale)


@pytest.mark.gpu
def test_a_window_over_a_long_context() -> None:
    heads, tokens = Heads(16, 1, 128), 120_003
    forest = Forest.from_nodes([-1], [tokens], [0], page_size=64)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=len(forest.used_pages))
    plan = plan_of(forest, heads, window=1024)
    assert sum(segment.end - segment.begin for segment in used_segments(plan)) <= 10
    check(arrays, forest, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [3, 50])
def test_draft_trees_with_a_window_equal_dense_attention(window: int) -> None:
    heads, requests, tokens = Heads(32, 8, 128), 20, 16
    forest = Forest.from_nodes([-1] + [0] * requests, [300, *range(0, 200, 10)], list(range(1, requests + 1)))
    num_pages = len(forest.used_pages) + 3 * requests
    forest = forest.reserve(PagePool.create(num_pages, forest.used_pages), tokens)[0].extend(tokens)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, tokens, num_pages)
    parent = random_drafts(np.random.default_rng(0), requests, tokens)
    check(arrays, forest, plan_of(forest, heads, query_tokens=tokens, window=window), parent=parent)


def random_drafts(rng: np.random.Generator, requests: int, tokens: int) -> list[list[int]]:
    """Random trees for each request; every other one is as narrow as to be nearly a chain."""
    lowest = [0 if request % 2 else -1 for request in range(requests)]
    return [
        renumbered([-1, *(int(rng.integers(max(low, t - 2) if low == 0 else low, t)) for t in range(1, tokens))])
        for low in lowest
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "tokens", "page_size", "dtype"),
    [
        (Heads(32, 8, 128), 1, 16, jnp.bfloat16),
        (Heads(32, 8, 128), 16, 16, jnp.bfloat16),
        (Heads(32, 8, 128), 64, 16, jnp.float16),
        (Heads(16, 1, 64), 33, 8, jnp.bfloat16),
        (Heads(28, 4, 128), 5, 48, jnp.float16),
        (Heads(71, 1, 64), 3, 24, jnp.bfloat16),
        (Heads(8, 4, 256), 24, 32, jnp.bfloat16),
        (Heads(28, 4, 96), 5, 16, jnp.bfloat16),
        (Heads(32, 32, 112), 3, 24, jnp.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("root", [300, 9000])
def test_draft_trees_equal_dense_attention(heads: Heads, tokens: int, page_size: int, dtype: Any, root: int) -> None:
    requests, rng = 20, np.random.default_rng(0)
    leaf = rng.permutation(requests) + 1
    tree = Tree([-1] + [0] * requests, [root, *rng.integers(0, 200, requests)], leaf.tolist())
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=22)
    num_pages = len(forest.used_pages) + 21 * (-(-tokens // page_size) + 2)
    forest, _ = forest.reserve(PagePool.create(num_pages, forest.used_pages), tokens + 3)
    forest = forest.extend(tokens)
    plan = plan_of(forest, heads, query_tokens=tokens, steps=3)
    for step in range(2):
        arrays = Arrays.random(forest, heads, dtype, step, tokens, num_pages)
        parent = random_drafts(rng, 22, tokens)
        check(arrays, forest, plan, requests=range(0, requests, 3), parent=parent)
        forest = forest.extend(3) if step == 0 else forest


@pytest.mark.gpu
def test_draft_trees_in_a_leaf_that_others_read_give_nan() -> None:
    heads, forest = Heads(32, 8, 128), Forest.from_nodes([-1, 0], [50, 20], [1, 1])
    drafts = DraftTrees.from_parents(np.zeros((2, 4), np.int64) - 1)
    arrays, plan = Arrays.random(forest, heads, jnp.bfloat16, 0, 4), plan_of(forest, heads, query_tokens=4)
    forest, plan = jax.device_put((forest, plan))
    assert np.isnan(np.asarray(attend_mosaic(*arrays, forest, plan, drafts=drafts), np.float32)).all()


@pytest.mark.gpu
def test_a_stale_plan_gives_nan_everywhere() -> None:
    heads, tree = Heads(32, 8, 128), Tree([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest = grown(tree, request_capacity=5)
    plan = plan_of(forest, heads)
    longer = tree._replace(length=[100, 15, 33])
    other_pages = grown(tree, request_capacity=5, seed=1)
    other_leaves = grown(tree._replace(leaf=[2, 1, 0]), request_capacity=5)
    for other in (grown(longer, request_capacity=5), other_pages, other_leaves):
        arrays = Arrays.random(other, heads, jnp.bfloat16, 0)
        out, residuals = attend_mosaic(*arrays, other, plan, return_residuals=True)
        assert all(np.isnan(np.asarray(x, np.float32)).all() for x in (out, *residuals))


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 5])
def test_results_are_the_same_from_run_to_run(query_tokens: int) -> None:
    heads = Heads(32, 8, 128)
    forest = Forest.from_nodes([-1, *[0] * 40], [9000, *[50] * 40], list(range(40, 0, -1)))
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages=800)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    assert num_wide(plan)
    forest, plan = jax.device_put((forest, plan))
    first, *others = (np.asarray(attend_mosaic(*arrays, forest, plan), np.float32) for _ in range(6))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_logits_far_from_0_are_exact(level: float, dtype: Any) -> None:
    """Scores are whole numbers about the level, so that float32 holds them exactly."""
    heads, forest = Heads(32, 8, 128), grown(TREE, request_capacity=9)
    arrays = Arrays.random(forest, heads, dtype, seed=1)
    rng = np.random.default_rng(0)
    query = jnp.zeros_like(arrays.query).at[..., :2].set(jnp.asarray([level / 100, 1.0], dtype))
    read = np.unique(np.concatenate([forest.context_slots(request) for request in range(7)]))
    keys = np.asarray(arrays.key_pages, np.float32).reshape(-1, 8, 128)
    keys[read] = 0.0
    keys[read, :, 0] = 100.0
    keys[read, :, 1] = rng.integers(-9, 4, (len(read), 8))
    keys = jnp.asarray(keys, dtype).reshape(arrays.key_pages.shape)
    check(Arrays(query, keys, arrays.value_pages), forest, plan_of(forest, heads), scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_one_token_far_above_all_others_gives_its_value(dtype: Any) -> None:
    heads, forest = Heads(32, 8, 128), grown(TREE, request_capacity=9)
    arrays = Arrays.random(forest, heads, dtype, seed=1)
    slot = forest.context_slots(0)[-1]  # also read by request 3
    keys = arrays.key_pages.reshape(-1, 8, 128).at[slot].set(jnp.asarray(100.0, dtype))
    arrays = Arrays(jnp.ones_like(arrays.query), keys.reshape(arrays.key_pages.shape), arrays.value_pages)
    plan = plan_of(forest, heads)
    check(arrays, forest, plan, scale=0.78125)  # 1e4 against a few tens
    out = attend_mosaic(*arrays, forest, plan, scale=0.78125)
    value = jnp.repeat(arrays.value_pages.reshape(-1, 8, 128)[slot], 4, axis=0)
    for request in (0, 3):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out[request, 0], value)), rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("request_slot", range(6))
def test_a_number_that_is_not_finite_never_reaches_another_request(request_slot: int, bad: float) -> None:
    # One leaf fills a block, which is masked by row; the others share theirs.
    heads, forest = Heads(32, 8, 128), grown(SIX._replace(length=[100, 5, 17, 30, 300, 1, 64]))
    arrays, plan = Arrays.random(forest, heads, jnp.bfloat16, 0), plan_of(forest, heads)
    clean = np.asarray(attend_mosaic(*arrays, forest, plan), np.float32)
    slots = np.full((6, 1), NO_SLOT, np.int32)
    own = forest.context_slots(request_slot)[100:]
    slots[request_slot] = own[len(own) // 2]
    row = jnp.full((6, 1, heads.kv, heads.dim), bad, jnp.bfloat16)
    pages = KVPages(*arrays[1:]).write(slots, row, row)
    others = np.arange(6) != request_slot
    for key, value in ((pages.key, pages.value), (pages.key, arrays.value_pages)):
        out = np.asarray(attend_mosaic(arrays.query, key, value, forest, plan), np.float32)
        np.testing.assert_array_equal(out[others], clean[others])
        assert np.isnan(out[request_slot]).all()
    only_value = np.asarray(attend_mosaic(arrays.query, arrays.key_pages, pages.value, forest, plan), np.float32)
    np.testing.assert_array_equal(only_value[others], clean[others])
    assert np.isfinite(only_value).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(32, 32, 128), Heads(16, 8, 64)], ids=str)
@pytest.mark.parametrize("min_wide_tokens", [8192, 2048])
def test_the_error_is_no_greater_than_that_of_cudnn(min_wide_tokens: int, heads: Heads, dtype: Any) -> None:
    requests, root = 40, 4000
    forest = Forest.from_nodes([-1, *[0] * requests], [root, *[200] * requests], list(range(1, requests + 1)))
    arrays = Arrays.random(forest, heads, dtype, 0, num_pages=root // 16 + 14 * requests)
    plan = plan_of(forest, heads, min_wide_tokens=min_wide_tokens)
    assert (num_wide(plan) > 0) == (min_wide_tokens == 2048 and heads.q > heads.kv)
    sample = np.arange(0, requests, 5)
    slots = np.stack([forest.context_slots(request) for request in sample])
    dense = [pages.reshape(-1, heads.kv, heads.dim)[slots] for pages in arrays[1:]]
    with jax.numpy_dtype_promotion("standard"):
        of_cudnn = jax.nn.dot_product_attention(arrays.query[sample], *dense, implementation="cudnn")
    ours = attend_mosaic(*arrays, forest, plan)[sample]
    exact, _, most = (np.stack(x) for x in zip(*(Exact.of(arrays, forest, request) for request in sample), strict=True))
    our_errors, errors_of_cudnn = (np.asarray(x, np.float64) - exact for x in (ours, of_cudnn))
    assert (np.abs(our_errors) <= most).all()
    # Of the mean, since the greatest of many rounding errors depends on the order of sums by more than 10%.
    assert np.sqrt(np.mean(our_errors**2)) <= 1.05 * np.sqrt(np.mean(errors_of_cudnn**2))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "query_tokens"), [((16, 64), 1), ((16, 257), 1), ((16, 64), 3)], ids=str)
def test_1024_requests_on_a_deep_tree(length: tuple[int, int], query_tokens: int) -> None:
    heads, rng = Heads(32, 8, 128), np.random.default_rng(0)
    parent = [-1, *((node - 1) // 2 for node in range(1, 2047))]
    leaf = rng.permutation(1024) + 1023
    forest = Forest.from_nodes(parent, rng.integers(*length, 2047), leaf)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    num_pages = len(forest.used_pages)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages)
    check(arrays, forest, plan, requests=(0, 500, 1023))


@pytest.mark.gpu
def test_one_request_with_a_long_context() -> None:
    heads, tokens = Heads(16, 1, 128), 120_003
    forest = Forest.from_nodes([-1], [tokens], [0], page_size=64)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=len(forest.used_pages))
    check(arrays, forest, plan_of(forest, heads))


@pytest.mark.gpu
def test_none_chooses_the_kernels_where_they_serve() -> None:
    forest = Forest.from_nodes([-1], [40], [0])
    query, pages = jnp.zeros((1, 1, 8, 128), jnp.bfloat16), jnp.zeros((4, 16, 2, 128), jnp.bfloat16)
    plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=128)
    assert "mosaic" in attend.lower(query, pages, pages, forest, plan).as_text()
    exact = [x.astype(jnp.float32) for x in (query, pages, pages)]
    with pytest.warns(UserWarning, match="attention runs on the xla path.*it takes bfloat16 or float16"):
        assert "mosaic" not in attend.lower(*exact, forest, plan).as_text()
    with pytest.raises(ValueError, match="cannot serve: it takes bfloat16 or float16"):
        forest_attention(*exact, forest, plan, implementation="mosaic")
