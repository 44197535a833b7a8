"""POR across devices: each has partials of the same rows over its own pages, and one exchange merges them.

    merge_everywhere   all to everyone: each device gets all heads, for whoever needs them
    merge_heads        each device gets its part of the heads, as the product after attention wants them, and so a
                       part of the bytes

Output, row maximum and row sum travel as one array of integers: collectives may convert floating-point numbers on their
way, and these are bits. An exchange is by XLA's collectives. NaN of one device, whose plan did not hold, becomes
everyone's. The merge is the paper's POR (section 4; doi 10.1145/3802028), which it leaves open across devices.
"""

from __future__ import annotations

from functools import reduce

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from codec_jax.attention.pac_por import Partial, por

Merged = tuple[Float[Array, "B T n V"], Float[Array, "B T n"], Float[Array, "B T n"]]


def merge_everywhere(
    out: Float[Array, "B T n V"], row_max: Float[Array, "B T n"], row_sum: Float[Array, "B T n"], axis: str
) -> Merged:
    """Merge the partials of all devices along a mesh axis; the result is the same on all. Inside `jax.shard_map`.

    Args:
      out: [B, T, n, V], attention over the tokens of this device, normalised by its own sum.
      row_max: [B, T, n], greatest scaled score, float32; -inf for rows that see no token here.
      row_sum: [B, T, n], sum of the exponentials, float32.
      axis: name of the mesh axis.

    Returns output, maximum and sum over the tokens of all devices.

    >>> from codec_jax.partial import merge_everywhere
    >>> mesh = jax.make_mesh((1,), ("context",))
    >>> merge = jax.shard_map(
    ...     lambda *partial: merge_everywhere(*partial, "context"),
    ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
    ... )
    >>> rows = jnp.ones((2, 1, 8))
    >>> merge(jnp.ones((2, 1, 8, 64)), rows, rows)[0].shape
    (2, 1, 8, 64)

    Source: CoDec, section 4, equation of POR (doi 10.1145/3802028).
    """
    return _merge(lax.all_gather(_packed(out, row_max, row_sum), axis, to="invarying"), out)


def merge_heads(
    out: Float[Array, "B T n V"], row_max: Float[Array, "B T n"], row_sum: Float[Array, "B T n"], axis: str
) -> Merged:
    """Merge the partials of all devices along a mesh axis; each gets an equal part of the heads, in their order.

    Args:
      out, row_max, row_sum, axis: as in `merge_everywhere`; the axis has C devices, and C divides n.

    Returns output [B, T, n / C, V], maximum and sum [B, T, n / C]. Raises ValueError if C does not divide n.

    >>> from codec_jax.partial import merge_heads
    >>> mesh = jax.make_mesh((1,), ("context",))
    >>> merge = jax.shard_map(
    ...     lambda *partial: merge_heads(*partial, "context"),
    ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P(None, None, "context"),
    ... )
    >>> rows = jnp.ones((2, 1, 8))
    >>> merge(jnp.ones((2, 1, 8, 64)), rows, rows)[0].shape
    (2, 1, 8, 64)

    Source: CoDec, section 4, equation of POR.
    """
    devices, heads = lax.axis_size(axis), out.shape[2]
    if heads % devices:
        raise ValueError(
            f"out: expected a number of heads that the {devices} devices of axis {axis!r} divide, got {heads}; "
            "use merge_everywhere, or fewer devices"
        )
    packed = _packed(out, row_max, row_sum)
    by_device = packed.reshape(*packed.shape[:2], devices, heads // devices, -1)
    return _merge(lax.all_to_all(by_device, axis, split_axis=2, concat_axis=0), out)


def _packed(
    out: Float[Array, "B T n V"], row_max: Float[Array, "B T n"], row_sum: Float[Array, "B T n"]
) -> Int[Array, "B T n X"]:
    """Return the bits of a partial, in integers as wide as the numbers of `out`."""
    bits = jnp.dtype(f"uint{8 * out.dtype.itemsize}")
    rest = lax.bitcast_convert_type(jnp.stack([row_max, row_sum], axis=-1), bits)  # one more axis if narrower
    return jnp.concatenate([lax.bitcast_convert_type(out, bits), rest.reshape(*out.shape[:-1], -1)], axis=-1)


def _merge(packed: Int[Array, "devices B T n X"], like: Float[Array, "B T N V"]) -> Merged:
    """Merge the partials that came from all devices, in the order of the devices."""
    value_dim, shape = like.shape[-1], packed.shape[:-1]
    out = lax.bitcast_convert_type(packed[..., :value_dim], like.dtype).astype(jnp.float32)
    rest = packed[..., value_dim:].reshape(*shape, 2, -1)
    rest = lax.bitcast_convert_type(rest[..., 0] if rest.shape[-1] == 1 else rest, jnp.float32)
    partials = (Partial(out[i], rest[i, ..., 0], rest[i, ..., 1]) for i in range(packed.shape[0]))
    merged = reduce(por, partials)
    return merged.out.astype(like.dtype), merged.max, merged.sum
