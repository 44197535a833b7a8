"""PAC and POR in plain jnp: the paper's equations, readable, for any device.

PAC (partial attention computation, paper section 4) is attention of some query rows over some KV tokens, normalised
by its own softmax sum. POR (partial output reduction) merges two such results over disjoint tokens into the result
over their union. POR is associative and commutative, so partials may be merged in any order and in parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """Attention of rows over some of their tokens, float32. Rows that saw no token have max = -inf, the rest 0."""

    out: Float[Array, "*rows H"]  # normalised by `sum`
    max: Float[Array, "*rows"]  # greatest score, scaled and capped; of some kernels a number a little below it
    sum: Float[Array, "*rows"]  # sum of exp(score - max)

    @classmethod
    def empty(cls, rows: tuple[int, ...], head_dim: int) -> Partial:
        """Return the neutral element of `por`: rows that saw no token.

        Args:
          rows: shape of the rows.
          head_dim: H, numbers of a head.

        >>> from codec_jax.partial import Partial
        >>> Partial.empty((2,), 64).out.shape
        (2, 64)
        """
        nothing = jnp.zeros(rows, jnp.float32)
        return cls(jnp.zeros((*rows, head_dim), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32), nothing)


def pac(
    query: Float[Array, "*batch R H"],
    key: Float[Array, "*batch S H"],
    value: Float[Array, "*batch S H"],
    mask: Bool[Array, "*batch R S"],
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Partial attention of R query rows over S tokens.

    Args:
      query: [..., R, H], in any float dtype; products, softmax and result are float32.
      key: [..., S, H].
      value: [..., S, H].
      mask: [..., R, S], true where a row sees a token.
      scale: factor on the scores.
      softcap: bound on the scaled scores s, which become softcap * tanh(s / softcap); None leaves them.

    >>> from codec_jax.partial import pac
    >>> pac(jnp.ones((2, 4)), jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones((2, 3), bool), scale=0.5).sum.tolist()
    [3.0, 3.0]

    Source: CoDec, section 4, equation of PAC (doi 10.1145/3802028).
    """
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    scores = jnp.einsum("...rh,...sh->...rs", query, key, precision=_HIGHEST) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask, scores, -jnp.inf)
    row_max = scores.max(axis=-1)
    weights = jnp.exp(scores - _finite(row_max)[..., None])
    row_sum = weights.sum(axis=-1)
    out = jnp.einsum("...rs,...sh->...rh", weights, value, precision=_HIGHEST)
    return Partial(_divide(out, row_sum), row_max, row_sum)


def por(left: Partial, right: Partial) -> Partial:
    """Merge two partials of the same rows over disjoint tokens.

    Args:
      left: one of them.
      right: the other.

    >>> from codec_jax.partial import Partial, pac, por
    >>> rows = jnp.ones((2, 4))
    >>> part = pac(rows, rows, rows, jnp.ones((2, 2), bool), scale=0.5)
    >>> por(part, Partial.empty((2,), 4)).sum.tolist()  # the neutral element changes nothing
    [2.0, 2.0]

    Source: CoDec, section 4, equation of POR.
    """
    row_max = jnp.maximum(left.max, right.max)
    left_sum = left.sum * jnp.exp(left.max - _finite(row_max))
    right_sum = right.sum * jnp.exp(right.max - _finite(row_max))
    row_sum = left_sum + right_sum
    # Shares first: of a partial beside the neutral element it is 1, so that not a bit of it changes.
    left_out, right_out = (
        partial.out * _divide(partial_sum[..., None], row_sum)
        for partial, partial_sum in ((left, left_sum), (right, right_sum))
    )
    return Partial(left_out + right_out, row_max, row_sum)


def por_segments(partials: Partial, stream: Int[Array, " segments"], num_streams: int) -> Partial:
    """Merge the partials of each stream: POR over any number of segments at once, in parallel.

    Args:
      partials: [segments, ...].
      stream: [segments], the stream of each segment; those of num_streams or more are left out.
      num_streams: streams to return.

    >>> from codec_jax.partial import Partial, por_segments
    >>> por_segments(Partial.empty((5, 2), 4), jnp.array([0, 0, 1, 1, 2]), num_streams=3).out.shape
    (3, 2, 4)
    """
    row_max = jax.ops.segment_max(partials.max, stream, num_streams)
    shared = row_max.at[stream].get(mode="fill", fill_value=-jnp.inf)
    sums = partials.sum * jnp.exp(partials.max - _finite(shared))
    row_sum = jax.ops.segment_sum(sums, stream, num_streams)
    out = jax.ops.segment_sum(partials.out * sums[..., None], stream, num_streams)
    return Partial(_divide(out, row_sum), row_max, row_sum)


def add_sinks(
    out: Float[Array, "B T N V"],
    residuals: tuple[Float[Array, "B T N"], Float[Array, "B T N"]],
    sinks: Float[Array, " N"],
) -> tuple[Float[Array, "B T N V"], tuple[Float[Array, "B T N"], Float[Array, "B T N"]]]:
    """Add the attention sink of each q head, one more logit in the softmax that no value belongs to.

    It is POR with a constant partial, so it is added once, after all others are merged.

    Args:
      out: [B, T, N, V], attention normalised by its own sum.
      residuals: row maximum and row sum, float32 [B, T, N] each.
      sinks: [N], logits as they are: neither scaled nor capped.

    Returns the same with the sinks in. A row that saw no token has out 0, its sink for a maximum, and sum 1.

    >>> from codec_jax.partial import add_sinks
    >>> rows = jnp.ones((2, 1, 8))
    >>> out, (row_max, row_sum) = add_sinks(jnp.ones((2, 1, 8, 64)), (rows, rows), jnp.ones(8))
    >>> row_sum[0, 0, 0].item(), out[0, 0, 0, 0].item()
    (2.0, 0.5)

    Source: StreamingLLM, section 3 (arXiv 2309.17453), as GPT-OSS has it; CoDec, section 4, equation of POR.
    """
    logit = jnp.broadcast_to(sinks.astype(jnp.float32), residuals[0].shape)
    sink = Partial(jnp.zeros(out.shape, jnp.float32), logit, jnp.ones_like(logit))
    merged = por(Partial(out.astype(jnp.float32), *residuals), sink)
    return merged.out.astype(out.dtype), (merged.max, merged.sum)


def _finite(row_max: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Replace the -inf of rows that saw nothing by 0, so that exp(-inf - 0) = 0 rather than exp(-inf + inf) = NaN."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def _divide(out: Float[Array, "*rows H"], row_sum: Float[Array, "*rows"]) -> Float[Array, "*rows H"]:
    """Normalise; rows that saw nothing stay 0."""
    return out / jnp.where(row_sum == 0.0, 1.0, row_sum)[..., None]
