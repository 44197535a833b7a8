"""A server's life: requests come, fork, grow and leave for 500 tokens, and the step that serves them compiles once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codec_jax import Forest, KVPages, PagePool, make_plan, replan
from codec_jax.attention import forest_attention

HEADS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8}
STEPS, INTERVAL, DOCUMENT = 500, 20, 1000


@pytest.mark.parametrize("given", [False, True], ids=["defaults", "capacities given"])
@pytest.mark.parametrize("requests", [64, 256, 1024])
def test_500_steps_of_a_changing_forest_compile_one_program(requests: int, given: bool) -> None:
    rng = np.random.default_rng(requests)
    num_pages = DOCUMENT // 16 + 1 + requests * (STEPS // 16 + 2)
    capacities = {"node_capacity": 4 * requests, "page_capacity": num_pages} if given else {}

    @jax.jit
    def step(pages, forest, plan, counts):
        forest = forest.extend(counts)
        ones = jnp.ones((requests, 1, 1, 8))
        pages = pages.write(forest.slots(), ones, ones)
        return forest_attention(jnp.ones((requests, 1, 2, 8)), pages.key, pages.value, forest, plan), pages

    forest = Forest.from_nodes([-1, 0], [DOCUMENT, 5], [1, 0], request_capacity=requests, **capacities)
    forest, _ = forest.fork(np.zeros(requests // 2, int))
    pool = PagePool.create(num_pages, taken=forest.used_pages)
    pages = KVPages(jnp.ones((num_pages, 16, 1, 8)), jnp.ones((num_pages, 16, 1, 8)))
    plan = None
    for _ in range(STEPS // INTERVAL):
        active = np.flatnonzero(forest.active)
        # Some leave, others come: from the document, or from where another one is.
        gone = rng.choice(active[1:], rng.integers(len(active) // 3), replace=False)
        forest, pool = forest.retire(pool, gone)
        active, free = np.flatnonzero(forest.active), np.flatnonzero(~forest.active)
        coming = rng.integers(len(free) + 1)
        forest, _ = forest.fork(rng.choice(active, coming))
        counts = np.where(forest.active & (rng.random(requests) < 0.9), INTERVAL, 0)
        forest, pool = forest.reserve(pool, counts)
        plan = make_plan(forest, **HEADS, steps=INTERVAL) if plan is None else replan(plan, forest, steps=INTERVAL)
        out, pages = step(pages, forest, plan, counts)
        forest = forest.extend(counts)
        np.testing.assert_allclose(np.asarray(out)[forest.active], 1.0, rtol=1e-5)
    assert step._cache_size() == 1
