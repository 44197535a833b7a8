"""What stands in for `tensor_core` where the GPU interpreter of Pallas runs the Hopper kernels on a CPU.

The interpreter simulates warpgroups, shared memory, copies and barriers, and reports races between them. It cannot view
a reference in another shape, takes no operand or accumulator of wgmma from registers, looks for no races in wgmma, and
demands that every completion of a barrier is seen. All else is the code that runs on a GPU.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from interpreted import RACE
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_kernels import by_thread, by_warp
from pallas_kernels.hopper import pac, tensor_core
from pallas_kernels.hopper.pac_pipeline import COLUMNS, PaddedRing, Pipeline, Query, Sizes
from pallas_kernels.hopper.terms import TERM, largest_of_rows, powers_of_rows, terms_of
from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.shared_memory import swizzled


def simulate(monkeypatch: pytest.MonkeyPatch, params: Any) -> None:
    """Let the kernels run in the interpreter."""
    monkeypatch.setattr(plgpu, "kernel", partial(plgpu.kernel, interpret=params))
    for of_threads in (gather, same_in_warp, publish):
        monkeypatch.setattr(by_thread, of_threads.__name__, of_threads)
    for of_warps in (any_above, fold_columns, reciprocals):
        monkeypatch.setattr(by_warp, of_warps.__name__, of_warps)
    for function in (
        query_scratch, query_views, ring_scratch, ring_views, view_units, make_terms,
        multiply_keys, multiply_values, multiply_both,
    ):  # fmt: skip
        monkeypatch.setattr(tensor_core, function.__name__, function)

    def then_see(role: str, rings: Callable[[Any], Iterable[Any]], others: Callable[[Pipeline], Iterable[Any]]) -> None:
        work = getattr(pac, role)

        def whole(pipeline: Pipeline) -> None:
            work(pipeline)
            see_completions(pipeline, rings(pipeline), others(pipeline))

        monkeypatch.setattr(pac, role, whole)

    then_see("load_blocks", lambda pipeline: (pipeline.refs.keys_free, pipeline.refs.values_free), lambda _: ())
    then_see(
        "prepare",
        lambda pipeline: [getattr(pipeline.refs, "widened_free", pipeline.refs.values_free)],
        lambda pipeline: [pipeline.refs.query_free.at[buffer] for buffer in range(pipeline.sizes.query_buffers)],
    )
    then_see("compute", lambda _: (), lambda pipeline: [pipeline.refs.state_free.at[pipeline.warpgroup]])


def gather(ref: Any, index: jax.Array) -> jax.Array:
    """Load a number for each thread; an index that is none gives a number that is none."""
    numbers = ref[...].reshape(-1)
    is_one = (index >= 0) & (index < len(numbers))
    lax.cond(is_one.all(), lambda: None, lambda: jax.debug.print(f"{RACE}: an index of no number"))
    nothing = jnp.nan if jnp.issubdtype(ref.dtype, jnp.floating) else 1 << 30
    return numbers.at[index].get(mode="fill", fill_value=nothing, wrap_negative_indices=False)


def same_in_warp(numbers: jax.Array) -> jax.Array:
    """Say whether the threads of a warp have the same number."""
    warps = numbers.reshape(-1, by_thread.WARP)
    same = (warps == warps[:, :1]).all(axis=1, keepdims=True).astype(jnp.int32)
    return jnp.broadcast_to(same, warps.shape).reshape(numbers.shape)


def publish() -> None:
    """Let copies and wgmma see what has been written."""
    plgpu.commit_smem()


def query_scratch(sizes: Sizes, other: Any = None) -> Any:
    """Describe the query buffers, [buffers, parts, units, rows, columns]; terms of 8 bits have memory of their own."""
    packing = sizes.packing

    def buffers(parts: int, dtype: Any) -> Any:
        shape = (sizes.query_buffers, parts, packing.units, packing.rows_of_unit, COLUMNS)
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, COLUMNS)[1:])

    copied = buffers(sizes.query_parts, sizes.query_dtype)
    return (copied, buffers(2 * sizes.query_parts, TERM)) if other == TERM else copied


def query_views(refs: Any) -> Query:
    """All views are the same, but for terms."""
    copied, other = refs if isinstance(refs, tuple) else (refs, refs)
    return Query(copied, copied, other)


def make_terms(pipeline: Pipeline, buffer: jax.Array, key_scale: jax.Array) -> None:
    """Put terms of a tile of the query in their own memory, and factors of its rows beside it."""
    refs = pipeline.refs
    given = read(refs.query_buffers.tiles.at[buffer])  # [parts, units, rows, columns]
    parts = [part.reshape(-1, COLUMNS) for part in given]
    scale, up = powers_of_rows(jnp.stack([largest_of_rows(part) for part in parts]).max(axis=0))
    refs.row_scale.at[buffer][...] = jnp.pad(scale * key_scale, (0, TILE_ROWS - len(scale)), constant_values=jnp.nan)
    for at, term in enumerate(term for part in parts for term in terms_of(part, up)):
        refs.query_buffers.other.at[buffer, at][...] = term.reshape(given.shape[1:])


def in_turn(*refs: Any) -> Any:
    """Describe memory for each use: the interpreter cannot view a reference in another dtype."""
    return refs


def ring_scratch(sizes: Sizes, columns: int) -> Any:
    """Describe a ring of padded rows, [stages, columns / 64, block, 64]."""
    _, swizzle = swizzled(sizes.kv_dtype, 64)
    return plgpu.SMEM((sizes.stages, columns // 64, sizes.block, 64), sizes.kv_dtype, transforms=(swizzle,))


def ring_views(refs: Any) -> PaddedRing:
    """Both views are the same."""
    return PaddedRing(refs, refs)


def view_units(ref: Any, first: Any, *, count: int, packing: Packing) -> Any:
    """View `count` units of 64 columns of a tile, from the first on, as [count, rows, 64]."""
    return ref.at[pl.ds(first, count)]


def query_tile(pipeline: Pipeline, buffer: jax.Array) -> jax.Array:
    """Return a tile of the query, [64, H]; of several terms of each part of the columns, their sum."""
    parts = read(pipeline.query(buffer))  # [parts, units, rows, columns]
    of_rows = parts.reshape(pipeline.sizes.query_parts, -1, parts.shape[1] * parts.shape[2], parts.shape[3])
    of_rows = of_rows[:, 0] if of_rows.shape[1] == 1 else of_rows.astype(jnp.float32).sum(axis=1)
    rows = jnp.moveaxis(of_rows, 0, 1).reshape(of_rows.shape[1], -1)
    # Rows that are not in use may hold anything on a GPU.
    return jnp.pad(rows, ((0, TILE_ROWS - rows.shape[0]), (0, 0)), constant_values=jnp.nan)


def any_above(numbers: jax.Array, limit: float) -> jax.Array:
    """Say whether one of the numbers is above a limit, of all warps at once."""
    return jnp.any(numbers > limit).astype(jnp.int32)


def fold_columns(combine: Any, numbers: jax.Array) -> jax.Array:
    """Combine columns 8 apart."""
    reduce = {arith.addf: jnp.sum, arith.maximumf: jnp.max, arith.maxnumf: jnp.nanmax}[combine]
    return reduce(numbers.reshape(numbers.shape[0], -1, 8), axis=1)


def reciprocals(numbers: jax.Array, *, apart: bool) -> jax.Array:
    """Return 1 over each number, of columns 8 apart four together unless they are to be kept apart.

    Those are rounded otherwise: here by so much that it shows in a sum.
    """
    if apart:
        return 1.0 / numbers
    fours = numbers.reshape(TILE_ROWS, -1, 4, 8)
    product = fours.prod(axis=2, keepdims=True)
    return (1.0 / product * (product / fours)).reshape(numbers.shape) * (1.0 + 2.0**-18)


def multiply_keys(pipeline: Pipeline, buffer: jax.Array, keys: Any) -> jax.Array:
    """Return the products of a tile of the query and a block of keys, [64, block]."""
    query = query_tile(pipeline, buffer)
    return multiply(query, rows_of(pipeline, keys).T.astype(query.dtype))


def multiply_values(pipeline: Pipeline, accs: list[jax.Array], weights: Any, values: Any) -> list[jax.Array]:
    """Add the products of weights [64, block] and a block of values to accumulators, [64, acc_columns] each."""
    weights = weights if isinstance(weights, jax.Array) else read(weights)
    products = multiply(weights, rows_of(pipeline, values))
    return [acc + part for acc, part in zip(accs, jnp.split(products, len(accs), axis=1), strict=True)]


def multiply_both(
    pipeline: Pipeline, accs: list[jax.Array], weights: Any, values: Any, buffer: jax.Array, keys: Any
) -> tuple[list[jax.Array], jax.Array]:
    """Do one after the other."""
    return multiply_values(pipeline, accs, weights, values), multiply_keys(pipeline, buffer, keys)


def rows_of(pipeline: Pipeline, block: Any) -> jax.Array:
    """Return the rows of a block of keys or values, whose columns may be in several parts."""
    rows = read(block)
    return jnp.concatenate(list(rows), axis=1) if pipeline.sizes.is_padded else rows


def see_completions(pipeline: Pipeline, rings: Iterable[Any], others: Iterable[Any]) -> None:
    """Wait, after the last block, for the stages of rings and other barriers that nobody waits for any more."""
    blocks = pipeline.each_segment(lambda segment, _, done, *__: done + segment.end - segment.begin, jnp.int32(0))

    for ring in rings:
        stages = ring.shape[0]

        def wait(number: jax.Array, _: None, ring: Any = ring, stages: int = stages) -> None:
            plgpu.barrier_wait(ring.at[lax.rem(number, jnp.int32(stages))])

        lax.fori_loop(jnp.maximum(blocks - stages, 0), blocks, wait, None)
    for barrier in others:
        plgpu.barrier_wait(barrier)


def read(ref: Any) -> jax.Array:
    """Read shared memory as wgmma does: done before a later copy begins."""
    values = ref[...]
    plgpu.commit_smem()  # or the interpreter takes a copy that follows for one that may overtake the read
    return values


def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply two matrices as wgmma does, with float32 products and sums."""
    return lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
