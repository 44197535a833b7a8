"""The arrays that hold the tokens of a layer, on the device.

`KVPages` are K and V in the layout of PagedAttention and FlashDecoding. They are immutable: every operation returns a
new value and leaves its input as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from codec_jax import checks
from codec_jax.arrays import HostOrDevice
from codec_jax.forest.token_slots import (
    both_in_bounds,
    check_rows,
    copied,
    copied_scales,
    counted,
    in_bounds,
    stored,
    stored_scales,
)

#: Of a token's scale: times weights it is a number of float16 in kernels.
MAX_SCALE = 32.0
#: Dtypes of one byte a number that pages may have.
ONE_BYTE = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


#: Of a scale: beyond these, numbers over scales, or the largest number that is stored times one, need not be finite.
LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**100


class Quantisation(NamedTuple):
    """Of pages of one byte a number: a stored number times its scale is the number that is meant.

    A kv head has a scale, given once, or each token and kv head has one of its own, found when it is written.
    """

    key_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"]  # float32
    value_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"]
    saturated: Int[Array, " devices"]  # on each, numbers that were too large for their scale when they were written

    @classmethod
    def of(
        cls,
        num_kv_heads: int,
        key_scale: Float[HostOrDevice, " K"] | float = 1.0,
        value_scale: Float[HostOrDevice, " K"] | float = 1.0,
    ) -> Quantisation:
        """Describe pages in which nothing is stored yet, or that others have written.

        Args:
          num_kv_heads: K, kv heads.
          key_scale: of each kv head, or of all.
          value_scale: the same for values.

        Raises ValueError for no kv heads, and for scales that are not numbers in [2**-100, 2**100], one for each.

        >>> from codec_jax.forest import Quantisation
        >>> Quantisation.of(2, key_scale=0.5).key_scale.tolist()
        [0.5, 0.5]
        """
        num_kv_heads, scales = checks.integer("num_kv_heads", num_kv_heads), []
        for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
            try:
                given = np.asarray(scale, np.float64)
            except (TypeError, ValueError):
                raise ValueError(f"{name}: expected numbers, got {scale!r:.100}") from None
            if given.shape not in ((), (num_kv_heads,)):
                raise ValueError(
                    f"{name}: expected a number, or one for each of {num_kv_heads} kv heads, got shape {given.shape}"
                )
            if not ((given >= LEAST_SCALE) & (given <= MOST_SCALE)).all():
                raise ValueError(f"{name}: expected positive numbers from 2**-100 to 2**100, got {given.tolist()}")
            scales.append(jnp.asarray(np.broadcast_to(given.astype(np.float32), num_kv_heads)))
        return cls(scales[0], scales[1], jnp.zeros(1, jnp.int32))

    @classmethod
    def by_token(cls, num_pages: int, page_size: int, num_kv_heads: int) -> Quantisation:
        """Describe pages in which nothing is stored yet, and each token and kv head will have scales of its own.

        They are 8 bytes more for each, beside the 2 H of its numbers.

        Args:
          num_pages: pages of the pool.
          page_size: tokens in a page.
          num_kv_heads: K, kv heads.

        Raises ValueError for sizes that pages cannot have.

        >>> from codec_jax.forest import KVPages, Quantisation
        >>> pages = KVPages.zeros(4, 16, 2, 64, jnp.float8_e4m3fn, quantisation=Quantisation.by_token(4, 16, 2))
        >>> pages = pages.write(np.array([[17]]), jnp.full((1, 1, 2, 64), 1000.0), jnp.full((1, 1, 2, 64), 1e-4))
        >>> round(float(pages.key[1, 1, 0, 0]) * float(pages.quantisation.key_scale[1, 0, 1]), 3)
        1000.0
        """
        num_pages, page_size = checks.integer("num_pages", num_pages, 0), checks.integer("page_size", page_size)
        ones = jnp.ones((num_pages, checks.integer("num_kv_heads", num_kv_heads), page_size), jnp.float32)
        return cls(ones, ones.copy(), jnp.zeros(1, jnp.int32))

    @property
    def is_by_token(self) -> bool:
        """Whether each token and kv head has scales of its own."""
        return self.key_scale.ndim == 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """K and V of one layer, `[num_pages, page_size, K, H]` each; every entry of `value` must be finite.

    Requests that share a tile of query rows pass over each other's pages with weights of 0, and so do all of them
    over slots past a node's end. A NaN or infinity in `value` would survive that (0 x NaN is NaN) and reach another
    request: `zeros` and `write` let none in. One in `key` stays with the requests that read it.
    """

    key: Float[Array, "num_pages page_size K H"]
    value: Float[Array, "num_pages page_size K V"]
    quantisation: Quantisation | None = None  # of pages of one byte a number

    @classmethod
    def zeros(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = jnp.bfloat16,
        *,
        quantisation: Quantisation | None = None,
    ) -> KVPages:
        """Return empty pages.

        Args:
          num_pages: pages of the pool.
          page_size: tokens in a page, as in the forest.
          num_kv_heads: K, kv heads.
          head_dim: H, numbers of a head.
          dtype: of K and V; they are rounded to it when they are written. Of one byte a number: float8_e4m3fn.
          quantisation: for one byte a number; scales of 1 by default.

        Raises ValueError for sizes that pages cannot have, a dtype that is no float, or of one byte and cannot be
        written, for a quantisation without one, and for scales of other heads or pages; TypeError for what is none.

        >>> KVPages.zeros(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64).key.shape
        (4, 16, 2, 64)
        >>> KVPages.zeros(4, 16, 2, 64, jnp.float8_e4m3fn).quantisation.value_scale.tolist()
        [1.0, 1.0]
        """
        num_pages, page_size = checks.integer("num_pages", num_pages, 0), checks.integer("page_size", page_size)
        num_kv_heads, head_dim = checks.integer("num_kv_heads", num_kv_heads), checks.integer("head_dim", head_dim)
        checks.float_dtype("dtype", dtype, *ONE_BYTE)
        shape, dtype = (num_pages, page_size, num_kv_heads, head_dim), jnp.dtype(dtype)
        if quantisation is not None:
            checks.instance("quantisation", quantisation, Quantisation)
        if dtype.itemsize == 1:
            _check_writable(dtype)
            quantisation = Quantisation.of(num_kv_heads) if quantisation is None else quantisation
            of_tokens = {"num_pages": num_pages, "K": num_kv_heads, "page_size": page_size}
            axes = of_tokens if quantisation.is_by_token else {"K": num_kv_heads}
            for name in ("key_scale", "value_scale"):
                checks.shape(f"quantisation.{name}", getattr(quantisation, name), **axes)
        elif quantisation is not None:
            raise ValueError(f"quantisation: expected None for pages of {dtype}; it is for one byte a number")
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), quantisation)

    def write(self, slots: Int[Array, "B T"], key: Float[Array, "B T K H"], value: Float[Array, "B T K H"]) -> KVPages:
        """Store one K and V row per token slot. Jittable; with donated pages the update is in place.

        Entries of V that are not finite in the pages' dtype are stored as 0. K is stored as it is, so that a request
        whose own numbers have blown up still sees NaN. With one byte a number, what is too large for its scale is
        stored as the largest number, and counted in `quantisation`; by token, numbers above 14336.

        Args:
          slots: [B, T], token slots (page * page_size + offset) from `Forest.slots`; rows for slots out of bounds
            (`NO_SLOT`, or negative) are dropped.
          key: [B, T, K, H], a row of K heads for each slot, in any float dtype.
          value: [B, T, K, H].

        Raises ValueError unless slots are integers and there is one row for each, for float8_e5m2, in which pages are
        only read, and for pages of one byte without a quantisation.

        >>> pages = KVPages.zeros(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, dtype=jnp.float32)
        >>> row = jnp.ones((1, 1, 2, 64))
        >>> float(pages.write(np.array([[17]]), row, row).key[1, 1].sum())
        128.0
        """
        where = in_bounds("slots", slots)
        scales: tuple[Any, ...] = ()
        key, value, quantisation = jnp.asarray(key), jnp.asarray(value), self.quantisation
        check_rows("key", where, key, *self.key.shape[2:])
        check_rows("value", where, value, *self.value.shape[2:])
        if quantisation is not None or self.key.dtype.itemsize == 1:
            _check_writable(self.key.dtype)
            if quantisation is None:
                raise ValueError(
                    "quantisation: expected the scales of pages of one byte that are written, got None; make them by "
                    "KVPages.zeros, or give them a Quantisation"
                )
            scales = tuple(scale[None, None] for scale in quantisation[:2])  # [1, 1, K]
            if quantisation.is_by_token:
                scales = _scale_of(key, self.key.dtype), _scale_of(value, self.key.dtype)  # [B, T, K]
            key, large_keys = _quantise(key, scales[0], self.key.dtype)
            value, large_values = _quantise(value, scales[1], self.key.dtype)
            is_stored = (where < math.prod(self.key.shape[:2]))[..., None, None]
            counts = ((large & is_stored).sum(dtype=jnp.int32) for large in (large_keys, large_values))
            quantisation = quantisation._replace(saturated=counted(quantisation.saturated, *counts))
        value = finite(value, self.value.dtype)
        pages = KVPages(stored(self.key, where, key), stored(self.value, where, value), quantisation)
        if quantisation is None or not quantisation.is_by_token:
            return pages
        of_keys, of_values = (stored_scales(*each, where) for each in zip(quantisation[:2], scales, strict=True))
        return replace(pages, quantisation=quantisation._replace(key_scale=of_keys, value_scale=of_values))

    def move(self, source: Int[Array, "B T"], target: Int[Array, "B T"]) -> KVPages:
        """Copy K and V from token slots to token slots, all read before any is written. Jittable.

        Args:
          source: [B, T], token slots to read.
          target: [B, T], token slots to write. Where either slot is out of bounds, nothing is copied.

        Raises ValueError for slots of different shapes.

        >>> pages = KVPages.zeros(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64)
        >>> pages = pages.move(np.array([[33, 34]]), np.array([[17, 18]]))
        """
        slots, quantisation = both_in_bounds(source, target), self.quantisation
        if quantisation is not None and quantisation.is_by_token:
            of_keys, of_values = (copied_scales(scale, *slots) for scale in quantisation[:2])
            quantisation = quantisation._replace(key_scale=of_keys, value_scale=of_values)
        return KVPages(copied(self.key, *slots), copied(self.value, *slots), quantisation)


def finite(values: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Return values in a dtype, which makes infinities of large ones, with 0 for what is not finite there."""
    cast = values.astype(dtype)
    return jnp.where(jnp.isfinite(cast), cast, 0)


def _check_writable(dtype: np.dtype) -> None:
    if dtype != jnp.float8_e4m3fn:
        raise ValueError(f"dtype: expected float8_e4m3fn to write one byte a number, got {dtype}, which is only read")


def _scale_of(rows: Float[Array, "B T K H"], dtype: np.dtype) -> Float[Array, "B T K"]:
    """Return scales by which the largest finite number of a row becomes that of a dtype; 1 for a row of zeros."""
    size = jnp.abs(rows.astype(jnp.float32))
    largest = jnp.where(jnp.isfinite(size), size, 0).max(axis=-1)
    # Rounded up, so that none is out of bounds by rounding; what is too small for a scale is 0 anyway.
    scale = jnp.nextafter(largest / float(jnp.finfo(dtype).max), jnp.inf)
    return jnp.where(scale >= jnp.finfo(jnp.float32).tiny, jnp.minimum(scale, MAX_SCALE), 1)


def _quantise(
    rows: Float[Array, "B T K H"], scale: Float[Array, "#B #T K"], dtype: np.dtype
) -> tuple[Float[Array, "B T K H"], Bool[Array, "B T K H"]]:
    """Return rows over their scale within the bounds of a dtype, and which are out of them; NaN stays as it is."""
    scaled, largest = rows.astype(jnp.float32) / scale[..., None], float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype), jnp.abs(scaled) > largest
