"""Tokens of a decode step to the rows of their experts on Hopper GPUs, in one launch from choices to rows.

`expert_rows` says which row is whose; XLA takes nine kernels for it. Here each token has a thread block, and each of
those counts all choices for itself, as waiting for one that counts would take longer:

    choices of all tokens ─► shared memory ─► how many chose each expert, and how many of them before this token
                                           ─► rows of the experts before each one
    the token's numbers ───► shared memory ─► one copy for each of its experts, to the row that it has there
    the first thread block ─► the tiles: of so few tokens an expert has one, or none

What is counted and summed up is [64, 64] at a time: a row is an expert, a column a choice or an expert, so that sums
along rows stay within the lanes of a warp.

    barrier   arrives, how often                        waits
    loaded    the copies of choices and of the token    all, before they count
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, store
from pallas_kernels.expert_rows import ROW_GROUP, Tiles, most_tiles
from pallas_kernels.hopper.grouped import TILE_ROWS

#: So many, and 64 choices of 32 experts, took less time than with XLA on an H200. Time grows with the product of both.
_MAX_CHOICES, _MAX_EXPERTS = 512, 128
_SIDE = 64  # of a block
_MAX_PIECES = 256  # of a token, 64 numbers each: what a copy takes
_NOBODY = -1  # fills the last block of choices
_SHIFT = 10  # bits of a sum that count all tokens; those above count the ones before
_ROWS, _COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def pays(x: jax.Array, expert: jax.Array, num_experts: int) -> bool:
    """Whether it can take tokens to their experts, and in less time than XLA; arguments as in `arrange`."""
    # Of tokens that fit one tile, no expert has more than one.
    fits = len(x) <= TILE_ROWS and x.shape[1] <= _MAX_PIECES * _SIDE
    return fits and expert.size <= _MAX_CHOICES and num_experts <= _MAX_EXPERTS


def arrange(x: jax.Array, expert: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, Tiles]:
    """Copy each token to a row of each of its experts.

    Args:
      x: [T, D], of 16 bits, T at most 128, D a multiple of 64, 16,384 at most.
      expert: [T, chosen], int32, the experts of each token, all different; those out of bounds get no row.
      num_experts: E.

    Returns the rows [R, D], in the order of their experts, of which those that no token has may be anything; the place
    of each token's rows, as `ExpertRows.place`; and the tiles of `expert_rows.tiles_of`, at most one of an expert.
    """
    (tokens, depth), chosen = x.shape, expert.shape[1]
    size = most_tiles(expert.size, num_experts, ROW_GROUP) * ROW_GROUP
    room, listed = (-(-count // _SIDE) * _SIDE for count in (num_experts, expert.size))
    pieces = depth // _SIDE
    tables = {f"tile_{name}": jax.ShapeDtypeStruct((room,), jnp.int32) for name in Tiles._fields}
    outputs = {
        "out_rows": jax.ShapeDtypeStruct((size, pieces, _SIDE), x.dtype),
        "out_place": jax.ShapeDtypeStruct((expert.size,), jnp.int32),
    } | tables
    of_experts = plgpu.SMEM((room,), jnp.int32)
    scratch: dict[str, Any] = {
        "token": plgpu.SMEM((1, pieces, _SIDE), x.dtype), "choice": plgpu.SMEM((listed // _SIDE, _SIDE), jnp.int32),
        "first": of_experts, "before": of_experts, "count": of_experts, "upto": of_experts,
        "loaded": plgpu.Barrier(num_arrivals=2),
    }  # fmt: skip
    names = ["x", "choices", *outputs, *scratch]

    def arranged(*refs: Any) -> None:  # the name that profilers show
        _arrange(SimpleNamespace(**dict(zip(names, refs, strict=True))), chosen, num_experts)

    kernel = plgpu.kernel(
        arranged,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    choice = jnp.pad(expert.reshape(-1), (0, listed - expert.size), constant_values=_NOBODY)
    rows, place, *tiles = kernel(x.reshape(tokens, pieces, _SIDE), choice.reshape(-1, _SIDE))
    return rows.reshape(size, depth), place.reshape(expert.shape), Tiles(*tiles)


def _arrange(refs: Any, chosen: int, num_experts: int) -> None:
    """Do one token; the first thread block also lists the tiles."""
    token = lax.axis_index("token")
    plgpu.copy_gmem_to_smem(refs.choices, refs.choice, refs.loaded)
    plgpu.copy_gmem_to_smem(refs.x.at[pl.ds(token, 1)], refs.token, refs.loaded)
    plgpu.barrier_wait(refs.loaded)
    _count(refs, token * chosen, num_experts)
    _sum_up(refs)
    for i in range(chosen):
        at = token * chosen + i
        expert = refs.choice[lax.div(at, _SIDE), lax.rem(at, _SIDE)]
        is_here = (expert >= 0) & (expert < num_experts)
        own = jnp.where(is_here, expert, 0)
        row = refs.first[own] + refs.before[own]
        refs.out_place[at] = jnp.where(is_here, row, refs.out_rows.shape[0])

        @pl.when(is_here)
        def _copy(row: jax.Array = row) -> None:
            plgpu.copy_smem_to_gmem(refs.token, refs.out_rows.at[pl.ds(row, 1)])

    @pl.when(token == 0)
    def _list() -> None:
        _list_tiles(refs)

    plgpu.wait_smem_to_gmem(0)


def _count(refs: Any, first_choice: jax.Array, num_experts: int) -> None:
    """Count who chose each expert, all of them and those before the token."""

    def count(begin: jax.Array) -> None:
        expert = _index(0) + begin

        def add(at: jax.Array, total: jax.Array) -> jax.Array:
            choice = load(refs.choice.at[lax.div(at, _SIDE)], _COLUMNS)
            counts = jnp.where(_index(1) + at < first_choice, 1 + (1 << _SHIFT), 1)
            return total + jnp.where(_across(choice) == expert, counts, 0)  # [64, 64]

        total = _over_blocks(refs.choice.size, add, _zeros()).sum(axis=1)  # [64]
        # The last block may have rows of no expert, for choices that are out of bounds.
        number = plgpu.broadcasted_iota(jnp.int32, (_SIDE,), 0, layout=_ROWS) + begin
        total = jnp.where(number < num_experts, total, 0)
        store(refs.before.at[pl.ds(begin, _SIDE)], total >> _SHIFT)
        store(refs.count.at[pl.ds(begin, _SIDE)], total & ((1 << _SHIFT) - 1))

    _for_blocks(refs.count.size, count)
    plgpu.commit_smem()


def _sum_up(refs: Any) -> None:
    """Find each expert's first row, and how many experts up to it have rows."""

    def sum_up(begin: jax.Array) -> None:
        expert = _index(0) + begin

        def add(at: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            other, count = _index(1) + at, load(refs.count.at[pl.ds(at, _SIDE)], _COLUMNS)
            rows = (count + (ROW_GROUP - 1)) & -ROW_GROUP
            first = jnp.where(other < expert, _across(rows), 0)
            upto = jnp.where(other <= expert, _across(jnp.minimum(count, 1)), 0)
            return sums[0] + first, sums[1] + upto

        first, upto = _over_blocks(refs.count.size, add, (_zeros(), _zeros()))
        store(refs.first.at[pl.ds(begin, _SIDE)], first.sum(axis=1))
        store(refs.upto.at[pl.ds(begin, _SIDE)], upto.sum(axis=1))

    _for_blocks(refs.count.size, sum_up)
    plgpu.commit_smem()


def _list_tiles(refs: Any) -> None:
    """Write the tiles: number i is that of the expert with rows up to which there are i + 1."""

    def list_tiles(begin: jax.Array) -> None:
        number = _index(0) + begin

        def add(at: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            part = pl.ds(at, _SIDE)
            upto, starts, count = (_across(load(ref.at[part], _COLUMNS)) for ref in (refs.upto, refs.first, refs.count))
            is_its = (upto == number + 1) & (count > 0)
            found = (_index(1) + at, starts, count)
            return tuple(total + jnp.where(is_its, each, 0) for total, each in zip(sums, found, strict=True))

        expert, first, rows = (
            total.sum(axis=1) for total in _over_blocks(refs.count.size, add, (_zeros(), _zeros(), _zeros()))
        )
        part = pl.ds(begin, _SIDE)
        upto = load(refs.upto.at[part], _ROWS)
        for name, values in {"expert": expert, "first": first, "rows": rows, "end": upto}.items():
            store(getattr(refs, f"tile_{name}").at[part], values)

    _for_blocks(refs.count.size, list_tiles)


def _for_blocks(size: int, run: Callable[[jax.Array], None]) -> None:
    """Run for where each block of an array begins."""
    _over_blocks(size, lambda at, _: run(at), None)


def _over_blocks(size: int, add: Callable[[jax.Array, Any], Any], sums: Any) -> Any:
    """Add to sums for where each block of an array begins, in a loop: code that runs once has to be loaded first."""
    return lax.fori_loop(0, size // _SIDE, lambda i, sums: add(i * _SIDE, sums), sums)


def _index(dimension: int) -> jax.Array:
    """Return the number of each row (0) or column (1) of a block."""
    return plgpu.broadcasted_iota(jnp.int32, (_SIDE, _SIDE), dimension, layout=plgpu.Layout.WGMMA)


def _across(values: jax.Array) -> jax.Array:
    """Repeat what columns have for all rows of a block."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (_SIDE, _SIDE), [1]), plgpu.Layout.WGMMA)


def _zeros() -> jax.Array:
    """Return a block of zeros."""
    return plgpu.layout_cast(jnp.zeros((_SIDE, _SIDE), jnp.int32), plgpu.Layout.WGMMA)
