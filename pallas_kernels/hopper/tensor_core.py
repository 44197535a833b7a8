"""Work that only a GPU does: products by wgmma, and several views of one shared memory."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, store, transposed
from pallas_kernels.hopper.pac_pipeline import COLUMNS, EIGHTS, PaddedRing, Pipeline, Query, Sizes
from pallas_kernels.hopper.terms import largest_of_rows, powers_of_rows, terms_of
from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.row_registers import filled
from pallas_kernels.shared_memory import swizzled


def query_scratch(sizes: Sizes, other: Any = None) -> Any:
    """Describe the query buffers; with a third view, as products with keys of another dtype need it, if that is given.

    Rows of 128 bytes, or 64, follow each other in the same places with and without tiles of 8 rows. All views begin
    where their memory begins; Pallas does not promise that of unions, so it rests on the tests that run on a GPU.
    """
    shape = (sizes.query_buffers, sizes.query_parts, TILE_ROWS, COLUMNS)
    _, swizzle = tiled = swizzled(sizes.query_dtype, COLUMNS)
    views = [plgpu.SMEM(shape, sizes.query_dtype, transforms=view) for view in ((swizzle,), tiled)]
    if other is not None:
        parts = sizes.query_parts * sizes.query_dtype.itemsize // jnp.dtype(other).itemsize
        shape = (sizes.query_buffers, parts, TILE_ROWS, COLUMNS)
        views.append(plgpu.SMEM(shape, other, transforms=swizzled(other, COLUMNS)))
    return plgpu.RefUnion(*views)


def query_views(refs: Any) -> Query:
    """Name the views."""
    return Query(*refs)


def in_turn(*refs: Any) -> Any:
    """Describe memory that has several uses, one after the other. They begin where it begins, as with query buffers."""
    return plgpu.RefUnion(*refs)


def ring_scratch(sizes: Sizes, columns: int) -> Any:
    """Describe a ring of padded rows: `COLUMNS` by themselves, as in query buffers, and views as of these.

    A copy fills tiles of 8 rows only if these divide a head's row.
    """
    shape = (sizes.stages, columns // COLUMNS, sizes.block, COLUMNS)
    _, swizzle = tiled = swizzled(sizes.kv_dtype, COLUMNS)
    return plgpu.RefUnion(*(plgpu.SMEM(shape, sizes.kv_dtype, transforms=view) for view in ((swizzle,), tiled)))


def ring_views(refs: Any) -> PaddedRing:
    """Name the two views."""
    return PaddedRing(*refs)


def view_units(ref: Any, first: Any, *, count: int, packing: Packing) -> Any:
    """View `count` units of a tile's columns, from the first on, as [count, rows, columns]."""
    rows = packing.rows_of_unit
    return ref.at[pl.ds(first * rows, count * rows)].reshape(count, rows, ref.shape[-1])


def make_terms(pipeline: Pipeline, buffer: jax.Array, key_scale: jax.Array) -> None:
    """Put terms of a tile of the query where it is, and factors of its rows, times that of its keys, beside it.

    Both terms of a part of the columns take the place of this part.
    """
    refs, sizes, views = pipeline.refs, pipeline.sizes, pipeline.refs.query_buffers
    given, made = views.tiles.at[buffer], views.other.at[buffer]  # [H / 64, 64, 64], [2 x H / 64, 64, 64]
    rows = EIGHTS.reduce(1)

    def part(at: Any) -> jax.Array:
        return load(given.at[at], EIGHTS, optimized=True)

    def larger(at: jax.Array, largest: jax.Array) -> jax.Array:
        return jnp.maximum(largest, largest_of_rows(part(at)))

    def replace(at: jax.Array, _: None) -> None:
        terms = terms_of(part(at), up, EIGHTS)
        plgpu.commit_smem()  # all threads have read what terms take the place of
        for which, term in enumerate(terms):
            made.at[2 * at + which][...] = term

    # In loops, since all thread blocks begin with this, and wait for its instructions to be fetched.
    largest = lax.fori_loop(0, given.shape[0], larger, plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), rows))
    down, up = powers_of_rows(largest)
    # Rows that are not in use may hold anything: their scores are 0, or else the softmax would look for their maximum.
    in_use = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=rows) < sizes.rows_in_use
    store(refs.row_scale.at[buffer], jnp.where(in_use, down * key_scale, 0.0))
    lax.fori_loop(0, given.shape[0], replace, None)


def multiply_keys(pipeline: Pipeline, buffer: jax.Array, keys: Any) -> jax.Array:
    """Return the products of a tile of the query and a block of keys: [64, block].

    Keys are a reference to [block, H], or of padded heads to [H / 64, block, 64]. A query of several terms, those of a
    part of the columns one after the other, is their sum.
    """

    def products(products_ref: Any) -> jax.Array:
        _issue_keys(pipeline, products_ref, buffer, keys)
        return products_ref[...]

    return pl.run_scoped(products, plgpu.ACC((TILE_ROWS, pipeline.sizes.block), jnp.float32))


def multiply_values(pipeline: Pipeline, accs: list[jax.Array], weights: Any, values: Any) -> list[jax.Array]:
    """Add the products of weights [64, block] and a block of values to accumulators, [64, acc_columns].

    Values are a reference to [block, V], or of padded heads to [V / 64, block, 64]. Weights are in registers, or a
    reference.
    """

    def products(acc_refs: list[Any]) -> None:
        _issue_values(pipeline, acc_refs, weights, values)

    return pl.run_state(products)([plgpu.ACC.init(acc) for acc in accs])


def multiply_both(
    pipeline: Pipeline, accs: list[jax.Array], weights: Any, values: Any, buffer: jax.Array, keys: Any
) -> tuple[list[jax.Array], jax.Array]:
    """Do what `multiply_values` does with a block, and `multiply_keys` with another, and wait once for all products."""

    def both(refs: list[Any]) -> None:
        *acc_refs, products_ref = refs
        _issue_values(pipeline, acc_refs, weights, values)
        _issue_keys(pipeline, products_ref, buffer, keys)

    products = filled(0, TILE_ROWS, pipeline.sizes.block)
    *accs, products = pl.run_state(both)([plgpu.ACC.init(acc) for acc in (*accs, products)])
    return accs, products


def _issue_keys(pipeline: Pipeline, products_ref: Any, buffer: jax.Array, keys: Any) -> None:
    sizes, query = pipeline.sizes, pipeline.query(buffer)
    for part in range(query.shape[0]):
        at = part * sizes.query_parts // query.shape[0]
        columns = keys.at[at] if sizes.is_padded else keys.at[:, pl.ds(at * COLUMNS, COLUMNS)]
        plgpu.wgmma(products_ref, query.at[part], transposed(columns))


def _issue_values(pipeline: Pipeline, acc_refs: list[Any], weights: Any, values: Any) -> None:
    sizes, columns = pipeline.sizes, pipeline.sizes.acc_columns
    for i, acc_ref in enumerate(acc_refs):
        part = values.at[i] if sizes.is_padded else values.at[:, pl.ds(i * columns, columns)]
        plgpu.wgmma(acc_ref, weights, part)
