"""POR on Hopper: merge the partials of every tile, in the order of the plan.

    one thread block per (stream, 16 columns of the head):

        partials p of the stream, 8 at a time ─► w = l 2^(m - M) ─► sum of w O over sum of w ─► output tile

Loading several partials before using any hides the latency of global memory; the order never changes, so results are
the same from run to run.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.compat import load
from pallas_kernels.pac_mosaic import PARTIALS, TILE_ROWS

_COLUMNS = 16  # of the head, for one thread block
_UNROLL = 8  # partials in flight
_LOWEST = -1e20


def por(
    out: jax.Array,
    row_max: jax.Array,
    row_sum: jax.Array,
    merge_ptr: jax.Array,
    merge_segment: jax.Array,
    *,
    num_kv_heads: int,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge the partials of `pac_mosaic.pac`.

    Args:
      out: float32 [segments * 2, 64, H].
      row_max: float32 [segments * 2, 64], in units of log2.
      row_sum: float32 [segments * 2, 64].
      merge_ptr: int32 [streams + 1]; stream tile * K + head merges merge_segment[merge_ptr[u] : merge_ptr[u + 1]].
      merge_segment: int32 [segments].
      num_kv_heads: K.
      dtype: of the output.

    Returns out [K, tiles * 64, H] in `dtype`, max (log2) and sum float32 [K, tiles * 64]. Rows that saw no token have
    out 0 and sum 0.
    """
    head_dim = out.shape[-1]
    num_streams = merge_ptr.shape[0] - 1
    num_rows = num_streams // num_kv_heads * TILE_ROWS

    def body(*refs: Any) -> None:
        o_ref, m_ref, s_ref, ptr_ref, segment_ref, out_ref, max_ref, sum_ref, out_smem, row_smem = refs
        stream, part = lax.axis_index("stream"), lax.axis_index("part")
        tile, head = lax.div(stream, jnp.int32(num_kv_heads)), lax.rem(stream, jnp.int32(num_kv_heads))
        first = ptr_ref[stream] * PARTIALS
        last = ptr_ref[stream + 1] * PARTIALS
        begin = pl.multiple_of(part * _COLUMNS, _COLUMNS)
        rows = plgpu.Layout.WGMMA.reduce(1)

        def spread(x: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(x, (TILE_ROWS, _COLUMNS), [0])

        def step(j: jax.Array, carry: tuple) -> tuple:
            acc, most, total = carry
            loaded = []
            for k in range(_UNROLL):
                i = first + j * _UNROLL + k
                at = jnp.minimum(i, last - 1)
                partial = segment_ref[lax.div(at, jnp.int32(PARTIALS))] * PARTIALS + lax.rem(at, jnp.int32(PARTIALS))
                counted = jnp.where(i < last, 1.0, 0.0).astype(jnp.float32)
                loaded.append((
                    load(o_ref.at[partial, :, pl.ds(begin, _COLUMNS)], plgpu.Layout.WGMMA),  # [64, 16]
                    load(m_ref.at[partial], rows),  # [64]
                    load(s_ref.at[partial], rows) * counted,
                ))  # fmt: skip
            new_most = most
            for _, m, _ in loaded:
                new_most = jnp.maximum(new_most, m)
            fade = jnp.exp2(most - new_most)
            acc, total = acc * spread(fade), total * fade
            for o, m, s in loaded:
                weight = s * jnp.exp2(m - new_most)
                acc, total = acc + o * spread(weight), total + weight
            return acc, new_most, total

        carry = (
            plgpu.layout_cast(jnp.full((TILE_ROWS, _COLUMNS), 0, jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((TILE_ROWS,), _LOWEST, jnp.float32), rows),
            plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), rows),
        )
        count = lax.div(last - first + (_UNROLL - 1), jnp.int32(_UNROLL))
        acc, most, total = lax.fori_loop(0, count, step, carry)
        out_smem[...] = (acc / spread(jnp.maximum(total, 1e-30))).astype(dtype)
        row_smem.at[0][...] = most
        row_smem.at[1][...] = total
        plgpu.commit_smem()
        start = pl.multiple_of(tile * TILE_ROWS, TILE_ROWS)
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[head, pl.ds(start, TILE_ROWS), pl.ds(begin, _COLUMNS)])

        @pl.when(part == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(row_smem.at[0], max_ref.at[head, pl.ds(start, TILE_ROWS)])
            plgpu.copy_smem_to_gmem(row_smem.at[1], sum_ref.at[head, pl.ds(start, TILE_ROWS)])

        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_kv_heads, num_rows, head_dim), dtype),
            jax.ShapeDtypeStruct((num_kv_heads, num_rows), jnp.float32),
            jax.ShapeDtypeStruct((num_kv_heads, num_rows), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((TILE_ROWS, _COLUMNS), dtype),
            plgpu.SMEM((2, TILE_ROWS), jnp.float32),
        ],
        grid=(num_streams, head_dim // _COLUMNS),
        grid_names=("stream", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(out, row_max, row_sum, merge_ptr, merge_segment)
