"""Pages of layers with a window, which have fewer of them than the forest: those that some request still sees.

    pages of the pool      0   1   2   3   4   5   6   7     a request ends in page 7, and sees as far back as page 5
    place of each          -   -   2   -   -   0   1   3     what is kept besides: page 2, where another prefix ends

Layers that see everything keep every page. In the others a page has a place while somebody sees it, and stays until its
place is needed: the one that nobody has seen for the longest time goes first. Who comes later shares a prefix only as
far as all that its next token sees is there, or still to be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.errors import OutOfPagesError
from codec_jax.forest.page_subset import PageSubset
from pallas_kernels.heads import Window

_NONE = -1


@dataclass(frozen=True, eq=False)
class WindowPages:
    """Which pages have a place in the arrays of layers with windows. Host only, and immutable.

    >>> from codec_jax import Window
    >>> from codec_jax.forest import WindowPages
    >>> kept = WindowPages.create(num_pages=8, capacity=4, windows=[Window(100)]).keep(np.array([5, 6]))
    >>> kept.keep(np.array([2, 6, 7])).place.tolist()
    [-1, -1, 2, -1, -1, 0, 1, 3]
    """

    windows: tuple[Window, ...]  # of the layers
    place: Int[np.ndarray, " num_pages"]  # of each page of the pool, -1 for none
    page: Int[np.ndarray, " capacity"]  # at each place, -1 for none
    last_seen: Int[np.ndarray, " capacity"]  # the clock when somebody saw the page
    clock: int  # calls of `keep`

    @classmethod
    def create(cls, num_pages: int, capacity: int, windows: Sequence[Window]) -> WindowPages:
        """Return places that are all free.

        Args:
          num_pages: pages of the pool.
          capacity: pages that the layers with windows have.
          windows: of these layers, one or more.

        Raises ValueError for numbers that are not positive, or no window, TypeError for what is no window.

        >>> from codec_jax.forest import WindowPages
        >>> WindowPages.create(num_pages=8, capacity=4, windows=[Window(100)]).first_positions([30, 150]).tolist()
        [0, 51]
        """
        if not windows:
            raise ValueError("windows: expected those of the layers, got none; without windows all pages are kept")
        for i, window in enumerate(windows):
            checks.instance(f"windows[{i}]", window, Window)
        of_pages = np.full(checks.integer("num_pages", num_pages), _NONE, np.int32)
        of_places = np.full(checks.integer("capacity", capacity), _NONE, np.int64)
        return cls(tuple(windows), of_pages, of_places, of_places, 0)

    @property
    def capacity(self) -> int:
        """Places that there are."""
        return len(self.page)

    @property
    def subset(self) -> PageSubset:
        """The pages that have a place, for plans of layers with windows."""
        return PageSubset(self.place, self.capacity)

    def first_positions(self, positions: Integers) -> Int[np.ndarray, " tokens"]:
        """Return the first position that each token sees in any of these layers.

        Args:
          positions: those of the tokens.
        """
        at = np.asarray(positions)
        return np.maximum(np.min([window.first_position(at) for window in self.windows], axis=0), 0)

    def keep(
        self, pages: Int[np.ndarray, " seen"], pinned: Bool[np.ndarray, " num_pages"] | None = None
    ) -> WindowPages:
        """Give a place to each of these pages, and leave the others theirs as long as there are enough.

        Args:
          pages: that somebody sees in the next step.
          pinned: pages of the pool that go last of those that nobody sees.

        Raises OutOfPagesError if there are more pages than places, ValueError for pages that the pool does not have.
        """
        pages = checks.int_vector("pages", np.unique(pages))
        checks.each("pages", pages, (pages >= 0) & (pages < len(self.place)), f"pages in [0, {len(self.place)})")
        if len(pages) > self.capacity:
            raise OutOfPagesError(
                f"layers with windows have {self.capacity} pages, {len(pages)} are needed for what requests see; let "
                "fewer requests in at a time, or make windowed_pages larger"
            )
        place, page, last_seen, now = self.place.copy(), self.page.copy(), self.last_seen.copy(), self.clock + 1
        there = place[pages] >= 0
        last_seen[place[pages[there]]] = now
        if new := len(pages) - int(there.sum()):
            taken, late = page >= 0, np.zeros(self.capacity, bool)
            if pinned is not None:
                late[taken] = pinned[page[taken]]
            order = np.where(taken, last_seen + np.where(late, 2**40, 0), _NONE)
            order[place[pages[there]]] = 2**62
            places = np.sort(np.argpartition(order, new - 1)[:new])
            gone = page[places]
            place[gone[gone >= 0]] = _NONE
            page[places], place[pages[~there]], last_seen[places] = pages[~there], places, now
        return replace(self, place=place, page=page, last_seen=last_seen, clock=now)

    def without(self, gone: Bool[np.ndarray, " num_pages"]) -> WindowPages:
        """Free the places of some pages.

        Args:
          gone: which pages of the pool.
        """
        free = (self.page >= 0) & gone[self.page]
        if not free.any():
            return self
        place, page = self.place.copy(), self.page.copy()
        place[page[free]], page[free] = _NONE, _NONE
        return replace(self, place=place, page=page)

    def emptied(self) -> WindowPages:
        """Return as many places, all of them free."""
        return WindowPages.create(len(self.place), self.capacity, self.windows)


class Reach(NamedTuple):
    """Where contexts may go on, as far as layers with windows are concerned."""

    kept: WindowPages
    computed: Int[np.ndarray, " num_pages"]  # tokens of each page whose K and V were computed

    def goes_on(self, pages: Int[np.ndarray, " pages"], ends: Int[np.ndarray, " pages"]) -> Bool[np.ndarray, " pages"]:
        """Say after which pages of a context all that the next token sees is there, or still to be computed.

        Args:
          pages: of the context, in order; those past the end of the pool are new.
          ends: the position after the last token of each.
        """
        known = pages < len(self.computed)
        ids = np.where(known, pages, 0)
        missing = known & (self.computed[ids] > 0) & (self.kept.place[ids] < 0)
        before = np.append(0, np.cumsum(missing))  # how many of the first pages are missing
        return before[1:] == before[np.searchsorted(ends, self.kept.first_positions(ends), side="right")]
