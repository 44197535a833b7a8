"""Places of pages in layers with windows: who has one, who loses it, and how far prefixes are found then."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import OutOfPagesError, Window
from codec_jax.forest import PrefixCache, WindowPages

NUM_PAGES, CAPACITY = 12, 5
pages_of_pool = st.sets(st.integers(0, NUM_PAGES - 1), max_size=CAPACITY)
steps = st.lists(st.tuples(st.booleans(), pages_of_pool, pages_of_pool), max_size=20)


@given(steps)
@settings(max_examples=200)
def test_who_was_not_seen_for_the_longest_time_goes_first(steps) -> None:
    kept, seen = WindowPages.create(NUM_PAGES, CAPACITY, [Window(8)]), {}  # page -> when it was seen last
    for now, (frees, pages, pinned) in enumerate(steps):
        before = kept.place.copy()
        marks = np.isin(np.arange(NUM_PAGES), [*pinned])
        if frees:
            after, seen = kept.without(marks), {page: at for page, at in seen.items() if page not in pinned}
        else:
            after = kept.keep(np.array(sorted(pages), int), marks)
            room = CAPACITY - len(pages - seen.keys())
            stay = sorted(seen, key=lambda page: (page in pages, page in pinned, seen[page]))[-room:] if room else []
            # Of pages that were seen at the same time any may go.
            gone = seen.keys() - {*np.flatnonzero(after.place >= 0).tolist()}
            rank = {page: (page in pinned, at) for page, at in seen.items() if page not in pages}
            assert len(gone) == max(len(seen.keys() | pages) - CAPACITY, 0) == len(seen) - len(stay) or len(gone) == 0
            assert all(rank[a] <= rank[b] for a in gone for b in rank.keys() - gone)
            seen = {page: at for page, at in seen.items() if page not in gone} | dict.fromkeys(pages, now)
        np.testing.assert_array_equal(kept.place, before)  # the input is as it was
        placed = np.flatnonzero(after.place >= 0)
        assert set(placed.tolist()) == seen.keys()
        np.testing.assert_array_equal(after.page[after.place[placed]], placed)
        assert np.count_nonzero(after.page >= 0) == len(placed)
        both = np.flatnonzero((before >= 0) & (after.place >= 0))
        np.testing.assert_array_equal(before[both], after.place[both])  # nothing that stays moves
        kept = after


def test_more_than_there_are_places_for_is_refused() -> None:
    kept = WindowPages.create(8, 3, [Window(8)])
    with pytest.raises(OutOfPagesError, match="have 3 pages, 4 are needed"):
        kept.keep(np.arange(4))
    with pytest.raises(ValueError, match="windows: expected those of the layers"):
        WindowPages.create(8, 3, [])
    with pytest.raises(ValueError, match="windows: expected places of 9 pages, got those of 8"):
        PrefixCache.create(9, 8, 2, windows=kept)
    with pytest.raises(ValueError, match="windows: expected a cache with pages"):
        PrefixCache.create(9, 8, 2).add([[1]])[0].seen(0, 0)


@given(
    window=st.sampled_from([Window(1), Window(9), Window(20), Window(16, chunked=True)]),
    nodes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    computed=st.integers(0, 120),
    places=st.sets(st.integers(0, 16)),
    most=st.none() | st.integers(0, 60),
)
@settings(max_examples=200)
def test_a_match_ends_where_all_that_its_next_token_sees_is_there(window, nodes, computed, places, most) -> None:
    cache = PrefixCache.create(40, 8, 8, windows=WindowPages.create(40, 40, [window]))
    text: list[int] = []
    for number, length in enumerate(nodes):  # each goes on where the one before ends
        text = [*text, *[number] * length]
        cache, [request] = cache.add([text])
    cache = cache.mark_computed(request, min(computed, len(text)))
    cache = cache.keep(np.array(sorted(places), int))
    match = cache.match([*text, 99], most=most)
    pages, start, held = cache._pages_of(request)
    ends, starts = start + held, np.append(0, cache.node_ends(request))

    def goes_on(end: int) -> bool:
        seen = (ends > max(window.first_position(end), 0)) & (start < end)
        return all(page in places or not cache.computed[page] for page in pages[seen])

    whole = [end for end in ends.tolist() if (end - starts[starts < end].max()) % 8 == 0 or end == len(text)]
    fits = [end for end in whole if goes_on(end) and (most is None or end <= most)]
    assert match.length == max(fits, default=0)
    assert cache.needed([*text, 99], most=most) >= -(-(len(text) + 1 - match.length) // 8)
    cache, [again] = cache.add([[*text, 99]], most=most)
    assert cache.context(again).tolist() == [*text, 99]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 120), st.integers(0, 120))
def test_pages_that_are_seen(nodes, begin, end) -> None:
    window = Window(13)
    cache = PrefixCache.create(40, 8, 8, windows=WindowPages.create(40, 40, [window]))
    text: list[int] = []
    for number, length in enumerate(nodes):
        text = [*text, *[number] * length]
        cache, [request] = cache.add([text])
    pages, start, held = cache._pages_of(request)
    first = max(window.first_position(begin), 0)
    expected = pages[(start + 8 > first) & (start < end)]
    got = cache.seen(request, begin, end)
    assert set(pages[(start + held > first) & (start < end)]) <= set(got.tolist()) <= set(expected.tolist())
    assert set(pages[start + held > first]) <= set(cache.seen(request, begin).tolist())
