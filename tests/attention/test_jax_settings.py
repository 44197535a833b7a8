"""JAX with 64-bit numbers switched on. Strict promotion of dtypes and ranks is switched on in all tests."""

import jax
import jax.numpy as jnp
import numpy as np
from attending import Layout, attend_each, forest_of
from forests import Tree, contexts
from kernel_calls import Heads, attend_hopper, plan_of

from codec_jax import KVPages
from codec_jax.attention import forest_attention
from codec_jax.partial import Partial

TREE = Tree([-1, 0, 0, 1], [150, 20, 9, 40], [1, 2, 3, 3])


def test_attention_with_64_bit_numbers_switched_on_is_exact_and_stays_float32() -> None:
    layout = Layout(query_tokens=3)
    arrays = layout.arrays(np.random.default_rng(0))

    @jax.jit
    def step(query, key, value, forest, plan):
        pages = KVPages(key, value).write(jnp.full(1, 2**31), jnp.ones((1, 2, 64)), jnp.ones((1, 2, 64)))
        return forest_attention(query, pages.key, pages.value, forest, plan, return_residuals=True), forest.extend(0)

    with jax.enable_x64(True):
        (out, (row_max, row_sum)), forest = step(*arrays, forest_of(TREE), layout.plan(forest_of(TREE)))
        neutral = Partial.empty((2, 3), 4)
    want = attend_each(*arrays, contexts(TREE, layout.page_size))
    np.testing.assert_allclose(out, want.out, atol=1e-5)
    np.testing.assert_allclose(row_max, want.max, rtol=1e-5)
    np.testing.assert_allclose(row_sum, want.sum, rtol=1e-4)
    assert {x.dtype for x in (out, row_max, row_sum, *jax.tree.leaves(neutral))} == {jnp.float32.dtype}
    assert {x.dtype for x in jax.tree.leaves(forest)} == {jnp.int32.dtype}


def test_the_kernels_lower_with_64_bit_numbers_switched_on() -> None:
    forest = forest_of(TREE)
    plan = plan_of(forest, Heads(8, 2, 128), query_tokens=2)
    query, pages = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((len(forest.leaf), 2, 8, 128), (32, 16, 2, 128))
    )
    with jax.enable_x64(True):
        lowered = jax.jit(attend_hopper).trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2
