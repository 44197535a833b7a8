"""A query as two terms of 8 bits: what they hold of it, whatever else is in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.hopper.terms import TERM, largest_of_rows, powers_of_rows, terms_of


@jax.jit  # as in a step, where XLA could leave out conversions
def in_terms(parts: list[jax.Array]) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    scale, up = powers_of_rows(jnp.stack([largest_of_rows(part) for part in parts]).max(axis=0))
    return scale, [terms_of(part, up) for part in parts]


def held(query: np.ndarray) -> np.ndarray:
    """What the terms of rows [..., H] stand for, in float64."""
    parts = [jnp.asarray(query)[:, at : at + 64] for at in range(0, query.shape[1], 64)]
    scale, terms = in_terms(parts)
    assert all(term.dtype == TERM for of_part in terms for term in of_part)
    sums = [sum(np.asarray(term, np.float64) for term in of_part) for of_part in terms]
    return np.concatenate(sums, axis=1) * np.asarray(scale, np.float64)[:, None]


@given(st.integers(0, 2**32 - 1), st.integers(-12, 12), st.sampled_from([64, 128]))
@settings(max_examples=30, deadline=None)
def test_terms_have_the_bits_of_bfloat16(seed: int, exponent: int, size: int) -> None:
    """All of a number but what is 2^-16 of its row's largest, or less."""
    query = np.random.default_rng(seed).normal(size=(3, size)) * 2.0**exponent
    rounded = np.asarray(jnp.asarray(query, jnp.bfloat16), np.float64)
    largest = np.abs(rounded).max(axis=-1, keepdims=True)
    assert (np.abs(held(jnp.asarray(rounded, jnp.bfloat16)) - rounded) <= 2.0**-16 * largest).all()


def test_numbers_of_more_bits_are_rounded_to_those_of_bfloat16() -> None:
    query = np.random.default_rng(0).normal(size=(50, 128)).astype(np.float32)
    limit = 2.0**-8 * np.abs(query) + 2.0**-16 * np.abs(query).max(axis=-1, keepdims=True)
    assert (np.abs(held(query) - query) <= limit).all()


def test_powers_of_two_and_zeros_are_exact() -> None:
    query = np.float32([[0, 0, 0, 0], [1, -1, 0.5, 0], [65504, -2, 0, 1024], [2.0**-20, 0, 0, -(2.0**-21)]])
    np.testing.assert_array_equal(held(query)[[0, 1, 3]], query[[0, 1, 3]])
    np.testing.assert_allclose(held(query)[2], query[2], rtol=2.0**-8)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(number: float) -> None:
    query = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    alone = held(query)
    query[1, 7] = number
    got = held(query)
    assert not np.isfinite(got[1, 7])
    np.testing.assert_array_equal(got[[0, 2]], alone[[0, 2]])
