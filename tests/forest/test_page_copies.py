"""Which pages have copies, and where, against a plain model: pages with contents, and copies made of them."""

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.forest import PageCopies

NUM_PAGES = 12
pages = st.integers(0, NUM_PAGES - 1)


class Turn(NamedTuple):
    groups: list[list[int]]  # of different pages; some may be of several groups
    written: list[int]


turns = st.builds(Turn, st.lists(st.lists(pages, max_size=5, unique=True), max_size=5), st.lists(pages, max_size=4))


class Plain:
    """Copies by place: of which page, what it held, and when there was a use for the copy."""

    def __init__(self, capacity: int) -> None:
        self.held = [0] * NUM_PAGES  # a new number whenever a page is written
        self.page: list[int | None] = [None] * capacity
        self.content = [-1] * capacity
        self.used = [-1] * capacity

    def turn(self, number: int, groups: list[list[int]], written: list[int]) -> tuple[set[int], set[int]]:
        """Return the pages that have a copy after a turn, and those to copy."""
        self.page = [None if page in written else page for page in self.page]
        wanted = {page for group in groups for page in group}
        room = [place for place, page in enumerate(self.page) if page not in wanted]
        room.sort(key=lambda place: (self.page[place] is not None, self.used[place]))
        have, new = {*self.page} - {None}, set()
        for group in groups:
            missing = {*group} - have
            if len(missing) <= len(room) - len(new) and not missing & {*written}:
                have |= missing
                new |= missing
        gone = {self.page[place] for place in room[: len(new)]}
        return have - gone, new


@settings(max_examples=150)
@given(st.integers(0, 8), st.lists(turns, min_size=1, max_size=8))
def test_copies_are_those_of_a_plain_model_and_hold_what_their_pages_hold(capacity: int, given: list[Turn]) -> None:
    copies, plain = PageCopies.none(NUM_PAGES, capacity), Plain(capacity)
    for number, (groups, written) in enumerate(given):
        have, new = plain.turn(number, groups, written)
        arrays = [np.array(group, np.int64) for group in groups]
        copies, subset, pages, places = copies.follow(arrays, np.array(written, np.int64))
        assert sorted(pages.tolist()) == sorted(new)  # each once, and none that has a copy
        assert {page for page in range(NUM_PAGES) if copies.place[page] >= 0} == have
        assert copies.count == len(have)
        for page, place in zip(pages.tolist(), places.tolist(), strict=True):
            plain.page[place], plain.content[place] = page, plain.held[page]
        wanted = {page for group in groups for page in group}
        assert {*np.flatnonzero(subset.place >= 0).tolist()} == have & wanted
        assert subset.capacity == capacity
        for page in have & wanted:
            place = int(subset.place[page])
            assert (plain.page[place], plain.content[place]) == (page, plain.held[page])
            assert page not in written
            plain.used[place] = number
        for page in written:
            plain.held[page] += 1


def test_a_copy_that_is_wanted_stays_whatever_else_is_worth_more() -> None:
    copies = PageCopies.none(NUM_PAGES, 4).follow([np.array([3, 5]), np.array([7])]).copies
    copies, subset, pages, _ = copies.follow([np.array([1, 2]), np.array([3, 5, 7])])
    assert pages.tolist() == []
    assert np.flatnonzero(subset.place >= 0).tolist() == [3, 5, 7]
    assert copies.follow([np.array([1, 2]), np.array([3, 5])]).pages.tolist() == [1, 2]


def test_of_copies_without_a_use_the_one_used_the_longest_ago_gives_way() -> None:
    copies = PageCopies.none(NUM_PAGES, 3).follow([np.array([page]) for page in (4, 6, 8)]).copies
    copies = copies.follow([np.array([4])]).copies
    copies = copies.follow([np.array([8])]).copies
    for new, gone in ((1, 6), (2, 4), (3, 8)):
        before = copies
        copies = copies.follow([np.array([new])]).copies
        assert {*before.page.tolist()} - {*copies.page.tolist()} == {gone}
