"""Numbers of an online softmax in units of log2, and the cap of scores before it; for the kernels of every family."""

import math

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30  # the score of a token that a row does not see
#: The maximum of a row is at least this: exp2(MASK_VALUE - MIN_ROW_MAX) is 0, not 1.
MIN_ROW_MAX = -1e20
#: tanh x is 1 - 2 / (1 + e^2x), and e^2x is 2 to the power of this times x.
TANH_TO_POWER = 2.0 * math.log2(math.e)


def tanh(x: jax.Array) -> jax.Array:
    """Return tanh, but for 1e-6: what the hardware has for it is good for 11 bits."""
    return 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(x * TANH_TO_POWER)))
