"""The computing warpgroups of PAC, one a lane: scores, online softmax, values, and a partial at a segment's end."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.hopper import pac_wide, tensor_core
from pallas_kernels.hopper.pac_mask import cap_and_mask, readers_of_warps
from pallas_kernels.hopper.pac_pipeline import LANES, LaneWork, Pipeline
from pallas_kernels.hopper.pac_softmax import (
    Scores,
    State,
    add_masked,
    add_unmasked,
    are_new,
    init_state,
    row_sum,
    score_factor,
)
from pallas_kernels.plan_format import Segment
from pallas_kernels.row_registers import broadcast_rows, over_rows


class _Partial(NamedTuple):
    """Softmax of a tile over a lane's blocks, not normalised."""

    accs: list[jax.Array]  # [64, columns] each
    max: jax.Array  # [64], in units of log2
    sum: jax.Array  # [64]


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
        state = _add_unmasked(pipeline, lane, middle)
        state = lax.fori_loop(middle, count, functools.partial(_step, pipeline, lane, masked=True), state)
        own = _Partial(state.accs, state.reference, row_sum(state))
        plgpu.barrier_arrive(refs.query_free.at[buffer0])

        @pl.when(wide)
        def _write_own() -> None:
            plgpu.barrier_arrive(refs.query_free.at[buffer1])
            _write(pipeline, jnp.where(warpgroup == 0, segment.partial0, segment.partial1), own)

        # The lane of the last block merges: the other one is done sooner, and has the next segment's first block.
        merges = warpgroup == lax.rem(done + segment.end - segment.begin - 1, jnp.int32(LANES))

        @pl.when(jnp.logical_not(wide | merges))
        def _hand_over() -> None:
            _send(pipeline, own)

        @pl.when(jnp.logical_not(wide) & merges)
        def _merge() -> None:
            _write(pipeline, segment.partial0, _merged(pipeline, own))

    pipeline.each_segment(work)


def _add_unmasked(pipeline: Pipeline, lane: LaneWork, count: jax.Array) -> State:
    """Return the state of the lane's tile after the first `count` of its blocks, which need no mask."""
    sizes = pipeline.sizes

    def one_by_one(_: None) -> State:
        step = functools.partial(_step, pipeline, lane, masked=False)
        return lax.fori_loop(0, count, step, init_state(sizes, sizes.by_reference))

    if not pac_wide.serves(sizes):
        return one_by_one(None)
    return lax.cond(lane.segment.is_wide, lambda _: pac_wide.add_blocks(pipeline, lane, count), one_by_one, None)


def _step(pipeline: Pipeline, lane: LaneWork, j: jax.Array, state: State, masked: bool) -> State:
    """Add the lane's block j; the other lane keeps the tensor cores busy during the softmax."""
    refs, sizes, segment = pipeline.refs, pipeline.sizes, lane.segment
    number = lane.number(j)
    stage = pipeline.stage(number)
    plgpu.barrier_wait(pipeline.full(refs.keys_full, segment, number))
    readers = readers_of_warps(pipeline, stage) if masked else ()  # loaded ahead of the products
    keys = pipeline.block_of(refs.key_ring, stage)
    products = tensor_core.multiply_keys(pipeline, lane.buffer, keys)  # [64, block]
    _release(segment, refs.keys_free.at[stage])
    key_scale = pipeline.key_scale(stage)
    products = products if key_scale is None else products * over_rows(key_scale)
    row_scale, value_scale = lane.row_scale, pipeline.value_scale(stage)
    if masked:
        visible, products, by_row = cap_and_mask(pipeline, lane, stage, readers, products)
        is_new = (j == 0) | by_row & are_new(sizes, state, visible)
        scores = Scores(products, score_factor(sizes, row_scale), visible, value_scale)
        weights, state = add_masked(sizes, state, scores, is_new)
    else:
        weights, state = add_unmasked(
            sizes, state, products, row_scale, value_scale, is_new=j == 0, by_reference=sizes.by_reference
        )
    plgpu.barrier_wait(pipeline.values_full(segment, number))
    values = pipeline.values(number, stage)
    accs = tensor_core.multiply_values(pipeline, state.accs, weights, values)  # [64, columns] each
    _release(segment, pipeline.values_free(number, stage))
    return state._replace(accs=accs)


def _release(segment: Segment, barrier: Any) -> None:
    """Give a stage back to who fills it, and expects an arrival for each lane."""
    plgpu.barrier_arrive(barrier)

    @pl.when(jnp.logical_not(segment.is_wide))
    def _for_the_other_lane() -> None:
        plgpu.barrier_arrive(barrier)


def _send(pipeline: Pipeline, own: _Partial) -> None:
    """Pass what this lane has to the other through shared memory."""
    refs, sender = pipeline.refs, pipeline.warpgroup
    for i, part in enumerate(_parts(pipeline, own)):
        plgpu.barrier_wait(refs.state_free.at[sender])
        refs.state[...] = part
        if i == 0:
            refs.state_rows.at[0][...] = own.max
            refs.state_rows.at[1][...] = own.sum
        plgpu.barrier_arrive(refs.state_full.at[sender])


def _merged(pipeline: Pipeline, own: _Partial) -> _Partial:
    """Merge what the other lane has into what this one has (POR of two)."""
    refs, columns, rows = pipeline.refs, pipeline.sizes.state_columns, plgpu.Layout.WGMMA.reduce(1)
    sender = 1 - pipeline.warpgroup
    accs = []
    for i, part in enumerate(_parts(pipeline, own)):
        plgpu.barrier_wait(refs.state_full.at[sender])
        if i == 0:
            sent_max, sent_sum = load(refs.state_rows.at[0], rows), load(refs.state_rows.at[1], rows)
            row_max = jnp.maximum(own.max, sent_max)
            alpha, sent_alpha = jnp.exp2(own.max - row_max), jnp.exp2(sent_max - row_max)
        sent = load(refs.state, plgpu.Layout.WGMMA)
        accs.append(part * broadcast_rows(alpha, columns) + sent * broadcast_rows(sent_alpha, columns))
        plgpu.barrier_arrive(refs.state_free.at[sender])
    return _Partial(accs, row_max, own.sum * alpha + sent_sum * sent_alpha)


def _parts(pipeline: Pipeline, own: _Partial) -> list[jax.Array]:
    """Cut accumulators into what is passed on at once, [64, state_columns]."""
    columns = pipeline.sizes.state_columns
    return [acc[:, at : at + columns] for acc in own.accs for at in range(0, acc.shape[1], columns)]


def _write(pipeline: Pipeline, partial: jax.Array, own: _Partial) -> None:
    """Write a partial, normalised by its own sum."""
    refs, columns = pipeline.refs, own.accs[0].shape[1]
    inverse_sum = 1.0 / broadcast_rows(jnp.maximum(own.sum, 1e-30), columns)
    for i, acc in enumerate(own.accs):
        refs.out.at[partial, :, pl.ds(i * columns, columns)][...] = acc * inverse_sum
    refs.max.at[partial][...] = own.max
    refs.sum.at[partial][...] = own.sum
