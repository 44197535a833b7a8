"""What POR gets of rows whose attention is known, without a plan or pages."""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.softmax import MIN_ROW_MAX


class Rows(NamedTuple):
    """Attention [.., B, T, N] that devices made of their pages."""

    out: Any
    max: Any
    sum: Any


def partials_of(rows: Rows, num_kv_heads: int, used: int | None = None) -> tuple[tuple[Any, ...], Any]:
    """What PAC leaves of rows whose requests are in the opposite order of the tiles, and what POR needs of a call."""
    batch, tokens, num_q_heads, _ = rows.out.shape
    group = num_q_heads // num_kv_heads
    tile_rows = Packing.of(group).tile_rows
    tiles = -(-batch * tokens * group // tile_rows)

    def packed(x: Any, nothing: float) -> Any:
        x = x.astype(jnp.float32).reshape(batch, tokens, num_kv_heads, group, -1)[::-1]
        x = x.transpose(0, 1, 3, 2, 4).reshape(batch * tokens * group, num_kv_heads, -1)
        x = jnp.pad(x, ((0, tiles * tile_rows - len(x)), (0, 0), (0, 0)), constant_values=nothing)
        x = x.reshape(tiles, tile_rows, num_kv_heads, -1).transpose(0, 2, 1, 3).reshape(-1, tile_rows, x.shape[2])
        return jnp.pad(x, ((0, 0), (0, TILE_ROWS - tile_rows), (0, 0)), constant_values=nothing)

    row_max = packed(jnp.maximum(rows.max / math.log(2), MIN_ROW_MAX), MIN_ROW_MAX)[..., 0]
    partials = packed(rows.out, 0.0), row_max, packed(rows.sum, 0.0)[..., 0], jnp.zeros(256, jnp.int32)
    plan = SimpleNamespace(
        heads=SimpleNamespace(group=group, num_kv_heads=num_kv_heads),
        merge_ptr=jnp.arange(tiles * num_kv_heads + 1, dtype=jnp.int32),
        cta_begin=jnp.zeros((132, 2), jnp.int32),
        used_rows=jnp.full(1, (batch if used is None else used) * tokens * group, jnp.int32),
    )
    forest = SimpleNamespace(request_of_row=jnp.arange(batch, dtype=jnp.int32)[::-1])
    return partials, SimpleNamespace(query=rows.out, plan=plan, forest=forest, value_scale=None, sinks=None)
