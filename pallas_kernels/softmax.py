"""Numbers of an online softmax in units of log2, and the cap of scores before it; for the kernels of every family."""

import math

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30  # the score of a token that a row does not see
#: The maximum of a row is at least this: exp2(MASK_VALUE - MIN_ROW_MAX) is 0, not 1.
MIN_ROW_MAX = -1e20
#: tanh x is 1 - 2 / (1 + e^2x), and e^2x is 2 to the power of this times x.
TANH_TO_POWER = 2.0 * math.log2(math.e)
#: Of tanh(x) / x by powers of x^2, for x up to 1: right but for 2.8e-6 of tanh.
_TANH_TERMS = (0.999968469, -0.332658231, 0.129220662, -0.0432998543, 0.00836588183)


def tanh(x: jax.Array) -> jax.Array:
    """Return tanh, but for 1e-6: what the hardware has for it is good for 11 bits."""
    return 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(x * TANH_TO_POWER)))


def scaled_tanh_below_1(products: jax.Array, factor: float, scale: float) -> jax.Array:
    """Return `scale` times tanh of products times `factor`, but for 2.8e-6 of it, where that is within [-1, 1].

    By products, of which the hardware makes eight in the time of one power.
    """
    if not 2.0**-12 < factor < 2.0**12:  # powers of other factors may be no float32
        products, factor = products * factor, 1.0
    square = products * products
    terms = [scale * factor ** (2 * i + 1) * term for i, term in enumerate(_TANH_TERMS)]
    total = square * terms[-1] + terms[-2]
    for term in reversed(terms[:-2]):
        total = total * square + term
    return products * total
