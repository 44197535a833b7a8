"""Plans of intervals: of one shape, whatever requests share, as a compiled step needs it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import H200

from codec_jax import Forest, PagePool
from codec_jax.nnx import DecoderConfig, Latent, intervals
from codec_jax.planning import default_tiling, planner
from pallas_kernels import Heads

PAGES = 4096


@pytest.mark.parametrize(
    ("group", "requests", "query_tokens", "kv_dtype", "num_ctas"),
    [
        (8, 64, 1, None, 132),
        (8, 63, 1, None, 128),
        (4, 128, 1, None, 128),
        (2, 128, 4, None, 132),
        (8, 4, 16, None, 132),
        (1, 4, 8, None, 128),
        (4, 128, 1, jnp.float8_e4m3fn, 132),
        (1, 4, 1, jnp.float8_e4m3fn, 132),
    ],
)
def test_plans_have_one_shape_whether_requests_share_all_or_nothing(
    group: int, requests: int, query_tokens: int, kv_dtype: Any, num_ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [H200])
    for module in (intervals, planner):  # where the other tests have small tiles
        monkeypatch.setattr(module, "default_tiling", default_tiling)
    config = DecoderConfig(
        64, 32, 64, num_layers=1, num_q_heads=8 * group, num_kv_heads=8, head_dim=128, kv_dtype=kv_dtype
    )
    prepared, shapes = intervals.Intervals(config, steps=1, num_pages=PAGES, page_size=16), set()
    for parent, length, leaf in (
        ([-1], [16_000], [0] * requests),
        ([-1] * requests, [500] * requests, range(requests)),
        ([-1], [16], [0]),
    ):
        forest = Forest.from_nodes(
            parent, length, leaf, request_capacity=requests, node_capacity=256, page_capacity=PAGES
        )
        forest, _ = forest.reserve(PagePool.create(PAGES, taken=forest.used_pages), 1)
        plan = prepared.plan(forest, query_tokens, block_capacity=8192)
        assert (plan.num_ctas, plan.heads.kv_dtype) == (num_ctas, config.cache_dtype)
        shapes.add(tuple(np.shape(leaf) for leaf in jax.tree.leaves(plan)))
    assert len(shapes) == 1


@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn])
def test_plans_of_latents_are_alike_for_pages_of_any_dtype(kv_dtype: Any) -> None:
    config = DecoderConfig(64, 32, 64, 1, 16, 1, 192, qk_norm=False, latent=Latent(128, 32, 64, 32), kv_dtype=kv_dtype)
    prepared = intervals.Intervals(config, steps=1, num_pages=64, page_size=16)
    plan = prepared.plan(Forest.from_nodes([-1, 0], [100, 20], [1]), 1, block_capacity=8)
    assert plan.heads == Heads(16, 1, 192, 128)
