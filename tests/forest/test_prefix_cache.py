"""A prefix cache case by case: what is shared, what is refused, and what stays."""

import re
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import OutOfPagesError, OutOfSlotsError
from codec_jax.forest import ROOT, Match, PrefixCache

PROMPT = [*range(20)]  # two pages and a half


def cache_with(*token_lists, num_pages=16, rows=8, computed=True):
    cache, requests = PrefixCache.create(num_pages, 8, rows).add(token_lists)
    for request in requests if computed else ():
        cache = cache.mark_computed(request, len(token_lists[request]))
    return cache


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (PROMPT, (20, 20)),  # a sample of the same prompt
        ([*PROMPT, 7], (20, 20)),  # a request that feeds the first token after it
        ([*PROMPT, 7, 7], (16, 16)),
        (PROMPT[:19], (16, 16)),
        (PROMPT[:9], (8, 8)),
        (PROMPT[:7], (0, 0)),
        ([], (0, 0)),
        ([5, *PROMPT], (0, 0)),
    ],
)
def test_a_list_shares_whole_pages_or_all_of_a_node(tokens, expected) -> None:
    node, *found = cache_with(PROMPT).match(tokens)
    assert tuple(found) == expected
    assert (node == ROOT) == (expected == (0, 0))


def test_what_follows_a_node_in_full_matches_below_it() -> None:
    cache = cache_with(PROMPT, [*PROMPT, 7])
    cache = cache.reserve(20, [0, 1]).append({0: [*range(30, 40)], 1: [8] * 16})
    assert cache.node_ends(0).tolist() == [20, 30]
    assert cache.match([*PROMPT, *range(30, 40)]).length == 30
    assert cache.match([*PROMPT, 7, *[8] * 8, 0, 0]).length == 28
    assert cache.match([*PROMPT, *range(30, 35)]).length == 16  # less than a page below


def test_samples_of_a_prompt_share_it_until_they_grow() -> None:
    cache = cache_with(PROMPT, PROMPT, PROMPT)
    assert (cache.num_nodes, cache.pool.num_free) == (1, 13)
    cache = cache.reserve(4, [0, 1, 2])
    assert (cache.num_nodes, cache.pool.num_free) == (4, 10)


def test_going_on_with_a_finished_request_computes_nothing_again() -> None:
    cache = cache_with(PROMPT).retire([0])
    cache, [request] = cache.add([PROMPT])
    assert (cache.computed_tokens(request), cache.num_cached) == (20, 0)
    assert cache.reserve(4, [request]).pool.num_free == cache.pool.num_free  # in the page that is not full


def test_a_request_does_not_write_where_cached_nodes_go_on() -> None:
    cache = cache_with(PROMPT, [*PROMPT, 7]).retire([1])
    cache = cache.reserve(4, [0]).append({0: [8]})
    assert cache.match([*PROMPT, 7]).length == 21
    assert cache.match([*PROMPT, 8]).length == 21


def test_a_page_in_which_a_step_writes_is_not_shared() -> None:
    cache = cache_with(PROMPT).reserve(4, [0])
    shared, _ = cache.add([PROMPT])
    with pytest.raises(ValueError, match=r"new: request 0 cannot take 1 more tokens, its leaf is shared; call reserve"):
        shared.append({0: [7]})
    assert cache.match(PROMPT, growing=[0]).length == 16
    beside, [other] = cache.add([PROMPT], growing=[0])
    assert shared.append({0: []}).context(0).tolist() == PROMPT
    assert beside.append({0: [7]}).context(0).tolist() == [*PROMPT, 7]
    assert beside.computed_tokens(other) == 16


def test_full_pages_are_shared_with_a_request_that_goes_on() -> None:
    cache = cache_with(PROMPT[:16]).reserve(8, [0])
    cache, [other] = cache.add([PROMPT])
    cache = cache.append({0: [7, 7]})
    assert cache.context(0).tolist() == [*PROMPT[:16], 7, 7]
    assert cache.computed_tokens(other) == 16


def test_lists_share_what_others_of_the_same_call_cut() -> None:
    cache = cache_with([1] * 16 + [2] * 16).retire([0])
    lists = [[1] * 16 + [3] * 16, [1] * 16 + [2] * 16, [1] * 8 + [4], [1] * 16 + [3] * 8 + [5]]
    cache, requests = cache.add(lists)
    assert [cache.context(request).tolist() for request in requests] == lists
    assert [cache.computed_tokens(request) for request in requests] == [16, 32, 8, 16]
    assert cache.pool.num_free == 16 - 4 - 2 - 1 - 1
    assert [cache.node_ends(request).tolist() for request in requests] == [
        [8, 16, 24, 32], [8, 16, 32], [8, 9], [8, 16, 24, 25]
    ]  # fmt: skip


def test_nodes_without_tokens_are_looked_through() -> None:
    cache = cache_with(PROMPT, PROMPT).reserve(0, [0, 1])  # an empty leaf each
    cache, [fork] = cache.fork([0])
    cache = cache.reserve(9, [fork]).append({fork: [7] * 9})  # below the one where the request still ends
    assert cache.node_ends(fork).tolist() == [20, 20, 29]
    assert cache.match([*PROMPT, *[7] * 9]).length == 29
    assert cache.retire([0]).node_ends(fork).tolist() == [20, 29]


def test_a_request_may_begin_with_nothing() -> None:
    cache, requests = cache_with([5] * 8).add([[], []])
    assert cache.reserve(9, [1, 2]).append({1: [5] * 9, 2: [6]}).context(1).tolist() == [5] * 9
    assert cache.match([5] * 8).length == 8
    assert (cache.num_nodes, cache.retire(requests).num_nodes) == (3, 1)


def test_a_request_that_has_to_leave_its_page_is_counted() -> None:
    cache = cache_with(PROMPT)
    for tokens in (PROMPT, [*PROMPT, 7]):
        shared, [request] = cache.add([tokens])
        grown = shared.reserve(4, [0, request])
        assert cache.available - grown.available == cache.needed(tokens, growth=4) == 2
    assert cache.available - cache.reserve(4, [0]).available == 0  # it would have stayed
    assert cache.needed(PROMPT, growth=4, growing=[0]) == 1


def test_nodes_that_are_still_to_be_computed_are_shared() -> None:
    cache = cache_with(PROMPT, PROMPT, computed=False).mark_computed(1, 9)
    assert [cache.computed_tokens(request) for request in (0, 1)] == [9, 9]
    cache = cache.retire([0])
    assert cache.num_nodes == 1
    cache = cache.retire([1])
    assert cache.match(PROMPT) == Match(0, 8, 8)  # the ninth token is in a page of its own
    assert cache.num_cached == 2


def test_pages_in_reserve_return_when_their_request_leaves() -> None:
    cache = cache_with(PROMPT).reserve(40, [0])
    assert cache.pool.num_free == 8
    assert cache.retire([0]).pool.num_free == 13


def test_what_was_read_last_stays_longest_and_tails_go_first() -> None:
    first, second = [1] * 16, [2] * 16
    cache = cache_with(first, second).retire([0]).retire([1])
    assert [cache.evict(n).match(first).length for n in range(4)] == [16, 8, 0, 0]
    assert [cache.evict(n).match(second).length for n in range(5)] == [16, 16, 16, 8, 0]
    again, [request] = cache.add([first])
    again = again.retire([request])
    assert again.evict(2).match(second).length == 0


def test_cached_pages_make_room_but_none_that_is_matched() -> None:
    cache = cache_with([1] * 32, [2] * 32, num_pages=8).retire([0]).retire([1])
    cache, [request] = cache.add([[1] * 32 + [3] * 16])
    assert cache.computed_tokens(request) == 32
    assert cache.match([2] * 32).length == 16
    with pytest.raises(OutOfPagesError, match=r"0 free pages of 8 and 2 cached ones that nobody reads, 3 are needed"):
        cache.reserve(24, [request])
    assert cache.reserve(16, [request]).num_cached == 0


def test_what_is_cached_below_forgotten_nodes_goes_with_them() -> None:
    cache = cache_with(PROMPT[:16], [*PROMPT, 7], PROMPT[:8]).retire([1])
    cache = cache.forget([0]).retire([0])
    assert [cache.match(tokens).length for tokens in (PROMPT, PROMPT[16:])] == [8, 0]
    assert (cache.num_nodes, cache.pool.num_free) == (1, 15)


def test_pinned_pages_stay_without_readers() -> None:
    cache, pages = cache_with(PROMPT).pin(0)
    cache = cache.retire([0])
    assert (cache.available, cache.match(PROMPT).length) == (13, 20)
    twice, [request] = cache.add([PROMPT])
    twice, others = twice.pin(request)
    twice = twice.retire([request]).unpin(others)
    assert (twice.num_cached, twice.unpin(pages).num_cached) == (0, 3)
    assert cache.drop().pool.num_free == 16
    with pytest.raises(ValueError, match=r"pages: expected pages that are pinned, got pages\[0\] = 0"):
        cache.drop().unpin(pages)


@pytest.mark.parametrize("pages", [[-1], [16], [9], [0, 0]])
def test_only_pinned_pages_are_unpinned(pages) -> None:
    cache, _ = cache_with(PROMPT).pin(0)
    with pytest.raises(ValueError, match="pages: expected pages that are pinned"):
        cache.unpin(np.asarray(pages))


def test_needed_counts_new_pages_cached_ones_and_growth() -> None:
    cache = cache_with(PROMPT, [5] * 24).retire([0])
    assert cache.needed([5] * 24) == 0  # all is there, and read
    assert cache.needed([5] * 24 + [6], growth=7) == 1
    assert cache.needed(PROMPT) == 3  # all is cached
    assert cache.needed([*PROMPT[:16], 6, 6], growth=7) == 2 + 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.add([1]), "token_lists[0]: expected a list of integers, got int64 of shape ()"),
        (lambda cache: cache.add([[1, -1]]), "token_lists[0]: expected no negative tokens, got token_lists[0][1] = -1"),
        (lambda cache: cache.add([[0.5]]), "token_lists[0]: expected a list of integers"),
        (lambda cache: cache.add([[1]], growing=[5]), "requests: expected requests in use, [0, 1], got [5]"),
        (lambda cache: cache.match([-1]), "tokens: expected no negative tokens"),
        (lambda cache: cache.needed([1], growth=-1), "growth: expected an integer of at least 0, got -1"),
        (lambda cache: cache.context(5), "requests: expected requests in use, [0, 1], got [5]"),
        (lambda cache: cache.computed_tokens(-1), "requests: expected requests in use, [0, 1], got [-1]"),
        (lambda cache: cache.node_ends(5), "requests: expected requests in use"),
        (lambda cache: cache.node_at(0, 20), "position: expected one in [0, 20), the request's context, got 20"),
        (lambda cache: cache.node_at(0, 1.5), "position: expected one in [0, 20), the request's context, got 1.5"),
        (lambda cache: cache.node_at(0, "1"), "position: expected one in [0, 20), the request's context, got '1'"),
        (
            lambda cache: cache.mark_computed(0, 21),
            "end: expected a position in [0, 20], the request's context, got 21",
        ),
        (lambda cache: cache.append({1: [1]}), "request 1 cannot take 1 more tokens, its leaf has room for 0; call"),
        (lambda cache: cache.append({0: [1]}), "got request 0 with 0 computed tokens; call mark_computed first"),
        (lambda cache: cache.append({5: [1]}), "requests: expected requests in use"),
        (lambda cache: cache.pin(0), "request: expected one whose 20 tokens are computed, got 0 of request 0; call"),
        (lambda cache: cache.reserve(-1, [0]), "tokens: expected a number of tokens to make room for"),
        (lambda cache: cache.retire([5]), "requests: expected requests in use"),
        (lambda cache: cache.fork([5]), "requests: expected requests in use"),
        (lambda cache: cache.view([5]), "requests: expected requests in use"),
        (lambda cache: cache.view([0], node_capacity=0), "node_capacity: expected an integer of at least 1, got 0"),
        (lambda cache: cache.evict(-1), "pages: expected an integer of at least 0, got -1"),
        (
            lambda cache: cache.chunks([(0, 8), (1, 8)], 1),
            "rows: expected at least one for each of the 2 pieces, got 1",
        ),
        (
            lambda cache: cache.chunks([(1, 8), (0, 9)], 2),
            "pieces: expected ends of pages or nodes of the request's con",
        ),
        (lambda cache: cache.chunks([(0, 24)], 2), "pieces: expected ends of pages or nodes"),
        (lambda cache: cache.chunks([(0, 0)], 2), "pieces: expected ends of pages or nodes"),
    ],
)
def test_what_does_not_fit_is_refused(call, message) -> None:
    cache = cache_with(PROMPT, [5] * 24, computed=False).mark_computed(1, 24)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(cache)


def test_what_is_no_mapping_is_not_appended() -> None:
    given: Any = [(0, [1])]
    with pytest.raises(TypeError, match="new: expected a Mapping, got list"):
        cache_with(PROMPT).append(given)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8, 1), "num_pages: expected an integer of at least 1, got 0"),
        ((1, 9, 1), "page_size: expected a positive multiple of 8, got 9"),
        ((1, 8, 0), "request_capacity: expected an integer of at least 1, got 0"),
        ((2**28, 8, 1), "pages: expected less than 2**31 token slots"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PrefixCache.create(*sizes)


def test_without_free_rows_nothing_is_added() -> None:
    cache = cache_with(PROMPT, rows=2)
    with pytest.raises(OutOfSlotsError, match=r"2 lists need as many free request slots, got 1 of 2; retire requests"):
        cache.add([PROMPT, PROMPT])


def test_it_says_how_large_it_is() -> None:
    cache = cache_with(PROMPT, [5] * 24).retire([0])
    assert repr(cache) == "PrefixCache(1 request, 2 nodes, 44 tokens in 6 pages of 8, 3 of them cached, 10 free)"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_an_invariant_cache_shares_the_whole_pages_that_lists_have_in_common_and_nothing_else(shares, seed) -> None:
    rng = np.random.default_rng(seed)
    root = rng.integers(0, 2, 40)
    lists = [[*root[:common].tolist(), *rng.integers(0, 2, own).tolist()] for common, own in shares]
    cache = PrefixCache.create(64, 8, len(lists), invariant=True)
    for one in lists[:2], lists[2:]:
        cache, _ = cache.add(one)
    pages = [cache.view([request]).context_slots(request)[::8] // 8 for request in range(len(lists))]
    for (i, one), (j, other) in combinations(enumerate(lists), 2):
        common = next((at for at, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1), None)
        common = min(len(one), len(other)) if common is None else common
        assert len({*pages[i]} & {*pages[j]}) == common // 8
    assert (cache.view(range(len(lists))).start % 8 == 0).all()


def test_an_invariant_cache_shares_no_token_that_was_drawn() -> None:
    cache, [first] = PrefixCache.create(16, 8, 4, invariant=True).add([PROMPT])
    cache = cache.mark_computed(first, 20).reserve(20, [first]).append({first: [9] * 20})
    assert cache.context(first).tolist() == [*PROMPT, *[-1] * 20]
    for left in (cache, cache.retire([first])):
        assert left.match([*PROMPT, *[9] * 20]).length == 16
    assert cache.retire([first]).available == 16
    assert cache.retire([first]).num_cached == 2
    cache = cache.retire([first])
    cache, both = cache.add([PROMPT, PROMPT])
    assert [cache.computed_tokens(request) for request in both] == [16, 16]
