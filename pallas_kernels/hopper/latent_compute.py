"""The computing warpgroups of PAC over latents: one has scores, softmax and half of the values, one the other half."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.hopper import latent_products, tensor_core
from pallas_kernels.hopper.latent_pipeline import HALF, LatentPipeline
from pallas_kernels.hopper.pac_cap import capped
from pallas_kernels.hopper.pac_mask import cap_and_mask, clear_other_rows, readers_of_warps
from pallas_kernels.hopper.pac_pipeline import LaneWork
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.plan_format import Segment
from pallas_kernels.row_registers import all_rows, broadcast_rows, filled
from pallas_kernels.softmax import MASK_VALUE, MIN_ROW_MAX


class _State(NamedTuple):
    """Softmax of a tile so far, not normalised; maximum in units of log2."""

    accs: list[jax.Array]  # [64, 128] each, columns 0 to 255 of the output
    max: jax.Array  # [64]
    sum: jax.Array  # [64]


def score(pipeline: LatentPipeline) -> None:
    """Compute the weights of every block, pass them on, and add up columns 0 to 255 of the output."""
    refs = pipeline.refs
    plgpu.barrier_arrive(refs.query_free.at[0])  # free to begin with

    def work(segment: Segment, _: Segment, done: jax.Array, buffer: jax.Array, __: None) -> None:
        zero, one = jnp.int32(0), jnp.int32(1)
        lane = LaneWork(segment=segment, tile=zero, buffer=buffer, done=done, stride=one, first=zero)
        pipeline.wait_for_query(segment.query_start0, buffer)
        middle, count = segment.first_masked - segment.begin, segment.end - segment.begin
        step = functools.partial(_score_block, pipeline, lane)
        state = lax.fori_loop(0, middle, functools.partial(step, masked=False), _init_state(pipeline))
        state = lax.fori_loop(middle, count, functools.partial(step, masked=True), state)
        plgpu.barrier_arrive(refs.query_free.at[buffer])
        inverse = 1.0 / jnp.maximum(state.sum, 1e-30)  # [64]
        plgpu.barrier_wait(refs.end_free.at[0])
        refs.factor.at[pipeline.sizes.stages][...] = inverse
        plgpu.barrier_arrive(refs.end_full.at[0])
        _write(pipeline, segment.partial0, 0, state.accs, inverse)
        refs.max.at[segment.partial0][...] = state.max
        refs.sum.at[segment.partial0][...] = state.sum

    pipeline.each_segment(work)


def follow(pipeline: LatentPipeline) -> None:
    """Add up columns 256 to 511 of the output, with the weights of the scorer."""
    refs = pipeline.refs
    plgpu.barrier_arrive(refs.end_free.at[0])  # free to begin with

    def work(segment: Segment, _: Segment, done: jax.Array, __: jax.Array, ___: None) -> None:
        def step(i: jax.Array, accs: list[jax.Array]) -> list[jax.Array]:
            stage = pipeline.stage(done + i)
            plgpu.barrier_wait(refs.weights_full.at[stage])
            accs = _scaled(pipeline, accs, _load_factor(pipeline, stage))
            values = pipeline.right_values(stage)  # [block, 256]
            accs = tensor_core.multiply_values(pipeline, accs, pipeline.weights(stage), values)  # [64, 128] each
            plgpu.barrier_arrive(refs.right_free.at[stage])
            return accs

        accs = lax.fori_loop(0, segment.end - segment.begin, step, _init_accs(pipeline))
        plgpu.barrier_wait(refs.end_full.at[0])
        inverse = _load_factor(pipeline, pipeline.sizes.stages)
        plgpu.barrier_arrive(refs.end_free.at[0])
        _write(pipeline, segment.partial0, HALF, accs, inverse)

    pipeline.each_segment(work)


def _init_state(pipeline: LatentPipeline) -> _State:
    return _State(_init_accs(pipeline), filled(MASK_VALUE, TILE_ROWS), filled(0, TILE_ROWS))


def _init_accs(pipeline: LatentPipeline) -> list[jax.Array]:
    columns = pipeline.sizes.acc_columns
    return [filled(0, TILE_ROWS, columns)] * (HALF // columns)


def _score_block(pipeline: LatentPipeline, lane: LaneWork, i: jax.Array, state: _State, masked: bool) -> _State:
    """Add block i of the segment to the state, and pass its weights on."""
    refs, sizes = pipeline.refs, pipeline.sizes
    number = lane.done + i
    stage = pipeline.stage(number)
    plgpu.barrier_wait(pipeline.keys_full.at[stage])
    readers = readers_of_warps(pipeline, stage) if masked else ()  # loaded ahead of the products
    # The query is in buffer 0. Were that a constant, the compiler would keep the addresses of all its parts from block
    # to block, in registers that it does not have; that numbers of blocks are not negative, it does not know.
    scores = latent_products.multiply_latents(pipeline, stage, number >> 31)  # [64, block]
    pipeline.release_keys(stage)
    if masked:
        visible, scores, _ = cap_and_mask(pipeline, lane, stage, readers, scores)
    else:
        visible, scores = all_rows(), capped(sizes, scores, None, apart=False)
    block_max = jnp.where(visible, scores.max(axis=1) * sizes.factor, MASK_VALUE)  # [64]
    row_max = jnp.maximum(jnp.maximum(state.max, block_max), MIN_ROW_MAX)
    alpha = jnp.exp2(state.max - row_max)
    weights = jnp.exp2(scores * sizes.factor - broadcast_rows(row_max, sizes.block))  # [64, block]
    rounded = clear_other_rows(visible, weights.astype(sizes.dtype))
    # A store waits for all warps, so none writes where another one's products still read keys.
    refs.factor.at[stage][...] = alpha
    pipeline.weights(stage)[...] = rounded
    plgpu.commit_smem()  # products read them
    plgpu.barrier_arrive(refs.weights_full.at[stage])
    row_sum = state.sum * alpha + jnp.where(visible, weights.sum(axis=1), 0.0)
    accs = _scaled(pipeline, state.accs, alpha)
    accs = tensor_core.multiply_values(pipeline, accs, rounded, pipeline.left_values(stage))  # [64, 128] each
    plgpu.barrier_arrive(refs.left_free.at[stage])
    return _State(accs, row_max, row_sum)


def _scaled(pipeline: LatentPipeline, accs: list[jax.Array], factor: jax.Array) -> list[jax.Array]:
    """Multiply the rows of accumulators by a factor each, [64]."""
    return [acc * broadcast_rows(factor, pipeline.sizes.acc_columns) for acc in accs]


def _write(pipeline: LatentPipeline, partial: jax.Array, first: int, accs: list[jax.Array], inverse: jax.Array) -> None:
    """Write columns `first` to first + 255 of a partial, normalised by the inverse of its sum [64]."""
    columns = pipeline.sizes.acc_columns
    for i, acc in enumerate(_scaled(pipeline, accs, inverse)):
        pipeline.refs.out.at[partial, :, pl.ds(first + i * columns, columns)][...] = acc


def _load_factor(pipeline: LatentPipeline, place: Any) -> jax.Array:
    return load(pipeline.refs.factor.at[place], plgpu.Layout.WGMMA.reduce(1))  # [64]
