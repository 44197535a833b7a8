"""Heads of 512 numbers on a Hopper GPU, held to float64 attention of each request alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, seeds, trees
from hypothesis import given, settings
from kernel_calls import LONG_SCALE, PAGES, TREE, Arrays, Heads, attend, check, grown, plan_of

from codec_jax import Forest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("query_tokens", [1, 5])
@pytest.mark.parametrize("heads", [Heads(8, 2, 512), Heads(32, 4, 512), Heads(16, 1, 512)], ids=str)
def test_random_forests_equal_dense_attention(heads: Heads, query_tokens: int, dtype: Any) -> None:
    """On scattered pages, with free request slots, and with requests shorter than the query."""

    @settings(max_examples=8)
    @given(trees(max_nodes=10, max_length=150, max_requests=8), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        forest = grown(tree, 16, seed, request_capacity=10)
        if forest.request_length.any():
            arrays = Arrays.random(forest, heads, dtype, seed, query_tokens)
            check(arrays, forest, plan_of(forest, heads, query_tokens=query_tokens), scale=LONG_SCALE)

    check_one()


@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, 30.0)])
def test_layouts_equal_dense_attention(page_size: int, window: int | None, softcap: float | None) -> None:
    heads, forest = Heads(16, 2, 512), grown(TREE, page_size, seed=0, request_capacity=9)
    sinks = None if softcap is None else np.linspace(-2, 2, heads.q, dtype=np.float32)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 1)
    check(arrays, forest, plan_of(forest, heads, window=window), scale=LONG_SCALE, softcap=softcap, sinks=sinks)


def test_many_requests_over_a_long_root() -> None:
    heads, leaf = Heads(16, 2, 512), np.random.default_rng(0).permutation(100) + 1
    forest = Forest.from_nodes([-1] + [0] * 50 + [1] * 50, [3000, *range(100)], leaf)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 2, num_pages=700)
    check(arrays, forest, plan_of(forest, heads), requests=range(0, 100, 7), scale=LONG_SCALE)


def test_a_stale_plan_gives_nan_and_results_are_the_same_from_run_to_run() -> None:
    heads, tree = Heads(16, 2, 512), Tree([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest, longer = (grown(tree._replace(length=[100, 15, n]), request_capacity=5) for n in (31, 33))
    plan, arrays = plan_of(forest, heads), Arrays.random(longer, heads, jnp.bfloat16, 0, num_pages=PAGES)
    once, *again = (np.asarray(attend(*arrays, forest, plan, implementation="mosaic"), np.float32) for _ in range(4))
    assert all(np.array_equal(once, each, equal_nan=True) for each in again)
    longer, plan = jax.device_put((longer, plan))
    assert np.isnan(np.asarray(attend(*arrays, longer, plan, implementation="mosaic"), np.float32)).all()
