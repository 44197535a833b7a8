"""A query as terms of 8 bits, for keys of one byte a number: products of 8 bits take half the time of others.

    tile of the query, 16 bits [64, H] ─► registers of the preparing warpgroup ─► a factor of each row
                          64 columns, again ─► registers ─► two terms [64, 64], in their place

The first term has the 4 leading bits of a number, the second one those of what is left: together the 8 bits of
bfloat16. Both products take what one of 16 bits does, and no key is converted. A row's power of two brings its largest
number to the upper end of what 8 bits hold; its factor takes that back, and the scale of the keys with it.

    barrier      one for each   arrives, how often              waits
    query_ready  query buffer   preparer, when terms are there  both lanes, before the segment's scores

The preparer alone waits for the copies of the tile.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.family import Call
from pallas_kernels.hopper.pac_pipeline import Sizes
from pallas_kernels.hopper.tiling import TERM
from pallas_kernels.packing import TILE_ROWS

#: The largest number of a row is brought to 2^7 or more, and below 2^8.
_LARGEST_EXPONENT = 7
#: Of float32: where the exponent begins, and that of 1.
_SHIFT, _BIAS = 23, 127
_EXPONENT = 0xFF << _SHIFT
#: What rows of smaller numbers, and of zeros, count as: times their factor, scores of hidden tokens stay the lowest.
_LEAST = _BIAS - 20
#: Bits of float32 that a term does not have.
_REST = 20


def inputs_of(call: Call) -> dict[str, jax.Array]:
    """Return the factors on the keys of each kv head, [K], if there are any."""
    return {} if call.key_scale is None else {"key_scale": call.key_scale.astype(jnp.float32)}


def scratch(sizes: Sizes) -> dict[str, Any]:
    """Describe shared memory and barriers of the terms."""
    return {
        "row_scale": plgpu.SMEM((sizes.query_buffers, TILE_ROWS), jnp.float32),
        "query_ready": plgpu.Barrier(num_barriers=sizes.query_buffers),
    }


def largest_of_rows(part: jax.Array) -> jax.Array:
    """Return the largest magnitude of each row [rows] in a part of the columns, [rows, columns]."""
    numbers = part.astype(jnp.float32)
    return jnp.maximum(numbers, -numbers).max(axis=1)


def powers_of_rows(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return powers of two [rows] that the sum of a row's terms is multiplied by, and that its numbers are before.

    Both from the largest magnitude of each row. The first one of a row that has a number that is not finite is NaN.
    """
    exponent = _bits(largest) & _EXPONENT
    bounded = jnp.maximum(exponent, _LEAST << _SHIFT)
    up = _float((2 * _BIAS << _SHIFT) - bounded + (_LARGEST_EXPONENT << _SHIFT))
    down = _float(bounded - (_LARGEST_EXPONENT << _SHIFT))
    return jnp.where(exponent == _EXPONENT, jnp.nan, down), up


def terms_of(part: jax.Array, up: jax.Array, layout: Any = None) -> tuple[jax.Array, jax.Array]:
    """Return first and second terms of a part of the columns, [rows, columns]: together its numbers, in 8 bits.

    `layout` is that of the part, in registers of a GPU.
    """
    numbers = part.astype(jnp.float32) * _over_columns(up, part.shape, layout)
    bits = _bits(numbers)
    # Rounded to even by hand, as compilers leave out conversions there and back.
    rounded = bits + ((1 << _REST - 1) - 1) + ((bits >> _REST) & 1)
    first = _float(rounded & -(1 << _REST))
    return first.astype(TERM), (numbers - first).astype(TERM)


def _bits(numbers: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(numbers, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _over_columns(rows: jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    repeated = lax.broadcast_in_dim(rows, shape, [0])
    return repeated if layout is None else plgpu.layout_cast(repeated, layout)
