"""Copies of PAC: blocks of K and V ahead of the products, across segments, and the query rows of tiles."""

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread, token_pages
from pallas_kernels.ampere import instructions
from pallas_kernels.ampere.pac_work import Numbers, Tile, Work


class Ahead(NamedTuple):
    """The block that is copied next."""

    number: jax.Array  # blocks before it, of this thread block
    segment: jax.Array  # the one that it belongs to; no block is left from the thread block's last segment on
    head: jax.Array
    block: jax.Array
    end: jax.Array  # of the segment's blocks
    rows: jax.Array  # int32 [128]: where the tokens of the block are, one by each thread


def begin(work: Work) -> Ahead:
    """Begin with the first blocks, as many as the rings take beside the one that is worked on."""
    first = work.first_segment
    rows = _rows_of(work, first.begin, first.head)
    ahead = Ahead(jnp.int32(0), work.first, first.head, first.begin, first.end, rows)
    for _ in range(work.sizes.stages - 1):
        keep_rows(work, ahead)
        instructions.wait_for_threads()
        ahead = copy_block(work, ahead)
    keep_rows(work, ahead)
    return ahead


def keep_rows(work: Work, ahead: Ahead) -> None:
    """Store where the tokens of a block are, beside those of the block before it, which threads may still read."""
    instructions.keep(work.numbers(Numbers.ROWS, ahead.number), ahead.rows)


def copy_block(work: Work, ahead: Ahead) -> Ahead:
    """Begin to copy a block, if there is one left, and make one group of its copies; return the one after it.

    Its rows have been kept, and all threads have waited for each other since.
    """
    refs, stage = work.refs, work.stage(ahead.number)

    @pl.when(ahead.segment < work.last)
    def _copy() -> None:
        rows = work.numbers(Numbers.ROWS, ahead.number)
        instructions.copy_rows(rows, (refs.keys, refs.key_ring.at[stage]), (refs.values, refs.value_ring.at[stage]))

    # An empty group where there was nothing to copy: what is waited for is counted in groups.
    instructions.commit_copies()
    ends = ahead.block + 1 == ahead.end
    segment = jnp.where(ends, ahead.segment + 1, ahead.segment)
    following = work.segment(segment)
    block = jnp.where(ends, following.begin, ahead.block + 1)
    rows = _rows_of(work, block, following.head)
    return Ahead(ahead.number + 1, segment, following.head, block, following.end, rows)


def awaited(work: Work, ahead: Ahead) -> jax.Array:
    """Count the blocks of this thread block before the one that is worked on when `ahead` is copied."""
    return ahead.number - (work.sizes.stages - 1)


def wait_for_block(work: Work, number: jax.Array) -> None:
    """Wait for block `number` of this thread block, and until all threads are done with the one before it."""
    del number  # the groups of copies are counted from the last
    instructions.wait_for_copies(work.sizes.stages - 2)


def copy_query(work: Work, head: jax.Array, tiles: list[Tile]) -> None:
    """Copy the query rows of tiles from wherever their requests are, when nobody reads the last ones any more."""
    refs, sizes = work.refs, work.sizes
    packing = sizes.packing
    of_unit = jnp.int32(packing.rows_of_unit)
    row = work.thread()  # rows that are not in use repeat rows of the last unit
    rows = [work.numbers(Numbers.QUERY_ROWS, tile.place) for tile in tiles]
    for tile, of_tile in zip(tiles, rows, strict=True):
        unit = tile.number * packing.units + jnp.minimum(lax.div(row, of_unit), packing.units - 1)
        request_row, token, part = packing.unit(unit, sizes.batch, sizes.query_tokens)
        entry = by_thread.gather(refs.request_of_row, request_row) * sizes.query_tokens + token
        q_head = packing.q_head(head, part, row)
        instructions.keep(of_tile, entry * sizes.num_q_heads + q_head)
    instructions.wait_for_threads()
    for tile, of_tile in zip(tiles, rows, strict=True):
        instructions.copy_rows(of_tile, (refs.query, refs.query_tiles.at[tile.place]))
    instructions.commit_copies()
    instructions.wait_for_copies(0)


def _rows_of(work: Work, block: jax.Array, head: jax.Array) -> jax.Array:
    """Return where the tokens of a block are, of [num_pages x page_tokens x K] rows of K and of V."""
    sizes = work.sizes
    page_id = token_pages.field(work.refs, sizes, block, "page_id")
    return (page_id * sizes.page_tokens + token_pages.offset(sizes)) * sizes.num_kv_heads + head
