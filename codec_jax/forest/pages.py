"""Pages of KV memory: which are taken (host), and the arrays that hold the tokens (device).

`PagePool` counts the owners of each physical page; forests take pages from it and give them back. `KVPages` are the
K and V arrays of one layer in the layout of PagedAttention and FlashDecoding. Both are immutable: every operation
returns a new value and leaves its input as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from codec_jax import checks
from codec_jax.arrays import HostOrDevice, expand, to_int32
from codec_jax.errors import OutOfPagesError
from codec_jax.forest.homes import Homes

#: A token slot that is out of every pool's bounds: what is written to it is dropped.
NO_SLOT = np.iinfo(np.int32).max


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """K and V of one layer, `[num_pages, page_size, K, H]` each; every entry of `value` must be finite.

    Requests that share a tile of query rows pass over each other's pages with weights of 0, and so do all of them
    over slots past a node's end. A NaN or infinity in `value` would survive that (0 x NaN is NaN) and reach another
    request: `zeros` and `write` let none in. One in `key` stays with the requests that read it.
    """

    key: Float[Array, "num_pages page_size K H"]
    value: Float[Array, "num_pages page_size K H"]

    @classmethod
    def zeros(
        cls, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike = jnp.bfloat16
    ) -> KVPages:
        """Return empty pages.

        Args:
          num_pages: pages of the pool.
          page_size: tokens in a page, as in the forest.
          num_kv_heads: K, kv heads.
          head_dim: H, numbers of a head.
          dtype: of K and V; they are rounded to it when they are written.

        >>> KVPages.zeros(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64).key.shape
        (4, 16, 2, 64)
        """
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, slots: Int[Array, "B T"], key: Float[Array, "B T K H"], value: Float[Array, "B T K H"]) -> KVPages:
        """Store one K and V row per token slot. Jittable; with donated pages the update is in place.

        Entries of V that are not finite in the pages' dtype are stored as 0. K is stored as it is, so that a request
        whose own numbers have blown up still sees NaN.

        Args:
          slots: [B, T], token slots (page * page_size + offset) from `Forest.slots`; rows for slots out of bounds
            (`NO_SLOT`, or negative) are dropped.
          key: [B, T, K, H], a row of K heads for each slot, in any float dtype.
          value: [B, T, K, H].

        Raises ValueError unless slots are integers and there is one row for each.

        >>> pages = KVPages.zeros(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, dtype=jnp.float32)
        >>> row = jnp.ones((1, 1, 2, 64))
        >>> float(pages.write(np.array([[17]]), row, row).key[1, 1].sum())
        128.0
        """
        where = _in_bounds("slots", slots)

        def store(name: str, pages: Array, rows: Array) -> Array:
            expected = (*where.shape, *pages.shape[2:])
            if rows.shape != expected:
                raise ValueError(f"{name}: expected shape {expected}, a row for each slot, got {rows.shape}")
            return _tokens(pages).at[where].set(rows, mode="drop").reshape(pages.shape)

        key, value = jnp.asarray(key), finite(jnp.asarray(value), self.value.dtype)
        return KVPages(store("key", self.key, key.astype(self.key.dtype)), store("value", self.value, value))

    def move(self, source: Int[Array, "B T"], target: Int[Array, "B T"]) -> KVPages:
        """Copy K and V from token slots to token slots, all read before any is written. Jittable.

        Args:
          source: [B, T], token slots to read.
          target: [B, T], token slots to write. Where either slot is out of bounds, nothing is copied.

        Raises ValueError for slots of different shapes.

        >>> pages = KVPages.zeros(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64)
        >>> pages = pages.move(np.array([[33, 34]]), np.array([[17, 18]]))
        """
        source, target = _in_bounds("source", source), _in_bounds("target", target)
        if source.shape != target.shape:
            raise ValueError(f"target: expected shape {source.shape}, that of source, got {target.shape}")

        def copy(pages: Array) -> Array:
            tokens = _tokens(pages)
            rows = tokens.at[source].get(mode="fill", fill_value=0)
            to = jnp.where(source < tokens.shape[0], target, NO_SLOT)
            return tokens.at[to].set(rows, mode="drop").reshape(pages.shape)

        return KVPages(copy(self.key), copy(self.value))


def finite(values: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Return values in a dtype, which makes infinities of large ones, with 0 for what is not finite there."""
    cast = values.astype(dtype)
    return jnp.where(jnp.isfinite(cast), cast, 0)


def _tokens(pages: Float[Array, "num_pages page_size K H"]) -> Float[Array, "slots K H"]:
    return pages.reshape(-1, *pages.shape[2:])


def _in_bounds(name: str, slots: HostOrDevice) -> Int[Array, "B T"]:
    """Return token slots as int32; negative ones, from where an index would count from the end, as NO_SLOT."""
    slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"{name}: expected token slots, integers, got {slots.dtype} of shape {slots.shape}")
    slots = jnp.asarray(to_int32(slots, minimum=-1))
    return jnp.where(slots < 0, NO_SLOT, slots)
