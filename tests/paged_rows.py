"""Rows over a paged cache, and attention of each of them alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from forests import first_seen
from hypothesis import strategies as st

from codec_jax.flash_decoding import flash_attn_with_kvcache, plans

ROWS, WIDTH, PAGE, BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 5, 4, 16, 48, 4, 2, 64
ROOM = WIDTH * PAGE
FLOAT32 = jnp.dtype(jnp.float32)  # of `arrays`


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    plans.clear()
    yield
    plans.clear()


class Arrays(NamedTuple):
    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray


class Rows(NamedTuple):
    block_table: np.ndarray
    cache_seqlens: np.ndarray


def arrays(seed: int = 0, tokens: int = 1, blocks: int = BLOCKS, page_size: int = PAGE) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = (ROWS, tokens, HEADS, HEAD_DIM), *[(blocks, page_size, KV_HEADS, HEAD_DIM)] * 2
    return Arrays(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))


def attend_alone(
    q: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    causal: bool,
    scale: float = HEAD_DIM**-0.5,
    *,
    window: Any = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q [T, N, H] over key and value [S, K, H] in float64, and its log-sum-exp [N, T]."""
    q, key, value = (np.asarray(x, np.float64) for x in (q, key, value))
    out, lse = np.zeros(q.shape), np.full(q.shape[1::-1], -np.inf)
    for t, head in np.ndindex(q.shape[:2]):
        seen = len(key) - len(q) + t + 1 if causal else len(key)
        kv_head, first = head * key.shape[1] // q.shape[1], first_seen(window, seen - 1)
        scores = key[first : max(seen, 0), kv_head] @ q[t, head] * scale
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        scores = scores if sinks is None else np.append(scores, sinks[head])
        if len(scores):
            weights = np.exp(scores - scores.max())
            seen_values = value[first : max(seen, 0), kv_head]
            out[t, head] = weights[: len(seen_values)] @ seen_values / weights.sum()
            lse[head, t] = scores.max() + np.log(weights.sum())
    return out, lse


def attend_each(
    given: Arrays, rows: Rows, causal: bool = False, scale: float = HEAD_DIM**-0.5, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """`attend_alone` for each row over a contiguous copy of what its blocks hold."""
    results = []
    for q, blocks, length in zip(given.q, rows.block_table, rows.cache_seqlens, strict=True):
        used = blocks[: -(-length // given.k_cache.shape[1])]
        key, value = (x[used].reshape(-1, *x.shape[2:])[:length] for x in (given.k_cache, given.v_cache))
        results.append(attend_alone(q, key, value, causal, scale, **options))
    return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])


def assert_attends(given: Arrays, rows: Rows, causal: bool = False, **options: Any) -> None:
    out, lse = flash_attn_with_kvcache(*given, **rows._asdict(), causal=causal, return_softmax_lse=True, **options)
    want_out, want_lse = attend_each(given, rows, causal)
    chex.assert_shape([out, lse], [want_out.shape, want_lse.shape])
    chex.assert_type(lse, jnp.float32)
    for got, want in ((out, want_out), (lse, want_lse)):
        chex.assert_trees_all_close(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)


def table(shared: int, seed: int = 0) -> np.ndarray:
    """Rows that share their first blocks, the others their own, in no order."""
    blocks = np.random.default_rng(seed).permutation(BLOCKS).astype(np.int32)
    rows = blocks[: ROWS * WIDTH].reshape(ROWS, WIDTH)
    rows[:, :shared] = rows[0, :shared]
    return rows


@st.composite
def rows_of_tables(draw: st.DrawFn) -> Rows:
    """Rows that share the heads of others, in any order, down to inside a block; anything past their lengths."""
    fresh = iter(draw(st.permutations(range(BLOCKS))))
    listed: list[list[int]] = []
    for row in range(ROWS):
        head = listed[draw(st.integers(0, row - 1))][: draw(st.integers(0, WIDTH))] if row else []
        listed.append(head + [next(fresh) for _ in range(WIDTH - len(head))])
    lens = np.asarray([draw(st.integers(0, ROOM) | st.sampled_from([0, 16, 17, 48])) for _ in range(ROWS)])
    order = draw(st.permutations(range(ROWS)))
    blocks = np.asarray([listed[row] for row in order])
    past = np.arange(WIDTH) >= -(-lens // PAGE)[:, None]
    rubbish = draw(st.sampled_from([-1, 0, 7, 10**6]))
    keep = draw(st.booleans())
    return Rows(np.where(past & (not keep), rubbish, blocks).astype(np.int32), lens)
