"""Registers with a row for each warp of a warpgroup, or more, [rows, columns]: sums along rows stay within a warp."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

#: Of a warpgroup, and of a warp.
WARPS, _LANES = 4, 32


def layout(columns: int) -> Any:
    """Give each row to a warp, and consecutive columns, 128 at a time at most, to its lanes."""
    of_row = min(columns, 4 * _LANES)
    tiling = plgpu.Tiling(((WARPS, of_row), (of_row // _LANES,)))
    return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)


def broadcast(x: jax.Array, dimension: int, columns: int) -> jax.Array:
    """Repeat numbers of a row for each warp (0), or of columns (1), [4, columns]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (WARPS, columns), [dimension]), layout(columns))
