"""POR on Hopper: merge the partials of every stream, in the order of the plan, and write the output where it belongs.

    one thread block per (stream, 8 to 32 columns of the head):

        partials of the stream, several at a time ─► w = l 2^(m - M) ─► sum of w O over sum of w ─► rows of each request
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
from pallas_kernels.interpret import store_tile, tile_shape, view_unit, view_units
from pallas_kernels.pac_check import FOUND_GROUP
from pallas_kernels.pac_compute import LOWEST
from pallas_kernels.packing import TILE_ROWS, Packing


class _Grain(NamedTuple):
    """How finely the work is cut."""

    columns: int  # of the head, for one thread block
    many: int  # partials in flight
    few: int  # and in the last turns


#: The grain by the pieces of 16 columns that all streams have, at most. Few streams have dozens of partials each: much
#: is in flight, in as many thread blocks as there can be, since a multiprocessor takes in only so much. Many have few:
#: thread blocks are large, and ask for little at a time, so that more of them fit a multiprocessor.
_GRAINS = {32: _Grain(8, many=16, few=2), 128: _Grain(16, many=16, few=2), math.inf: _Grain(32, many=2, few=1)}

_WRITES_AT_ONCE = 8  # pieces of a tile that requests elsewhere get
_LN2 = 0.6931471805599453


def por(
    out: jax.Array,
    row_max: jax.Array,
    row_sum: jax.Array,
    broken: jax.Array,
    merge_ptr: jax.Array,
    tile_unit: jax.Array,
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
      tile_unit: int32 [tiles], the unit of the query at which each tile begins, or -1 if its units are not
        consecutive there.
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
    grain = next(grain for most, grain in _GRAINS.items() if num_streams * head_dim <= most * 16)
    columns = grain.columns
    units, chunk = packing.units, packing.rows_of_unit
    num_units = batch * tokens * packing.parts
    most_units = min(units, batch * tokens)
    by_unit = chunk * columns % 64 == 0  # a copy begins at a multiple of 128 bytes; other units are written row by row
    swizzle = (plgpu.SwizzleTransform(2 * columns),) if columns > 8 else ()
    interpreted = interpret is not None

    def body(*refs: Any) -> None:
        o_ref, m_ref, s_ref, broken_ref, ptr_ref, unit_ref, request_ref, used_ref, *refs = refs  # type: ignore[assignment]
        out_ref, max_ref, sum_ref, out_smem, row_smem = refs
        stream, part_of_head = lax.axis_index("stream"), lax.axis_index("part")
        tile, head = lax.div(stream, jnp.int32(num_kv_heads)), lax.rem(stream, jnp.int32(num_kv_heads))
        # All that comes from memory is asked for at once; PAC has brought it to the L2 cache.
        first, last = ptr_ref[stream], ptr_ref[stream + 1]
        unit, used_rows = unit_ref[tile], used_ref[0]
        begin = pl.multiple_of(part_of_head * columns, columns)
        rows = plgpu.Layout.WGMMA.reduce(1)

        def spread(x: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(x, (TILE_ROWS, columns), [0])

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
                    load(o_ref.at[partial, :, pl.ds(begin, columns)], plgpu.Layout.WGMMA),  # [64, columns]
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
            plgpu.layout_cast(jnp.full((TILE_ROWS, columns), 0, jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((TILE_ROWS,), LOWEST, jnp.float32), rows),
            plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), rows),
        )
        against = objections()
        # Loads of a turn that has too few partials are wasted, so the last few have turns of their own.
        many = lax.div(last - first + (grain.many - 1 - grain.few), jnp.int32(grain.many))
        few_first = jnp.minimum(first + many * grain.many, last)
        few = lax.div(last - few_first + (grain.few - 1), jnp.int32(grain.few))
        carry = lax.fori_loop(0, many, functools.partial(step, first=first, at_once=grain.many), carry)
        acc, most, total = lax.fori_loop(0, few, functools.partial(step, first=few_first, at_once=grain.few), carry)
        spoiled = jnp.where(jnp.max(against) == 0, 0.0, jnp.nan).astype(jnp.float32)
        row = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA)
        merged = jnp.where(row + tile * packing.tile_rows < used_rows, acc / spread(jnp.maximum(total, 1e-30)), 0.0)
        merged = (merged + spoiled).astype(dtype)

        def place(number: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the entry of the query [B x T] and the first q head of a unit."""
            row, token, part = packing.unit(number, batch, tokens)
            return request_ref[row] * tokens + token, head * packing.group + part * chunk

        @pl.when(unit >= 0)
        def _write_together() -> None:
            store_tile(out_smem, merged, interpreted)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                view_units(out_smem, 0, count=most_units, packing=packing, interpreted=interpreted),
                out_ref.at[pl.ds(unit, most_units), pl.ds(head * packing.group, chunk), pl.ds(begin, columns)],
            )

        @pl.when(unit < 0)
        def _write_one_by_one() -> None:
            if by_unit:
                store_tile(out_smem, merged, interpreted)
            else:
                store(row_smem.at[:, 0], merged)
            plgpu.commit_smem()

            pieces = units if by_unit else packing.tile_rows
            at_once = min(pieces, _WRITES_AT_ONCE)

            def write(i: jax.Array, _: None) -> None:
                # Where requests are is loaded for several pieces before any is written.
                numbers = [i * at_once + j for j in range(at_once)]
                of_units = numbers if by_unit else [lax.div(number, jnp.int32(chunk)) for number in numbers]
                places = [place(tile * units + jnp.minimum(number, units - 1)) for number in of_units]
                for number, of_unit, (entry, first_head) in zip(numbers, of_units, places, strict=True):
                    if by_unit:
                        source, heads = view_unit(out_smem, number, packing, interpreted), pl.ds(first_head, chunk)
                    else:
                        head_of_row = first_head + lax.rem(number, jnp.int32(chunk))
                        source, heads = row_smem.at[number, pl.ds(0, 1)], pl.ds(head_of_row, 1)
                    target = out_ref.at[entry, heads, pl.ds(begin, columns)]

                    @pl.when((of_unit < units) & (tile * units + of_unit < num_units))
                    def _inside(source: Any = source, target: Any = target) -> None:
                        plgpu.copy_smem_to_gmem(source, target)

            lax.fori_loop(0, -(-pieces // at_once), write, None)

        @pl.when(part_of_head == 0)
        def _residuals() -> None:
            max_ref.at[stream][...] = most * _LN2 + spoiled
            sum_ref.at[stream][...] = total + spoiled

        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((batch * tokens, num_q_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((num_streams, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((num_streams, TILE_ROWS), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM(tile_shape(packing, columns, interpreted), dtype, transforms=swizzle),
            plgpu.SMEM((TILE_ROWS, 64 // columns, columns), dtype),  # rows of 128 bytes
        ],
        grid=(num_streams, head_dim // columns),
        grid_names=("stream", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    merged, most, total = kernel(out, row_max, row_sum, broken, merge_ptr, tile_unit, request_of_row, used_rows)
    return merged.reshape(query_shape), most, total
