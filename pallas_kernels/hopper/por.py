"""POR on Hopper: merge the partials of every row tile and kv head, in the order of the plan, and write the output.

    one thread block per (merge group, 2 to 16 rows of its tile), a warp or two for each row:

        partials of the rows, several at a time ─► w = l 2^(m - M) ─► sum of w O over sum of w ─► rows of each request
        what PAC's thread blocks found ─► NaN if the plan does not hold

A merge group is a row tile and a kv head. Loading several partials before using any hides the latency of global memory;
the order never changes, so results are the same from run to run. The paper's POR is in section 4 (doi 10.1145/3802028).
"""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import por_rows
from pallas_kernels.family import Call
from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.por_grain import Grain, grain_of
from pallas_kernels.por_rows import Merge

#: Numbers of partials that a thread block holds at a time, at most: 128 in a thread.
_IN_FLIGHT = 1 << 14


class Work(NamedTuple):
    """All that is known when the kernel is compiled."""

    packing: Packing
    batch: int
    query_tokens: int
    num_kv_heads: int
    grain: Grain
    piece: int  # rows of those that all warps have at a time which are next to each other in the output
    merge: Merge

    @classmethod
    def of(cls, out: jax.Array, call: Call, grain: Grain, heads: int | None = None) -> "Work":
        """Describe a call of `por`, whose output has so many heads next to each other; all by default."""
        packing, head_dim = Packing.of(call.plan.heads.group), out.shape[2]
        turns = min(grain.many, _IN_FLIGHT // (grain.rows * head_dim)), grain.few
        return cls(
            packing=packing,
            batch=call.query.shape[0],
            query_tokens=call.query.shape[1],
            num_kv_heads=call.plan.heads.num_kv_heads,
            grain=grain,
            piece=math.gcd(grain.together, packing.rows_of_unit, heads or 0),
            merge=Merge(grain.rows, turns, head_dim, call.plan.cta_begin.shape[0], _layout(grain, head_dim)),
        )


class Place(NamedTuple):
    """Where rows next to each other go."""

    exists: Any  # whether they are some of the query's
    entry: jax.Array  # of [B x T]
    q_head: jax.Array  # of the first one


def _layout(grain: Grain, head_dim: int) -> Any:
    """Give each of some rows to some warps, and consecutive columns to their lanes."""
    columns, numbers = grain.columns(head_dim), (grain.numbers(head_dim),)
    if grain.warps == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((grain.together, columns), numbers)), (-3,), (-2,), -1)
    tiles = (grain.together, columns), (columns // grain.warps,), numbers
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4, -3), (-2,), -1)


def por(
    out: jax.Array, row_max: jax.Array, row_sum: jax.Array, violations: jax.Array, call: Call
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge the partials of `pac`.

    Args:
      out: float32 [partials, 64, V].
      row_max: float32 [partials, 64], in units of log2.
      row_sum: float32 [partials, 64].
      violations: int32 [num_ctas, rounded up to a multiple of 128], not 0 where a thread block of PAC found that the
        plan does not hold.
      call: what they are partials of.

    Returns out [B, T, N, V] in the query's dtype, 0 for free request slots, and the rows' max (natural log) and sum,
    float32 [tiles * K, 64]. Rows that saw no token have out 0, max -inf and sum 0. Everything is NaN if the plan does
    not hold.
    """
    (batch, tokens, num_q_heads, _), dtype = call.query.shape, call.query.dtype
    num_groups, head_dim = call.plan.merge_ptr.shape[0] - 1, out.shape[2]
    work = Work.of(out, call, grain_of(num_groups, head_dim))
    rows = work.grain.rows
    inputs = por_rows.inputs_of(out, row_max, row_sum, violations, call)
    scratch = {"rows": plgpu.SMEM((rows, head_dim), dtype)} | por_rows.scratch_of(call)
    names = [*inputs, "out", "max", "sum", *scratch]
    kernel = plgpu.kernel(
        lambda *refs: _merge(SimpleNamespace(**dict(zip(names, refs, strict=True))), work),
        out_type=[
            jax.ShapeDtypeStruct((batch * tokens, num_q_heads, head_dim), dtype),
            *por_rows.rows_of_groups(num_groups),
        ],
        scratch_types=[*scratch.values()],
        grid=(num_groups, TILE_ROWS // rows),
        grid_names=("group", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    merged, merged_max, merged_sum = kernel(*inputs.values())
    return merged.reshape(batch, tokens, num_q_heads, head_dim), merged_max, merged_sum


def _merge(refs: Any, work: Work) -> None:
    """Merge and write the rows of one thread block."""
    rows, piece, together = work.grain.rows, work.piece, work.grain.together
    group, part = lax.axis_index("group"), lax.axis_index("part")
    places, (merged, *softmax) = merge_here(refs, work, group, part)
    merged = merged.astype(refs.out.dtype)  # [rows, H]
    por_rows.store_rows_of_groups(refs, group, pl.ds(pl.multiple_of(part * rows, rows), rows), *softmax)

    if piece < together:  # registers hold rows that go to several places
        refs.rows[...] = merged
        plgpu.commit_smem()
    for i, (exists, entry, q_head) in enumerate(places):
        source, target = pl.ds(i * piece, piece), refs.out.at[entry, pl.ds(q_head, piece)]

        @pl.when(exists)
        def _write(i: int = i, source: Any = source, target: Any = target) -> None:
            if piece < together:
                plgpu.copy_smem_to_gmem(refs.rows.at[source], target)
            else:
                target[...] = merged[i * piece : (i + 1) * piece]

    plgpu.wait_smem_to_gmem(0)


def merge_here(
    refs: Any, work: Work, group: jax.Array, part: jax.Array
) -> tuple[list[Place], tuple[jax.Array, jax.Array, jax.Array]]:
    """Merge the rows of one thread block.

    Returns where they go, `work.piece` rows each, and output [rows, H], maximum and sum [rows], float32.
    """
    heads, rows = jnp.int32(work.num_kv_heads), work.grain.rows
    tile, head = lax.div(group, heads), lax.rem(group, heads)
    begin = pl.multiple_of(part * rows, rows)

    # All that comes from memory is asked for at once; PAC has brought most of it to the L2 cache.
    first, last = refs.merge_ptr[group], refs.merge_ptr[group + 1]
    used_here = refs.used_rows[0] - tile * work.packing.tile_rows  # rows of the tile
    places = [_place(refs, work, tile, head, begin + i) for i in range(0, rows, work.piece)]
    sink = por_rows.sinks_of_rows(refs, work.merge, work.packing, tile, head, begin)
    return places, por_rows.merge_rows(refs, work.merge, head, begin, used_here, (first, last), sink)


def _place(refs: Any, work: Work, tile: jax.Array, head: jax.Array, row: jax.Array) -> Place:
    """Return where a row of a tile goes."""
    packing, tokens = work.packing, work.query_tokens
    units = packing.units
    num_units = work.batch * tokens * packing.parts
    unit = lax.div(row, jnp.int32(packing.rows_of_unit))
    request_row, token, part = packing.unit(tile * units + jnp.minimum(unit, units - 1), work.batch, tokens)
    entry = refs.request_of_row[request_row] * tokens + token
    return Place((unit < units) & (tile * units + unit < num_units), entry, packing.q_head(head, part, row))
