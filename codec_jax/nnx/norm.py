"""Root mean square normalisation, in orders of operations that XLA makes few kernels of."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from codec_jax.nnx.decoder_config import DecoderConfig


class RMSNorm(nnx.Module):
    """Divide each vector by its root mean square and multiply it with learned factors."""

    def __init__(self, size: int, config: DecoderConfig) -> None:
        """Create factors of 1."""
        self.epsilon, self.plus_one = config.norm_epsilon, config.norm_plus_one
        self.scale = nnx.Param((jnp.zeros if self.plus_one else jnp.ones)(size, config.param_dtype))

    @property
    def factors(self) -> Float[Array, " D"]:
        """Return the factors, float32."""
        scale = self.scale[...].astype(jnp.float32)
        return 1.0 + scale if self.plus_one else scale

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalise the last axis; float32 inside, the dtype of x outside."""
        exact = x.astype(jnp.float32)
        # The vector first: a reduction whose result goes to nothing but the vector itself is one kernel on a GPU. With
        # the factors first, as in `nnx.RMSNorm`, it is two.
        normed = exact * reciprocal_root_mean_square(exact, self.epsilon)
        return (normed * jnp.expand_dims(self.factors, range(x.ndim - 1))).astype(x.dtype)


def reciprocal_root_mean_square(x: Float[Array, "*batch D"], epsilon: float) -> Float[Array, "*batch 1"]:
    """Return 1 / sqrt(mean of squares + epsilon) along the last axis; the dtype of x."""
    return lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
