"""The computing warpgroups of PAC, one a lane: scores, online softmax, values, and a partial at a segment's end."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret
from pallas_kernels.columns import Segment
from pallas_kernels.compat import load, transposed
from pallas_kernels.pac_pipeline import ALIKE, LANES, Pipeline
from pallas_kernels.packing import TILE_ROWS

_HIDDEN = -1e30  # the score of a token that a row does not see
#: The least maximum of a row: exp2(_HIDDEN - LOWEST) is 0, not 1.
LOWEST = -1e20


class _State(NamedTuple):
    """Softmax of a tile so far, not normalised; maximum in units of log2."""

    accs: list[jax.Array]  # [64, columns] each
    max: jax.Array  # [64]
    sum: jax.Array


class _Share(NamedTuple):
    """A lane's part of a segment."""

    segment: Segment
    lane: jax.Array  # whose tile
    buffer: jax.Array  # of the query
    done: jax.Array  # blocks of earlier segments
    stride: jax.Array  # the lane works on blocks first, first + stride, ...
    first: jax.Array

    def blocks_before(self, end: jax.Array) -> jax.Array:
        """Count the lane's blocks before block `end` of the segment."""
        return lax.div(jnp.maximum(end - self.first + self.stride - 1, 0), self.stride)


def compute(pipeline: Pipeline) -> None:
    """Work on this lane's blocks of every segment."""
    scratch, warpgroup = pipeline.scratch, pipeline.warpgroup
    for buffer in range(pipeline.sizes.query_buffers):
        plgpu.barrier_arrive(scratch.query_free.at[buffer])  # free to begin with

    # Free to begin with: for either lane to give its half, an arrival of the other.
    plgpu.barrier_arrive(scratch.half_free.at[1 - warpgroup])

    def work(segment: Segment, _: Segment, done: jax.Array, turn: jax.Array, __: None) -> None:
        wide, other = segment.is_wide, pipeline.query_buffer(turn + 1)
        share = _Share(
            segment=segment,
            lane=jnp.where(wide, warpgroup, 0),
            buffer=jnp.where(wide & (warpgroup == 1), other, turn),
            done=done,
            stride=jnp.where(wide, 1, LANES),
            first=jnp.where(wide, 0, lax.rem(warpgroup + done, jnp.int32(LANES))),
        )
        _wait_for_query(pipeline, segment.unit, turn)

        @pl.when(wide)
        def _second_buffer() -> None:
            _wait_for_query(pipeline, segment.other_unit, other)

        middle = share.blocks_before(segment.masked - segment.lo)
        count = share.blocks_before(segment.hi - segment.lo)
        state = lax.fori_loop(0, middle, functools.partial(_step, pipeline, share, masked=False), _nothing(pipeline))
        state = lax.fori_loop(middle, count, functools.partial(_step, pipeline, share, masked=True), state)
        plgpu.barrier_arrive(scratch.query_free.at[turn])

        @pl.when(wide)
        def _own() -> None:
            plgpu.barrier_arrive(scratch.query_free.at[other])
            _write(pipeline, jnp.where(warpgroup == 0, segment.partial, segment.other_partial), state)

        # The lane of the last block merges: the other one is done sooner, and has the next segment's first block.
        merges = warpgroup == lax.rem(done + segment.hi - segment.lo - 1, jnp.int32(LANES))

        @pl.when(jnp.logical_not(wide | merges))
        def _hand_over() -> None:
            _give_half(pipeline, state)

        @pl.when(jnp.logical_not(wide) & merges)
        def _merge() -> None:
            _write(pipeline, segment.partial, _take_half(pipeline, state))

    pipeline.each_segment(work)
    if pipeline.sizes.interpreted:
        interpret.see_completions(pipeline, 0, (), [scratch.half_free.at[warpgroup]])


def _wait_for_query(pipeline: Pipeline, unit: jax.Array, buffer: jax.Array) -> None:
    """Wait for the rows of a tile, which come together or unit by unit."""

    @pl.when(unit >= 0)
    def _together() -> None:
        plgpu.barrier_wait(pipeline.scratch.query_together.at[buffer])

    @pl.when(unit < 0)
    def _unit_by_unit() -> None:
        plgpu.barrier_wait(pipeline.scratch.query_scattered.at[buffer])


def _nothing(pipeline: Pipeline) -> _State:
    columns, rows = pipeline.sizes.columns, plgpu.Layout.WGMMA.reduce(1)
    zeros = plgpu.layout_cast(jnp.full((TILE_ROWS, columns), 0, jnp.float32), plgpu.Layout.WGMMA)
    return _State(
        accs=[zeros] * (pipeline.sizes.head_dim // columns),
        max=plgpu.layout_cast(jnp.full((TILE_ROWS,), _HIDDEN, jnp.float32), rows),
        sum=plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), rows),
    )


def _step(pipeline: Pipeline, share: _Share, j: jax.Array, state: _State, masked: bool) -> _State:
    """Add the lane's block j; the other lane keeps the tensor cores busy during the softmax."""
    scratch, sizes, segment = pipeline.scratch, pipeline.sizes, share.segment
    number = share.done + j * share.stride + share.first
    slot = pipeline.slot(number)
    plgpu.barrier_wait(pipeline.full(scratch.keys_full, segment, number))
    readers = scratch.columns[slot, 0, 0] if masked else None  # of the first token; loaded ahead of the products

    def multiply_keys(scores_ref: Any) -> jax.Array:
        for at in range(sizes.query_parts):
            plgpu.wgmma(
                scores_ref,
                scratch.query.tiled.at[share.buffer, at],
                transposed(scratch.keys.at[slot, :, pl.ds(at * 64, 64)]),
            )
        return scores_ref[...]

    if sizes.interpreted:
        query = interpret.load_tile(scratch.query.rows.at[share.buffer])
        scores = interpret.multiply(query, interpret.read(scratch.keys.at[slot]).T)
    else:
        scores = pl.run_scoped(multiply_keys, plgpu.ACC((TILE_ROWS, sizes.block), jnp.float32))  # [64, block]
    _release(segment, scratch.keys_free, slot)
    visible, scores = _hide(pipeline, share, slot, readers, scores) if masked else (_all_rows(), scores)
    block_max = jnp.where(visible, scores.max(axis=1) * sizes.factor, _HIDDEN)  # [64]
    row_max = jnp.maximum(jnp.maximum(state.max, block_max), LOWEST)
    fade = jnp.exp2(state.max - row_max)
    weights = jnp.exp2(scores * sizes.factor - _spread(row_max, sizes.block))  # [64, block]
    accs = [acc * _spread(fade, sizes.columns) for acc in state.accs]
    rounded = _clear_others(visible, weights.astype(sizes.dtype))
    row_sum = state.sum * fade + jnp.where(visible, weights.sum(axis=1), 0.0)
    plgpu.barrier_wait(pipeline.full(scratch.values_full, segment, number))

    def multiply_values(acc_refs: list[Any]) -> None:
        for i, acc_ref in enumerate(acc_refs):
            plgpu.wgmma(acc_ref, rounded, scratch.values.at[slot, :, pl.ds(i * sizes.columns, sizes.columns)])

    if sizes.interpreted:
        products = jnp.split(interpret.multiply(rounded, interpret.read(scratch.values.at[slot])), len(accs), axis=1)
        accs = [acc + product for acc, product in zip(accs, products, strict=True)]
    else:
        accs = pl.run_state(multiply_values)([plgpu.ACC.init(acc) for acc in accs])  # [64, columns] each
    _release(segment, scratch.values_free, slot)
    return _State(accs, row_max, row_sum)


def _hide(
    pipeline: Pipeline, share: _Share, slot: jax.Array, readers: Any, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the rows that may see the block, and scores that are lowered where such a row does not see a token.

    Where all tokens have the same `readers`, as in most blocks of a long leaf, nothing needs to be done by token.
    """
    by_token = functools.partial(_hide_by_token, pipeline, share, slot)
    if pipeline.sizes.causal or pipeline.sizes.by_token:
        return _all_rows(), by_token(scores)

    def alike(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        visible = _within(row + _first_row(pipeline, share), *_unpack(readers & ~ALIKE))  # [64]
        # Scores stay as they are: were both branches to select, the compiler would join them and keep, in registers
        # that it does not have, one predicate for each score.
        return visible, scores

    def unlike(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _all_rows(), by_token(scores)

    return lax.cond(readers & ALIKE != 0, alike, unlike, scores)


def _hide_by_token(pipeline: Pipeline, share: _Share, slot: jax.Array, scores: jax.Array) -> jax.Array:
    """Lower the scores of tokens that a row does not see."""
    sizes, inputs, columns = pipeline.sizes, pipeline.inputs, pipeline.scratch.columns
    along = plgpu.Layout.WGMMA.reduce(0)

    def over_columns(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, scores.shape, [1])

    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    readers = load(columns.at[slot, 0, pl.ds(0, sizes.block)], along)  # [block]
    visible = _within(row + _first_row(pipeline, share), *map(over_columns, _unpack(readers)))
    scores = jnp.where(visible, scores, _HIDDEN)
    if sizes.causal:
        tile = jnp.where(share.lane == 0, share.segment.tile, share.segment.other_tile)
        at = pl.ds(tile * sizes.packing.tile_rows, TILE_ROWS)
        query_position = load(inputs.query_position.at[at], plgpu.Layout.WGMMA.reduce(1))  # [64]
        position = load(columns.at[slot, 1, pl.ds(0, sizes.block)], along)  # [block]
        past = over_columns(position) <= _spread(query_position, sizes.block)
        scores = jnp.where(past, scores, _HIDDEN)
    return scores


def _first_row(pipeline: Pipeline, share: _Share) -> jax.Array:
    """Count the rows before the lane's tile, since readers are counted over both tiles of a wide segment."""
    return share.lane * pipeline.sizes.packing.tile_rows


def _unpack(readers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first row of a token's or a block's readers, and their number."""
    first = readers & 0xFFFF
    return first, lax.shift_right_logical(readers, 16) - first


def _within(row: jax.Array, first: jax.Array, count: jax.Array) -> jax.Array:
    """Tell whether first <= row < first + count, by one comparison: what lies before `first` wraps around."""
    return (row - first).astype(jnp.uint32) < count.astype(jnp.uint32)


def _all_rows() -> jax.Array:
    """Return [64] of True, whose operations the compiler leaves out."""
    return plgpu.layout_cast(jnp.full((TILE_ROWS,), True), plgpu.Layout.WGMMA.reduce(1))


def _clear_others(visible: jax.Array, weights: jax.Array) -> jax.Array:
    """Clear the rows that do not see the block, even of NaN; bit by bit, since that takes two weights at once."""
    bits = _spread(jnp.where(visible, jnp.int16(-1), jnp.int16(0)), weights.shape[1])  # [64, block]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(weights, jnp.int16) & bits, weights.dtype)


def _release(segment: Segment, barrier: Any, slot: jax.Array) -> None:
    """Give a slot back to the loader, which expects an arrival for each lane."""
    plgpu.barrier_arrive(barrier.at[slot])

    @pl.when(jnp.logical_not(segment.is_wide))
    def _for_the_other_lane() -> None:
        plgpu.barrier_arrive(barrier.at[slot])


def _give_half(pipeline: Pipeline, state: _State) -> None:
    """Pass this lane's state to the other through shared memory."""
    scratch, giver = pipeline.scratch, pipeline.warpgroup
    for i, acc in enumerate(state.accs):
        plgpu.barrier_wait(scratch.half_free.at[giver])
        scratch.half[...] = acc
        if i == 0:
            scratch.half_rows.at[0][...] = state.max
            scratch.half_rows.at[1][...] = state.sum
        plgpu.barrier_arrive(scratch.half_full.at[giver])


def _take_half(pipeline: Pipeline, state: _State) -> _State:
    """Merge the other lane's state into this lane's (POR of two)."""
    scratch, columns, rows = pipeline.scratch, pipeline.sizes.columns, plgpu.Layout.WGMMA.reduce(1)
    giver = 1 - pipeline.warpgroup
    accs = []
    for i, acc in enumerate(state.accs):
        plgpu.barrier_wait(scratch.half_full.at[giver])
        if i == 0:
            other_max, other_sum = load(scratch.half_rows.at[0], rows), load(scratch.half_rows.at[1], rows)
            row_max = jnp.maximum(state.max, other_max)
            fade, other_fade = jnp.exp2(state.max - row_max), jnp.exp2(other_max - row_max)
        other = load(scratch.half, plgpu.Layout.WGMMA)
        accs.append(acc * _spread(fade, columns) + other * _spread(other_fade, columns))
        plgpu.barrier_arrive(scratch.half_free.at[giver])
    return _State(accs, row_max, state.sum * fade + other_sum * other_fade)


def _write(pipeline: Pipeline, partial: jax.Array, state: _State) -> None:
    outputs, columns = pipeline.outputs, pipeline.sizes.columns
    share = 1.0 / _spread(jnp.maximum(state.sum, 1e-30), columns)
    for i, acc in enumerate(state.accs):
        outputs.out.at[partial, :, pl.ds(i * columns, columns)][...] = acc * share
    outputs.max.at[partial][...] = state.max
    outputs.sum.at[partial][...] = state.sum


def _spread(rows: jax.Array, width: int) -> jax.Array:
    """Repeat a value of each row along the columns."""
    return lax.broadcast_in_dim(rows, (TILE_ROWS, width), [0])
