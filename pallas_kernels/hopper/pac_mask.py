"""Masks of PAC on the scores of a block: rows that do not see it, or tokens that a row does not see."""

import functools
import operator

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.by_thread import WARP
from pallas_kernels.compat import load
from pallas_kernels.hopper import pac_cap, row_positions
from pallas_kernels.hopper.pac_pipeline import UNIFORM_READERS, LaneWork, Pipeline
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.row_registers import all_rows, broadcast_rows, over_rows
from pallas_kernels.token_mask import bounds, is_reader, unpack_readers


def readers_of_warps(pipeline: Pipeline, stage: jax.Array) -> tuple[jax.Array, ...]:
    """Load the readers of the first of every 32 tokens of a block; none where all blocks are masked by token."""
    sizes = pipeline.sizes
    if sizes.has_positions or sizes.token_planes:
        return ()
    return tuple(pipeline.refs.mask[stage, 0, token] for token in range(0, sizes.block, WARP))


def cap_and_mask(
    pipeline: Pipeline, lane: LaneWork, stage: jax.Array, readers: tuple[jax.Array, ...], products: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rows that may see the block, capped products, and a flag.

    Products are lowered where such a row does not see a token. The flag says that these rows see all of the block.

    Where all tokens have the same readers, as in most blocks of a long leaf, nothing needs to be done by token.
    `readers` are those of `readers_of_warps`.
    """
    sizes = pipeline.sizes

    def by_token(products: jax.Array) -> jax.Array:
        return _mask_by_token(pipeline, lane, stage, pac_cap.capped(sizes, products, lane.row_scale, apart=True))

    if not readers:
        return all_rows(), by_token(products), jnp.bool_(False)

    def uniform(products: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        visible = is_reader(row + _first_row(pipeline, lane), *unpack_readers(readers[0] & ~UNIFORM_READERS))  # [64]
        # None is lowered: were both branches to select, the compiler would join them and keep, in registers that it
        # does not have, one predicate for each score.
        return visible, pac_cap.capped_where_seen(sizes, products, lane.row_scale, visible)

    def mixed(products: jax.Array) -> tuple[jax.Array, jax.Array]:
        return all_rows(), by_token(products)

    same = functools.reduce(operator.and_, (word == readers[0] for word in readers), readers[0] & UNIFORM_READERS != 0)
    return *lax.cond(same, uniform, mixed, products), same


def _mask_by_token(pipeline: Pipeline, lane: LaneWork, stage: jax.Array, scores: jax.Array) -> jax.Array:
    """Lower the scores of tokens that a row does not see."""
    sizes, mask = pipeline.sizes, pipeline.refs.mask
    along = plgpu.Layout.WGMMA.reduce(0)

    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    readers = load(mask.at[stage, 0, pl.ds(0, sizes.block)], along) & ~UNIFORM_READERS  # [block]
    visible = is_reader(row + _first_row(pipeline, lane), *map(over_rows, unpack_readers(readers)))
    scores = jnp.where(visible, scores, sizes.mask_value)
    if sizes.has_positions:
        own = row_positions.of_tile(pipeline, lane.buffer)  # [64]
        position = load(mask.at[stage, 1, pl.ds(0, sizes.block)], along)  # [block]
        for bound, is_within in bounds(own, sizes.causal, sizes.window):
            within = is_within(over_rows(position), broadcast_rows(bound, sizes.block))
            scores = jnp.where(within, scores, sizes.mask_value)
    return scores


def _first_row(pipeline: Pipeline, lane: LaneWork) -> jax.Array:
    """Count the rows before the lane's tile, since readers are counted over both tiles of a wide segment."""
    return lane.tile * pipeline.sizes.packing.tile_rows


def clear_other_rows(visible: jax.Array, weights: jax.Array) -> jax.Array:
    """Clear the rows that do not see the block, even of NaN; bit by bit, since that takes two weights at once."""
    bits = broadcast_rows(jnp.where(visible, jnp.int16(-1), jnp.int16(0)), weights.shape[1])  # [64, block]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(weights, jnp.int16) & bits, weights.dtype)
