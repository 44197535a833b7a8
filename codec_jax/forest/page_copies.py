"""Which pages have a copy in other arrays, and where, while what is worth a copy changes from step to step.

    groups of pages that are worth it ──► follow ───► copies to make, where others leave room
    pages that a step writes          ──► without ──► copies that are out of date

A copy is good until its page is written, whoever the page belongs to: one that is freed and taken again is written
before anybody reads it. So pages are all that counts, not nodes, which split and merge. A copy that nobody has a use
for stays until its place is needed; of these the one that was used the longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.forest.page_subset import PageSubset

_NONE = -1


@dataclass(frozen=True, eq=False)
class PageCopies:
    """The copies that there are, by the places that they may have. Host only, and immutable.

    >>> from codec_jax.forest import PageCopies
    >>> copies, subset, pages, places = PageCopies.none(8, capacity=3).follow([np.array([4, 6]), np.array([1, 2])])
    >>> pages.tolist(), places.tolist(), subset.place.tolist()
    ([4, 6], [0, 1], [-1, -1, -1, -1, 0, -1, 1, -1])
    """

    page: Int[np.ndarray, " capacity"]  # that each place has a copy of; -1 for none
    last_used: Int[np.ndarray, " capacity"]  # the clock when there was a use for it
    num_pages: int
    clock: int  # calls of `follow`

    @classmethod
    def none(cls, num_pages: int, capacity: int) -> PageCopies:
        """Return no copies.

        Args:
          num_pages: pages of the pool.
          capacity: pages of the arrays that copies are for.

        >>> from codec_jax.forest import PageCopies
        >>> PageCopies.none(num_pages=8, capacity=3).page.tolist()
        [-1, -1, -1]
        """
        zeros = np.zeros(checks.integer("capacity", capacity, 0), np.int64)
        return cls(zeros + _NONE, zeros, checks.integer("num_pages", num_pages), 0)

    @property
    def capacity(self) -> int:
        """Places that there are."""
        return len(self.page)

    @property
    def count(self) -> int:
        """Copies that there are."""
        return int(np.count_nonzero(self.page != _NONE))

    @property
    def place(self) -> Int[np.ndarray, " num_pages"]:
        """Where the copy of each page is; -1 for none."""
        place, used = np.full(self.num_pages, _NONE, np.int32), np.flatnonzero(self.page != _NONE)
        place[self.page[used]] = used
        return place

    def without(self, pages: Int[np.ndarray, " pages"]) -> PageCopies:
        """Forget the copies of pages that are written.

        Args:
          pages: page ids, whether they have a copy or not.

        >>> from codec_jax.forest import PageCopies
        >>> copies = PageCopies.none(num_pages=8, capacity=3).follow([np.array([4, 6])]).copies
        >>> copies.without(np.array([6, 7])).page.tolist()
        [4, -1, -1]
        """
        return replace(self, page=np.where(np.isin(self.page, pages), _NONE, self.page))

    def follow(
        self, groups: Sequence[Int[np.ndarray, " pages"]], written: Int[np.ndarray, " written"] | None = None
    ) -> Followed:
        """Find places for the copies that are worth having now.

        Those that there are stay if they are. A group gets all that it lacks, or nothing if there is no room.

        Args:
          groups: page ids, of the group that is worth the most first.
          written: those that the step to come writes: they have no copy in it.

        >>> from codec_jax.forest import PageCopies
        >>> copies = PageCopies.none(num_pages=8, capacity=3).follow([np.array([4, 6])]).copies
        >>> copies.follow([np.array([1, 2]), np.array([6])]).places.tolist()  # page 4 gives way
        [2, 0]
        """
        closed = np.zeros(self.num_pages, bool)
        if written is not None:
            closed[written] = True
        kept = self.without(np.flatnonzero(closed))
        wanted, place = np.zeros(self.num_pages, bool), kept.place
        for group in groups:
            wanted[group] = True
        stays = (kept.page != _NONE) & wanted[kept.page]
        free, chosen = np.flatnonzero(~stays), [np.zeros(0, np.int64)]
        free = free[np.argsort(np.where(kept.page[free] == _NONE, -1, kept.last_used[free]), kind="stable")]
        left, has_copy = len(free), place >= 0
        for group in groups:
            missing = group[~has_copy[group]]
            if len(missing) <= left and not closed[missing].any():
                chosen.append(missing)
                has_copy[missing] = True
                left -= len(missing)
        pages = np.concatenate(chosen)
        places, page = free[: len(pages)], kept.page.copy()
        page[places] = pages
        used = (page != _NONE) & wanted[page]
        copies = replace(kept, page=page, last_used=np.where(used, self.clock, kept.last_used), clock=self.clock + 1)
        subset = PageSubset(np.where(wanted, copies.place, np.int32(_NONE)), self.capacity)
        return Followed(copies, subset, pages, places)


class Followed(NamedTuple):
    """What `PageCopies.follow` finds."""

    copies: PageCopies  # once those to make are made
    subset: PageSubset  # of the groups' pages, those that have a copy then
    pages: Int[np.ndarray, " new"]  # to copy
    places: Int[np.ndarray, " new"]  # where to
