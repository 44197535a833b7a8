"""Forests of one set of capacities, layouts for them, and attention of each request alone in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest
from forests import Tree, contexts, trees

from codec_jax import Forest, Plan, make_plan
from codec_jax.attention import forest_attention

# Capacities that all forests here share, so that each layout below compiles once.
REQUESTS, NODES, ENTRIES, PAGES = 10, 128, 128, 128
SOME_TREES = trees(max_nodes=10, max_length=50, max_requests=8)


class Layout(NamedTuple):
    """Head layout, query tokens, and how the plan cuts the work: what one compiled step serves."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    query_tokens: int = 1
    page_size: int = 16
    tile_rows: int = 16
    num_ctas: int = 5
    block_tokens: int = 64
    lanes: int = 1

    def plan(self, forest: Forest, steps: int = 1) -> Plan:
        rows = forest.request_capacity * self.query_tokens * self.num_q_heads // self.num_kv_heads
        parts = self.page_size // 8 if self.page_size > self.block_tokens else 1  # of a page, at most
        return make_plan(
            forest,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            steps=steps,
            query_tokens=self.query_tokens,
            num_ctas=self.num_ctas,
            tile_rows=self.tile_rows,
            block_tokens=self.block_tokens,
            lanes=self.lanes,
            min_wide_tokens=24,
            block_capacity=-(-rows // self.tile_rows) * ENTRIES * parts,  # every tile reads every page
        )

    def arrays(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A query and pages full of numbers; what no request reads is huge."""
        query = rng.normal(size=(REQUESTS, self.query_tokens, self.num_q_heads, self.head_dim))
        shape = (PAGES, self.page_size, self.num_kv_heads, self.head_dim)
        return tuple(x.astype(np.float32) for x in (query, rng.normal(size=shape), rng.normal(size=shape)))


LAYOUTS = {
    "decoding with grouped heads": Layout(4, 2, 64),
    "one request per tile row": Layout(3, 3, 64, num_ctas=7),
    "all heads share K and V": Layout(4, 1, 64, tile_rows=8, block_tokens=16),
    "four heads per kv head": Layout(8, 2, 128, tile_rows=64, num_ctas=3, block_tokens=512),
    "wide heads, one thread block": Layout(2, 1, 256, num_ctas=1, page_size=8, block_tokens=1),
    "odd head size, many thread blocks": Layout(6, 3, 80, num_ctas=40, page_size=24, block_tokens=100),
    "two query tokens": Layout(4, 2, 64, query_tokens=2, page_size=8, tile_rows=8),
    "three query tokens": Layout(6, 3, 80, query_tokens=3, page_size=32, tile_rows=64, num_ctas=1),
    "four query tokens": Layout(4, 4, 64, query_tokens=4, num_ctas=33, block_tokens=16),
    "five query tokens": Layout(4, 1, 128, query_tokens=5, page_size=8, num_ctas=9, block_tokens=24),
    "pairs of tiles and a single one": Layout(4, 2, 64, tile_rows=8, num_ctas=7, lanes=2),
    "pairs of tiles, pages in parts": Layout(4, 1, 64, tile_rows=8, page_size=32, block_tokens=16, lanes=2),
    "pairs of tiles of 63 rows": Layout(6, 2, 80, query_tokens=5, tile_rows=63, block_tokens=48, lanes=2),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


class Reference(NamedTuple):
    out: np.ndarray
    max: np.ndarray
    sum: np.ndarray


def attend_alone(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float | None = None) -> Reference:
    """Causal attention in float64 of the last T tokens of one context: query [T, N, H], key and value [S, K, H]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    tokens, heads, head_dim = query.shape
    context, kv_heads, _ = key.shape
    out, row_max, row_sum = np.zeros(query.shape), np.full((tokens, heads), -np.inf), np.zeros((tokens, heads))
    for t in range(tokens):
        visible = context - tokens + t + 1
        for head in range(heads):
            if visible <= 0:
                continue
            kv_head = head // (heads // kv_heads)
            scores = key[:visible, kv_head] @ query[t, head] * (head_dim**-0.5 if scale is None else scale)
            weights = np.exp(scores - scores.max())
            row_max[t, head], row_sum[t, head] = scores.max(), weights.sum()
            out[t, head] = weights @ value[:visible, kv_head] / weights.sum()
    return Reference(out, row_max, row_sum)


def attend_each(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    slots: list[list[int]],
    scale: float | None = None,
) -> Reference:
    """`attend_alone` for each request over the token slots that it reads; free request slots read nothing."""
    key, value = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (key_pages, value_pages))
    rows = slots + [[]] * (len(query) - len(slots))
    return Reference(
        *map(
            np.stack,
            zip(*(attend_alone(q, key[s], value[s], scale) for q, s in zip(query, rows, strict=True)), strict=True),
        )
    )


def forest_of(tree: Tree, page_size: int = 16, page_order: np.ndarray | None = None) -> Forest:
    """The tree in arrays of the capacities above, on scattered pages if an order is given."""
    forest = Forest.from_nodes(*tree, page_size=page_size)
    page_ids = forest.used_pages if page_order is None else page_order[forest.used_pages]
    return Forest.build(forest.tree._replace(page_ids=page_ids), REQUESTS, NODES, ENTRIES)


def slots_of(tree: Tree, page_size: int, page_order: np.ndarray) -> list[list[int]]:
    """The token slots that each request reads when the pages are in the given order."""
    return [
        [int(page_order[slot // page_size]) * page_size + slot % page_size for slot in context]
        for context in contexts(tree, page_size)
    ]


def jitted(**options: Any) -> Callable:
    return jax.jit(partial(forest_attention, **options))


with_residuals = jitted(return_residuals=True)
attend = jitted()
jax_nn_attention = jax.jit(partial(jax.nn.dot_product_attention, implementation="xla"))


def assert_close(got: Any, want: np.ndarray, atol: float = 1e-5) -> None:
    chex.assert_trees_all_close(np.asarray(got, np.float64), want, rtol=1e-5, atol=atol)
