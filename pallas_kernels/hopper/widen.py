"""Blocks of one byte a number, made into the 16 bits that products take: by the warpgroup that multiplies.

    ring [block, H] of 8 bits ─► registers ─► 16 bits ─► a buffer of the lane's own ─► wgmma

K and V of a block take the same buffer one after the other. While a lane converts, the other one multiplies. The format
is float16: every number of 8 bits is one of its numbers, and the hardware converts two of them at a time.
"""

import itertools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import load
from pallas_kernels.hopper.pac_pipeline import LANES, Pipeline, Sizes

#: What blocks of 8 bits are made into.
WIDE = jnp.float16


def ring_transforms(sizes: Sizes) -> tuple[Any, ...]:
    """Return how a block lies in the rings: rows of 128 bytes, or of what a head has."""
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64 * jnp.dtype(sizes.kv_dtype).itemsize)


def scratch(sizes: Sizes, tiled: tuple[Any, ...]) -> dict[str, Any]:
    """Describe the buffers, [lanes, block, H]; none where blocks are as products take them."""
    if not sizes.is_one_byte:
        return {}
    return {"widened": plgpu.SMEM((LANES, sizes.block, sizes.head_dim), sizes.dtype, transforms=tiled)}


def in_sixteen_bits(pipeline: Pipeline, ring: Any, stage: Any) -> Any:
    """Return a block of K or V as products take it, a reference to [block, H], or [H / 64, block, 64] if padded."""
    refs, sizes = pipeline.refs, pipeline.sizes
    if not sizes.is_one_byte:
        return (ring.blocks if sizes.is_padded else ring).at[stage]
    target = refs.widened.at[pipeline.warpgroup]
    plgpu.commit_smem()  # every warp of the lane is done with the products that read the buffer
    for row, column in itertools.product(range(0, sizes.block, 64), range(0, sizes.head_dim, 64)):
        part = pl.ds(row, 64), pl.ds(column, 64)
        narrow = load(ring.at[stage, *part], plgpu.Layout.WGMMA_UPCAST_2X, optimized=True)
        target.at[part][...] = narrow.astype(sizes.dtype)
    plgpu.commit_smem()
    return target
