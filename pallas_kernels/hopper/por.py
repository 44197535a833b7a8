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
from pallas_kernels.por_rows import Merge


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
#: Numbers of partials that a thread block holds at a time, at most: 128 in a thread.
_IN_FLIGHT = 1 << 14


class _Sizes(NamedTuple):
    """All that is known when the kernel is compiled."""

    packing: Packing
    batch: int
    query_tokens: int
    num_kv_heads: int
    grain: _Grain
    merge: Merge

    @property
    def together(self) -> int:
        """Rows that all warps have at a time."""
        return _WARPS // self.grain.warps

    @property
    def piece(self) -> int:
        """Rows of those that are next to each other in the output."""
        return math.gcd(self.together, self.packing.rows_of_unit)


def _layout(grain: _Grain, head_dim: int) -> Any:
    """Give each of some rows to some warps, and consecutive columns, 128 at a time at most, to their lanes."""
    of_row = min(head_dim, 128)
    of_warp = of_row // grain.warps
    tiles: tuple[tuple[int, ...], ...] = (_WARPS // grain.warps, of_row), (of_warp,), (of_warp // _LANES,)
    if grain.warps == 1:
        return plgpu.Layout.TILED(plgpu.Tiling((tiles[0], tiles[2])), (-3,), (-2,), -1)
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
    plan, (batch, tokens, num_q_heads, _), dtype = call.plan, call.query.shape, call.query.dtype
    num_groups, head_dim = plan.merge_ptr.shape[0] - 1, out.shape[2]
    grain = next(grain for groups, grain in _GRAINS.items() if num_groups <= groups)
    turns = min(grain.many, _IN_FLIGHT // (grain.rows * head_dim)), grain.few
    sizes = _Sizes(
        packing=Packing.of(plan.heads.group),
        batch=batch,
        query_tokens=tokens,
        num_kv_heads=plan.heads.num_kv_heads,
        grain=grain,
        merge=Merge(
            grain.rows,
            turns,
            head_dim,
            plan.cta_begin.shape[0],
            _layout(grain, head_dim),
            dtype,
        ),
    )
    inputs = por_rows.inputs_of(out, row_max, row_sum, violations, call)
    names = [*inputs, "out", "max", "sum", "rows"]
    kernel = plgpu.kernel(
        lambda *refs: _merge(SimpleNamespace(**dict(zip(names, refs, strict=True))), sizes),
        out_type=[
            jax.ShapeDtypeStruct((batch * tokens, num_q_heads, head_dim), dtype),
            *por_rows.rows_of_groups(num_groups),
        ],
        scratch_types=[plgpu.SMEM((grain.rows, head_dim), dtype)],
        grid=(num_groups, TILE_ROWS // grain.rows),
        grid_names=("group", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    merged, merged_max, merged_sum = kernel(*inputs.values())
    return merged.reshape(batch, tokens, num_q_heads, head_dim), merged_max, merged_sum


def _merge(refs: Any, sizes: _Sizes) -> None:
    """Merge and write the rows of one thread block."""
    grain, piece = sizes.grain, sizes.piece
    group, part = lax.axis_index("group"), lax.axis_index("part")
    heads = jnp.int32(sizes.num_kv_heads)
    tile, head = lax.div(group, heads), lax.rem(group, heads)
    begin = pl.multiple_of(part * grain.rows, grain.rows)

    # All that comes from memory is asked for at once; PAC has brought most of it to the L2 cache.
    first, last = refs.merge_ptr[group], refs.merge_ptr[group + 1]
    used_here = refs.used_rows[0] - tile * sizes.packing.tile_rows  # rows of the tile
    places = [_place(refs, sizes, tile, head, begin + i) for i in range(0, grain.rows, piece)]
    merged = por_rows.merge_rows(refs, sizes.merge, group, head, begin, used_here, (first, last))  # [rows, H]

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
