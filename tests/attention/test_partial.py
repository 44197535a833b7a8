"""PAC and POR against the same sums in float64 NumPy."""

from functools import reduce
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.partial import Partial, pac, por, por_segments

# One compilation each: (batch axes, rows, tokens, head size).
SHAPES = [((), 1, 1, 8), ((), 5, 33, 64), ((3,), 16, 40, 80), ((2, 3), 4, 7, 128)]

jitted_pac = jax.jit(pac)
jitted_por = jax.jit(por)
jitted_por_segments = jax.jit(por_segments, static_argnums=2)


class Sums(NamedTuple):
    """What a `Partial` holds, in float64."""

    out: np.ndarray
    max: np.ndarray
    sum: np.ndarray


def exact_pac(query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray, scale: float) -> Sums:
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.where(mask, query @ np.swapaxes(key, -1, -2) * scale, -np.inf)
    row_max = scores.max(-1)
    weights = np.where(mask, np.exp(scores - np.where(mask.any(-1), row_max, 0.0)[..., None]), 0.0)
    row_sum = weights.sum(-1)
    return Sums(weights @ value / np.where(row_sum == 0.0, 1.0, row_sum)[..., None], row_max, row_sum)


def exact_por(left: Sums, right: Sums) -> Sums:
    """Plain loops over rows; rows that saw nothing have no maximum to subtract."""
    merged = Sums(*(np.array(x, np.float64) for x in left))
    for row in np.ndindex(left.max.shape):
        row_max = max(left.max[row], right.max[row])
        terms = [
            (part.out[row], part.sum[row] * np.exp(part.max[row] - row_max)) for part in (left, right) if part.sum[row]
        ]
        if terms:
            merged.sum[row] = sum(weight for _, weight in terms)
            merged.out[row] = sum(out * weight for out, weight in terms) / merged.sum[row]
            merged.max[row] = row_max
    return merged


def as_sums(x: Partial) -> Sums:
    return Sums(*(np.asarray(part, np.float64) for part in (x.out, x.max, x.sum)))


def assert_close(got: Partial, want: Sums | Partial, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    want = as_sums(want) if isinstance(want, Partial) else want
    chex.assert_type([got.out, got.max, got.sum], jnp.float32)
    chex.assert_trees_all_close(as_sums(got), want, rtol=rtol, atol=atol)


def integers(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Whole numbers up to `size`, so that float32 products and sums of products are exact."""
    return rng.integers(-size, size + 1, shape).astype(np.float32)


def random_partial(rng: np.random.Generator, rows: tuple[int, ...], head_dim: int = 8) -> Partial:
    """Partials that `pac` may return, far apart in their maxima; some rows saw nothing."""
    seen = rng.random(rows) < 0.7
    return Partial(
        np.where(seen[..., None], rng.normal(size=(*rows, head_dim)), 0.0).astype(np.float32),
        np.where(seen, rng.normal(size=rows) * 10.0 ** rng.integers(-1, 4), -np.inf).astype(np.float32),
        np.where(seen, rng.uniform(1.0, 1000.0, rows), 0.0).astype(np.float32),
    )


@settings(max_examples=60)
@given(
    seed=seeds,
    shape=st.sampled_from(SHAPES),
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    size=st.sampled_from([1, 8, 60]),
)
def test_pac_is_softmax_attention_over_the_tokens_that_each_row_sees(
    seed: int, shape: tuple, density: float, size: int
) -> None:
    batch, rows, tokens, head_dim = shape
    rng = np.random.default_rng(seed)
    # Scores up to 128 x 60 x 60 / 8, far beyond the range of exp, and exact in float32.
    query, key = integers(rng, (*batch, rows, head_dim), size), integers(rng, (*batch, tokens, head_dim), size)
    value = rng.normal(size=(*batch, tokens, head_dim)).astype(np.float32)
    mask = rng.random((*batch, rows, tokens)) < density
    got = jitted_pac(query, key, value, mask, np.float32(0.125))
    chex.assert_shape([got.max, got.sum], (*batch, rows))
    assert_close(got, exact_pac(query, key, value, mask, 0.125))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_pac_computes_in_float32_whatever_comes_in(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=shape) * 3, dtype) for shape in ((16, 64), (40, 64), (40, 64)))
    mask = rng.random((16, 40)) < 0.6
    got = jitted_pac(query, key, value, mask, np.float32(0.3))
    want = exact_pac(*(np.asarray(x.astype(jnp.float32)) for x in (query, key, value)), mask, np.float32(0.3))
    assert_close(got, want, rtol=3e-5, atol=3e-5)


def test_a_row_that_sees_nothing_has_out_0_max_minus_infinity_and_sum_0() -> None:
    ones = jnp.ones((2, 4, 8))
    mask = jnp.zeros((2, 3, 4), bool).at[1, 2, 0].set(True)
    got = pac(ones[:, :3], ones, ones, mask, 1.0)
    nothing = (slice(None), slice(0, 2))
    np.testing.assert_array_equal(got.out[nothing], 0.0)
    np.testing.assert_array_equal(got.max[nothing], -np.inf)
    np.testing.assert_array_equal(got.sum[nothing], 0.0)
    assert (got.max[1, 2], got.sum[1, 2]) == (8.0, 1.0)


def test_residuals_are_the_scaled_maximum_and_the_sum_relative_to_it() -> None:
    """Two equal best scores and a third one ln(4) below them: the sum is 1 + 1 + 1/4."""
    query = np.ones((1, 1), np.float32)
    key = np.asarray([[6.0], [6.0], [6.0 - 2 * np.log(4.0)]], np.float32)
    value = np.asarray([[1.0], [4.0], [8.0]], np.float32)
    got = pac(query, key, value, np.ones((1, 3), bool), 0.5)
    assert_close(got, Sums(np.asarray([[7.0 / 2.25]]), np.asarray([3.0]), np.asarray([2.25])))


def test_empty_has_the_shape_of_its_rows() -> None:
    empty = Partial.empty((2, 3), 8)
    chex.assert_shape([empty.out, empty.max, empty.sum], [(2, 3, 8), (2, 3), (2, 3)])
    assert_close(empty, Sums(np.zeros((2, 3, 8)), np.full((2, 3), -np.inf), np.zeros((2, 3))))


@settings(max_examples=40)
@given(seed=seeds)
def test_por_is_the_weighted_mean_of_its_arguments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = (random_partial(rng, (3, 4)) for _ in range(2))
    assert_close(jitted_por(left, right), exact_por(as_sums(left), as_sums(right)))


@settings(max_examples=40)
@given(seed=seeds)
def test_por_is_commutative_and_associative(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = (random_partial(rng, (3, 4)) for _ in range(3))
    assert_close(jitted_por(a, b), jitted_por(b, a))
    assert_close(jitted_por(jitted_por(a, b), c), jitted_por(a, jitted_por(b, c)))


@settings(max_examples=20)
@given(seed=seeds)
def test_empty_is_the_neutral_element_of_por(seed: int) -> None:
    partial = random_partial(np.random.default_rng(seed), (3, 4))
    empty = Partial.empty((3, 4), 8)
    assert_close(jitted_por(partial, empty), partial)
    assert_close(jitted_por(empty, partial), partial)
    assert_close(jitted_por(empty, empty), empty)


@settings(max_examples=30)
@given(seed=seeds, shape=st.sampled_from(SHAPES[1:]), parts=st.integers(2, 6))
def test_por_of_pac_over_parts_is_pac_over_all_tokens(seed: int, shape: tuple, parts: int) -> None:
    batch, rows, tokens, head_dim = shape
    rng = np.random.default_rng(seed)
    query, key = integers(rng, (*batch, rows, head_dim), 8), integers(rng, (*batch, tokens, head_dim), 8)
    value = rng.normal(size=(*batch, tokens, head_dim)).astype(np.float32)
    mask = rng.random((*batch, rows, tokens)) < 0.8
    part_of_token = rng.integers(0, parts, tokens)  # parts need not be contiguous, and may be empty
    scale = np.float32(0.125)
    partials = [jitted_pac(query, key, value, mask & (part_of_token == part), scale) for part in range(parts)]
    assert_close(reduce(jitted_por, partials), exact_pac(query, key, value, mask, 0.125))


@settings(max_examples=60)
@given(seed=seeds, stream=st.lists(st.integers(0, 7), min_size=12, max_size=12))
def test_por_segments_merges_the_segments_of_each_stream_and_leaves_unused_ones_out(
    seed: int, stream: list[int]
) -> None:
    """Streams 0 to 4 have any number of segments, none included; segments of streams 5 to 7 do not count."""
    rng = np.random.default_rng(seed)
    segments = random_partial(rng, (12, 3))
    unused = np.asarray(stream) >= 5
    for part in (segments.out, segments.max, segments.sum):
        part[unused] = np.nan
    got = jitted_por_segments(segments, np.asarray(stream, np.int32), 5)
    chex.assert_shape([got.out, got.max, got.sum], [(5, 3, 8), (5, 3), (5, 3)])
    for number in range(5):
        mine = [Sums(*(x[i] for x in as_sums(segments))) for i in range(12) if stream[i] == number]
        want = reduce(exact_por, mine, as_sums(Partial.empty((3,), 8)))
        assert_close(jax.tree.map(lambda x, n=number: x[n], got), want)


def test_partials_pass_through_transformations_as_pytrees() -> None:
    rng = np.random.default_rng(0)
    stacked = [random_partial(rng, (4, 3)) for _ in range(2)]
    got = jax.jit(jax.vmap(por))(*stacked)
    assert_close(got, exact_por(*map(as_sums, stacked)))
    assert len(jax.tree.leaves(got)) == 3
