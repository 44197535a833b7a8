"""Sizes of published models, and random weights for them: what measuring needs, without a download."""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig, Mixture
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.rope import LinearScaling, Llama3Scaling, YarnScaling
from codec_jax.nnx.shards import Cut, PlacedDecoder, check_sizes, divided
from codec_jax.nnx.weights import filled, parameter_shapes
from pallas_kernels import Window

_qwen3 = partial(DecoderConfig, 151_936, num_kv_heads=8, head_dim=128, rope_theta=1e6)
_llama3 = partial(DecoderConfig, 128_256, num_kv_heads=8, rope_theta=5e5, norm_epsilon=1e-5, qk_norm=False)
_llama31 = partial(_llama3, head_dim=128, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), tied_embeddings=False)
_gemma3 = partial(
    DecoderConfig, 262_208, rope_theta=1e6, rope_scaling=LinearScaling(8.0), window_rope_theta=1e4,
    windows=(Window(1024),) * 5 + (None,), norm_placement="both", norm_plus_one=True, activation="gelu_tanh",
)  # fmt: skip
_gpt_oss = partial(
    DecoderConfig, 201_088, num_kv_heads=8, head_dim=64, rope_theta=150_000.0, norm_epsilon=1e-5, qk_norm=False,
    rope_scaling=YarnScaling(32.0, 4096, 0.1 * math.log(32.0) + 1.0, truncate=False), tied_embeddings=False,
    windows=(Window(128), None), qkv_bias=True, out_bias=True, sinks=True, activation="clamped",
)  # fmt: skip

#: Name -> configuration. Order of sizes: hidden_size, mlp_size, num_layers, num_q_heads.
PUBLISHED: dict[str, DecoderConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied_embeddings=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, tied_embeddings=False),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, num_kv_heads=4, tied_embeddings=False, mixture=Mixture(128, 8, 768)),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    "llama-3.1-8b": _llama31(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama31(8192, 28_672, 80, 64),
    "gemma-3-12b": _gemma3(
        3840, 15_360, 48, 16, num_kv_heads=8, head_dim=256, scale=256**-0.5, embedding_scale=3840**0.5
    ),
    "gpt-oss-20b": _gpt_oss(2880, 2880, 24, 64, mixture=Mixture(32, 4, 2880, bias=True)),
}


@overload
def random_decoder(config: DecoderConfig, seed: int = 0, *, mesh: None = None, progress: bool = False) -> Decoder: ...


@overload
def random_decoder(config: DecoderConfig, seed: int = 0, *, mesh: Mesh, progress: bool = False) -> PlacedDecoder: ...


def random_decoder(
    config: DecoderConfig, seed: int = 0, *, mesh: Mesh | None = None, progress: bool = False
) -> Decoder | PlacedDecoder:
    """Make a decoder whose weights are drawn on the device: matrices are normal with a deviation of 0.02.

    Norms multiply by 1; biases and sinks are 0.

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
        whole = _draw(key, parameter.shape, parameter.dtype, _constant(config, path))
        return whole if mesh is None else divided(mesh, Cut.of(config, parallel, path, parameter.shape), whole)

    graph, weights = filled(config, weight, progress=progress)
    if mesh is None:
        return nnx.merge(graph, weights)
    return PlacedDecoder(graph, weights, config, mesh, parameter_shapes(config))


def _constant(config: DecoderConfig, path: str) -> float | None:
    """Return what all numbers of a norm, a bias or sinks are, None for those that are drawn."""
    if path.endswith(".scale"):
        return 0.0 if config.norm_plus_one else 1.0
    return 0.0 if path.endswith(("bias", ".sinks")) else None


@partial(jax.jit, static_argnames=("shape", "dtype", "constant"))
def _draw(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike, constant: float | None) -> Array:
    if constant is not None:
        return jnp.full(shape, constant, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)
