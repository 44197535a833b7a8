"""Queries, keys and values from one product to attention and pages, by one Hopper kernel where it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Array, Float, Int

from codec_jax.forest import KVPages
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.head_sizes import sizes_of, takes_heads
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.rope import turns
from pallas_kernels.addends import Parts
from pallas_kernels.hopper import head_rows
from pallas_kernels.hopper.head_rows import Places, Scales


def serves(config: DecoderConfig, parallel: Parallel, rows: int) -> bool:
    """Whether the kernel takes so many rows of a decoder; XLA's kernels take the others.

    Args:
      config: of the decoder.
      parallel: the devices among which its heads are divided.
      rows: tokens of a step, of all batches.
    """
    return parallel.has_kernels and takes_heads(config, parallel.heads(config.num_q_heads, config.num_kv_heads), rows)


def split_heads(
    config: DecoderConfig,
    parallel: Parallel,
    layer: int,
    columns: Float[Array, "B T columns"] | Parts,
    scales: Scales,
    positions: Int[Array, "B T"],
    slots: Int[Array, "B T"],
    pages: KVPages,
) -> tuple[Float[Array, "B T N H"], KVPages]:
    """Normalise and rotate queries and keys, and store K and V.

    Args:
      config: of the decoder, which the kernel serves.
      parallel: the devices among which its heads are divided.
      layer: its number.
      columns: queries, keys and values of all heads that this device attends with, or of those that it computed, if
        its group `collects_heads`.
      scales: factors of the norms of query and key heads, if there are norms.
      positions, slots, pages: as in `Attention.decode`.

    Returns the queries, and the pages.
    """
    left = columns if isinstance(columns, Parts) else Parts(columns[None])
    sizes = sizes_of(config, parallel.heads(config.num_q_heads, config.num_kv_heads))
    count, *batch, width = left.parts.shape
    cos, sin = turns(positions.reshape(-1), config.head_dim // 2, *config.rope_of(layer))
    places = Places(cos, sin, slots.reshape(-1), pages.key, pages.value)
    run: Callable[..., tuple[Array, Array, Array]] = head_rows.split_heads
    if parallel.gathers is not None and parallel.collects_heads:
        run = parallel.gathers.split_heads
    query, key, value = run(left._replace(parts=left.parts.reshape(count, -1, width)), scales, places, sizes)
    return query.reshape(*batch, *query.shape[1:]), replace(pages, key=key, value=value)
