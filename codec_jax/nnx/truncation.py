"""top-k, top-p and min-p without sorting: the least likely token that stays is found bit by bit.

Every bound is the greatest number such that what is not below it still has a wanted weight: k tokens, or p of the
probability. Two bits of it are found in a pass over the vocabulary. XLA cannot capture a sort in a CUDA graph, so that
the host would have to wait for the device in every step that holds one.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


class _Order(NamedTuple):
    """How tokens rank: by the score, and where scores are equal by the number of the token, the lower one first."""

    score: UInt32[Array, "B V"]  # in the order of the scores
    place: UInt32[Array, "1 V"]  # the greater, the lower the number of the token

    @classmethod
    def of(cls, scores: Float[Array, "B V"]) -> "_Order":
        bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)  # -0 is 0
        # Of negative numbers a greater one has smaller bits.
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ np.int32(-(2**31))
        place = np.arange(scores.shape[1], dtype=np.uint32)[None, ::-1]
        return cls(lax.bitcast_convert_type(ordered, jnp.uint32), jnp.asarray(place))

    def first(self, weights: Float[Array, "B V"], wanted: Float[Array, "B 1"]) -> Bool[Array, "B V"]:
        """Select the first tokens that together have the wanted weight; all, where all have less."""
        bound = _greatest_bound(self.score, weights, wanted, bits=32)
        above, equal = self.score > bound, self.score == bound
        missing, among = wanted - _sum(weights, above), jnp.where(equal, weights, 0.0)
        bits = max(self.place.shape[1] - 1, 1).bit_length()
        return above | (equal & (self.place >= _greatest_bound(self.place, among, missing, bits)))


def truncate(
    scores: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"], min_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Set all but the most likely tokens of each row to -inf; the most likely one always stays. Jittable.

    Args:
      scores: float32 [B, V], logits after temperature.
      top_k: int32 [B], tokens that stay; V for no limit.
      top_p: float32 [B], the part of their probability that the first ones of these must reach; 1 for no limit.
      min_p: float32 [B], the least probability, as a part of the greatest one; 0 for no limit.
    """
    top_k, top_p, min_p = (x[:, None] for x in (top_k, top_p, min_p))
    order, shifted = _Order.of(scores), scores - scores.max(axis=-1, keepdims=True)
    kept = order.first(jnp.ones_like(scores), top_k.astype(jnp.float32))
    weights = jnp.where(kept, jnp.exp(shifted), 0.0)
    # Of a weight of 0 no token would be the one that reaches it.
    wanted = jnp.maximum(top_p * weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    # A rounded sum may reach 1 early: no limit means no limit.
    kept &= (top_p >= 1.0) | order.first(weights, wanted)
    return jnp.where(kept & (shifted >= jnp.log(min_p)), scores, -jnp.inf)


# It is asked for several times: a jitted function is traced once for all.
@partial(jax.jit, static_argnames="bits")
def _greatest_bound(
    keys: UInt32[Array, "B V"], weights: Float[Array, "B V"], wanted: Float[Array, "B 1"], bits: int
) -> UInt32[Array, "B 1"]:
    """Return the greatest number such that keys that are not below it have the wanted weight; 0 where all have less."""

    def find(state: tuple, keys: Array, weights: Array, wanted: Array) -> tuple[Array, Array]:
        bound, unit = state
        # Three sums in one pass. They fall, so that the number of those that reach is the digit.
        tried = (bound | (jnp.uint32(digit) * unit) for digit in (1, 2, 3))
        sums = _row_sums(tuple(jnp.where(keys >= each, weights, 0.0) for each in tried))
        reached = sum((each >= wanted).astype(jnp.uint32) for each in sums)
        return bound | (reached * unit), unit >> 2

    def start(wanted: Array) -> tuple[Array, Array]:
        return jnp.zeros_like(wanted, jnp.uint32), jnp.full_like(wanted, 4 ** (rounds - 1), jnp.uint32)

    def unrolled(keys: Array, weights: Array, wanted: Array) -> UInt32[Array, "B 1"]:
        state, keys, wanted = lax.optimization_barrier((start(wanted), keys, wanted))
        for _ in range(rounds):
            # Barriers, and the unit of the digit in an array: all rounds have the same kernels, compiled once.
            state = lax.optimization_barrier(find(state, keys, weights, wanted))
        return state[0]

    def looped(keys: Array, weights: Array, wanted: Array) -> UInt32[Array, "B 1"]:
        return lax.fori_loop(0, rounds, lambda _, state: find(state, keys, weights, wanted), start(wanted))[0]

    rounds = -(-bits // 2)
    # A loop inside of a branch keeps that out of CUDA graphs; elsewhere it saves seconds of compilation.
    return lax.platform_dependent(keys, weights, wanted, cuda=unrolled, default=looped)


def _sum(weights: Float[Array, "B V"], chosen: Bool[Array, "B V"]) -> Float[Array, "B 1"]:
    return jnp.where(chosen, weights, 0.0).sum(axis=-1, keepdims=True)


def _row_sums(terms: tuple[Float[Array, "B V"], ...]) -> list[Float[Array, "B 1"]]:
    """Return the sums of several arrays by one reduction: XLA needs as many kernels for it as for one array."""

    def add(some: tuple, others: tuple) -> tuple:
        return tuple(a + b for a, b in zip(some, others, strict=True))

    return [each[:, None] for each in lax.reduce(terms, (np.float32(0.0),) * len(terms), add, (1,))]
