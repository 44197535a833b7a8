"""Rows that nobody has added up yet, which the kernel that needs their sums does: of a product, or of experts."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Parts(NamedTuple):
    """A product in parts, or whole, and what is added to it; `Attention.decode` may return one on a Hopper GPU.

    >>> from codec_jax.nnx import Parts
    >>> Parts(jnp.ones((2, 3, 1, 4))).parts.sum(axis=0).shape
    (3, 1, 4)
    """

    parts: Float[Array, "S *rows N"]  # float32; a whole product may have 16 bits
    bias: Float[Array, " N"] | None = None


class Shares(NamedTuple):
    """What the experts of each token made of it, in rows by themselves."""

    made: Float[Array, "R N"]  # those that no token has may be anything
    place: Int[Array, "rows chosen"]  # the rows of a token; R for one that is on another device
    share: Float[Array, "rows chosen"]  # of each in the sum, float32; NaN shows whether its row is here or not
