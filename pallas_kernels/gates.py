"""How one half of an MLP's numbers decides what becomes of the other half; for XLA and for kernels."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

#: What becomes of gate and up: silu(gate) up, or with the tanh form of gelu; or both clamped, as in gpt-oss.
Activation = Literal["silu", "gelu_tanh", "clamped"]
#: Of gpt-oss: the sigmoid's slope, and the bound of gate and up.
_SLOPE, _LIMIT = 1.702, 7.0
#: Of gelu's tanh form: 1 + tanh(u) is 2 sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
_LINEAR, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return up times what the gate lets through.

    Args:
      activation: which gate.
      gate: any shape.
      up: of the same shape.
    """
    match activation:
        case "silu":
            return gate * lax.logistic(gate) * up
        case "gelu_tanh":
            return gate * lax.logistic(_LINEAR * (gate + _CUBIC * gate * gate * gate)) * up
        case "clamped":
            gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
            return gate * lax.logistic(_SLOPE * gate) * (up + 1)
