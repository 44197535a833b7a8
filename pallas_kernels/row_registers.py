"""Registers with a number for each row of a tile, [64], or for each row and column, laid out as products have them."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.packing import TILE_ROWS


def filled(value: float, *shape: int) -> jax.Array:
    """Return registers of one value, [64] or [64, columns]."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def all_rows() -> jax.Array:
    """Return [64] of True, whose operations the compiler leaves out."""
    return plgpu.layout_cast(jnp.full((TILE_ROWS,), True), plgpu.Layout.WGMMA.reduce(1))


def over_rows(columns: jax.Array) -> jax.Array:
    """Repeat a value of each column, [block], in every row."""
    return lax.broadcast_in_dim(columns, (TILE_ROWS, columns.shape[0]), [1])


def broadcast_rows(rows: jax.Array, width: int) -> jax.Array:
    """Repeat a value of each row along the columns."""
    return lax.broadcast_in_dim(rows, (TILE_ROWS, width), [0])
