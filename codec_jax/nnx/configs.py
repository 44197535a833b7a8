"""Sizes of published models, and random weights for them: what measuring needs, without a download."""

from __future__ import annotations

import zlib
from functools import partial
from typing import overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from codec_jax.nnx.decoder import Decoder, DecoderConfig
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.rope import Llama3Scaling
from codec_jax.nnx.shards import Cut, PlacedDecoder, check_sizes, divided
from codec_jax.nnx.weights import filled, parameter_shapes

_qwen3 = partial(DecoderConfig, 151_936, num_kv_heads=8, head_dim=128, rope_theta=1e6)
_llama3 = partial(DecoderConfig, 128_256, num_kv_heads=8, rope_theta=5e5, norm_epsilon=1e-5, qk_norm=False)
_llama31 = partial(_llama3, head_dim=128, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), tied_embeddings=False)

#: Name -> configuration. Order of sizes: hidden_size, mlp_size, num_layers, num_q_heads.
PUBLISHED: dict[str, DecoderConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied_embeddings=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, tied_embeddings=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    "llama-3.1-8b": _llama31(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama31(8192, 28_672, 80, 64),
}


@overload
def random_decoder(config: DecoderConfig, seed: int = 0, *, mesh: None = None, progress: bool = False) -> Decoder: ...


@overload
def random_decoder(config: DecoderConfig, seed: int = 0, *, mesh: Mesh, progress: bool = False) -> PlacedDecoder: ...


def random_decoder(
    config: DecoderConfig, seed: int = 0, *, mesh: Mesh | None = None, progress: bool = False
) -> Decoder | PlacedDecoder:
    """Make a decoder whose weights are drawn on the device: norms are 1, matrices normal with a deviation of 0.02.

    Args:
      config: sizes, such as those in `PUBLISHED`.
      seed: the same seed draws the same weights.
      mesh: devices along axes "context" and "tensor", each of which keeps its part; no device holds them all.
      progress: show a bar.

    Raises ValueError for a mesh that does not divide the decoder.

    >>> from codec_jax.nnx import random_decoder
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> random_decoder(config).embedding.embedding.shape
    (64, 32)
    """
    parallel = Parallel.of(mesh)
    check_sizes(config, parallel)

    def weight(path: str, parameter: jax.ShapeDtypeStruct) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        whole = _draw(key, parameter.shape, config.param_dtype)
        return whole if mesh is None else divided(mesh, Cut.of(config, parallel, path, parameter.shape), whole)

    graph, weights = filled(config, weight, progress=progress)
    if mesh is None:
        return nnx.merge(graph, weights)
    return PlacedDecoder(graph, weights, config, mesh, parameter_shapes(config))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)
