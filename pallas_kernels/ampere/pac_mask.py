"""Masks of PAC on GPUs since Ampere: who sees which token of a block, found while the block before it is worked on."""

from enum import IntEnum

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ampere import instructions
from pallas_kernels.ampere.pac_work import Numbers, Tile, Work
from pallas_kernels.ampere.products import PRODUCTS, ROWS
from pallas_kernels.compat import load
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.row_registers import broadcast_rows, over_rows
from pallas_kernels.softmax import MASK_VALUE
from pallas_kernels.token_mask import bounds, is_reader, unpack_readers
from pallas_kernels.token_pages import Planes


class Seen(IntEnum):
    """What the rows of a warp see of a block, as `products.seen` says."""

    NOTHING = 0
    BY_TOKEN = 1  # not all tokens, or not all rows the same ones
    BY_ROW = 2  # some rows all of it, the others nothing


def keep_planes(work: Work, number: jax.Array, planes: Planes) -> None:
    """Store the mask of block `number` beside the one of the block before it, which threads may still read."""
    for which, plane in zip((Numbers.READERS, Numbers.POSITIONS), planes, strict=False):
        instructions.keep(work.numbers(which, number), plane)


def mask_by_row(work: Work, tile: Tile, number: jax.Array) -> jax.Array:
    """Return the rows of a tile that see a block, of which all tokens have the same readers, bool [64]."""
    row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=ROWS) + work.first_row(tile.place)
    return is_reader(row, *unpack_readers(work.numbers(Numbers.READERS, number)[0]))


def mask_by_token(work: Work, tile: Tile, number: jax.Array, scores: jax.Array) -> jax.Array:
    """Lower the scores of tokens that a row of a tile does not see."""
    sizes, refs = work.sizes, work.refs

    def plane(which: Numbers) -> jax.Array:
        of_block = load(work.numbers(which, number).at[pl.ds(0, sizes.block)], PRODUCTS.reduce(0))
        return over_rows(of_block)  # [64, block]

    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=PRODUCTS) + work.first_row(tile.place)
    visible = is_reader(row, *unpack_readers(plane(Numbers.READERS)))
    scores = jnp.where(visible, scores, MASK_VALUE)
    if not sizes.has_positions:
        return scores
    own = load(refs.row_position.at[pl.ds(tile.number * sizes.packing.tile_rows, TILE_ROWS)], ROWS)  # [64]
    for bound, is_within in bounds(own, sizes.causal, sizes.window):
        within = is_within(plane(Numbers.POSITIONS), broadcast_rows(bound, sizes.block))
        scores = jnp.where(within, scores, MASK_VALUE)
    return scores
