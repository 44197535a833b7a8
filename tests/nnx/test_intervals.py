"""Plans of intervals: of one shape, whatever requests share, as a compiled step needs it."""

import jax
import numpy as np
import pytest
from kernel_calls import H200

from codec_jax import Forest, PagePool
from codec_jax.nnx import DecoderConfig, intervals
from codec_jax.planning import default_tiling, planner

PAGES = 4096


@pytest.mark.parametrize(
    ("group", "requests", "query_tokens", "num_ctas"),
    [(8, 64, 1, 132), (8, 63, 1, 128), (4, 128, 1, 128), (2, 128, 4, 132), (8, 4, 16, 132), (1, 4, 8, 128)],
)
def test_plans_have_one_shape_whether_requests_share_all_or_nothing(
    group: int, requests: int, query_tokens: int, num_ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [H200])
    for module in (intervals, planner):  # where the other tests have small tiles
        monkeypatch.setattr(module, "default_tiling", default_tiling)
    config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=8 * group, num_kv_heads=8, head_dim=128)
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
        assert plan.num_ctas == num_ctas
        shapes.add(tuple(np.shape(leaf) for leaf in jax.tree.leaves(plan)))
    assert len(shapes) == 1
