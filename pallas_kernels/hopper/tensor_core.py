"""Work that only a GPU does: products by wgmma, and several views of one shared memory."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.compat import transposed
from pallas_kernels.hopper.pac_pipeline import PaddedRing, Pipeline, Query, Sizes, tiles_of
from pallas_kernels.packing import TILE_ROWS, Packing


def query_scratch(sizes: Sizes, rotated: Any = None) -> Any:
    """Describe the query buffers; with a third view if rotated keys have a dtype of their own.

    Rows of 128 bytes, or 64, follow each other in the same places with and without tiles of 8 rows. All views begin
    where their memory begins; Pallas does not promise that of unions, so it rests on the tests that run on a GPU.
    """
    shape = (sizes.query_buffers, sizes.query_parts, TILE_ROWS, sizes.query_columns)
    _, swizzle = tiled = tiles_of(sizes.query_dtype, sizes.query_columns)
    views = [((swizzle,), sizes.query_dtype), (tiled, sizes.query_dtype)]
    views += [] if rotated is None else [(tiled, rotated)]
    return plgpu.RefUnion(*(plgpu.SMEM(shape, dtype, transforms=view) for view, dtype in views))


def query_views(refs: Any) -> Query:
    """Name the views."""
    return Query(*refs)


def in_turn(*refs: Any) -> Any:
    """Describe memory that has several uses, one after the other. They begin where it begins, as with query buffers."""
    return plgpu.RefUnion(*refs)


def ring_scratch(sizes: Sizes, columns: int) -> Any:
    """Describe a ring of padded rows: 64 columns by themselves, as in query buffers, and views as of these.

    A copy fills tiles of 8 rows only if these divide a head's row.
    """
    shape = (sizes.stages, columns // 64, sizes.block, 64)
    _, swizzle = tiled = tiles_of(sizes.kv_dtype, 64)
    return plgpu.RefUnion(*(plgpu.SMEM(shape, sizes.kv_dtype, transforms=view) for view in ((swizzle,), tiled)))


def ring_views(refs: Any) -> PaddedRing:
    """Name the two views."""
    return PaddedRing(*refs)


def view_units(ref: Any, first: Any, *, count: int, packing: Packing) -> Any:
    """View `count` units of a tile's columns, from the first on, as [count, rows, columns]."""
    rows = packing.rows_of_unit
    return ref.at[pl.ds(first * rows, count * rows)].reshape(count, rows, ref.shape[-1])


def multiply_keys(pipeline: Pipeline, buffer: jax.Array, keys: Any) -> jax.Array:
    """Return the products of a tile of the query and a block of keys: [64, block].

    Keys are a reference to [block, H], or of padded heads to [H / 64, block, 64]. A query of several terms, one after
    the other, is their sum.
    """
    refs, sizes, width = pipeline.refs, pipeline.sizes, pipeline.sizes.query_columns

    def products(scores_ref: Any) -> jax.Array:
        for part in range(sizes.query_parts):
            at = part % sizes.parts_of_keys
            columns = keys.at[at] if sizes.is_padded else keys.at[:, pl.ds(at * width, width)]
            plgpu.wgmma(scores_ref, refs.query_buffers.tiles.at[buffer, part], transposed(columns))
        return scores_ref[...]

    return pl.run_scoped(products, plgpu.ACC((TILE_ROWS, sizes.block), jnp.float32))


def multiply_values(pipeline: Pipeline, accs: list[jax.Array], weights: Any, values: Any) -> list[jax.Array]:
    """Add the products of weights [64, block] and a block of values to accumulators, [64, acc_columns].

    Values are a reference to [block, V], or of padded heads to [V / 64, block, 64]. Weights are in registers, or a
    reference.
    """
    sizes, columns = pipeline.sizes, pipeline.sizes.acc_columns

    def products(acc_refs: list[Any]) -> None:
        for i, acc_ref in enumerate(acc_refs):
            part = values.at[i] if sizes.is_padded else values.at[:, pl.ds(i * columns, columns)]
            plgpu.wgmma(acc_ref, weights, part)

    return pl.run_state(products)([plgpu.ACC.init(acc) for acc in accs])
