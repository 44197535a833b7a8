"""Scores of PAC over latents by wgmma: work that only a GPU does, beside that of `tensor_core`."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import transposed
from pallas_kernels.hopper.latent_pipeline import HALF, LatentPipeline
from pallas_kernels.packing import TILE_ROWS


def multiply_latents(pipeline: LatentPipeline, stage: jax.Array, buffer: jax.Array) -> jax.Array:
    """Return the products of the tile of the query and a block, [64, block].

    The left half of the block is there. The right half is waited for while products of the left one go on.
    """
    refs, sizes = pipeline.refs, pipeline.sizes
    left_parts, last = HALF // 64, sizes.query_parts - 1

    def products(scores_ref: Any) -> jax.Array:
        for part in range(sizes.query_parts):
            if part == left_parts:
                plgpu.barrier_wait(refs.right_full.at[stage])
            ring, at = (refs.left_ring, part) if part < left_parts else (refs.right_ring, part - left_parts)
            tiles = refs.query_buffers.tiles
            if sizes.is_one_byte and part == last:
                ring, at, tiles = refs.rotated_ring, 0, refs.query_buffers.rotated
            columns = ring.at[stage].at[:, pl.ds(at * 64, 64)]  # [block, 64]
            plgpu.wgmma(scores_ref, tiles.at[buffer, part], transposed(columns))
        return scores_ref[...]

    return pl.run_scoped(products, plgpu.ACC((TILE_ROWS, sizes.block), jnp.float32))
