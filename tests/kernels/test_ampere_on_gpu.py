"""The kernels for GPUs since Ampere on such a GPU, held to float64 attention of each request alone."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, renumbered, seeds, trees
from hypothesis import given, settings
from kernel_calls import PAGES, TREE, Arrays, Heads, attend, check, grown, plan_of

from codec_jax import Forest, PagePool, Plan, Window
from pallas_kernels import AMPERE
from pallas_kernels import Heads as AllHeads

if not hasattr(plgpu, "mma"):
    pytest.skip("before JAX 0.11 there are no warp-level products", allow_module_level=True)

pytestmark = pytest.mark.gpu
LAYOUTS = [
    *((Heads(32, 8, 128), page_size) for page_size in (8, 16, 24, 48, 256)),
    *((Heads(8, 8, 64), page_size) for page_size in (8, 64, 256)),
    *((Heads(8, 4, 256), page_size) for page_size in (8, 48, 128)),
    (Heads(28, 4, 128), 24),
    (Heads(6, 3, 64), 32),
    (Heads(71, 1, 64), 16),
    *((Heads(32, 8, 96), page_size) for page_size in (8, 24, 256)),
    (Heads(7, 1, 112), 16),
    (Heads(8, 4, 40), 64),
]


def ampere_plan(forest: Forest, heads: Heads, **options: Any) -> Plan:
    """Plan as the kernels want it on this device."""
    tiling = AMPERE.tiling(AllHeads(heads.q, heads.kv, heads.dim, heads.dim), jax.devices()[0])
    sizes = {"lanes": tiling.lanes, "block_tokens": tiling.block_tokens[0], "num_ctas": tiling.num_ctas}
    return plan_of(forest, heads, **(sizes | options))


@pytest.mark.parametrize("query_tokens", [1, 5, 33])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(6, 3, 64), Heads(8, 4, 256)], ids=str)
def test_random_forests_equal_dense_attention(heads: Heads, query_tokens: int) -> None:
    @settings(max_examples=25)
    @given(trees(max_nodes=10, max_length=150, max_requests=8), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        forest = grown(tree, 16, seed, request_capacity=10)
        if forest.request_length.any():
            plan = ampere_plan(forest, heads, query_tokens=query_tokens)
            arrays = Arrays.random(forest, heads, jnp.bfloat16, seed, query_tokens)
            check(arrays, forest, plan, implementation="ampere")

    check_one()


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(192, 128), (96, 256), (40, 72)])
def test_values_may_have_another_size_than_keys(head_dim: int, value_head_dim: int) -> None:
    heads, forest = Heads(32, 8, head_dim, value_head_dim), grown(TREE, 16, seed=0, request_capacity=9)
    tiling = AMPERE.tiling(AllHeads(32, 8, head_dim, value_head_dim), jax.devices()[0])
    plan = ampere_plan(forest, heads, block_tokens=tiling.block_tokens[0])
    check(Arrays.random(forest, heads, jnp.bfloat16, seed=0), forest, plan, implementation="ampere")


@pytest.mark.parametrize(("heads", "page_size"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_layouts_equal_dense_attention(heads: Heads, page_size: int, dtype: Any) -> None:
    forest = grown(TREE, page_size, seed=0, request_capacity=9)
    check(Arrays.random(forest, heads, dtype, seed=1), forest, ampere_plan(forest, heads), implementation="ampere")


@pytest.mark.parametrize("num_ctas", [1, 3, 132])
def test_many_requests_on_any_number_of_thread_blocks(num_ctas: int) -> None:
    heads, leaf = Heads(9, 3, 128), np.random.default_rng(0).permutation(100) + 1
    forest = Forest.from_nodes([-1] + [0] * 50 + [1] * 50, [3000, *range(100)], leaf)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 2, num_pages=700)
    plan = ampere_plan(forest, heads, num_ctas=num_ctas)
    check(arrays, forest, plan, requests=range(0, 100, 7), implementation="ampere")


@pytest.mark.parametrize("query_tokens", [1, 5])
@pytest.mark.parametrize("window", [None, 100, Window(500, chunked=True)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_plan_serves_leaves_that_grow(head_dim: int, window: Any, query_tokens: int) -> None:
    heads = Heads(32, 8, head_dim)
    forest = Forest.from_nodes([-1] + [0] * 20, [900, *range(0, 200, 10)], list(range(1, 21)), request_capacity=22)
    forest, _ = forest.reserve(PagePool.create(PAGES * 2, forest.used_pages), 40)
    plan = ampere_plan(forest, heads, steps=40, query_tokens=query_tokens, window=window)
    for step in range(2):
        arrays = Arrays.random(forest, heads, jnp.bfloat16, step, query_tokens, num_pages=2 * PAGES)
        check(arrays, forest, plan, softcap=20.0 if step else None, implementation="ampere")
        forest = forest.extend(np.random.default_rng(step).integers(0, 40, 22)) if step == 0 else forest


@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(71, 1, 64), Heads(8, 4, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_draft_trees_equal_dense_attention(heads: Heads, window: int | None) -> None:
    requests, tokens, rng = 20, 16, np.random.default_rng(0)
    forest = Forest.from_nodes([-1] + [0] * requests, [300, *range(0, 200, 10)], list(range(1, requests + 1)))
    num_pages = len(forest.used_pages) + 3 * requests
    forest = forest.reserve(PagePool.create(num_pages, forest.used_pages), tokens)[0].extend(tokens)
    parent = [renumbered([-1, *(int(rng.integers(-1, t)) for t in range(1, tokens))]) for _ in range(requests)]
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, tokens, num_pages)
    plan = ampere_plan(forest, heads, query_tokens=tokens, window=window)
    check(arrays, forest, plan, parent=parent, implementation="ampere")


def test_a_stale_plan_gives_nan_and_results_are_the_same_from_run_to_run() -> None:
    heads, tree = Heads(32, 8, 128), Tree([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest, longer = (grown(tree._replace(length=[100, 15, n]), request_capacity=5) for n in (31, 33))
    plan, arrays = ampere_plan(forest, heads), Arrays.random(longer, heads, jnp.bfloat16, 0)
    results = [np.asarray(attend(*arrays, forest, plan, implementation="ampere"), np.float32) for _ in range(4)]
    assert all((result == results[0]).all() for result in results)
    longer, plan = jax.device_put((longer, plan))
    assert np.isnan(np.asarray(attend(*arrays, longer, plan, implementation="ampere"), np.float32)).all()
