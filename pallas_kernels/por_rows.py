"""The merge of a few rows of a tile, which is POR's work in every family; where they are written to is not in here."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread
from pallas_kernels.by_thread import THREAD, THREADS
from pallas_kernels.compat import load, store
from pallas_kernels.family import Call
from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.plan_guard import GROUP
from pallas_kernels.softmax import MIN_ROW_MAX

_LN2, _LOG2E = math.log(2.0), math.log2(math.e)


class Merge(NamedTuple):
    """How a thread block merges."""

    rows: int  # of a tile
    #: Partials in flight, turn after turn. Loads of a turn that has too few partials are wasted, so the last ones may
    #: have shorter turns of their own.
    turns: tuple[int, ...]
    head_dim: int
    num_ctas: int  # of PAC
    layout: Any  # of registers [rows, H]

    @property
    def of_rows(self) -> Any:
        """The layout of registers [rows]."""
        return self.layout.reduce(1)

    def filled(self, value: float | jax.Array, *shape: int) -> jax.Array:
        """Return registers of one value, [rows] or [rows, H]."""
        layout = self.layout if len(shape) == 2 else self.of_rows
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def over_columns(self, rows: jax.Array) -> jax.Array:
        """Repeat a value of each row along the columns."""
        return plgpu.layout_cast(lax.broadcast_in_dim(rows, (self.rows, self.head_dim), [0]), self.layout)


def inputs_of(
    out: jax.Array, row_max: jax.Array, row_sum: jax.Array, violations: jax.Array, call: Call
) -> dict[str, jax.Array]:
    """Name what POR reads."""
    given = {"value_scale": call.value_scale, "sinks": call.sinks}
    return {name: array for name, array in given.items() if array is not None} | {
        "partial_out": out,
        "partial_max": row_max,
        "partial_sum": row_sum,
        "violations": violations,
        "merge_ptr": call.plan.merge_ptr,
        "request_of_row": call.forest.request_of_row,
        "used_rows": call.plan.used_rows,
    }


def scratch_of(call: Call) -> dict[str, Any]:
    """Name what `sinks_of_rows` needs of shared memory."""
    return {} if call.sinks is None else {"sink_of_row": plgpu.SMEM((THREADS,), jnp.float32)}


def rows_of_groups(num_groups: int) -> list[jax.ShapeDtypeStruct]:
    """Describe the rows' maximum and sum, which POR writes."""
    return [jax.ShapeDtypeStruct((num_groups, TILE_ROWS), jnp.float32)] * 2


def sinks_of_rows(
    refs: Any, merge: Merge, packing: Packing, tile: jax.Array, head: jax.Array, begin: jax.Array
) -> jax.Array | None:
    """Return the sink of each row of a tile from one on, float32 [rows]; None if there are none."""
    if not hasattr(refs, "sinks"):
        return None
    if packing.group == 1:  # a number that all threads have in common is no index for each
        return merge.filled(refs.sinks[head].astype(jnp.float32), merge.rows)
    row = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=THREAD) + begin
    unit = jnp.minimum(lax.div(row, jnp.int32(packing.rows_of_unit)), packing.units - 1)
    q_head = packing.q_head(head, packing.part(tile * packing.units + unit), row)
    refs.sink_of_row[...] = by_thread.gather(refs.sinks, q_head).astype(jnp.float32)
    return load(refs.sink_of_row.at[pl.ds(0, merge.rows)], merge.of_rows)


def merge_rows(
    refs: Any,
    merge: Merge,
    head: jax.Array,
    begin: jax.Array,
    used_here: jax.Array,
    partials: tuple[jax.Array, ...],
    sink: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge rows [begin, begin + rows) of a tile for a kv head, of which the first `used_here` belong to requests.

    Returns the output [rows, H], and maximum and sum [rows], float32.
    """
    rows, (first, last) = pl.ds(begin, merge.rows), partials
    violations = _count_violations(refs, merge.num_ctas)
    last = jnp.where(begin < used_here, last, first)
    acc, row_max, row_sum = _merge_partials(refs, merge, rows, first, last, sink)
    nan_or_zero = jnp.where(jnp.max(violations) == 0, 0.0, jnp.nan).astype(jnp.float32)
    row = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=merge.layout)
    merged = acc / merge.over_columns(jnp.maximum(row_sum, 1e-30))
    if hasattr(refs, "value_scale"):  # before the output is rounded
        merged *= refs.value_scale[head]
    merged = jnp.where(row + begin < used_here, merged, 0.0)
    # PAC leaves anything in rows that no request has.
    row_of_part = plgpu.broadcasted_iota(jnp.int32, row_sum.shape, 0, layout=merge.of_rows)
    row_sum = jnp.where(row_of_part + begin < used_here, row_sum, 0.0)
    row_max = jnp.where(row_sum == 0, -jnp.inf, row_max * _LN2)
    if sink is not None:  # which rows have that no request has, too
        row_max = jnp.where(row_sum == 0, sink, row_max)
        row_sum = jnp.where(row_sum == 0, _sum_of(sink), row_sum)
    return merged + nan_or_zero, row_max + nan_or_zero, row_sum + nan_or_zero


def store_rows_of_groups(refs: Any, group: jax.Array, rows: Any, row_max: jax.Array, row_sum: jax.Array) -> None:
    """Store maximum and sum of some rows of a merge group."""
    store(refs.max.at[group, rows], row_max)
    store(refs.sum.at[group, rows], row_sum)


def _count_violations(refs: Any, num_ctas: int) -> jax.Array:
    """Count, in each thread, the thread blocks of PAC that found the plan violated."""
    thread = plgpu.Layout.WG_STRIDED((GROUP,), 1)
    cta = plgpu.broadcasted_iota(jnp.int32, (GROUP,), 0, layout=thread)
    count = plgpu.layout_cast(jnp.full((GROUP,), 0, jnp.int32), thread)
    for begin in range(0, num_ctas, GROUP):
        found = load(refs.violations.at[pl.ds(begin, GROUP)], thread)
        count += jnp.where(begin + cta < num_ctas, found, 0)
    return count


def _sum_of(sink: jax.Array) -> jax.Array:
    """Return the sum of rows that see their sink only."""
    return jnp.where(sink == -jnp.inf, 0.0, 1.0)


def _merge_partials(
    refs: Any, merge: Merge, rows: Any, first: jax.Array, last: jax.Array, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge rows of partials [first, last): the sum of outputs [rows, H], weighted, the maximum and the sum, [rows].

    A row's sink is a partial, too, and comes first.
    """

    def step(j: jax.Array, carry: tuple, first: jax.Array, at_once: int) -> tuple:
        acc, row_max, row_sum = carry
        loaded = []
        for k in range(at_once):
            i = first + j * at_once + k
            partial = jnp.minimum(i, last - 1)
            counted = jnp.where(i < last, 1.0, 0.0).astype(jnp.float32)
            loaded.append((
                load(refs.partial_out.at[partial, rows], merge.layout),  # [rows, H]
                load(refs.partial_max.at[partial, rows], merge.of_rows),  # [rows]
                load(refs.partial_sum.at[partial, rows], merge.of_rows) * counted,
            ))  # fmt: skip
        # One after the other, so that partials which a row does not see change nothing, in whichever turns they are.
        for o, m, s in loaded:
            new_max = jnp.maximum(row_max, m)
            alpha, weight = jnp.exp2(row_max - new_max), s * jnp.exp2(m - new_max)
            acc = acc * merge.over_columns(alpha) + o * merge.over_columns(weight)
            row_max, row_sum = new_max, row_sum * alpha + weight
        return acc, row_max, row_sum

    row_max, row_sum = merge.filled(MIN_ROW_MAX, merge.rows), merge.filled(0, merge.rows)
    if sink is not None:
        row_max, row_sum = jnp.maximum(sink * _LOG2E, MIN_ROW_MAX), _sum_of(sink)
    carry: tuple = merge.filled(0, merge.rows, merge.head_dim), row_max, row_sum
    loops = []
    for at_once, shorter in zip(merge.turns, (*merge.turns[1:], 0), strict=True):
        turns = lax.div(last - first + (at_once - 1 - shorter), jnp.int32(at_once))
        loops.append((turns, functools.partial(step, first=first, at_once=at_once)))
        first = jnp.minimum(first + turns * at_once, last) if shorter else first
    for turns, turn in loops:
        carry = lax.fori_loop(0, turns, turn, carry)
    return carry
