"""Which pages of KV memory are taken; on the host.

`PagePool` counts the owners of each physical page; forests take pages from it and give them back. It is immutable:
every operation returns a new value and leaves its input as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import expand
from codec_jax.errors import OutOfPagesError
from codec_jax.forest.homes import Homes


@dataclass(frozen=True)
class PagePool:
    """How many nodes own each physical page; a page without owners is free. Host memory only."""

    owners: Int[np.ndarray, " num_pages"]
    devices: int = 1  # that the pages are spread over, equal runs of them on each

    @classmethod
    def create(cls, num_pages: int, taken: Int[np.ndarray, " pages"] | None = None, *, devices: int = 1) -> PagePool:
        """Make a pool of `num_pages` pages, of which `taken` (ids, repeats allowed) have owners already.

        Args:
          num_pages: pages of every layer's `KVPages`.
          taken: the pages of a forest, `Forest.used_pages`; none by default.
          devices: that the pages are spread over, along the context axis of a mesh.

        Raises ValueError if `num_pages` is not positive, `devices` does not divide it, or an id in `taken` is not a
        page of the pool.

        >>> PagePool.create(64, taken=np.arange(10)).num_free
        54
        """
        checks.integer("num_pages", num_pages)
        if num_pages % checks.integer("devices", devices):
            raise ValueError(
                f"num_pages: expected as many pages on each of {devices} devices, got {num_pages}; "
                f"make it {-(-num_pages // devices) * devices}"
            )
        ids = checks.int_vector("taken", () if taken is None else taken)
        if ids.size and (ids.min() < 0 or ids.max() >= num_pages):
            raise ValueError(
                f"taken: expected page ids in [0, {num_pages}), got {ids.min()} to {ids.max()}; "
                "make the pool large enough for the forest's pages"
            )
        return cls(np.bincount(ids, minlength=num_pages).astype(np.int32), devices)

    @property
    def num_pages(self) -> int:
        """Pages in the pool, free or taken."""
        return len(self.owners)

    @property
    def num_free(self) -> int:
        """Pages without owners."""
        return int(np.count_nonzero(self.owners == 0))

    @property
    def homes(self) -> Homes:
        """On which device each page lives."""
        return Homes(self.devices, self.num_pages // self.devices)

    @property
    def free_of_devices(self) -> Int[np.ndarray, " devices"]:
        """Pages without owners of each device."""
        return np.count_nonzero(self.owners.reshape(self.devices, -1) == 0, axis=1)

    def allocate(self, count: int) -> tuple[PagePool, Int[np.ndarray, " count"]]:
        """Take the `count` free pages with the lowest ids.

        Args:
          count: pages to take.

        Returns the pool and the page ids. Raises OutOfPagesError if fewer are free; the pool is immutable, so nothing
        has changed then.

        >>> pool, pages = PagePool.create(4, taken=np.array([0, 2])).allocate(2)
        >>> pages.tolist(), pool.num_free
        ([1, 3], 0)
        """
        self.check_free(count)
        return self._taking(np.flatnonzero(self.owners == 0)[:count])

    def allocate_on(self, devices: Int[np.ndarray, " count"]) -> tuple[PagePool, Int[np.ndarray, " count"]]:
        """Take free pages of these devices, on each those with the lowest ids.

        Args:
          devices: the device of each page to take.

        Returns the pool and the page ids. Raises ValueError for what is no device of the pool, OutOfPagesError if one
        has too few free pages.

        >>> pool, pages = PagePool.create(8, devices=2).allocate_on(np.array([1, 0, 1]))
        >>> pages.tolist(), pool.free_of_devices.tolist()
        ([4, 0, 5], [3, 2])
        """
        wanted, free = checks.int_vector("devices", devices), self.free_of_devices
        checks.each("devices", wanted, (wanted >= 0) & (wanted < self.devices), f"devices in [0, {self.devices})")
        counts = np.bincount(wanted, minlength=self.devices)
        if (counts > free).any():
            short = int(np.argmax(counts > free))
            raise OutOfPagesError(
                f"device {short} has {free[short]} free pages, {counts[short]} are needed; "
                "take pages of other devices, or make the pool larger"
            )
        device, nth = expand(counts)
        first, pages = np.cumsum(free) - free, np.empty_like(wanted)
        pages[np.argsort(wanted, kind="stable")] = np.flatnonzero(self.owners == 0)[first[device] + nth]
        return self._taking(pages)

    def check_free(self, count: int) -> None:
        """Raise OutOfPagesError unless so many pages are free.

        Args:
          count: pages that are to be taken.

        >>> PagePool.create(4, taken=np.array([0])).check_free(3)
        """
        if checks.integer("count", count, 0, below=2**63) > self.num_free:
            raise OutOfPagesError(
                f"the pool has {self.num_free} free pages of {self.num_pages}, {count} are needed; "
                "retire requests, reserve fewer tokens at a time, or make the pool larger"
            )

    def check_taken(self, pages: Int[np.ndarray, " pages"]) -> None:
        """Raise ValueError if one of the pages is free, or not of this pool: it would be given away twice.

        Args:
          pages: page ids.

        >>> PagePool.create(4, taken=np.array([0])).check_taken(np.array([0]))
        """
        free = pages[(pages >= self.num_pages) | (self.owners[np.minimum(pages, self.num_pages - 1)] == 0)]
        if free.size:
            raise ValueError(
                f"pool: expected a pool in which all pages of the forest are taken, got one in which page {free[0]} "
                "is not; make it with PagePool.create(num_pages, taken=forest.used_pages) and pass on the newest one"
            )

    def release(self, pages: Int[np.ndarray, " pages"]) -> PagePool:
        """Take one owner off each page.

        Args:
          pages: page ids, repeats allowed.

        Raises ValueError if a page has none to give up, or is not of this pool.

        >>> PagePool.create(4, taken=np.array([0, 2])).release(np.array([2])).num_free
        3
        """
        ids = checks.int_vector("pages", pages)
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_pages):
            raise ValueError(f"pages: expected page ids in [0, {self.num_pages}), got {ids.min()} to {ids.max()}")
        owners = self.owners - np.bincount(ids, minlength=self.num_pages).astype(np.int32)
        if (owners < 0).any():
            raise ValueError(
                f"pages: expected pages that are taken, got page {int(np.argmax(owners < 0))} more often "
                "than it has owners; was this forest's pool replaced by an older one?"
            )
        return replace(self, owners=owners)

    def _taking(self, free: Int[np.ndarray, " count"]) -> tuple[PagePool, Int[np.ndarray, " count"]]:
        """Give free pages an owner."""
        owners = self.owners.copy()
        owners[free] = 1
        return replace(self, owners=owners), free.astype(np.int32)
