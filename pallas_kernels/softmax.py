"""Numbers of an online softmax in units of log2, and the cap of scores before it; for the kernels of every family."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30  # the score of a token that a row does not see
#: The maximum of a row is at least this: exp2(MASK_VALUE - MIN_ROW_MAX) is 0, not 1.
MIN_ROW_MAX = -1e20
#: tanh x is 1 - 2 / (1 + e^2x), and e^2x is 2 to the power of this times x.
TANH_TO_POWER = 2.0 * math.log2(math.e)


class TanhTerms(NamedTuple):
    """A polynomial of tanh(x) / x in x^2; it is right but for 2.8e-6 of tanh, for x up to a bound."""

    bound: float
    terms: tuple[float, ...]


FEW_TERMS = TanhTerms(0.35, (0.99999713, -0.33290954, 0.12395031))
MORE_TERMS = TanhTerms(1.0, (0.999968469, -0.332658231, 0.129220662, -0.0432998543, 0.00836588183))


def tanh(x: jax.Array) -> jax.Array:
    """Return tanh, but for 1e-6: what the hardware has for it is good for 11 bits."""
    return 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(x * TANH_TO_POWER)))


def tanh_over(products: jax.Array, factor: float, polynomial: TanhTerms, scale: float = 1.0) -> jax.Array:
    """Return what makes `scale` times tanh of products times `factor`, when products are multiplied by it.

    By products, of which the hardware makes eight in the time of one power. Right where products times `factor` are
    within the polynomial's bound.
    """
    terms = [scale * factor * term for term in polynomial.terms]
    if 2.0**-12 < factor < 2.0**12:  # powers of other factors may be no float32
        terms = [term * factor ** (2 * i) for i, term in enumerate(terms)]
    else:
        products = products * factor
    square = products * products
    total = square * terms[-1] + terms[-2]
    for term in reversed(terms[:-2]):
        total = total * square + term
    return total
