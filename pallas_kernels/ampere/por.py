"""POR on GPUs since Ampere: merge the partials of every row tile and kv head, in the order of the plan.

    one thread block per (merge group, 4 or 16 rows of its tile), a warp for each row:

        partials of the rows, several at a time ─► w = l 2^(m - M) ─► sum of w O over sum of w ─► rows of each request
        what PAC's thread blocks found ─► NaN if the plan does not hold

A merge group is a row tile and a kv head. Every warp looks up where its rows go and stores them there from registers.
The order never changes, so results are the same from run to run. The paper's POR is in section 4 (doi 10.1145/3802028).
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.ampere import instructions
from pallas_kernels.ampere.instructions import THREAD, THREADS
from pallas_kernels.family import Call
from pallas_kernels.hopper.compat import load, store
from pallas_kernels.hopper.pac_compute import MIN_ROW_MAX
from pallas_kernels.hopper.packing import TILE_ROWS, Packing
from pallas_kernels.hopper.plan_guard import GROUP

_WARPS, _LANES = 4, 32  # of a thread block, and of a warp
_LN2 = 0.6931471805599453
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
    head_dim: int
    num_ctas: int  # of PAC
    rows: int  # of a thread block
    at_once: int  # partials in flight
    dtype: DTypeLike

    @property
    def layout(self) -> Any:
        """Give each row to a warp, and consecutive columns, 128 at a time at most, to its lanes."""
        of_row = min(self.head_dim, 128)
        tiling = plgpu.Tiling(((_WARPS, of_row), (of_row // _LANES,)))
        return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)

    def filled(self, value: float, *shape: int) -> jax.Array:
        """Return registers of one value, [rows] or [rows, H]."""
        layout = self.layout if len(shape) == 2 else self.layout.reduce(1)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def over_columns(self, rows: jax.Array) -> jax.Array:
        """Repeat a value of each row along the columns."""
        return plgpu.layout_cast(lax.broadcast_in_dim(rows, (self.rows, self.head_dim), [0]), self.layout)


def por(
    out: jax.Array, row_max: jax.Array, row_sum: jax.Array, violations: jax.Array, call: Call
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge the partials of `pac`.

    Args:
      out: float32 [partials, 64, H].
      row_max: float32 [partials, 64], in units of log2.
      row_sum: float32 [partials, 64].
      violations: int32 [num_ctas, rounded up to a multiple of 128], not 0 where a thread block of PAC found that the
        plan does not hold.
      call: what they are partials of.

    Returns out [B, T, N, H] in the query's dtype, 0 for free request slots, and the rows' max (natural log) and sum,
    float32 [tiles * K, 64]. Rows that saw no token have out 0 and sum 0. Everything is NaN if the plan does not hold.
    """
    plan, (batch, tokens, num_q_heads, head_dim), dtype = call.plan, call.query.shape, call.query.dtype
    num_groups = plan.merge_ptr.shape[0] - 1
    sizes = _Sizes(
        packing=Packing.of(plan.heads.group),
        batch=batch,
        query_tokens=tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=plan.heads.num_kv_heads,
        head_dim=head_dim,
        num_ctas=plan.cta_begin.shape[0],
        rows=4 if num_groups < _MANY_GROUPS else 16,
        at_once=8 if num_groups < _MANY_GROUPS else 2,
        dtype=dtype,
    )
    inputs = {
        "partial_out": out,
        "partial_max": row_max,
        "partial_sum": row_sum,
        "violations": violations,
        "merge_ptr": plan.merge_ptr,
        "request_of_row": call.forest.request_of_row,
        "used_rows": plan.used_rows,
    }
    names = [*inputs, "out", "max", "sum", "places"]
    kernel = plgpu.kernel(
        lambda *refs: _merge(SimpleNamespace(**dict(zip(names, refs, strict=True))), sizes),
        out_type=[
            jax.ShapeDtypeStruct((batch * tokens * num_q_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((num_groups, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((num_groups, TILE_ROWS), jnp.float32),
        ],
        scratch_types=[plgpu.SMEM((THREADS,), jnp.int32)],
        grid=(num_groups, TILE_ROWS // sizes.rows),
        grid_names=("group", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    merged, merged_max, merged_sum = kernel(*inputs.values())
    return merged.reshape(call.query.shape), merged_max, merged_sum


def _merge(refs: Any, sizes: _Sizes) -> None:
    """Merge and write the rows of one thread block."""
    group, part = lax.axis_index("group"), lax.axis_index("part")
    heads = jnp.int32(sizes.num_kv_heads)
    tile, head = lax.div(group, heads), lax.rem(group, heads)
    begin = pl.multiple_of(part * sizes.rows, sizes.rows)
    rows = pl.ds(begin, sizes.rows)

    # All that comes from memory is asked for at once.
    first, last = refs.merge_ptr[group], refs.merge_ptr[group + 1]
    used_here = refs.used_rows[0] - tile * sizes.packing.tile_rows  # rows of the tile
    places = _places(refs, sizes, tile, head, begin)
    violations = _count_violations(refs, sizes)
    last = jnp.where(begin < used_here, last, first)
    acc, row_max, row_sum = _merge_partials(refs, sizes, rows, first, last)
    nan_or_zero = jnp.where(jnp.max(violations) == 0, 0.0, jnp.nan).astype(jnp.float32)
    row = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=sizes.layout)
    merged = jnp.where(row + begin < used_here, acc / sizes.over_columns(jnp.maximum(row_sum, 1e-30)), 0.0)
    merged = (merged + nan_or_zero).astype(sizes.dtype)  # [rows, H]
    store(refs.max.at[group, rows], row_max * _LN2 + nan_or_zero)
    # PAC leaves anything in rows that no request has; a sum of 0 says that they saw no token.
    row_of_part = plgpu.broadcasted_iota(jnp.int32, row_sum.shape, 0, layout=sizes.layout.reduce(1))
    store(refs.sum.at[group, rows], jnp.where(row_of_part + begin < used_here, row_sum, 0.0) + nan_or_zero)
    refs.places[...] = places
    of_rows = load(refs.places.at[pl.ds(0, sizes.rows)], sizes.layout.reduce(1))  # [rows]
    instructions.store_rows(refs.out, sizes.over_columns(of_rows), merged, sizes.layout)


def _places(refs: Any, sizes: _Sizes, tile: jax.Array, head: jax.Array, begin: jax.Array) -> jax.Array:
    """Return where each row goes, int32 [128], of [B x T x N] of them; -1 for rows that are none of the query's."""
    packing, tokens = sizes.packing, sizes.query_tokens
    units, of_unit = packing.units, jnp.int32(packing.rows_of_unit)
    num_units = sizes.batch * tokens * packing.parts
    row = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=THREAD) + begin
    unit = lax.div(row, of_unit)
    request_row, token, part = packing.unit(tile * units + jnp.minimum(unit, units - 1), sizes.batch, tokens)
    entry = instructions.gather(refs.request_of_row, request_row) * tokens + token
    q_head = head * packing.group + part * packing.rows_of_unit + lax.rem(row, of_unit)
    exists = (unit < units) & (tile * units + unit < num_units)
    return jnp.where(exists, entry * sizes.num_q_heads + q_head, -1)


def _count_violations(refs: Any, sizes: _Sizes) -> jax.Array:
    """Count, in each thread, the thread blocks of PAC that found the plan violated."""
    cta = plgpu.broadcasted_iota(jnp.int32, (GROUP,), 0, layout=THREAD)
    count = plgpu.layout_cast(jnp.full((GROUP,), 0, jnp.int32), THREAD)
    for begin in range(0, sizes.num_ctas, GROUP):
        found = load(refs.violations.at[pl.ds(begin, GROUP)], THREAD)
        count += jnp.where(begin + cta < sizes.num_ctas, found, 0)
    return count


def _merge_partials(
    refs: Any, sizes: _Sizes, rows: Any, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge rows of partials [first, last): the sum of outputs [rows, H], weighted, the maximum and the sum, [rows]."""
    along_rows = sizes.layout.reduce(1)

    def step(j: jax.Array, carry: tuple) -> tuple:
        acc, row_max, row_sum = carry
        loaded = []
        for k in range(sizes.at_once):
            i = first + j * sizes.at_once + k
            partial = jnp.minimum(i, last - 1)
            counted = jnp.where(i < last, 1.0, 0.0).astype(jnp.float32)
            loaded.append((
                load(refs.partial_out.at[partial, rows], sizes.layout),  # [rows, H]
                load(refs.partial_max.at[partial, rows], along_rows),  # [rows]
                load(refs.partial_sum.at[partial, rows], along_rows) * counted,
            ))  # fmt: skip
        new_max = functools.reduce(jnp.maximum, (m for _, m, _ in loaded), row_max)
        alpha = jnp.exp2(row_max - new_max)
        acc, row_sum = acc * sizes.over_columns(alpha), row_sum * alpha
        for o, m, s in loaded:
            weight = s * jnp.exp2(m - new_max)
            acc, row_sum = acc + o * sizes.over_columns(weight), row_sum + weight
        return acc, new_max, row_sum

    turns = lax.div(last - first + (sizes.at_once - 1), jnp.int32(sizes.at_once))
    carry = (
        sizes.filled(0, sizes.rows, sizes.head_dim),
        sizes.filled(MIN_ROW_MAX, sizes.rows),
        sizes.filled(0, sizes.rows),
    )
    return lax.fori_loop(0, turns, step, carry)
