"""The part of a block that maps each token by itself, where it is no mixture of experts."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.parts import multiply
from pallas_kernels.addends import Parts
from pallas_kernels.gates import gated


def linear(config: DecoderConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, bias: bool = False) -> nnx.Linear:
    """Return a product with weights in the dtypes of the config."""
    return nnx.Linear(inputs, outputs, use_bias=bias, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)


class MLP(nnx.Module):
    """A gated MLP, such as SwiGLU."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, size: int | None = None) -> None:
        """Create the two projections, of another size than the config's if one is given."""
        self.config, size = config, config.mlp_size if size is None else size
        self.gate_up = linear(config, config.hidden_size, 2 * size, rngs)
        self.down = linear(config, size, config.hidden_size, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Map each token by itself."""
        return self.down(self._gated(x))

    def decode(self, x: Float[Array, "B T D"], parallel: Parallel = ALONE) -> Float[Array, "B T D"] | Parts:
        """Map each token by itself; of several devices each has a share, which add up to what all columns give."""
        return multiply(self.config, parallel, self.down, self._gated(x))

    def _gated(self, x: Float[Array, "B T D"]) -> Float[Array, "B T M"]:
        return gated(self.config.activation, *jnp.split(self.gate_up(x), 2, axis=-1))
