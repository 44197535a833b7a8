"""The arrays that hold the tokens of a layer with multi-head latent attention, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from codec_jax import checks
from codec_jax.forest.kv_pages import KVPages, finite
from codec_jax.forest.token_slots import both_in_bounds, check_rows, copied, counted, in_bounds, stored

#: Numbers of a latent of one byte a number that have a scale of their own.
SCALED_TOGETHER = 128
_LARGEST, _SMALLEST_SCALE = float(jnp.finfo(jnp.float8_e4m3fn).max), float(jnp.finfo(jnp.float32).tiny)


class LatentQuantisation(NamedTuple):
    """What latents of one byte a number have beside them: a stored number times its scale is the number that is meant.

    Source: the cache of FlashMLA (github.com/deepseek-ai/FlashMLA), which has the three in one array.
    """

    scale: Float[Array, "num_pages page_size 1 parts"]  # float32, of each 128 numbers of a token
    rotated: Float[Array, "num_pages page_size 1 rope"]  # the rotated keys, bfloat16
    saturated: Int[Array, " devices"]  # on each, numbers that no scale was enough for when they were written


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentPages:
    """One latent vector and one rotated key per token, in the place of K and V of every head; all entries finite.

    All heads share what a token has: there is one array, whose numbers are keys, and the first L of them values. Beside
    it there may be K and V of every head for some of the pages (`PageCopies` knows which). Like `KVPages` it is
    immutable.
    """

    latent: Float[Array, "num_pages page_size 1 L+rope"]  # of one byte a number: latents alone
    reconstructed: KVPages | None = None  # of other pages, fewer of them
    quantisation: LatentQuantisation | None = None  # of pages of one byte a number

    @property
    def key(self) -> Float[Array, "num_pages page_size 1 L+rope"]:
        """The array of latents, which with more than one byte a number are the keys."""
        return self.latent

    @property
    def value(self) -> None:
        """None: values have no pages of their own, as `forest_attention` takes it."""
        return None

    @property
    def size(self) -> int:
        """Numbers of a token: L + rope."""
        rotated = 0 if self.quantisation is None else self.quantisation.rotated.shape[3]
        return self.latent.shape[3] + rotated

    @classmethod
    def zeros(
        cls, num_pages: int, page_size: int, size: int, dtype: DTypeLike = jnp.bfloat16, *, rope: int | None = None
    ) -> LatentPages:
        """Return empty pages.

        Args:
          num_pages: pages of the pool.
          page_size: tokens in a page, as in the forest.
          size: L + rope, numbers of a token.
          dtype: float32, bfloat16 or float16; rows are rounded to it when they are written. Or float8_e4m3fn: then
            latents take one byte a number, each 128 of them with a scale, and rotated keys are bfloat16.
          rope: numbers of the rotated key, which one byte a number needs to know.

        Raises ValueError for sizes that are none, another dtype, and one byte a number unless L is a multiple of 128.

        >>> from codec_jax import LatentPages
        >>> LatentPages.zeros(num_pages=4, page_size=16, size=512 + 64).latent.shape
        (4, 16, 1, 576)
        >>> pages = LatentPages.zeros(4, 16, 512 + 64, jnp.float8_e4m3fn, rope=64)
        >>> [x.shape[3] for x in (pages.latent, pages.quantisation.scale, pages.quantisation.rotated)]
        [512, 4, 64]
        """
        checks.float_dtype("dtype", dtype, jnp.dtype(jnp.float8_e4m3fn))
        shape = (checks.integer("num_pages", num_pages, 0), checks.integer("page_size", page_size), 1)
        size = checks.integer("size", size)
        if jnp.dtype(dtype).itemsize > 1:
            return cls(jnp.zeros((*shape, size), dtype))
        latent = size - checks.integer("rope", rope, 0)
        if latent < 1 or latent % SCALED_TOGETHER:
            raise ValueError(
                f"size: expected rope and a multiple of {SCALED_TOGETHER} numbers, each of which have a scale, got "
                f"{rope} + {latent}"
            )
        scale = jnp.zeros((*shape, latent // SCALED_TOGETHER), jnp.float32)
        rotated = jnp.zeros((*shape, size - latent), jnp.bfloat16)
        quantisation = LatentQuantisation(scale, rotated, jnp.zeros(1, jnp.int32))
        return cls(jnp.zeros((*shape, latent), dtype), quantisation=quantisation)

    def write(self, slots: Int[Array, "B T"], rows: Float[Array, "B T 1 L+rope"], *, rope: int = 0) -> LatentPages:
        """Store one row per token slot. Jittable; with donated pages the update is in place.

        Entries that are not finite in the pages' dtype are stored as 0, as those of V are by `KVPages.write`, since
        latents are values too. Rotated keys are not: a row with such an entry has NaN for its rotated key, so that a
        request whose own numbers have blown up sees it. With one byte a number the largest of 128 numbers makes their
        scale, and an infinity in a latent becomes as large as that; it is counted in `quantisation`.

        Args:
          slots: [B, T], token slots (page * page_size + offset) from `Forest.slots`; rows for slots out of bounds
            (`NO_SLOT`, or negative) are dropped.
          rows: [B, T, 1, L + rope], each token's latent after its normalisation, then its rotated key; any float dtype.
          rope: numbers of the rotated key, which pages of one byte a number know; with 0, such a row has no mark.

        Raises ValueError unless slots are integers, there is one row for each, and the rotated key is a part of it.

        >>> from codec_jax import LatentPages
        >>> pages = LatentPages.zeros(num_pages=4, page_size=16, size=48, dtype=jnp.float32)
        >>> float(pages.write(np.array([[17]]), jnp.ones((1, 1, 1, 48))).latent[1, 1].sum())
        48.0
        """
        where, rows, quantisation = in_bounds("slots", slots), jnp.asarray(rows), self.quantisation
        check_rows("rows", where, rows, 1, self.size)
        if quantisation is None:
            is_rotated = np.arange(self.size) >= self.size - checks.integer("rope", rope, 0, below=self.size)
            rows = rows.astype(self.latent.dtype)
            is_whole = jnp.isfinite(rows).all(axis=3, keepdims=True)
            rows = jnp.where(is_rotated[None, None, None] & ~is_whole, jnp.nan, finite(rows, rows.dtype))
            return replace(self, latent=stored(self.latent, where, rows))
        latent, rotated = jnp.split(rows, [self.latent.shape[3]], axis=3)
        rotated = rotated.astype(jnp.bfloat16)
        is_whole = ~jnp.isnan(latent).any(axis=3, keepdims=True) & jnp.isfinite(rotated).all(axis=3, keepdims=True)
        parts = latent.astype(jnp.float32).reshape(*latent.shape[:3], -1, SCALED_TOGETHER)
        parts = jnp.where(jnp.isnan(parts), 0.0, parts)
        large = jnp.isinf(parts)
        most = jnp.abs(jnp.where(large, 0.0, parts)).max(axis=4)
        scale = jnp.maximum(most / _LARGEST, _SMALLEST_SCALE)
        codes = jnp.clip(parts / scale[..., None], -_LARGEST, _LARGEST).reshape(latent.shape)
        is_stored = (where < math.prod(self.latent.shape[:2]))[..., None, None, None]
        return replace(
            self,
            latent=stored(self.latent, where, codes),
            quantisation=LatentQuantisation(
                stored(quantisation.scale, where, scale),
                stored(quantisation.rotated, where, jnp.where(is_whole, rotated, jnp.nan)),
                counted(quantisation.saturated, (large & is_stored).sum(dtype=jnp.int32)),
            ),
        )

    def move(self, source: Int[Array, "B T"], target: Int[Array, "B T"]) -> LatentPages:
        """Copy from token slots to token slots, all read before any is written. Jittable.

        Args:
          source: [B, T], token slots to read.
          target: [B, T], token slots to write. Where either slot is out of bounds, nothing is copied.

        Raises ValueError for slots of different shapes.

        >>> from codec_jax import LatentPages
        >>> pages = LatentPages.zeros(num_pages=4, page_size=16, size=48)
        >>> pages = pages.move(np.array([[33, 34]]), np.array([[17, 18]]))
        """
        slots, quantisation = both_in_bounds(source, target), self.quantisation
        if quantisation is not None:
            scale, rotated = (copied(array, *slots) for array in quantisation[:2])
            quantisation = quantisation._replace(scale=scale, rotated=rotated)
        return replace(self, latent=copied(self.latent, *slots), quantisation=quantisation)

    def rows(self, pages: Int[Array, " pages"] | slice) -> Float[Array, "pages page_size 1 L+rope"]:
        """Return what tokens have in some pages. Jittable.

        Args:
          pages: page ids, or a slice of all.

        Returns it in the dtype of the pages, or in float32 if they have one byte a number.

        >>> from codec_jax import LatentPages
        >>> pages = LatentPages.zeros(4, 16, 128 + 64, jnp.float8_e4m3fn, rope=64)
        >>> pages.rows(np.array([2, 3])).shape
        (2, 16, 1, 192)
        """
        latent, quantisation = self.latent[pages], self.quantisation
        return latent if quantisation is None else meant(latent, *(array[pages] for array in quantisation[:2]))


def meant(
    latent: Float[Array, "*rows L"], scale: Float[Array, "*rows parts"], rotated: Float[Array, "*rows rope"]
) -> Float[Array, "*rows L+rope"]:
    """Return the numbers that latents of one byte a number stand for, and the rotated keys after them; float32."""
    factors = jnp.repeat(scale, SCALED_TOGETHER, axis=-1)
    return jnp.concatenate([latent.astype(jnp.float32) * factors, rotated.astype(jnp.float32)], axis=-1)


def reconstructed_dtype(latents: DTypeLike) -> jnp.dtype:
    """Return the dtype in which K and V lose least for their bytes: float16 where latents are bfloat16.

    K and V are sums of products, of which bfloat16 keeps 8 bits and float16 11, as of the weights of V. Tensor cores
    multiply both at one rate, and K and V of models are far from the end of float16's range.
    """
    return jnp.dtype(jnp.float16 if jnp.dtype(latents) == jnp.bfloat16 else latents)


#: Of one layer of a decoder.
Pages = KVPages | LatentPages
