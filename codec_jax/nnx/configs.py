"""Sizes of published models, and random weights for them: what measuring needs, without a download."""

from __future__ import annotations

import zlib
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from codec_jax.nnx.decoder import Decoder, DecoderConfig
from codec_jax.nnx.rope import Llama3Scaling
from codec_jax.nnx.weights import filled_decoder

_qwen3 = partial(DecoderConfig, 151_936, num_kv_heads=8, head_dim=128, rope_theta=1e6)
_llama3 = partial(DecoderConfig, 128_256, num_kv_heads=8, rope_theta=5e5, norm_epsilon=1e-5, qk_norm=False)

#: Name -> configuration. Order of sizes: hidden_size, mlp_size, num_layers, num_q_heads.
PUBLISHED: dict[str, DecoderConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied_embeddings=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    "llama-3.1-8b": _llama3(
        4096, 14_336, 32, 32, head_dim=128, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), tied_embeddings=False
    ),
}


def random_decoder(config: DecoderConfig, seed: int = 0, *, progress: bool = False) -> Decoder:
    """Make a decoder whose weights are drawn on the device: norms are 1, matrices normal with a deviation of 0.02.

    Args:
      config: sizes, such as those in `PUBLISHED`.
      seed: the same seed draws the same weights.
      progress: show a bar.

    >>> from codec_jax.nnx import random_decoder
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> random_decoder(config).embedding.embedding.shape
    (64, 32)
    """

    def weight(path: str, parameter: jax.ShapeDtypeStruct) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        return _draw(key, parameter.shape, config.param_dtype)

    return filled_decoder(config, weight, progress=progress)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)
