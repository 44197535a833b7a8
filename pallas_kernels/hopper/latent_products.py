"""Scores of PAC over latents by wgmma: work that only a GPU does, beside that of `tensor_core`."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import transposed
from pallas_kernels.hopper.latent_pipeline import LatentPipeline
from pallas_kernels.packing import TILE_ROWS


def multiply_latents(pipeline: LatentPipeline, stage: jax.Array, buffer: jax.Array) -> jax.Array:
    """Return the products of the tile of the query and a block, [64, block]."""
    refs, sizes = pipeline.refs, pipeline.sizes
    last = sizes.query_parts - 1

    def products(scores_ref: Any) -> jax.Array:
        for part in range(sizes.query_parts):
            columns = pipeline.keys(stage, part)  # [block, 64]
            is_rotated = sizes.is_one_byte and part == last
            tiles = refs.query_buffers.other if is_rotated else refs.query_buffers.tiles
            plgpu.wgmma(scores_ref, tiles.at[buffer, part], transposed(columns))
        return scores_ref[...]

    return pl.run_scoped(products, plgpu.ACC((TILE_ROWS, sizes.block), jnp.float32))
