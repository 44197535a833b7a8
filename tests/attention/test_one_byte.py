"""Pages of one byte a number: attended as what they mean, in float64, on one device and on several."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, seeds, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_calls import SIX, Arrays, Exact, Heads, check, grown, plan_of, token_scales

from codec_jax import Forest, make_plan
from codec_jax.attention import forest_attention
from codec_jax.flash_decoding import flash_attn_with_kvcache

HEADS = Heads(4, 2, 16)


def scales_of(heads: int) -> tuple[jax.Array, jax.Array]:
    return jnp.linspace(0.25, 1.5, heads), jnp.linspace(3.0, 0.01, heads)


@given(trees(), seeds, st.sampled_from([jnp.float8_e4m3fn, jnp.float8_e5m2]), st.booleans(), st.sampled_from([1, 3]))
@settings(max_examples=8, deadline=None)
def test_random_forests(tree: Tree, seed: int, kv_dtype: Any, planned_for_it: bool, query_tokens: int) -> None:
    forest, cut = grown(tree, seed=seed, request_capacity=8), {"num_ctas": 3, "tile_rows": 16, "lanes": 1}
    plan = plan_of(forest, HEADS, query_tokens=query_tokens, **cut, kv_dtype=kv_dtype if planned_for_it else None)
    arrays = Arrays.random(forest, HEADS, jnp.bfloat16, seed, query_tokens, kv_dtype=kv_dtype)
    check(arrays, forest, plan, implementation="xla", scales=scales_of(HEADS.kv))
    check(arrays, forest, plan, implementation="xla", scales=token_scales(arrays))


@pytest.mark.parametrize("kv_dtype", [jnp.float8_e4m3fn, jnp.float32])
def test_a_plan_for_some_pages_serves_all_alike(kv_dtype: Any) -> None:
    forest = Forest.from_nodes(*SIX)
    arrays = Arrays.random(forest, HEADS, jnp.float32, 0, kv_dtype=kv_dtype)
    sizes = {"num_q_heads": HEADS.q, "num_kv_heads": HEADS.kv, "head_dim": HEADS.dim}
    exact = [Exact.of(arrays, forest, request).out for request in range(6)]
    for planned_for in (None, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32):
        out = forest_attention(*arrays, forest, make_plan(forest, **sizes, kv_dtype=planned_for))
        np.testing.assert_allclose(out, np.stack(exact), atol=1e-5)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_several_devices_attend_the_same(axis_type: Any, by_token: bool) -> None:
    forest, heads = Forest.from_nodes(*SIX), Heads(4, 2, 16)
    arrays = Arrays.random(forest, heads, jnp.float32, 0, num_pages=64, kv_dtype=jnp.float8_e4m3fn)
    key_scale, value_scale = token_scales(arrays) if by_token else scales_of(2)
    plan = make_plan(forest, num_q_heads=2, num_kv_heads=1, head_dim=16)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(axis_type,), devices=jax.devices()[:2])
    by_head = NamedSharding(mesh, PartitionSpec(None, None, "tensor", None))
    placed = [jax.device_put(array, by_head) for array in arrays]
    out = forest_attention(*placed, forest, plan, key_scale=key_scale, value_scale=value_scale, mesh=mesh)
    for request in range(6):
        exact = Exact.of(arrays, forest, request, scales=(key_scale, value_scale))
        np.testing.assert_allclose(np.asarray(out)[request], exact.out, atol=1e-5)


def test_flash_decoding_takes_factors_of_each_row_and_kv_head() -> None:
    rng, table = np.random.default_rng(0), np.asarray([[2, 0, 1], [2, 0, 3]])
    cache = [jnp.asarray(rng.normal(size=(5, 16, 2, 16)), jnp.float8_e4m3fn) for _ in "kv"]
    query = jnp.asarray(rng.normal(size=(2, 3, 4, 16)), jnp.float32)
    factors = [rng.uniform(0.2, 2.0, (2, 2)).astype(np.float32) for _ in "kv"]
    lens = np.asarray([40, 47])
    for causal in (False, True):
        out = flash_attn_with_kvcache(
            query, *cache, block_table=table, cache_seqlens=lens, causal=causal,
            k_descale=factors[0], v_descale=factors[1],
        )  # fmt: skip
        for row, length in enumerate(lens):
            key, value = (
                np.asarray(pages, np.float64)[table[row]].reshape(-1, 2, 16)[:length] * factor[row][:, None]
                for pages, factor in zip(cache, factors, strict=True)
            )
            scores = np.einsum("tnh,snh->nts", np.asarray(query[row], np.float64), key.repeat(2, axis=1)) / 4
            if causal:
                scores = np.where(np.arange(length) <= np.arange(3)[:, None] + length - 3, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(out[row], np.einsum("nts,snh->tnh", weights, value.repeat(2, axis=1)), atol=1e-5)


@pytest.mark.parametrize(
    ("pages", "scale", "message"),
    [
        (jnp.bfloat16, np.ones(2), "key_scale: expected None for pages of bfloat16; scales are for one byte a number"),
        (jnp.float8_e4m3fn, np.ones(3), "key_scale: expected shape [K = 2], got (3,)"),
        (jnp.float8_e4m3fn, [1.0, 1.0, 1.0], "key_scale: expected shape [K = 2], got (3,)"),
        (jnp.float8_e4m3fn, 0.5, "key_scale: expected shape [K = 2], got ()"),
        (jnp.float8_e4m3fn, np.ones(2, int), "key_scale: expected float32"),
        (
            jnp.float8_e4m3fn,
            np.ones((2, 16, 2)),
            "[num_pages = 2, K = 2, page_size = 16], got (2, 16, 2)",
        ),
        (
            jnp.float8_e4m3fn,
            np.ones((2, 2, 16), np.float32),
            "value_scale: expected scales of each token for both",
        ),
        (jnp.int8, None, "key_pages: expected float32, bfloat16, float8_e4m3fn, float8_e5m2 or float16, got int8"),
    ],
)
def test_scales_and_dtypes_that_do_not_fit_are_refused(pages: Any, scale: Any, message: str) -> None:
    forest = Forest.from_nodes([-1], [20], [0])
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16)
    key = jnp.zeros((2, 16, 2, 16), pages)
    with pytest.raises(ValueError, match=re.escape(message)):
        forest_attention(jnp.ones((1, 1, 4, 16)), key, key, forest, plan, key_scale=scale)
