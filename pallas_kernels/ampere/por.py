"""POR on GPUs since Ampere: merge the partials of every row tile and kv head, in the order of the plan.

    one thread block per (merge group, 4 or 16 rows of its tile), a warp for each row:

        partials of the rows, several at a time ─► w = l 2^(m - M) ─► sum of w O over sum of w ─► rows of each request
        what PAC's thread blocks found ─► NaN if the plan does not hold

A merge group is a row tile and a kv head. Every warp looks up where its rows go and stores them there from registers.
The order never changes, so results are the same from run to run. The paper's POR is in section 4 (doi 10.1145/3802028).
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread, por_rows, warp_rows
from pallas_kernels.ampere import instructions
from pallas_kernels.by_thread import THREAD, THREADS
from pallas_kernels.compat import load
from pallas_kernels.family import Call
from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.por_rows import Merge

#: Merge groups from which on a thread block has 16 rows, and few partials in flight, rather than 4 and many: the fewer
#: groups there are, the more partials each has.
_MANY_GROUPS = 64


class _Sizes(NamedTuple):
    """All that is known when the kernel is compiled."""

    packing: Packing
    batch: int
    query_tokens: int
    num_q_heads: int
    num_kv_heads: int
    merge: Merge


def por(
    out: jax.Array, row_max: jax.Array, row_sum: jax.Array, violations: jax.Array, call: Call
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge the partials of `pac`.

    Args:
      out: float32 [partials, 64, V and more].
      row_max: float32 [partials, 64], in units of log2.
      row_sum: float32 [partials, 64].
      violations: int32 [num_ctas, rounded up to a multiple of 128], not 0 where a thread block of PAC found that the
        plan does not hold.
      call: what they are partials of.

    Returns out [B, T, N, V] in the query's dtype, 0 for free request slots, and the rows' max (natural log) and sum,
    float32 [tiles * K, 64]. Rows that saw no token have out 0, max -inf and sum 0. Everything is NaN if the plan does
    not hold.
    """
    plan, (batch, tokens, num_q_heads, _), dtype = call.plan, call.query.shape, call.query.dtype
    value_head_dim, columns = plan.heads.value_head_dim, out.shape[2]
    num_groups = plan.merge_ptr.shape[0] - 1
    rows, turns = (4, (8,)) if num_groups < _MANY_GROUPS else (16, (2,))
    sizes = _Sizes(
        packing=Packing.of(plan.heads.group),
        batch=batch,
        query_tokens=tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=plan.heads.num_kv_heads,
        merge=Merge(rows, turns, columns, plan.cta_begin.shape[0], warp_rows.layout(columns)),
    )
    inputs = por_rows.inputs_of(out, row_max, row_sum, violations, call)
    scratch = {"places": plgpu.SMEM((THREADS,), jnp.int32)} | por_rows.scratch_of(call)
    names = [*inputs, "out", "max", "sum", *scratch]
    kernel = plgpu.kernel(
        lambda *refs: _merge(SimpleNamespace(**dict(zip(names, refs, strict=True))), sizes),
        out_type=[
            jax.ShapeDtypeStruct((batch * tokens * num_q_heads, value_head_dim), dtype),
            *por_rows.rows_of_groups(num_groups),
        ],
        scratch_types=[*scratch.values()],
        grid=(num_groups, TILE_ROWS // rows),
        grid_names=("group", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    merged, merged_max, merged_sum = kernel(*inputs.values())
    return merged.reshape(batch, tokens, num_q_heads, value_head_dim), merged_max, merged_sum


def _merge(refs: Any, sizes: _Sizes) -> None:
    """Merge and write the rows of one thread block."""
    group, part = lax.axis_index("group"), lax.axis_index("part")
    heads = jnp.int32(sizes.num_kv_heads)
    tile, head = lax.div(group, heads), lax.rem(group, heads)
    merge = sizes.merge
    begin = pl.multiple_of(part * merge.rows, merge.rows)

    # All that comes from memory is asked for at once.
    first, last = refs.merge_ptr[group], refs.merge_ptr[group + 1]
    used_here = refs.used_rows[0] - tile * sizes.packing.tile_rows  # rows of the tile
    places = _places(refs, sizes, tile, head, begin)
    sink = por_rows.sinks_of_rows(refs, merge, sizes.packing, tile, head, begin)
    merged, *softmax = por_rows.merge_rows(refs, merge, head, begin, used_here, (first, last), sink)  # [rows, H]
    por_rows.store_rows_of_groups(refs, group, pl.ds(begin, merge.rows), *softmax)
    refs.places[...] = places
    of_rows = load(refs.places.at[pl.ds(0, merge.rows)], merge.of_rows)  # [rows]
    instructions.store_rows(refs.out, merge.over_columns(of_rows), merged.astype(refs.out.dtype), merge.layout)


def _places(refs: Any, sizes: _Sizes, tile: jax.Array, head: jax.Array, begin: jax.Array) -> jax.Array:
    """Return where each row goes, int32 [128], of [B x T x N] of them; -1 for rows that are none of the query's."""
    packing, tokens = sizes.packing, sizes.query_tokens
    units = packing.units
    num_units = sizes.batch * tokens * packing.parts
    row = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=THREAD) + begin
    unit = lax.div(row, jnp.int32(packing.rows_of_unit))
    request_row, token, part = packing.unit(tile * units + jnp.minimum(unit, units - 1), sizes.batch, tokens)
    entry = by_thread.gather(refs.request_of_row, request_row) * tokens + token
    q_head = packing.q_head(head, part, row)
    exists = (unit < units) & (tile * units + unit < num_units)
    return jnp.where(exists, entry * sizes.num_q_heads + q_head, -1)
