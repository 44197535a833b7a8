"""Some pages of a pool, for plans of a part of what requests see; and where other arrays have a copy of each.

    pages of the pool     0   1   2   3   4   5
    place of each copy    -   0   1   -   -   2     `PageSubset`
    place of each other   0   -   -   3   4   -     `PageSubset.rest`

A plan of the subset and one of the rest see every token once. POR merges what they give.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from codec_jax import checks

_NOWHERE = -1


@dataclass(frozen=True, eq=False)
class PageSubset:
    """Some pages of a pool, and the page of other arrays that each is in."""

    place: Int[np.ndarray, " num_pages"]  # of each page of the pool; -1 for those that are not among them
    capacity: int  # pages of the arrays

    @classmethod
    def of(cls, pages: Int[np.ndarray, " pages"], num_pages: int, capacity: int) -> PageSubset:
        """Give pages places from 0 on, in their order.

        Args:
          pages: page ids, each once.
          num_pages: pages of the pool.
          capacity: pages that there is room for in the arrays.

        Raises ValueError for a page that is not of the pool, twice the same, or more than there is room for.

        >>> from codec_jax import PageSubset
        >>> PageSubset.of(np.array([1, 2, 5]), num_pages=6, capacity=4).place.tolist()
        [-1, 0, 1, -1, -1, 2]
        """
        pages = checks.int_vector("pages", pages)
        num_pages, capacity = checks.integer("num_pages", num_pages), checks.integer("capacity", capacity)
        if len(np.unique(pages)) != len(pages) or pages.min(initial=0) < 0 or pages.max(initial=-1) >= num_pages:
            raise ValueError(f"pages: expected different pages of 0 to {num_pages - 1}, got {pages}")
        if len(pages) > capacity:
            raise ValueError(f"capacity: expected at least {len(pages)}, the number of pages, got {capacity}")
        place = np.full(num_pages, _NOWHERE, np.int32)
        place[pages] = np.arange(len(pages), dtype=np.int32)
        return cls(place, capacity)

    @property
    def page_ids(self) -> Int[np.ndarray, " capacity"]:
        """The page at each place, to copy it from; 0 where there is none."""
        pages = np.flatnonzero(self.place >= 0)
        ids = np.zeros(self.capacity, np.int32)
        ids[self.place[pages]] = pages
        return ids

    @property
    def rest(self) -> PageSubset:
        """The other pages, each in its own place of the pool."""
        others = np.where(self.place < 0, np.arange(len(self.place), dtype=np.int32), np.int32(_NOWHERE))
        return PageSubset(others, len(self.place))
