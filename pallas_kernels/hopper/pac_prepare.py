"""The preparing warpgroup of PAC: query rows from wherever their requests are, and masks from the nodes' lengths.

Masks that compare positions need those of the rows, too: `row_positions`.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels import by_thread, plan_guard, token_pages
from pallas_kernels.hopper import row_positions, tensor_core
from pallas_kernels.hopper.pac_pipeline import COLUMNS, UNIFORM_READERS, Pipeline
from pallas_kernels.pac_arrays import PacSizes
from pallas_kernels.plan_format import Segment
from pallas_kernels.token_pages import Planes

_MAX_AT_ONCE = 8  # loads in flight while gathering


def prepare(pipeline: Pipeline) -> None:
    """Fill the query buffers, a tile for each lane, and the ring of masks; then look whether the plan holds."""
    refs, sizes = pipeline.refs, pipeline.sizes

    def work(segment: Segment, _: Segment, done: jax.Array, buffer: jax.Array, __: None) -> None:
        # Asked for ahead of the query rows: what the first mask needs takes two trips to memory.
        entries = [token_pages.entries_of(refs, sizes, segment.first_masked + i) for i in range(2)]
        scales = pipeline.first_scales(segment)
        positions = row_positions.ask(pipeline, segment.tile0, segment.query_start0)
        _gather(pipeline, segment.tile0, segment.query_start0, segment.head, buffer)
        first = token_pages.look_up(refs, sizes, entries[0])

        @pl.when(segment.is_wide)
        def _second_tile() -> None:
            following, start = pipeline.query_buffer(buffer + 1), segment.query_start1
            others = row_positions.ask(pipeline, segment.tile1, start)
            _gather(pipeline, segment.tile1, start, segment.head, following)
            row_positions.put(pipeline, segment.tile1, following, others)

        row_positions.put(pipeline, segment.tile0, buffer, positions)

        def step(i: jax.Array, carry: Any, masked: bool) -> Any:
            (planes, entries, scales), number = carry, done + i
            stage = pipeline.stage(number)
            if masked:
                # Loads take as long as a block: ask now for what the next one, and the one after it, need.
                looked_up = token_pages.look_up(refs, sizes, entries)
                entries = token_pages.entries_of(refs, sizes, segment.begin + i + 2)

            pipeline.wait_for_mask(number, stage)
            for plane, values in enumerate(planes if masked else []):
                refs.mask.at[stage, plane][...] = values
            scales = pipeline.put_scales(segment, segment.begin + i, stage, scales)
            pipeline.give_mask(segment, number)
            planes = _marked(sizes, token_pages.planes_of(looked_up)) if masked else planes
            return planes, entries, scales

        middle = segment.first_masked - segment.begin
        pipeline.give_query(segment.query_start0, segment.head, buffer)

        @pl.when(segment.is_wide)
        def _give_second() -> None:
            pipeline.give_query(segment.query_start1, segment.head, pipeline.query_buffer(buffer + 1))

        planes = _marked(sizes, token_pages.planes_of(first))
        carry = lax.fori_loop(0, middle, functools.partial(step, masked=False), (planes, entries[1], scales))
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


def _marked(sizes: PacSizes, planes: Planes) -> Planes:
    """Mark the readers of tokens where all of a warp have the same, so that a block may be masked by row."""
    if sizes.has_positions or sizes.token_planes:
        return planes
    return [readers | by_thread.same_in_warp(readers) * UNIFORM_READERS for readers in planes]
