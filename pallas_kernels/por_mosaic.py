"""POR on Hopper: merge the partials of every stream, in the order of the plan, and write the output where it belongs.

    one thread block per (stream, 2 to 16 rows of its tile), a warp or two for each row:

        partials of the rows, several at a time ─► w = l 2^(m - M) ─► sum of w O over sum of w ─► rows of each request
        what PAC's thread blocks found ─► NaN if the plan does not hold

Loading several partials before using any hides the latency of global memory; the order never changes, so results are
the same from run to run.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.compat import load, store
from pallas_kernels.pac_check import FOUND_GROUP
from pallas_kernels.pac_compute import LOWEST
from pallas_kernels.packing import TILE_ROWS, Packing


class _Grain(NamedTuple):
    """How finely the work is cut."""

    rows: int  # of a tile, for one thread block
    warps: int  # for a row
    many: int  # partials in flight
    few: int  # and in the last turns


#: The grain by the number of streams, at most. The fewer there are, the more partials each has: much is in flight then,
#: in as many thread blocks as there can be. Where there are many streams, most have one partial or two.
_GRAINS = {
    4: _Grain(2, warps=2, many=32, few=4),
    16: _Grain(4, warps=1, many=16, few=4),
    32: _Grain(4, warps=1, many=8, few=4),
    64: _Grain(4, warps=1, many=4, few=2),
    math.inf: _Grain(16, warps=1, many=2, few=1),
}

_WARPS, _LANES = 4, 32  # of a warpgroup, and of a warp
_LN2 = 0.6931471805599453


def por(
    out: jax.Array,
    row_max: jax.Array,
    row_sum: jax.Array,
    broken: jax.Array,
    merge_ptr: jax.Array,
    request_of_row: jax.Array,
    used_rows: jax.Array,
    *,
    num_ctas: int,
    packing: Packing,
    query_shape: tuple[int, ...],
    dtype: DTypeLike,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge the partials of `pac_mosaic.pac`.

    Args:
      out: float32 [partials, 64, H].
      row_max: float32 [partials, 64], in units of log2.
      row_sum: float32 [partials, 64].
      broken: int32 [num_ctas, rounded up to a multiple of FOUND_GROUP], not 0 where a thread block of PAC found that
        the plan does not hold.
      merge_ptr: int32 [streams + 1]; stream tile * K + head merges partials [merge_ptr[u], merge_ptr[u + 1]).
      request_of_row: int32 [B], the request of each request row.
      used_rows: int32 [1]; query rows from there on belong to free request slots.
      num_ctas: thread blocks of PAC.
      packing: how query rows make up a tile.
      query_shape: [B, T, N, H].
      dtype: of the output.
      interpret: parameters of the GPU interpreter, to simulate the kernel on a CPU.

    Returns out [B, T, N, H] in `dtype`, 0 for free request slots, and the rows' max (natural log) and sum, float32
    [streams, 64]. Rows that saw no token have out 0 and sum 0. Everything is NaN if the plan does not hold.
    """
    batch, tokens, num_q_heads, head_dim = query_shape
    num_kv_heads = num_q_heads // packing.group
    num_streams = merge_ptr.shape[0] - 1
    grain = next(grain for most, grain in _GRAINS.items() if num_streams <= most)
    num_rows, together = grain.rows, _WARPS // grain.warps  # rows that all warps have at a time
    units, chunk = packing.units, packing.rows_of_unit
    num_units = batch * tokens * packing.parts
    piece = math.gcd(together, chunk)  # rows that are next to each other in the output
    layout = _layout(together, grain.warps, head_dim)
    along_rows = layout.reduce(1)

    def body(*refs: Any) -> None:
        o_ref, m_ref, s_ref, broken_ref, ptr_ref, request_ref, used_ref, *refs = refs  # type: ignore[assignment]
        out_ref, max_ref, sum_ref, out_smem = refs
        stream, part_of_tile = lax.axis_index("stream"), lax.axis_index("part")
        tile, head = lax.div(stream, jnp.int32(num_kv_heads)), lax.rem(stream, jnp.int32(num_kv_heads))
        begin = pl.multiple_of(part_of_tile * num_rows, num_rows)
        rows = pl.ds(begin, num_rows)

        def spread(x: jax.Array) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (num_rows, head_dim), [0]), layout)

        def place(row: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
            """Return whether a row of the tile is one of the query's, its entry there [B x T], and its q head."""
            unit = lax.div(row, jnp.int32(chunk))
            request_row, token, part = packing.unit(tile * units + jnp.minimum(unit, units - 1), batch, tokens)
            entry = request_ref[request_row] * tokens + token
            q_head = head * packing.group + part * chunk + lax.rem(row, jnp.int32(chunk))
            return (unit < units) & (tile * units + unit < num_units), entry, q_head

        def objections() -> jax.Array:
            """Count, in each thread, the thread blocks of PAC that found the plan broken."""
            thread = plgpu.Layout.WG_STRIDED((FOUND_GROUP,), 1)
            cta = plgpu.broadcasted_iota(jnp.int32, (FOUND_GROUP,), 0, layout=thread)
            count = plgpu.layout_cast(jnp.full((FOUND_GROUP,), 0, jnp.int32), thread)
            for begin in range(0, num_ctas, FOUND_GROUP):
                count += jnp.where(begin + cta < num_ctas, load(broken_ref.at[pl.ds(begin, FOUND_GROUP)], thread), 0)
            return count

        def step(j: jax.Array, carry: tuple, first: jax.Array, at_once: int) -> tuple:
            acc, most, total = carry
            loaded = []
            for k in range(at_once):
                i = first + j * at_once + k
                partial = jnp.minimum(i, last - 1)
                counted = jnp.where(i < last, 1.0, 0.0).astype(jnp.float32)
                loaded.append((
                    load(o_ref.at[partial, rows], layout),  # [rows, H]
                    load(m_ref.at[partial, rows], along_rows),  # [rows]
                    load(s_ref.at[partial, rows], along_rows) * counted,
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

        # All that comes from memory is asked for at once; PAC has brought most of it to the L2 cache.
        first, last = ptr_ref[stream], ptr_ref[stream + 1]
        used_here = used_ref[0] - tile * packing.tile_rows  # rows of the tile
        places = [place(begin + i) for i in range(0, num_rows, piece)]
        against = objections()
        last = jnp.where(begin < used_here, last, first)
        # Loads of a turn that has too few partials are wasted, so the last few have turns of their own.
        many = lax.div(last - first + (grain.many - 1 - grain.few), jnp.int32(grain.many))
        few_first = jnp.minimum(first + many * grain.many, last)
        few = lax.div(last - few_first + (grain.few - 1), jnp.int32(grain.few))
        carry = (
            plgpu.layout_cast(jnp.full((num_rows, head_dim), 0, jnp.float32), layout),
            plgpu.layout_cast(jnp.full((num_rows,), LOWEST, jnp.float32), along_rows),
            plgpu.layout_cast(jnp.full((num_rows,), 0, jnp.float32), along_rows),
        )
        carry = lax.fori_loop(0, many, functools.partial(step, first=first, at_once=grain.many), carry)
        acc, most, total = lax.fori_loop(0, few, functools.partial(step, first=few_first, at_once=grain.few), carry)
        spoiled = jnp.where(jnp.max(against) == 0, 0.0, jnp.nan).astype(jnp.float32)
        row = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=layout)
        merged = jnp.where(row + begin < used_here, acc / spread(jnp.maximum(total, 1e-30)), 0.0)
        merged = (merged + spoiled).astype(dtype)  # [rows, H]
        store(max_ref.at[stream, rows], most * _LN2 + spoiled)
        store(sum_ref.at[stream, rows], total + spoiled)

        if piece < together:  # registers hold rows that go to several places
            out_smem[...] = merged
            plgpu.commit_smem()
        for i, (exists, entry, q_head) in enumerate(places):
            source, target = pl.ds(i * piece, piece), out_ref.at[entry, pl.ds(q_head, piece)]

            @pl.when(exists)
            def _write(i: int = i, source: Any = source, target: Any = target) -> None:
                if piece < together:
                    plgpu.copy_smem_to_gmem(out_smem.at[source], target)
                else:
                    target[...] = merged[i * piece : (i + 1) * piece]

        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((batch * tokens, num_q_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((num_streams, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((num_streams, TILE_ROWS), jnp.float32),
        ],
        scratch_types=[plgpu.SMEM((num_rows, head_dim), dtype)],
        grid=(num_streams, TILE_ROWS // num_rows),
        grid_names=("stream", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    merged, most, total = kernel(out, row_max, row_sum, broken, merge_ptr, request_of_row, used_rows)
    return merged.reshape(query_shape), most, total


def _layout(rows: int, warps: int, head_dim: int) -> Any:
    """Give each of some rows to some warps, and consecutive columns, 128 at a time at most, to their lanes."""
    of_row = min(head_dim, 128)
    of_warp = of_row // warps
    tiles: tuple[tuple[int, ...], ...] = (rows, of_row), (of_warp,), (of_warp // _LANES,)
    if warps == 1:
        return plgpu.Layout.TILED(plgpu.Tiling((tiles[0], tiles[2])), (-3,), (-2,), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4, -3), (-2,), -1)
