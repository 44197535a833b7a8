"""POR on Hopper: merge the partials of every row tile and kv head, in the order of the plan, and write the output.

    one thread block per (merge group, 2 to 16 rows of its tile), a warp or two for each row:

        partials of the rows, several at a time ─► w = l 2^(m - M) ─► sum of w O over sum of w ─► rows of each request
        what PAC's thread blocks found ─► NaN if the plan does not hold

A merge group is a row tile and a kv head. Loading several partials before using any hides the latency of global memory;
the order never changes, so results are the same from run to run. The paper's POR is in section 4 (doi 10.1145/3802028).
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.family import Call
from pallas_kernels.hopper.compat import load, store
from pallas_kernels.hopper.pac_compute import MIN_ROW_MAX
from pallas_kernels.hopper.packing import TILE_ROWS, Packing
from pallas_kernels.hopper.plan_guard import GROUP


class _Grain(NamedTuple):
    """How finely the work is cut."""

    rows: int  # of a tile, for one thread block
    warps: int  # for a row
    many: int  # partials in flight
    few: int  # and in the last turns


#: The grain by the number of merge groups, at most. The fewer there are, the more partials each has: much is in flight
#: then, in as many thread blocks as there can be. Where there are many groups, most have one partial or two.
_GRAINS = {
    4: _Grain(2, warps=2, many=32, few=4),
    16: _Grain(4, warps=1, many=16, few=4),
    32: _Grain(4, warps=1, many=8, few=4),
    64: _Grain(4, warps=1, many=4, few=2),
    math.inf: _Grain(16, warps=1, many=2, few=1),
}

_WARPS, _LANES = 4, 32  # of a warpgroup, and of a warp
_LN2 = 0.6931471805599453


class _Sizes(NamedTuple):
    """All that is known when the kernel is compiled."""

    packing: Packing
    batch: int
    query_tokens: int
    num_kv_heads: int
    head_dim: int
    num_ctas: int  # of PAC
    grain: _Grain
    dtype: DTypeLike

    @property
    def together(self) -> int:
        """Rows that all warps have at a time."""
        return _WARPS // self.grain.warps

    @property
    def piece(self) -> int:
        """Rows of those that are next to each other in the output."""
        return math.gcd(self.together, self.packing.rows_of_unit)

    @property
    def layout(self) -> Any:
        """Give each of some rows to some warps, and consecutive columns, 128 at a time at most, to their lanes."""
        of_row = min(self.head_dim, 128)
        of_warp = of_row // self.grain.warps
        tiles: tuple[tuple[int, ...], ...] = (self.together, of_row), (of_warp,), (of_warp // _LANES,)
        if self.grain.warps == 1:
            return plgpu.Layout.TILED(plgpu.Tiling((tiles[0], tiles[2])), (-3,), (-2,), -1)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4, -3), (-2,), -1)

    def filled(self, value: float, *shape: int) -> jax.Array:
        """Return registers of one value, [rows] or [rows, H]."""
        layout = self.layout if len(shape) == 2 else self.layout.reduce(1)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def over_columns(self, rows: jax.Array) -> jax.Array:
        """Repeat a value of each row along the columns."""
        shape = (self.grain.rows, self.head_dim)
        return plgpu.layout_cast(lax.broadcast_in_dim(rows, shape, [0]), self.layout)


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
        num_kv_heads=plan.heads.num_kv_heads,
        head_dim=head_dim,
        num_ctas=plan.cta_begin.shape[0],
        grain=next(grain for groups, grain in _GRAINS.items() if num_groups <= groups),
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
    names = [*inputs, "out", "max", "sum", "rows"]
    kernel = plgpu.kernel(
        lambda *refs: _merge(SimpleNamespace(**dict(zip(names, refs, strict=True))), sizes),
        out_type=[
            jax.ShapeDtypeStruct((batch * tokens, num_q_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((num_groups, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((num_groups, TILE_ROWS), jnp.float32),
        ],
        scratch_types=[plgpu.SMEM((sizes.grain.rows, head_dim), dtype)],
        grid=(num_groups, TILE_ROWS // sizes.grain.rows),
        grid_names=("group", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    merged, merged_max, merged_sum = kernel(*inputs.values())
    return merged.reshape(call.query.shape), merged_max, merged_sum


def _merge(refs: Any, sizes: _Sizes) -> None:
    """Merge and write the rows of one thread block."""
    grain, piece = sizes.grain, sizes.piece
    group, part = lax.axis_index("group"), lax.axis_index("part")
    heads = jnp.int32(sizes.num_kv_heads)
    tile, head = lax.div(group, heads), lax.rem(group, heads)
    begin = pl.multiple_of(part * grain.rows, grain.rows)
    rows = pl.ds(begin, grain.rows)

    # All that comes from memory is asked for at once; PAC has brought most of it to the L2 cache.
    first, last = refs.merge_ptr[group], refs.merge_ptr[group + 1]
    used_here = refs.used_rows[0] - tile * sizes.packing.tile_rows  # rows of the tile
    places = [_place(refs, sizes, tile, head, begin + i) for i in range(0, grain.rows, piece)]
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

    if piece < sizes.together:  # registers hold rows that go to several places
        refs.rows[...] = merged
        plgpu.commit_smem()
    for i, (exists, entry, q_head) in enumerate(places):
        source, target = pl.ds(i * piece, piece), refs.out.at[entry, pl.ds(q_head, piece)]

        @pl.when(exists)
        def _write(i: int = i, source: Any = source, target: Any = target) -> None:
            if piece < sizes.together:
                plgpu.copy_smem_to_gmem(refs.rows.at[source], target)
            else:
                target[...] = merged[i * piece : (i + 1) * piece]

    plgpu.wait_smem_to_gmem(0)


def _place(
    refs: Any, sizes: _Sizes, tile: jax.Array, head: jax.Array, row: jax.Array
) -> tuple[Any, jax.Array, jax.Array]:
    """Return whether a row of a tile is one of the query's, its entry there [B x T], and its q head."""
    packing, tokens = sizes.packing, sizes.query_tokens
    units, of_unit = packing.units, packing.rows_of_unit
    num_units = sizes.batch * tokens * packing.parts
    unit = lax.div(row, jnp.int32(of_unit))
    request_row, token, part = packing.unit(tile * units + jnp.minimum(unit, units - 1), sizes.batch, tokens)
    entry = refs.request_of_row[request_row] * tokens + token
    q_head = head * packing.group + part * of_unit + lax.rem(row, jnp.int32(of_unit))
    return (unit < units) & (tile * units + unit < num_units), entry, q_head


def _count_violations(refs: Any, sizes: _Sizes) -> jax.Array:
    """Count, in each thread, the thread blocks of PAC that found the plan violated."""
    thread = plgpu.Layout.WG_STRIDED((GROUP,), 1)
    cta = plgpu.broadcasted_iota(jnp.int32, (GROUP,), 0, layout=thread)
    count = plgpu.layout_cast(jnp.full((GROUP,), 0, jnp.int32), thread)
    for begin in range(0, sizes.num_ctas, GROUP):
        found = load(refs.violations.at[pl.ds(begin, GROUP)], thread)
        count += jnp.where(begin + cta < sizes.num_ctas, found, 0)
    return count


def _merge_partials(
    refs: Any, sizes: _Sizes, rows: Any, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge rows of partials [first, last): the sum of outputs [rows, H], weighted, the maximum and the sum, [rows]."""
    grain, along_rows = sizes.grain, sizes.layout.reduce(1)

    def step(j: jax.Array, carry: tuple, first: jax.Array, at_once: int) -> tuple:
        acc, row_max, row_sum = carry
        loaded = []
        for k in range(at_once):
            i = first + j * at_once + k
            partial = jnp.minimum(i, last - 1)
            counted = jnp.where(i < last, 1.0, 0.0).astype(jnp.float32)
            loaded.append((
                load(refs.partial_out.at[partial, rows], sizes.layout),  # [rows, H]
                load(refs.partial_max.at[partial, rows], along_rows),  # [rows]
                load(refs.partial_sum.at[partial, rows], along_rows) * counted,
            ))  # fmt: skip
        new_max = row_max
        for _, m, _ in loaded:
            new_max = jnp.maximum(new_max, m)
        alpha = jnp.exp2(row_max - new_max)
        acc, row_sum = acc * sizes.over_columns(alpha), row_sum * alpha
        for o, m, s in loaded:
            weight = s * jnp.exp2(m - new_max)
            acc, row_sum = acc + o * sizes.over_columns(weight), row_sum + weight
        return acc, new_max, row_sum

    # Loads of a turn that has too few partials are wasted, so the last few have turns of their own.
    many = lax.div(last - first + (grain.many - 1 - grain.few), jnp.int32(grain.many))
    few_first = jnp.minimum(first + many * grain.many, last)
    few = lax.div(last - few_first + (grain.few - 1), jnp.int32(grain.few))
    carry: tuple = (
        sizes.filled(0, grain.rows, sizes.head_dim),
        sizes.filled(MIN_ROW_MAX, grain.rows),
        sizes.filled(0, grain.rows),
    )
    carry = lax.fori_loop(0, many, functools.partial(step, first=first, at_once=grain.many), carry)
    return lax.fori_loop(0, few, functools.partial(step, first=few_first, at_once=grain.few), carry)
