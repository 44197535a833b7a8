"""What only the Hopper kernels have, on such a GPU, held to float64 attention of each request alone."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import (
    CONFIGS,
    FEW_BITS,
    PADDED_CONFIGS,
    PAGES,
    TREE,
    Arrays,
    Heads,
    attend,
    check,
    grown,
    plan_of,
    token_scales,
)
from plan_cases import num_wide

from codec_jax import Forest, PagePool, Window, make_plan
from codec_jax.attention import forest_attention

SINKS = np.linspace(-4, 4, 32, dtype=np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize(
    ("heads", "query_tokens", "requests", "checked"),
    [
        (Heads(32, 8, 128), 1, 6, (0, 1, 5)),
        (Heads(32, 8, 128), 5, 45, (0, 1, 44)),
        (Heads(16, 2, 64), 1, 45, (0, 1, 44)),
        # Rows of all parts of a tile: terms of some are made in the memory of others.
        (Heads(8, 4, 256), 3, 20, (*range(0, 20, 3), 19)),
    ],
    ids=str,
)
def test_pages_of_one_byte(
    heads: Heads, query_tokens: int, requests: int, checked: tuple[int, ...], kv_dtype: Any
) -> None:
    lengths = np.random.default_rng(0).integers(0, 200, requests)
    forest = Forest.from_nodes([-1] + [0] * requests, [5000, *lengths], np.arange(requests) + 1)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages=1000, kv_dtype=kv_dtype)
    arrays = arrays.with_small_rows()
    scales = jnp.linspace(0.3, 2.0, heads.kv), jnp.linspace(1.7, 0.01, heads.kv)
    check(arrays, forest, plan, requests=checked, scales=scales)
    check(arrays, forest, plan, requests=checked, scales=token_scales(arrays))


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
@pytest.mark.parametrize(
    ("kv_dtype", "most", "softcap"),
    [
        (jnp.bfloat16, 600.0, None),
        (jnp.bfloat16, 30.0, 20.0),
        (jnp.float8_e4m3fn, 16.0, None),
        (jnp.float8_e4m3fn, 16.0, 12.0),
    ],
)
@pytest.mark.parametrize(
    ("heads", "requests"), [(Heads(32, 8, 128), 45), (Heads(24, 2, 64), 5), (Heads(8, 2, 256), 40)]
)
def test_scores_may_rise_and_fall_along_a_context(
    heads: Heads, requests: int, kv_dtype: Any, most: float, softcap: float | None
) -> None:
    """By more than float32 has exponents for where there are 16 bits."""
    lengths, leaves = np.random.default_rng(0).integers(0, 900, requests), np.arange(requests) + 1
    forest = Forest.from_nodes([-1] + [0] * requests, [5000, *lengths], leaves, request_capacity=48)
    plan = plan_of(forest, heads)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=3000, kv_dtype=kv_dtype)
    lost = FEW_BITS if arrays.key_pages.dtype.itemsize == 1 else 0.0
    check(arrays.with_slopes(forest, most), forest, plan, requests=(0, 1, requests - 1), softcap=softcap, lost=lost)


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
