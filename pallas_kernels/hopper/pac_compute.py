"""The computing warpgroups of PAC, one a lane: scores, online softmax, values, and a partial at a segment's end."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.hopper import tensor_core
from pallas_kernels.hopper.pac_pipeline import LANES, UNIFORM_READERS, Pipeline
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.plan_format import Segment
from pallas_kernels.softmax import MASK_VALUE, MIN_ROW_MAX, tanh
from pallas_kernels.token_mask import is_in_window, is_not_after, is_reader, unpack_readers


class _State(NamedTuple):
    """Softmax of a tile so far, not normalised; maximum in units of log2."""

    accs: list[jax.Array]  # [64, columns] each
    max: jax.Array  # [64]
    sum: jax.Array  # [64]


class LaneWork(NamedTuple):
    """The part of a segment that a lane does."""

    segment: Segment
    tile: jax.Array  # whose rows: 0 or 1
    buffer: jax.Array  # of the query
    done: jax.Array  # blocks of earlier segments
    stride: jax.Array  # the lane works on blocks first, first + stride, ...
    first: jax.Array
    row_scale: jax.Array | None = None  # [64], factors on the scores of each row

    def blocks_before(self, end: jax.Array) -> jax.Array:
        """Count the lane's blocks before block `end` of the segment."""
        return lax.div(jnp.maximum(end - self.first + self.stride - 1, 0), self.stride)


def compute(pipeline: Pipeline) -> None:
    """Work on this lane's blocks of every segment."""
    refs, warpgroup = pipeline.refs, pipeline.warpgroup
    for buffer in range(pipeline.sizes.query_buffers):
        plgpu.barrier_arrive(refs.query_free.at[buffer])  # free to begin with

    # Free to begin with: for either lane to send its state, an arrival of the other.
    plgpu.barrier_arrive(refs.state_free.at[1 - warpgroup])

    def work(segment: Segment, _: Segment, done: jax.Array, buffer0: jax.Array, __: None) -> None:
        wide, buffer1 = segment.is_wide, pipeline.query_buffer(buffer0 + 1)
        pipeline.wait_for_query(segment.query_start0, buffer0)

        @pl.when(wide)
        def _second_buffer() -> None:
            pipeline.wait_for_query(segment.query_start1, buffer1)

        buffer = jnp.where(wide & (warpgroup == 1), buffer1, buffer0)
        lane = LaneWork(
            segment=segment,
            tile=jnp.where(wide, warpgroup, 0),
            buffer=buffer,
            done=done,
            stride=jnp.where(wide, 1, LANES),
            first=jnp.where(wide, 0, lax.rem(warpgroup + done, jnp.int32(LANES))),
            row_scale=pipeline.row_scale(buffer),
        )
        middle = lane.blocks_before(segment.first_masked - segment.begin)
        count = lane.blocks_before(segment.end - segment.begin)
        # The first turn is lane 0's.
        pipeline.take_turn(segment, warpgroup == 1)
        state = lax.fori_loop(0, middle, functools.partial(_step, pipeline, lane, masked=False), _init_state(pipeline))
        state = lax.fori_loop(middle, count, functools.partial(_step, pipeline, lane, masked=True), state)
        pipeline.give_turn(segment, warpgroup == 0)
        plgpu.barrier_arrive(refs.query_free.at[buffer0])

        @pl.when(wide)
        def _own() -> None:
            plgpu.barrier_arrive(refs.query_free.at[buffer1])
            _write(pipeline, jnp.where(warpgroup == 0, segment.partial0, segment.partial1), state)

        # The lane of the last block merges: the other one is done sooner, and has the next segment's first block.
        merges = warpgroup == lax.rem(done + segment.end - segment.begin - 1, jnp.int32(LANES))

        @pl.when(jnp.logical_not(wide | merges))
        def _hand_over() -> None:
            _send_state(pipeline, state)

        @pl.when(jnp.logical_not(wide) & merges)
        def _merge() -> None:
            _write(pipeline, segment.partial0, _merge_state(pipeline, state))

    pipeline.each_segment(work)


def _init_state(pipeline: Pipeline) -> _State:
    columns, rows = pipeline.sizes.acc_columns, plgpu.Layout.WGMMA.reduce(1)
    zeros = plgpu.layout_cast(jnp.full((TILE_ROWS, columns), 0, jnp.float32), plgpu.Layout.WGMMA)
    return _State(
        accs=[zeros] * (pipeline.sizes.value_head_dim // columns),
        max=plgpu.layout_cast(jnp.full((TILE_ROWS,), MASK_VALUE, jnp.float32), rows),
        sum=plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), rows),
    )


def _step(pipeline: Pipeline, lane: LaneWork, j: jax.Array, state: _State, masked: bool) -> _State:
    """Add the lane's block j; the other lane keeps the tensor cores busy during the softmax."""
    refs, sizes, segment = pipeline.refs, pipeline.sizes, lane.segment
    number = lane.done + j * lane.stride + lane.first
    stage = pipeline.stage(number)
    plgpu.barrier_wait(pipeline.full(refs.keys_full, segment, number))
    readers = refs.mask[stage, 0, 0] if masked else None  # of the first token; loaded ahead of the products
    keys = pipeline.block_of(refs.key_ring, stage)
    give_turn = functools.partial(pipeline.give_turn, segment)
    scores = tensor_core.multiply_keys(pipeline, lane.buffer, keys, give_turn)  # [64, block]
    _release(segment, refs.keys_free.at[stage])
    factor: float | jax.Array = sizes.factor if sizes.cap_factor is None else sizes.cap_factor
    factor = factor if lane.row_scale is None else factor * lane.row_scale  # [64], or a number
    if sizes.cap_factor is not None:
        scores, factor = tanh(_scaled(scores, factor)), sizes.factor
    visible, scores = mask_scores(pipeline, lane, stage, readers, scores) if masked else (all_rows(), scores)
    block_max = jnp.where(visible, scores.max(axis=1) * factor, MASK_VALUE)  # [64]
    row_max = jnp.maximum(jnp.maximum(state.max, block_max), MIN_ROW_MAX)
    alpha = jnp.exp2(state.max - row_max)
    weights = jnp.exp2(_scaled(scores, factor) - broadcast_rows(row_max, sizes.block))  # [64, block]
    accs = [acc * broadcast_rows(alpha, sizes.acc_columns) for acc in state.accs]
    rounded = clear_other_rows(visible, weights.astype(sizes.dtype))
    row_sum = state.sum * alpha + jnp.where(visible, weights.sum(axis=1), 0.0)
    plgpu.barrier_wait(pipeline.values_full(segment, number))
    pipeline.take_turn(segment)
    accs = tensor_core.multiply_values(pipeline, accs, rounded, pipeline.values(number, stage))  # [64, columns] each
    _release(segment, pipeline.values_free(number, stage))
    return _State(accs, row_max, row_sum)


def _scaled(scores: jax.Array, factor: float | jax.Array) -> jax.Array:
    """Multiply scores [64, block] by a number, or by one of each row."""
    return scores * (factor if isinstance(factor, float) else broadcast_rows(factor, scores.shape[1]))


def mask_scores(
    pipeline: Pipeline, lane: LaneWork, stage: jax.Array, readers: Any, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the rows that may see the block, and scores that are lowered where such a row does not see a token.

    Where all tokens have the same `readers`, as in most blocks of a long leaf, nothing needs to be done by token.
    """
    by_token = functools.partial(_mask_by_token, pipeline, lane, stage)
    if pipeline.sizes.has_positions or pipeline.sizes.token_planes:
        return all_rows(), by_token(scores)

    def uniform(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        visible = is_reader(row + _first_row(pipeline, lane), *unpack_readers(readers & ~UNIFORM_READERS))  # [64]
        # Scores stay as they are: were both branches to select, the compiler would join them and keep, in registers
        # that it does not have, one predicate for each score.
        return visible, scores

    def mixed(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        return all_rows(), by_token(scores)

    return lax.cond(readers & UNIFORM_READERS != 0, uniform, mixed, scores)


def _mask_by_token(pipeline: Pipeline, lane: LaneWork, stage: jax.Array, scores: jax.Array) -> jax.Array:
    """Lower the scores of tokens that a row does not see."""
    sizes, refs, mask = pipeline.sizes, pipeline.refs, pipeline.refs.mask
    along = plgpu.Layout.WGMMA.reduce(0)

    def over_columns(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, scores.shape, [1])

    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    readers = load(mask.at[stage, 0, pl.ds(0, sizes.block)], along)  # [block]
    visible = is_reader(row + _first_row(pipeline, lane), *map(over_columns, unpack_readers(readers)))
    scores = jnp.where(visible, scores, sizes.mask_value)
    if sizes.has_positions:
        tile = jnp.where(lane.tile == 0, lane.segment.tile0, lane.segment.tile1)
        at = pl.ds(tile * sizes.packing.tile_rows, TILE_ROWS)
        bounds: list[tuple[Any, Any]] = [(refs.query_position, is_not_after)] if sizes.causal else []
        bounds += [(refs.first_position, is_in_window)] if sizes.windowed else []
        for ref, is_within in bounds:
            bound = load(ref.at[at], plgpu.Layout.WGMMA.reduce(1))  # [64]
            position = load(mask.at[stage, 1, pl.ds(0, sizes.block)], along)  # [block]
            within = is_within(over_columns(position), broadcast_rows(bound, sizes.block))
            scores = jnp.where(within, scores, sizes.mask_value)
    return scores


def _first_row(pipeline: Pipeline, lane: LaneWork) -> jax.Array:
    """Count the rows before the lane's tile, since readers are counted over both tiles of a wide segment."""
    return lane.tile * pipeline.sizes.packing.tile_rows


def all_rows() -> jax.Array:
    """Return [64] of True, whose operations the compiler leaves out."""
    return plgpu.layout_cast(jnp.full((TILE_ROWS,), True), plgpu.Layout.WGMMA.reduce(1))


def clear_other_rows(visible: jax.Array, weights: jax.Array) -> jax.Array:
    """Clear the rows that do not see the block, even of NaN; bit by bit, since that takes two weights at once."""
    bits = broadcast_rows(jnp.where(visible, jnp.int16(-1), jnp.int16(0)), weights.shape[1])  # [64, block]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(weights, jnp.int16) & bits, weights.dtype)


def _release(segment: Segment, barrier: Any) -> None:
    """Give a stage back to who fills it, and expects an arrival for each lane."""
    plgpu.barrier_arrive(barrier)

    @pl.when(jnp.logical_not(segment.is_wide))
    def _for_the_other_lane() -> None:
        plgpu.barrier_arrive(barrier)


def _send_state(pipeline: Pipeline, state: _State) -> None:
    """Pass this lane's state to the other through shared memory."""
    refs, sender = pipeline.refs, pipeline.warpgroup
    for i, acc in enumerate(state.accs):
        plgpu.barrier_wait(refs.state_free.at[sender])
        refs.state[...] = acc
        if i == 0:
            refs.state_rows.at[0][...] = state.max
            refs.state_rows.at[1][...] = state.sum
        plgpu.barrier_arrive(refs.state_full.at[sender])


def _merge_state(pipeline: Pipeline, state: _State) -> _State:
    """Merge the other lane's state into this lane's (POR of two)."""
    refs, columns, rows = pipeline.refs, pipeline.sizes.acc_columns, plgpu.Layout.WGMMA.reduce(1)
    sender = 1 - pipeline.warpgroup
    accs = []
    for i, acc in enumerate(state.accs):
        plgpu.barrier_wait(refs.state_full.at[sender])
        if i == 0:
            sent_max, sent_sum = load(refs.state_rows.at[0], rows), load(refs.state_rows.at[1], rows)
            row_max = jnp.maximum(state.max, sent_max)
            alpha, sent_alpha = jnp.exp2(state.max - row_max), jnp.exp2(sent_max - row_max)
        sent = load(refs.state, plgpu.Layout.WGMMA)
        accs.append(acc * broadcast_rows(alpha, columns) + sent * broadcast_rows(sent_alpha, columns))
        plgpu.barrier_arrive(refs.state_free.at[sender])
    return _State(accs, row_max, state.sum * alpha + sent_sum * sent_alpha)


def _write(pipeline: Pipeline, partial: jax.Array, state: _State) -> None:
    """Write a partial, normalised by its own sum."""
    refs, columns = pipeline.refs, pipeline.sizes.acc_columns
    inverse_sum = 1.0 / broadcast_rows(jnp.maximum(state.sum, 1e-30), columns)
    for i, acc in enumerate(state.accs):
        refs.out.at[partial, :, pl.ds(i * columns, columns)][...] = acc * inverse_sum
    refs.max.at[partial][...] = state.max
    refs.sum.at[partial][...] = state.sum


def broadcast_rows(rows: jax.Array, width: int) -> jax.Array:
    """Repeat a value of each row along the columns."""
    return lax.broadcast_in_dim(rows, (TILE_ROWS, width), [0])
