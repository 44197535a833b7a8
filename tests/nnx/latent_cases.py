"""A decoder with latent attention and the mixture of DeepSeek-V3, for the tests of both."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import VOCAB
from flax import nnx
from jax.sharding import Mesh

from codec_jax.nnx import Decoder, DecoderConfig, Latent, Mixture, YarnScaling

#: Latents so large that K and V of the heads, of which there are few, are worth it for two readers.
LATENT = Latent(size=136, nope_dim=12, rope_dim=8, value_dim=10, query_size=20)
MIXTURE = Mixture(
    6, 3, 24, first_layer=1, shared_size=40, sigmoid=True, groups=3, groups_per_token=2, weight_scale=1.7
)  # fmt: skip
CONFIG = DecoderConfig(
    VOCAB, 32, 48, num_layers=2, num_q_heads=4, num_kv_heads=1, head_dim=144, rope_theta=100.0, qk_norm=False,
    rope_scaling=YarnScaling(4.0, 40, 1.1, 4.0), scale=0.4, tied_embeddings=False, latent=LATENT, mixture=MIXTURE,
    dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip


def sharp(config: DecoderConfig, seed: int = 0) -> Decoder:
    """Weights with sharp attention and texts that do not repeat, in which norms and biases count."""
    graph, weights = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(x: jax.Array) -> jax.Array:
        fan = x.shape[0] if x.ndim == 3 and x.shape[0] == LATENT.size else x.shape[-2] if x.ndim > 1 else 1
        wide = rng.normal(size=x.shape) * 2 * fan**-0.5 if x.ndim > 1 else rng.uniform(0.3, 1.0, x.shape)
        return jnp.asarray(wide, x.dtype)

    return nnx.merge(graph, jax.tree.map(draw, weights))


def mesh_of(context: int, tensor: int) -> Mesh:
    return jax.make_mesh((context, tensor), ("context", "tensor"), devices=jax.devices("cpu")[: context * tensor])
