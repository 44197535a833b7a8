"""Arguments of a wrong type: the error names the argument, whatever it was given."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from codec_jax import DraftTrees, Forest, KVPages, PagePool, PrefixCache, Window, make_plan, replan, show
from codec_jax.attention import forest_attention
from codec_jax.forest import Quantisation, WindowPages

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
FOREST = Forest.from_nodes([-1, 0, 0], [30, 2, 3], [1, 2])
POOL = PagePool.create(8, FOREST.used_pages)
PLAN = make_plan(FOREST, **HEADS)
QUERY, PAGES, ROWS = jnp.ones((2, 1, 4, 16)), jnp.ones((8, 16, 2, 16)), jnp.ones((1, 1, 2, 16))
CACHE = KVPages(PAGES, PAGES)
DRAFTS = DraftTrees.from_parents(np.full((2, 1), -1))
PREFIXES, FLOAT8 = PrefixCache.create(64, 16, 4).add([range(100)])[0], jnp.float8_e4m3fn

# The argument that is wrong, the call that takes it, and values that it must refuse.
CALLS: list[tuple[str, Callable[[Any], Any], list[Any]]] = [
    *(
        (name, lambda x, name=name: Forest.from_nodes([-1], [3], [0], **{name: x}), ["3", 1.5, True, -1])
        for name in ("request_capacity", "node_capacity", "page_capacity", "page_size")
    ),
    ("parent", lambda x: Forest.from_nodes(x, [3], [0]), [None, "x", [0.5], [[0]]]),
    ("token_lists", Forest.from_sequences, [None, 5, []]),
    ("token_lists[0]", lambda x: Forest.from_sequences([x]), [None, "abc", 5, [0.5], [1, [2]]]),
    ("token_lists[1]", lambda x: Forest.from_sequences([[1, 2], x]), [[1, [3]], [1, {}]]),
    ("block_table", lambda x: Forest.from_block_table(x, [1], 16), [None, "x", [1], [[0.5]]]),
    ("context_lens", lambda x: Forest.from_block_table(np.zeros((1, 2), int), x, 16), [None, "x", [[1]]]),
    ("num_pages", PagePool.create, ["3", None, 0, 2.0]),
    ("count", POOL.allocate, [None, "3", -1, 1.5]),
    ("pages", POOL.release, [None, "abc", [0.5]]),
    ("pool", lambda x: FOREST.reserve(x, 3), [None, 8]),
    ("pool", lambda x: FOREST.retire(x, [0]), [None, 8]),
    ("tokens", lambda x: FOREST.reserve(POOL, x), [None, "3", 1.5, [1], -1]),
    *(("requests", call, [None, "x", [0.5], [2]]) for call in (FOREST.fork, FOREST.only, partial(FOREST.retire, POOL))),
    ("requests", partial(FOREST.reserve, POOL, 1), ["x", [0.5], [2]]),
    ("chunk", FOREST.chunks, [None, "16", 3, 0]),
    ("count", FOREST.extend, [None, "1", 1.5, [1]]),
    ("forest", lambda x: make_plan(x, **HEADS), [None, FOREST.tree]),
    *(
        (name, lambda x, name=name: make_plan(FOREST, **(HEADS | {name: x})), ["4", 0, 1.5, 2**40])
        for name in (*HEADS, "query_tokens", "num_ctas", "tile_rows", "block_tokens", "min_wide_tokens")
    ),
    ("kv_dtype", lambda x: make_plan(FOREST, **HEADS, kv_dtype=x), [jnp.int8, "x", 8, np.zeros(3)]),
    ("block_capacity", lambda x: make_plan(FOREST, **HEADS, block_capacity=x), ["4", 1.5]),
    ("segment_capacity", lambda x: make_plan(FOREST, **HEADS, segment_capacity=x), ["4", 1.5, -1]),
    ("policy", lambda x: make_plan(FOREST, **HEADS, policy=x), ["other", 0]),
    ("cost_model", lambda x: make_plan(FOREST, **HEADS, cost_model=x), ["H200"]),
    ("forest", PLAN.check, [None, PLAN]),
    ("forest", partial(replan, PLAN), [None]),
    ("x", show, [None, [FOREST]]),
    ("query", lambda x: forest_attention(x, PAGES, PAGES, FOREST, PLAN), [None, [[1.0]], QUERY.astype(int)]),
    ("key_pages", lambda x: forest_attention(QUERY, x, PAGES, FOREST, PLAN), [None, "k", PAGES[0]]),
    ("value_pages", lambda x: forest_attention(QUERY, PAGES, x, FOREST, PLAN), [3, "v", PAGES[0]]),
    ("forest", lambda x: forest_attention(QUERY, PAGES, PAGES, x, PLAN), [None, PLAN]),
    ("plan", lambda x: forest_attention(QUERY, PAGES, PAGES, FOREST, x), [None, FOREST]),
    ("drafts", lambda x: forest_attention(QUERY, PAGES, PAGES, FOREST, PLAN, drafts=x), [3, DRAFTS.parent]),
    ("scale", lambda x: forest_attention(QUERY, PAGES, PAGES, FOREST, PLAN, scale=x), ["1", 1e40, float("nan"), True]),
    ("implementation", lambda x: forest_attention(QUERY, PAGES, PAGES, FOREST, PLAN, implementation=x), ["cuda", 3]),
    ("slots", lambda x: CACHE.write(x, ROWS, ROWS), [np.zeros((1, 1), bool), [[0.5]]]),
    ("key", lambda x: CACHE.write([[3]], x, ROWS), [[[1.0]], ROWS[0]]),
    ("target", lambda x: CACHE.move([[3]], x), [[[True]], [3]]),
    ("values", DRAFTS.sort, [[1, 2], 3]),
    ("path", lambda x: DRAFTS.accept(FOREST, x, np.ones(2, int)), [[[0]], [0, 0], np.zeros((2, 1))]),
    ("count", lambda x: DRAFTS.accept(FOREST, np.zeros((2, 1), int), x), [[1], 1]),
    ("parent", DraftTrees.from_parents, ["x", [0], [[0.5]]]),
    ("request", FOREST.path, [None, 1.5, True, 2]),
    ("query_tokens", lambda x: make_plan(FOREST, **HEADS, query_tokens=x), [2**30]),
    ("dtype", lambda x: KVPages.zeros(8, 16, 2, 16, x), [jnp.int32, jnp.bool_]),
    ("quantisation.key_scale", lambda x: KVPages.zeros(8, 16, 2, 16, FLOAT8, quantisation=x), [Quantisation.of(3)]),
    ("windows[0]", lambda x: WindowPages.create(8, 4, [x]), [None, 5]),
    ("pages", WindowPages.create(8, 4, [Window(9)]).keep, [[-1], [8], [0.5]]),
    ("end", partial(PREFIXES.mark_computed, 0), [None, 50.5, True, 101]),
    ("chunk_tokens", PREFIXES.chunks_missing, [None, 0, 1.5]),
]


@pytest.mark.parametrize(
    ("name", "call", "value"),
    [
        pytest.param(name, call, value, id=f"{name} {type(value).__name__}")
        for name, call, all in CALLS
        for value in all
    ],
)
def test_the_error_names_the_argument(name: str, call: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{re.escape(name)}: expected"):
        call(value)
