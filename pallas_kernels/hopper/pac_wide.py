"""Blocks of a wide segment that need no mask: products of a block's values and of the next keys, waited for at once.

    tensor cores   │ P0 V0, Q K1ᵀ of lane 0 │ P0 V0, Q K1ᵀ of lane 1 │ P1 V1, Q K2ᵀ of lane 0 │ ..
    lane 0         │ waits                  │ weights P1 of Q K1ᵀ    │ waits                  │ ..
    lane 1         │ weights P0             │ waits                  │ weights P1             │ ..

Both lanes work on every block. A lane waits for the tensor cores once a block, for as long as the other one needs for
its weights, so that these always have something to do. The softmax is by reference: it leaves accumulators alone, and
takes less time than the products of the other lane. In narrow segments, where the next block is seldom there yet, a
block's values would wait for its keys: they keep `pac_compute`'s loop.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import pac_softmax, tensor_core
from pallas_kernels.hopper.pac_pipeline import LaneWork, Pipeline, Sizes
from pallas_kernels.hopper.pac_softmax import State
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.row_registers import filled


def serves(sizes: Sizes) -> bool:
    """Whether wide segments have this loop: with keys and values of one byte, or of 256 numbers, registers run out."""
    return jnp.dtype(sizes.kv_dtype).itemsize == 2 and sizes.value_head_dim <= 128


def add_blocks(pipeline: Pipeline, lane: LaneWork, count: jax.Array) -> State:
    """Return the state of a tile after the segment's first `count` blocks."""
    refs, sizes, segment = pipeline.refs, pipeline.sizes, lane.segment

    def first_products(_: None) -> jax.Array:
        number = lane.number(jnp.int32(0))
        plgpu.barrier_wait(pipeline.full(refs.keys_full, segment, number))
        keys = pipeline.block_of(refs.key_ring, pipeline.stage(number))
        products = tensor_core.multiply_keys(pipeline, lane.buffer, keys)  # [64, block]

        @pl.when(count > 1)
        def _release() -> None:
            plgpu.barrier_arrive(refs.keys_free.at[pipeline.stage(number)])

        return products

    def no_products(_: None) -> jax.Array:
        return filled(0, TILE_ROWS, sizes.block)

    def step(j: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, products = carry
        weights, state = pac_softmax.add_unmasked(  # [64, block]
            sizes, state, products, row_scale=None, value_scale=None, is_new=j == 0, by_reference=True
        )
        number, following = lane.number(j), lane.number(jnp.minimum(j + 1, count - 1))
        stage, next_stage = pipeline.stage(number), pipeline.stage(following)
        plgpu.barrier_wait(pipeline.values_full(segment, number))

        @pl.when(j + 1 < count)
        def _wait_for_keys() -> None:
            plgpu.barrier_wait(pipeline.full(refs.keys_full, segment, following))

        # After the last block its own keys, which are kept for that, are multiplied once more, for nobody: products of
        # values alone would be the same instructions again.
        accs, products = tensor_core.multiply_both(
            pipeline,
            state.accs,
            weights,
            pipeline.values(number, stage),
            lane.buffer,
            pipeline.block_of(refs.key_ring, next_stage),
        )

        @pl.when(j + 2 != count)
        def _release_keys() -> None:
            plgpu.barrier_arrive(refs.keys_free.at[next_stage])

        plgpu.barrier_arrive(pipeline.values_free(number, stage))
        return state._replace(accs=accs), products

    products = lax.cond(count > 0, first_products, no_products, None)
    state, _ = lax.fori_loop(0, count, step, (pac_softmax.init_state(sizes, by_reference=True), products))
    return state._replace(sums=pac_softmax.row_sum(state))
