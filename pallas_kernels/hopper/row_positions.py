"""Positions of a tile's rows, which causal masks and windows need: from the forest to where lanes read them.

    leaf of each row's request ─► start and length of it ─► position ─► shared memory, beside the tile of the query
      (before the query is copied)   (after that)                         (before a mask is given)

Rows are the last T tokens of their requests, so that their positions follow from where leaves end, and nothing has to
be computed ahead of the kernel. Candidates of draft trees have positions that the call gives. What says that the mask
of a block is in place says so of the positions, and what says that a query buffer is free that they are needed no more.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread
from pallas_kernels.by_thread import THREAD, THREADS
from pallas_kernels.compat import load
from pallas_kernels.family import Call
from pallas_kernels.hopper.pac_pipeline import Pipeline, Sizes
from pallas_kernels.packing import TILE_ROWS


def inputs_of(call: Call, sizes: Sizes) -> dict[str, jax.Array]:
    """Return what positions follow from, where masks need any."""
    if not sizes.has_positions:
        return {}
    return {"query_position": call.query_position.reshape(-1)} if sizes.token_planes else {"leaf": call.forest.leaf}


def scratch(sizes: Sizes) -> dict[str, Any]:
    """Describe shared memory for them. There are two threads for each row, of which the second ones repeat the rows."""
    return {"row_position": plgpu.SMEM((sizes.query_buffers, THREADS), jnp.int32)} if sizes.has_positions else {}


def ask(pipeline: Pipeline, tile: jax.Array, query_start: jax.Array) -> jax.Array | None:
    """Ask for the leaf of each row of a tile, or for the given position, int32 [128]; None where no mask needs it."""
    sizes, refs = pipeline.sizes, pipeline.refs
    if not sizes.has_positions:
        return None
    row, token, _ = _unit(sizes, tile)

    def together(_: None) -> jax.Array:
        return lax.div(query_start + _unit_of_tile(sizes), jnp.int32(sizes.query_tokens))

    def unit_by_unit(_: None) -> jax.Array:
        return by_thread.gather(refs.request_of_row, row)

    # A tile may have rows past its last unit, or past the last request: nobody's, they may be anywhere in the arrays.
    request = jnp.minimum(lax.cond(query_start >= 0, together, unit_by_unit, None), sizes.batch - 1)
    if sizes.token_planes:
        return by_thread.gather(refs.query_position, request * sizes.query_tokens + token)
    return by_thread.gather(refs.leaf, request)


def put(pipeline: Pipeline, tile: jax.Array, buffer: jax.Array, asked: jax.Array | None) -> None:
    """Store the positions of a tile's rows, given what `ask` returned."""
    sizes, refs = pipeline.sizes, pipeline.refs
    if asked is None:
        return
    position = asked
    if not sizes.token_planes:
        leaf = jnp.maximum(asked, 0)  # free request slots have none
        end = by_thread.gather(refs.node_start, leaf) + by_thread.gather(refs.node_length, leaf)
        position = end - sizes.query_tokens + _unit(sizes, tile)[1]
    refs.row_position.at[buffer][...] = position


def of_tile(pipeline: Pipeline, buffer: jax.Array) -> jax.Array:
    """Load the positions of a tile's rows, [64]."""
    return load(pipeline.refs.row_position.at[buffer, pl.ds(0, TILE_ROWS)], plgpu.Layout.WGMMA.reduce(1))


def _unit(sizes: Sizes, tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the request row, the query token and the part of each thread's row of a tile."""
    return sizes.packing.unit(tile * sizes.packing.units + _unit_of_tile(sizes), sizes.batch, sizes.query_tokens)


def _unit_of_tile(sizes: Sizes) -> jax.Array:
    row = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=THREAD) & (TILE_ROWS - 1)
    return lax.div(row, jnp.int32(sizes.packing.rows_of_unit))
