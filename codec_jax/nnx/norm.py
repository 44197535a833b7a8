"""Root mean square normalisation, in orders of operations that XLA makes few kernels of."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Divide each vector by its root mean square and multiply it with learned factors."""

    def __init__(self, size: int, epsilon: float, param_dtype: DTypeLike) -> None:
        """Create factors of 1."""
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(size, param_dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalise the last axis; float32 inside, the dtype of x outside."""
        exact = x.astype(jnp.float32)
        # The vector first: a reduction whose result goes to nothing but the vector itself is one kernel on a GPU. With
        # the factors first, as in `nnx.RMSNorm`, it is two.
        normed = exact * reciprocal_root_mean_square(exact, self.epsilon)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), range(x.ndim - 1))
        return (normed * scale).astype(x.dtype)


def reciprocal_root_mean_square(x: Float[Array, "*batch D"], epsilon: float) -> Float[Array, "*batch 1"]:
    """Return 1 / sqrt(mean of squares + epsilon) along the last axis; the dtype of x."""
    return lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
