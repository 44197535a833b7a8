"""What stands in for what the GPU interpreter of Pallas cannot do, so that the kernels run step by step on a CPU.

The interpreter simulates warpgroups, shared memory, copies and barriers, and reports races between them. It cannot view
a reference in another shape, takes no operand or accumulator of wgmma from registers, looks for no races in wgmma, and
demands that every completion of a barrier is seen. All else is the code that runs on a GPU.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pac_pipeline import Pipeline
from pallas_kernels.packing import TILE_ROWS, Packing


def read(ref: Any) -> jax.Array:
    """Read shared memory as wgmma and loads that a warpgroup waits for do: done before a later copy begins."""
    values = ref[...]
    plgpu.commit_smem()  # or the interpreter takes a copy that follows for one that may overtake the read
    return values


def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply two matrices as wgmma does, with float32 products and sums."""
    return lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def see_completions(pipeline: Pipeline, blocks: jax.Array | int, rings: Iterable[Any], others: Iterable[Any]) -> None:
    """Wait, after the last of `blocks`, for the slots of rings and other barriers that nobody waits for any more."""

    def wait(number: jax.Array, _: None) -> None:
        for ring in rings:
            plgpu.barrier_wait(ring.at[pipeline.slot(number)])

    lax.fori_loop(jnp.maximum(blocks - pipeline.sizes.stages, 0), blocks, wait, None)
    for barrier in others:
        plgpu.barrier_wait(barrier)


def tile_shape(packing: Packing, interpreted: bool) -> tuple[int, ...]:
    """Return the shape of shared memory for 64 columns of a tile: [64, 64], or [units, rows, 64]."""
    return (packing.units, packing.rows_of_unit, 64) if interpreted else (TILE_ROWS, 64)


def view_units(ref: Any, first: Any, *, count: int, packing: Packing, interpreted: bool) -> Any:
    """View `count` units of such a tile, from the first on, as [count, rows, 64]."""
    if interpreted:
        return ref.at[pl.ds(first, count)]
    rows = packing.rows_of_unit
    return ref.at[pl.ds(first * rows, count * rows)].reshape(count, rows, 64)


def load_tile(tile_ref: Any) -> jax.Array:
    """Load all columns of such a tile as [64, H]; rows that are not in use may hold anything, and are NaN."""
    parts = read(tile_ref)  # [H / 64, units, rows, 64]
    rows = jnp.moveaxis(parts.reshape(parts.shape[0], -1, 64), 0, 1).reshape(-1, parts.shape[0] * 64)
    return jnp.pad(rows, ((0, TILE_ROWS - rows.shape[0]), (0, 0)), constant_values=jnp.nan)
