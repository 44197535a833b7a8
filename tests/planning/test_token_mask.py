"""The definition of who sees which token: what the planner concludes for whole pages follows from it token by token."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import Window
from pallas_kernels.token_mask import (
    MAX_ROWS,
    is_in_window,
    is_not_after,
    is_reader,
    pack_readers,
    pages_behind,
    pages_seen,
    readers_of_token,
    unpack_readers,
)

rows = st.integers(0, MAX_ROWS)


@given(rows, rows, rows)
def test_an_interval_of_rows_survives_packing_and_one_comparison_says_who_is_in_it(a: int, b: int, row: int) -> None:
    first, end = sorted((a, b))
    unpacked = unpack_readers(jnp.int32(pack_readers(first, end)))
    assert tuple(map(int, unpacked)) == (first, end - first)
    assert bool(is_reader(jnp.int32(row), *unpacked)) == (first <= row < end)


@given(
    length=st.integers(0, 80),
    start=st.integers(0, 40),
    page_tokens=st.sampled_from([8, 16, 24]),
    steps=st.integers(1, 20),
    query=st.none() | st.tuples(st.integers(-5, 120), st.integers(0, 12)),
)
def test_pages_that_all_see_and_that_some_may_see_are_those_of_the_definition(
    length: int, start: int, page_tokens: int, steps: int, query: tuple[int, int] | None
) -> None:
    token = np.arange(160 // page_tokens * page_tokens)
    there = np.asarray(readers_of_token(1, token, length)) > 0
    if query is None:
        everybody, somebody = there, np.ones_like(there)
    else:
        first, last = query[0], sum(query)
        # A query token may be told not to see those beside it, so only what is before all of them is certain.
        everybody = there & is_not_after(start + token, first - 1)
        somebody = is_not_after(start + token, last + steps)
    positions = None if query is None else np.asarray([[first], [last]])
    whole, seen = pages_seen(np.asarray([length]), np.asarray([start]), page_tokens, steps, positions)
    of_pages = everybody.reshape(-1, page_tokens).all(1)
    assert max(int(whole[0]), 0) == of_pages.sum()
    assert of_pages[: of_pages.sum()].all()
    assert (seen is None) == (query is None)
    if seen is not None:
        of_pages = somebody.reshape(-1, page_tokens).any(1)
        assert np.clip(seen[0], 0, len(of_pages)) == of_pages.sum()


@given(
    length=st.integers(1, 80),
    start=st.integers(0, 40),
    page_tokens=st.sampled_from([8, 16, 24]),
    first=st.tuples(st.integers(-30, 130), st.integers(0, 40)),
)
def test_pages_that_a_window_hides_from_all_and_from_some_are_those_of_the_definition(
    length: int, start: int, page_tokens: int, first: tuple[int, int]
) -> None:
    smallest, greatest = first[0], sum(first)
    token = np.arange(-(-length // page_tokens) * page_tokens)
    somebody = is_in_window(start + token, smallest) & (token < length)
    everybody = is_in_window(start + token, greatest)
    bounds = np.asarray([[smallest], [greatest]])
    hidden, edge = pages_behind(np.asarray([length]), np.asarray([start]), page_tokens, bounds)
    pages = len(token) // page_tokens
    assert np.clip(hidden[0], 0, pages) == (~somebody.reshape(-1, page_tokens).any(1)).sum()
    assert np.clip(edge[0], 0, pages) == (~everybody.reshape(-1, page_tokens).all(1)).sum()


@given(st.integers(1, 50), st.booleans(), st.integers(0, 300))
def test_a_window_begins_where_its_definition_says(tokens: int, chunked: bool, position: int) -> None:
    window = Window(tokens, chunked)
    first = window.first_position(position)
    sees = [
        token for token in range(position + 1)
        if (token // tokens == position // tokens if chunked else position - token < tokens)
    ]  # fmt: skip
    assert max(first, 0) == sees[0]
    assert int(window.first_position(jnp.int32(position))) == first
