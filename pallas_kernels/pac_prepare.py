"""The preparing warpgroup of PAC: query rows from wherever their requests are, and masks from the nodes' lengths."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret
from pallas_kernels.columns import Page, Segment
from pallas_kernels.compat import load
from pallas_kernels.pac_pipeline import ALIKE, BLOCK_TOKENS, Pipeline

_MOST_AT_ONCE = 8  # loads in flight while gathering
_FEW_SLOTS = 4  # pages of a block whose entries are kept in registers while the copies of query rows are issued
_THREAD = plgpu.Layout.WG_STRIDED((BLOCK_TOKENS,), 1)  # a token for each thread

_Pages = tuple[Page, ...] | jax.Array  # or the readers of each token, where those are given


class _Slot(NamedTuple):
    """What the mask of a block needs to know of one of its pages, lengths looked up."""

    readers: jax.Array
    valid: jax.Array  # tokens from the page's first to the end of its node
    position: jax.Array | None  # of its first token, with causal masks


_Slots = tuple[_Slot, ...] | jax.Array  # or the readers of each token


def prepare(pipeline: Pipeline) -> None:
    """Fill the query buffers, a tile for each lane, and the ring of mask columns."""
    scratch, sizes = pipeline.scratch, pipeline.sizes

    def work(segment: Segment, _: Segment, done: jax.Array, turn: jax.Array, __: None) -> None:
        # Asked for ahead of the query rows where registers allow: what the first mask needs takes two trips to memory.
        early = _pages_of(pipeline, segment.masked) if sizes.slots <= _FEW_SLOTS else None
        _gather(pipeline, segment.tile, segment.unit, segment.head, turn)
        looked_up = None if early is None else _look_up(pipeline, early)

        @pl.when(segment.is_wide)
        def _second_tile() -> None:
            other = pipeline.query_buffer(turn + 1)
            _gather(pipeline, segment.other_tile, segment.other_unit, segment.head, other)

        def step(i: jax.Array, slots: _Slots, masked: bool) -> _Slots:
            number = done + i
            slot = pipeline.slot(number)
            # Loads take as long as a block: ask for the next block's pages now.
            following = _pages_of(pipeline, segment.lo + i + 1) if masked else None
            columns = _columns(pipeline, slots) if masked else []

            @pl.when(number >= sizes.stages)
            def _wait() -> None:
                plgpu.barrier_wait(scratch.values_free.at[slot])

            for plane, values in enumerate(columns):
                scratch.columns.at[slot, plane][...] = values
            plgpu.barrier_arrive(pipeline.full(scratch.keys_full, segment, number))
            return slots if following is None else _look_up(pipeline, following)

        middle = segment.masked - segment.lo
        slots = _look_up(pipeline, _pages_of(pipeline, segment.masked)) if early is None else looked_up
        slots = lax.fori_loop(0, middle, functools.partial(step, masked=False), slots)
        lax.fori_loop(middle, segment.hi - segment.lo, functools.partial(step, masked=True), slots)

    blocks = pipeline.each_segment(work)
    if sizes.interpreted:
        queries = [scratch.query_free.at[buffer] for buffer in range(sizes.query_buffers)]
        interpret.see_completions(pipeline, blocks, [scratch.values_free], queries)


def _gather(pipeline: Pipeline, tile: jax.Array, first: jax.Array, head: jax.Array, buffer: jax.Array) -> None:
    """Copy the rows of a tile to a query buffer, together if they are consecutive in the query, or unit by unit."""
    inputs, scratch, sizes = pipeline.inputs, pipeline.scratch, pipeline.sizes
    packing, tokens = sizes.packing, sizes.query_tokens
    rows = packing.rows_of_unit
    target = scratch.query.rows.at[buffer]
    at_once = max(number for number in range(1, _MOST_AT_ONCE + 1) if packing.units % number == 0)

    def copy(entry: Any, count: int, part: Any, place: Any, arrived: Any) -> None:
        """Copy `count` consecutive entries of the query to where unit `place` of the tile begins."""
        heads = pl.ds(head * packing.group + part * rows, rows)
        for at in range(sizes.query_parts):
            plgpu.copy_gmem_to_smem(
                inputs.query.at[pl.ds(entry, count), heads, pl.ds(at * 64, 64)],  # [count, rows, 64]
                interpret.view_units(target.at[at], place, count=count, packing=packing, interpreted=sizes.interpreted),
                arrived.at[buffer],
            )

    def some(i: jax.Array, _: None) -> None:
        units = [i * at_once + j for j in range(at_once)]
        places = [packing.unit(tile * packing.units + unit, sizes.batch, tokens) for unit in units]
        requests = [inputs.request_of_row[row] for row, _, _ in places]
        for unit, request, (_, token, part) in zip(units, requests, places, strict=True):
            copy(request * tokens + token, 1, part, unit, scratch.query_scattered)

    plgpu.barrier_wait(scratch.query_free.at[buffer])

    @pl.when(first >= 0)
    def _together() -> None:
        copy(first, sizes.most_units, 0, 0, scratch.query_together)

    @pl.when(first < 0)
    def _unit_by_unit() -> None:
        lax.fori_loop(0, packing.units // at_once, some, None)


def _pages_of(pipeline: Pipeline, block: jax.Array) -> _Pages:
    """Load the entries of a block's pages."""
    ref = pipeline.inputs.pages
    at = jnp.minimum(block, ref.shape[0] - 1)
    if pipeline.sizes.by_token:
        return load(pipeline.inputs.readers_of_tokens.at[at], _THREAD)
    fields = range(1, len(Page._fields))
    return tuple(Page(None, *(ref[at, j, field] for field in fields)) for j in range(pipeline.sizes.slots))


def _look_up(pipeline: Pipeline, pages: _Pages) -> _Slots:
    """Load the lengths (and positions) of the nodes that a block's pages belong to."""
    if isinstance(pages, jax.Array):
        return pages
    inputs = pipeline.inputs
    return tuple(
        _Slot(
            readers=page.readers,
            valid=inputs.node_length[page.node] - page.token,
            position=inputs.node_start[page.node] + page.token if pipeline.sizes.causal else None,
        )
        for page in pages
    )


def _columns(pipeline: Pipeline, slots: _Slots) -> list[jax.Array]:
    """Readers (and positions) of each token of a block; no reader, where a page is not full.

    Without causality, readers are marked where all tokens have the same, so that a block may be masked by row.
    """
    if isinstance(slots, jax.Array):
        return [slots]
    page_size = jnp.int32(pipeline.sizes.page_size)
    index = plgpu.broadcasted_iota(jnp.int32, (BLOCK_TOKENS,), 0, layout=_THREAD)
    slot_of, offset = lax.div(index, page_size), lax.rem(index, page_size)
    readers = position = plgpu.layout_cast(jnp.full((BLOCK_TOKENS,), 0, jnp.int32), _THREAD)
    for j, slot in enumerate(slots):
        readers = jnp.where((slot_of == j) & (offset < slot.valid), slot.readers, readers)
        if slot.position is not None:
            position = jnp.where(slot_of == j, slot.position + offset, position)
    if pipeline.sizes.causal:
        return [readers, position]
    alike = [(slot.readers == slots[0].readers) & (slot.valid >= page_size) for slot in slots]
    return [readers | jnp.where(functools.reduce(operator.and_, alike), ALIKE, 0)]
