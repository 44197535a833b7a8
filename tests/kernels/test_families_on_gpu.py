"""Every family of kernels that the GPU has, held to float64 attention of each request alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, renumbered, seeds, trees
from hypothesis import given, settings
from kernel_calls import PAGES, SIX, TREE, Arrays, Exact, Heads, attend, check, grown, plan_of
from plan_cases import num_wide, used_segments

from codec_jax import DraftTrees, Forest, KVPages, PagePool, Plan, Window
from codec_jax.forest import NO_SLOT
from pallas_kernels import AMPERE, HOPPER, Family
from pallas_kernels import Heads as AllHeads
from pallas_kernels.packing import TILE_ROWS

pytestmark = pytest.mark.gpu
SINKS = np.linspace(-4, 4, 32, dtype=np.float32)


class Kernels(NamedTuple):
    """A family, with plans as it wants them."""

    family: Family

    def plan(self, forest: Forest, heads: Heads, **options: Any) -> Plan:
        return plan_of(forest, heads, self.family, **options)

    def attend(self, *arrays: Any, **options: Any) -> Any:
        return attend(*arrays, implementation=self.family.name, **options)

    def check(self, arrays: Arrays, forest: Forest, plan: Plan, **options: Any) -> None:
        check(arrays, forest, plan, implementation=self.family.name, **options)

    def widens(self, heads: Heads) -> bool:
        """Whether a segment may serve the rows of several tiles."""
        wanted = AllHeads(heads.q, heads.kv, heads.dim, heads.value_dim)
        return self.family.tiling(wanted, jax.devices()[0]).lanes > 1


@pytest.fixture(params=[HOPPER, AMPERE], ids=lambda family: family.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of a family; what the GPU or the version of JAX has not is skipped."""
    if reason := request.param.why_not(AllHeads(32, 8, 128, 128), jax.devices()[0]):
        pytest.skip(reason)
    return Kernels(request.param)


@pytest.mark.parametrize(
    ("heads", "query_tokens", "page_size", "block_tokens"),
    [
        (Heads(32, 8, 128), 1, 16, None),
        (Heads(32, 8, 128), 1, 16, 64),
        (Heads(16, 1, 128), 1, 8, None),
        (Heads(6, 3, 64), 33, 24, None),
        (Heads(28, 4, 128), 5, 48, None),
        (Heads(28, 4, 128), 5, 48, 64),
        (Heads(8, 4, 256), 16, 32, None),
        (Heads(32, 32, 96), 1, 16, None),
        (Heads(28, 4, 96), 5, 48, 64),
        (Heads(32, 8, 112), 33, 8, None),
    ],
    ids=str,
)
def test_random_forests_equal_dense_attention(
    kernels: Kernels, heads: Heads, query_tokens: int, page_size: int, block_tokens: int | None
) -> None:
    """On scattered pages, with free request slots, and with requests shorter than the query."""
    wide, options = 0, {} if block_tokens is None else {"block_tokens": block_tokens}

    @settings(max_examples=25)
    @given(trees(max_nodes=10, max_length=150, max_requests=8), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        nonlocal wide
        forest = grown(tree, page_size, seed, request_capacity=10)
        if not forest.request_length.any():
            return
        plan = kernels.plan(forest, heads, query_tokens=query_tokens, **options)
        wide += num_wide(plan)
        kernels.check(Arrays.random(forest, heads, jnp.bfloat16, seed, query_tokens), forest, plan)

    check_one()
    several_tiles = 10 * query_tokens * heads.q // heads.kv > 2 * TILE_ROWS
    assert (wide > 0) == (several_tiles and kernels.widens(heads))


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
        *((Heads(32, 8, 96), page_size) for page_size in (8, 24, 256)),
        *((Heads(32, 32, size), page_size) for size, page_size in ((80, 16), (96, 128), (112, 8))),
        *((Heads(7, 1, size), 16) for size in range(72, 128, 8)),
        *((Heads(28, 4, size), 24) for size in (80, 96, 112)),
        *((Heads(71, 1, size), 48) for size in (80, 96, 112)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_layouts_equal_dense_attention(kernels: Kernels, heads: Heads, page_size: int, dtype: Any) -> None:
    forest = grown(TREE, page_size, seed=0, request_capacity=9)
    kernels.check(Arrays.random(forest, heads, dtype, seed=1), forest, kernels.plan(forest, heads))


@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("heads", [Heads(16, 2, 64), Heads(9, 3, 128), Heads(71, 1, 64)], ids=str)
@pytest.mark.parametrize("num_ctas", [1, 3, 132])
def test_many_requests_in_any_order_on_any_number_of_thread_blocks(
    kernels: Kernels, heads: Heads, num_ctas: int, order: str
) -> None:
    leaf = list(range(1, 101))
    if order == "scattered":
        np.random.default_rng(0).shuffle(leaf)
    forest = Forest.from_nodes([-1] + [0] * 50 + [1] * 50, [200, *range(100)], leaf)
    plan = kernels.plan(forest, heads, num_ctas=num_ctas)
    if heads.q < 71:  # whose units are parts of a group
        assert any(segment.query_start0 >= 0 for segment in used_segments(plan)) == (order == "consecutive")
    kernels.check(
        Arrays.random(forest, heads, jnp.bfloat16, 2, num_pages=512),
        forest,
        plan,
        requests=range(0, 100, 7),
        sinks=np.linspace(-2, 4, heads.q).astype(jnp.bfloat16) if order == "scattered" else None,
    )


@pytest.mark.parametrize("query_tokens", [2, 5, 33])
def test_leaves_shorter_than_the_query_and_requests_shorter_than_it(kernels: Kernels, query_tokens: int) -> None:
    tree = Tree([-1, 0, 0, 1, -1, 4], [60, 1, 40, 2, 3, 129], [3, 2, 1, 3, 5, 4, 0])
    heads, forest = Heads(32, 8, 128), grown(tree, request_capacity=9)
    plan = kernels.plan(forest, heads, query_tokens=query_tokens)
    kernels.check(Arrays.random(forest, heads, jnp.float16, 3, query_tokens), forest, plan)


@pytest.mark.parametrize("query_tokens", [1, 5])
@pytest.mark.parametrize("window", [None, 100, 700, Window(500, chunked=True)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_plan_serves_leaves_that_grow(kernels: Kernels, head_dim: int, window: Any, query_tokens: int) -> None:
    heads = Heads(32, 8, head_dim)
    forest = Forest.from_nodes([-1] + [0] * 20, [900, *range(0, 200, 10)], list(range(1, 21)), request_capacity=22)
    forest, _ = forest.reserve(PagePool.create(PAGES * 2, forest.used_pages), 40)
    plan = kernels.plan(forest, heads, steps=40, query_tokens=query_tokens, window=window)
    for step in range(2):
        arrays = Arrays.random(forest, heads, jnp.bfloat16, step, query_tokens, num_pages=2 * PAGES)
        kernels.check(arrays, forest, plan, softcap=20.0 if step else None, sinks=SINKS)
        forest = forest.extend(np.random.default_rng(step).integers(0, 40, 22)) if step == 0 else forest


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("softcap", "scale"), [(50.0, 1.0), (9.0, 1.0), (30.0, 20.0), (0.01, 1.0)])
def test_capped_scores_are_as_exact_as_others(kernels: Kernels, softcap: float, scale: float, dtype: Any) -> None:
    """Of scores far below the cap, about it, and so far above it that tanh is 1."""
    heads, forest = Heads(32, 8, 128), grown(TREE, request_capacity=9)
    kernels.check(
        Arrays.random(forest, heads, dtype, 1),
        forest,
        kernels.plan(forest, heads),
        softcap=softcap,
        scale=scale,
    )


def test_a_window_over_a_long_context(kernels: Kernels) -> None:
    heads, tokens = Heads(16, 1, 128), 120_003
    forest = Forest.from_nodes([-1], [tokens], [0], page_size=64)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=len(forest.used_pages))
    plan = kernels.plan(forest, heads, window=1024)
    blocks = sum(segment.end - segment.begin for segment in used_segments(plan))
    assert blocks <= 1024 // plan.arrays.block_tokens + 2
    kernels.check(arrays, forest, plan)


@pytest.mark.parametrize("window", [3, 50])
def test_draft_trees_with_a_window_equal_dense_attention(kernels: Kernels, window: int) -> None:
    heads, requests, tokens = Heads(32, 8, 128), 20, 16
    forest = Forest.from_nodes([-1] + [0] * requests, [300, *range(0, 200, 10)], list(range(1, requests + 1)))
    num_pages = len(forest.used_pages) + 3 * requests
    forest = forest.reserve(PagePool.create(num_pages, forest.used_pages), tokens)[0].extend(tokens)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, tokens, num_pages)
    parent = random_drafts(np.random.default_rng(0), requests, tokens)
    kernels.check(
        arrays,
        forest,
        kernels.plan(forest, heads, query_tokens=tokens, window=window),
        parent=parent,
    )


def random_drafts(rng: np.random.Generator, requests: int, tokens: int) -> list[list[int]]:
    """Random trees for each request; every other one is as narrow as to be nearly a chain."""
    lowest = [0 if request % 2 else -1 for request in range(requests)]
    return [
        renumbered([-1, *(int(rng.integers(max(low, t - 2) if low == 0 else low, t)) for t in range(1, tokens))])
        for low in lowest
    ]


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
def test_draft_trees_equal_dense_attention(
    kernels: Kernels, heads: Heads, tokens: int, page_size: int, dtype: Any, root: int
) -> None:
    requests, rng = 20, np.random.default_rng(0)
    leaf = rng.permutation(requests) + 1
    tree = Tree([-1] + [0] * requests, [root, *rng.integers(0, 200, requests)], leaf.tolist())
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=22)
    num_pages = len(forest.used_pages) + 21 * (-(-tokens // page_size) + 2)
    forest, _ = forest.reserve(PagePool.create(num_pages, forest.used_pages), tokens + 3)
    forest = forest.extend(tokens)
    plan = kernels.plan(forest, heads, query_tokens=tokens, steps=3)
    for step in range(2):
        arrays = Arrays.random(forest, heads, dtype, step, tokens, num_pages)
        parent = random_drafts(rng, 22, tokens)
        kernels.check(arrays, forest, plan, requests=range(0, requests, 3), parent=parent)
        forest = forest.extend(3) if step == 0 else forest


def test_draft_trees_in_a_leaf_that_others_read_give_nan(kernels: Kernels) -> None:
    heads, forest = Heads(32, 8, 128), Forest.from_nodes([-1, 0], [50, 20], [1, 1])
    drafts = DraftTrees.from_parents(np.zeros((2, 4), np.int64) - 1)
    arrays, plan = Arrays.random(forest, heads, jnp.bfloat16, 0, 4), kernels.plan(forest, heads, query_tokens=4)
    forest, plan = jax.device_put((forest, plan))
    assert np.isnan(np.asarray(kernels.attend(*arrays, forest, plan, drafts=drafts), np.float32)).all()


def test_a_stale_plan_gives_nan_everywhere(kernels: Kernels) -> None:
    heads, tree = Heads(32, 8, 128), Tree([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest = grown(tree, request_capacity=5)
    plan = kernels.plan(forest, heads)
    longer = tree._replace(length=[100, 15, 33])
    other_pages = grown(tree, request_capacity=5, seed=1)
    other_leaves = grown(tree._replace(leaf=[2, 1, 0]), request_capacity=5)
    for other in (grown(longer, request_capacity=5), other_pages, other_leaves):
        arrays = Arrays.random(other, heads, jnp.bfloat16, 0)
        out, residuals = kernels.attend(*arrays, other, plan, return_residuals=True)
        assert all(np.isnan(np.asarray(x, np.float32)).all() for x in (out, *residuals))


@pytest.mark.parametrize("query_tokens", [1, 5])
def test_results_are_the_same_from_run_to_run(kernels: Kernels, query_tokens: int) -> None:
    heads = Heads(32, 8, 128)
    forest = Forest.from_nodes([-1, *[0] * 40], [9000, *[50] * 40], list(range(40, 0, -1)))
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages=800)
    plan = kernels.plan(forest, heads, query_tokens=query_tokens)
    assert (num_wide(plan) > 0) == kernels.widens(heads)
    forest, plan = jax.device_put((forest, plan))
    first, *others = (np.asarray(kernels.attend(*arrays, forest, plan), np.float32) for _ in range(6))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_logits_far_from_0_are_exact(kernels: Kernels, level: float, dtype: Any) -> None:
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
    kernels.check(
        Arrays(query, keys, arrays.value_pages),
        forest,
        kernels.plan(forest, heads),
        scale=1.0,
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_one_token_far_above_all_others_gives_its_value(kernels: Kernels, dtype: Any) -> None:
    heads, forest = Heads(32, 8, 128), grown(TREE, request_capacity=9)
    arrays = Arrays.random(forest, heads, dtype, seed=1)
    slot = forest.context_slots(0)[-1]  # also read by request 3
    keys = arrays.key_pages.reshape(-1, 8, 128).at[slot].set(jnp.asarray(100.0, dtype))
    arrays = Arrays(jnp.ones_like(arrays.query), keys.reshape(arrays.key_pages.shape), arrays.value_pages)
    plan = kernels.plan(forest, heads)
    kernels.check(arrays, forest, plan, scale=0.78125)  # 1e4 against a few tens
    out = kernels.attend(*arrays, forest, plan, scale=0.78125)
    value = jnp.repeat(arrays.value_pages.reshape(-1, 8, 128)[slot], 4, axis=0)
    for request in (0, 3):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out[request, 0], value)), rtol=1e-3)


@pytest.mark.parametrize(("bad", "softcap"), [(np.nan, None), (np.inf, None), (-np.inf, None), (np.nan, 20.0)])
@pytest.mark.parametrize("request_slot", range(6))
def test_a_number_that_is_not_finite_never_reaches_another_request(
    kernels: Kernels, request_slot: int, bad: float, softcap: float | None
) -> None:
    # One leaf fills a block, which is masked by row; the others share theirs.
    heads, forest = Heads(32, 8, 128), grown(SIX._replace(length=[100, 5, 17, 30, 300, 1, 64]))
    arrays, plan = Arrays.random(forest, heads, jnp.bfloat16, 0), kernels.plan(forest, heads)
    clean = np.asarray(kernels.attend(*arrays, forest, plan, softcap=softcap), np.float32)
    slots = np.full((6, 1), NO_SLOT, np.int32)
    own = forest.context_slots(request_slot)[100:]
    slots[request_slot] = own[len(own) // 2]
    row = jnp.full((6, 1, heads.kv, heads.dim), bad, jnp.bfloat16)
    pages = KVPages(*arrays[1:]).write(slots, row, row)
    others = np.arange(6) != request_slot
    for key, value in ((pages.key, pages.value), (pages.key, arrays.value_pages)):
        out = np.asarray(kernels.attend(arrays.query, key, value, forest, plan, softcap=softcap), np.float32)
        np.testing.assert_array_equal(out[others], clean[others])
        assert np.isnan(out[request_slot]).all()
    only_value = np.asarray(
        kernels.attend(arrays.query, arrays.key_pages, pages.value, forest, plan, softcap=softcap), np.float32
    )
    np.testing.assert_array_equal(only_value[others], clean[others])
    assert np.isfinite(only_value).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(32, 32, 128), Heads(16, 8, 64)], ids=str)
@pytest.mark.parametrize("min_wide_tokens", [8192, 2048])
def test_the_error_is_no_greater_than_that_of_cudnn(
    kernels: Kernels, min_wide_tokens: int, heads: Heads, dtype: Any
) -> None:
    requests, root = 40, 4000
    forest = Forest.from_nodes([-1, *[0] * requests], [root, *[200] * requests], list(range(1, requests + 1)))
    arrays = Arrays.random(forest, heads, dtype, 0, num_pages=root // 16 + 14 * requests)
    plan = kernels.plan(forest, heads, min_wide_tokens=min_wide_tokens)
    assert (num_wide(plan) > 0) == (kernels.widens(heads) and min_wide_tokens == 2048 and heads.q > heads.kv)
    sample = np.arange(0, requests, 5)
    slots = np.stack([forest.context_slots(request) for request in sample])
    dense = [pages.reshape(-1, heads.kv, heads.dim)[slots] for pages in arrays[1:]]
    with jax.numpy_dtype_promotion("standard"):
        of_cudnn = jax.nn.dot_product_attention(arrays.query[sample], *dense, implementation="cudnn")
    ours = kernels.attend(*arrays, forest, plan)[sample]
    exact, _, most = (np.stack(x) for x in zip(*(Exact.of(arrays, forest, request) for request in sample), strict=True))
    our_errors, errors_of_cudnn = (np.asarray(x, np.float64) - exact for x in (ours, of_cudnn))
    assert (np.abs(our_errors) <= most).all()
    # Of the mean, since the greatest of many rounding errors depends on the order of sums by more than 10%.
    assert np.sqrt(np.mean(our_errors**2)) <= 1.05 * np.sqrt(np.mean(errors_of_cudnn**2))


@pytest.mark.parametrize(("length", "query_tokens"), [((16, 64), 1), ((16, 257), 1), ((16, 64), 3)], ids=str)
def test_1024_requests_on_a_deep_tree(kernels: Kernels, length: tuple[int, int], query_tokens: int) -> None:
    heads, rng = Heads(32, 8, 128), np.random.default_rng(0)
    parent = [-1, *((node - 1) // 2 for node in range(1, 2047))]
    leaf = rng.permutation(1024) + 1023
    forest = Forest.from_nodes(parent, rng.integers(*length, 2047), leaf)
    plan = kernels.plan(forest, heads, query_tokens=query_tokens)
    num_pages = len(forest.used_pages)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages)
    kernels.check(arrays, forest, plan, requests=(0, 500, 1023))


def test_one_request_with_a_long_context(kernels: Kernels) -> None:
    heads, tokens = Heads(16, 1, 128), 120_003
    forest = Forest.from_nodes([-1], [tokens], [0], page_size=64)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=len(forest.used_pages))
    kernels.check(arrays, forest, kernels.plan(forest, heads))
