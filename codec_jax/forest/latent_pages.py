"""The array that holds the tokens of a layer with multi-head latent attention, on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from codec_jax import checks
from codec_jax.forest.kv_pages import KVPages, finite
from codec_jax.forest.token_slots import both_in_bounds, copied, in_bounds, stored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentPages:
    """One latent vector and one rotated key per token, in the place of K and V of every head; all entries finite.

    All heads share what a token has: there is one array, whose numbers are keys, and the first L of them values. Beside
    it there may be K and V of every head for some of the pages (`PageCopies` knows which). Like `KVPages` it is
    immutable.
    """

    latent: Float[Array, "num_pages page_size 1 L+rope"]
    reconstructed: KVPages | None = None  # of other pages, fewer of them

    @property
    def key(self) -> Float[Array, "num_pages page_size 1 L+rope"]:
        """The pages as keys."""
        return self.latent

    @property
    def value(self) -> None:
        """None: values have no pages of their own, as `forest_attention` takes it."""
        return None

    @property
    def quantisation(self) -> None:
        """None: no dtype of one byte a number is served."""
        return None

    @classmethod
    def zeros(cls, num_pages: int, page_size: int, size: int, dtype: DTypeLike = jnp.bfloat16) -> LatentPages:
        """Return empty pages.

        Args:
          num_pages: pages of the pool.
          page_size: tokens in a page, as in the forest.
          size: L + rope, numbers of a token.
          dtype: float32, bfloat16 or float16; rows are rounded to it when they are written.

        Raises ValueError for another dtype.

        >>> from codec_jax import LatentPages
        >>> LatentPages.zeros(num_pages=4, page_size=16, size=512 + 64).latent.shape
        (4, 16, 1, 576)
        """
        checks.float_dtype("dtype", dtype)
        return cls(jnp.zeros((num_pages, page_size, 1, size), dtype))

    def write(self, slots: Int[Array, "B T"], rows: Float[Array, "B T 1 L+rope"]) -> LatentPages:
        """Store one row per token slot. Jittable; with donated pages the update is in place.

        Entries that are not finite in the pages' dtype are stored as 0, as those of V are by `KVPages.write`.

        Args:
          slots: [B, T], token slots (page * page_size + offset) from `Forest.slots`; rows for slots out of bounds
            (`NO_SLOT`, or negative) are dropped.
          rows: [B, T, 1, L + rope], each token's latent after its normalisation, then its rotated key; any float dtype.

        Raises ValueError unless slots are integers and there is one row for each.

        >>> from codec_jax import LatentPages
        >>> pages = LatentPages.zeros(num_pages=4, page_size=16, size=48, dtype=jnp.float32)
        >>> float(pages.write(np.array([[17]]), jnp.ones((1, 1, 1, 48))).latent[1, 1].sum())
        48.0
        """
        rows = finite(jnp.asarray(rows), self.latent.dtype)
        return replace(self, latent=stored("rows", self.latent, in_bounds("slots", slots), rows))

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
        return replace(self, latent=copied(self.latent, *both_in_bounds(source, target)))


#: Of one layer of a decoder.
Pages = KVPages | LatentPages
