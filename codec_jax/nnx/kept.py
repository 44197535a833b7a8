"""K and V that a decoder keeps beside its latents, of nodes that many requests share.

nodes worth it ──► PageCopies ───► reconstruct ──► plans of both forms
Forms              what is kept    once, here      Intervals
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from codec_jax import checks
from codec_jax.forest import Pages
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.shards import PlacedDecoder, Program, program
from codec_jax.planning.latent_forms import Forms

#: Where they pay, they may take this share of the memory that latents take, beside it.
SHARE = 0.25
#: Tokens of which a call computes K and V: beside them it takes as many float32 numbers, of one layer.
_TOKENS = 1024


def forms_of(config: DecoderConfig, parallel: Parallel) -> Forms:
    """Return the sizes of latent attention on one device."""
    latent = config.latent
    assert latent is not None
    num_q_heads, _ = parallel.heads(config.num_q_heads, config.num_kv_heads)
    heads = latent.rope_dim, latent.nope_dim, latent.value_dim
    return Forms(num_q_heads, latent.size, *heads, config.reconstructed_dtype.itemsize)


def pays(config: DecoderConfig, parallel: Parallel, max_requests: int) -> bool:
    """Whether so many requests can be enough readers of a node, on this device."""
    if config.latent is None or parallel.context > 1 or jax.devices()[0].platform != "gpu":
        return False
    return bool((forms_of(config, parallel).saved_us(np.arange(2, max_requests + 1)) > 0).any())


def pages_to_keep(
    config: DecoderConfig, parallel: Parallel, max_requests: int, num_pages: int, given: int | None
) -> int:
    """Return the pages of K and V to have room for: those that are asked for, or where it pays a share of the memory.

    Raises ValueError for what cannot be kept.
    """
    if given is None:
        if not pays(config, parallel, max_requests):
            return 0
        token_bytes = config.reconstructed_token_bytes // parallel.tensor
        return min(int(SHARE * num_pages * config.kv_token_bytes // token_bytes), num_pages)
    if not checks.integer("reconstructed_pages", given, 0):
        return 0
    if config.latent is None:
        raise ValueError(f"reconstructed_pages: expected 0 or None for a model without latent attention, got {given}")
    if parallel.context > 1:
        raise ValueError(
            f"reconstructed_pages: expected 0 or None where {parallel.context} devices divide the pages, got {given}; "
            "use an axis 'tensor' alone"
        )
    return given


def reconstruct(
    model: PlacedDecoder, cache: tuple[Pages, ...], pages: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"]
) -> tuple[Pages, ...]:
    """Compute K and V of pages, by one program for any number of them; the cache is used up."""
    size = max(_TOKENS // cache[0].key.shape[1], 1)
    for first in range(0, len(pages), size):
        ids, where = np.zeros(size, np.int32), np.full(size, np.iinfo(np.int32).max, np.int32)  # out of bounds
        given = slice(first, first + size)
        ids[: len(pages[given])], where[: len(pages[given])] = pages[given], places[given]
        (cache,) = _program(model.graph, model.config, model.mesh)(model.weights, cache, ids, where)
    return cache


@lru_cache(maxsize=16)
def _program(graph: nnx.GraphDef[Decoder], config: DecoderConfig, mesh: Mesh | None) -> Program:
    """Return a jitted call for some pages of all layers."""

    def run(model: Decoder, cache: Any, ids: Array, where: Array, parallel: Parallel) -> tuple:
        layers = zip(model.blocks, cache, strict=True)
        return (tuple(block.attention.reconstruct(pages, ids, where) for block, pages in layers),)

    return program(graph, config, mesh, run, donate=(1,))
