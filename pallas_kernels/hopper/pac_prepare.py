"""The preparing warpgroup of PAC: query rows from wherever their requests are, and masks from the nodes' lengths.

Masks that compare positions need those of the rows, too: `row_positions`.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import plan_guard
from pallas_kernels.by_thread import THREAD, THREADS, page_and_token
from pallas_kernels.compat import load
from pallas_kernels.hopper import row_positions, tensor_core
from pallas_kernels.hopper.pac_pipeline import COLUMNS, UNIFORM_READERS, Pipeline
from pallas_kernels.plan_format import Page, Segment
from pallas_kernels.token_mask import readers_of_token

_MAX_AT_ONCE = 8  # loads in flight while gathering
_FEW_PAGES = 4  # pages of a block whose entries are kept in registers while the copies of query rows are issued

_Entries = tuple[Page, ...] | list[jax.Array]  # or the planes of the mask, where those are given


class _PageMask(NamedTuple):
    """One page of a block, as its mask needs it, lengths looked up."""

    readers: jax.Array
    valid: jax.Array  # tokens from the page's first to the end of its node
    position: jax.Array | None  # of its first token, with causal masks and windows


_Masks = tuple[_PageMask, ...] | list[jax.Array]  # or the planes


def prepare(pipeline: Pipeline) -> None:
    """Fill the query buffers, a tile for each lane, and the ring of masks; then look whether the plan holds."""
    refs, sizes = pipeline.refs, pipeline.sizes

    def work(segment: Segment, _: Segment, done: jax.Array, buffer: jax.Array, __: None) -> None:
        # Asked for ahead of the query rows where registers allow: what the first mask needs takes two trips to memory.
        early = _entries_of(pipeline, segment.first_masked) if sizes.pages_per_block <= _FEW_PAGES else None
        scales = pipeline.first_scales(segment)
        positions = row_positions.ask(pipeline, segment.tile0, segment.query_start0)
        _gather(pipeline, segment.tile0, segment.query_start0, segment.head, buffer)
        looked_up = None if early is None else _look_up(pipeline, early)

        @pl.when(segment.is_wide)
        def _second_tile() -> None:
            following, start = pipeline.query_buffer(buffer + 1), segment.query_start1
            others = row_positions.ask(pipeline, segment.tile1, start)
            _gather(pipeline, segment.tile1, start, segment.head, following)
            row_positions.put(pipeline, segment.tile1, following, others)

        row_positions.put(pipeline, segment.tile0, buffer, positions)

        def step(i: jax.Array, carry: tuple[_Masks, Any], masked: bool) -> tuple[_Masks, Any]:
            (masks, scales), number = carry, done + i
            stage = pipeline.stage(number)
            # Loads take as long as a block: ask for the next block's pages now.
            following = _entries_of(pipeline, segment.begin + i + 1) if masked else None
            planes = _mask_planes(pipeline, masks) if masked else []

            pipeline.wait_for_mask(number, stage)
            for plane, values in enumerate(planes):
                refs.mask.at[stage, plane][...] = values
            scales = pipeline.put_scales(segment, segment.begin + i, stage, scales)
            pipeline.give_mask(segment, number)
            return masks if following is None else _look_up(pipeline, following), scales

        middle = segment.first_masked - segment.begin
        masks = looked_up
        if early is None:
            masks = _look_up(pipeline, _entries_of(pipeline, segment.first_masked))
        pipeline.give_query(segment.query_start0, segment.head, buffer)

        @pl.when(segment.is_wide)
        def _give_second() -> None:
            pipeline.give_query(segment.query_start1, segment.head, pipeline.query_buffer(buffer + 1))

        carry = lax.fori_loop(0, middle, functools.partial(step, masked=False), (masks, scales))
        lax.fori_loop(middle, segment.end - segment.begin, functools.partial(step, masked=True), carry)

    pipeline.each_segment(work)
    plan_guard.look(refs)


def _gather(pipeline: Pipeline, tile: jax.Array, start: jax.Array, head: jax.Array, buffer: jax.Array) -> None:
    """Copy the rows of a tile to a query buffer, together if they are consecutive in the query, or unit by unit."""
    refs, sizes = pipeline.refs, pipeline.sizes
    packing, tokens = sizes.packing, sizes.query_tokens
    rows, columns = packing.rows_of_unit, COLUMNS
    target = refs.query_buffers.units.at[buffer]
    at_once = max(number for number in range(1, _MAX_AT_ONCE + 1) if packing.units % number == 0)

    def copy(entry: Any, count: int, part: Any, place: Any, arrived: Any) -> None:
        """Copy `count` consecutive entries of the query to where unit `place` of the tile begins."""
        heads = pl.ds(head * packing.group + part * rows, rows)
        for at in range(sizes.query_parts):
            plgpu.copy_gmem_to_smem(
                refs.query.at[pl.ds(entry, count), heads, pl.ds(at * columns, columns)],  # [count, rows, columns]
                tensor_core.view_units(target.at[at], place, count=count, packing=packing),
                arrived.at[buffer],
            )

    def some(i: jax.Array, _: None) -> None:
        units = [i * at_once + j for j in range(at_once)]
        places = [packing.unit(tile * packing.units + unit, sizes.batch, tokens) for unit in units]
        requests = [refs.request_of_row[row] for row, _, _ in places]
        for unit, request, (_, token, part) in zip(units, requests, places, strict=True):
            copy(request * tokens + token, 1, part, unit, refs.query_scattered)

    plgpu.barrier_wait(refs.query_free.at[buffer])

    @pl.when(start >= 0)
    def _together() -> None:
        copy(start, min(packing.units, sizes.batch * tokens), 0, 0, refs.query_together)

    @pl.when(start < 0)
    def _unit_by_unit() -> None:
        lax.fori_loop(0, packing.units // at_once, some, None)


def _entries_of(pipeline: Pipeline, block: jax.Array) -> _Entries:
    """Load the entries of a block's pages."""
    ref, sizes = pipeline.refs.block_pages, pipeline.sizes
    at = jnp.minimum(block, ref.shape[0] - 1)
    if sizes.token_planes:
        return [load(getattr(pipeline.refs, name).at[at], THREAD) for name in sizes.token_planes]
    fields = range(1, len(Page._fields))
    return tuple(Page(None, *(ref[at, j, field] for field in fields)) for j in range(sizes.pages_per_block))


def _look_up(pipeline: Pipeline, entries: _Entries) -> _Masks:
    """Load the lengths (and positions) of the nodes that a block's pages belong to."""
    if isinstance(entries, list):
        return entries
    refs = pipeline.refs
    return tuple(
        _PageMask(
            readers=page.readers,
            valid=refs.node_length[page.node] - page.token,
            position=refs.node_start[page.node] + page.token if pipeline.sizes.has_positions else None,
        )
        for page in entries
    )


def _mask_planes(pipeline: Pipeline, masks: _Masks) -> list[jax.Array]:
    """Readers (and positions) of each token of a block; no reader, where a page is not full.

    Without positions, readers are marked where all tokens have the same, so that a block may be masked by row.
    """
    if isinstance(masks, list):
        return masks
    page_tokens = pipeline.sizes.page_tokens
    page_of, offset = page_and_token(page_tokens)
    readers = position = plgpu.layout_cast(jnp.full((THREADS,), 0, jnp.int32), THREAD)
    for j, page in enumerate(masks):
        readers = jnp.where(page_of == j, readers_of_token(page.readers, offset, page.valid), readers)
        if page.position is not None:
            position = jnp.where(page_of == j, page.position + offset, position)
    if pipeline.sizes.has_positions:
        return [readers, position]
    uniform = [(page.readers == masks[0].readers) & (page.valid >= page_tokens) for page in masks]
    return [readers | jnp.where(functools.reduce(operator.and_, uniform), UNIFORM_READERS, 0)]
