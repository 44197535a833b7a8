"""Numbers of an online softmax in units of log2, and the cap of scores before it; for the kernels of every family."""

import math

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30  # the score of a token that a row does not see
#: The maximum of a row is at least this: exp2(MASK_VALUE - MIN_ROW_MAX) is 0, not 1.
MIN_ROW_MAX = -1e20


def tanh(x: jax.Array) -> jax.Array:
    """Return tanh, but for 1e-6: 1 - 2 / (1 + e^2x), as what the hardware has for tanh itself is good for 11 bits."""
    return 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(x * (2.0 * math.log2(math.e)))))  # a reciprocal is one instruction
